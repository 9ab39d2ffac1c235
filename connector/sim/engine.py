"""The scheduler: which tokens are computed in which step, from which tier the others come, and what that evicts.

Follows vLLM v1's scheduler for one full-attention model: running requests first, then waiting ones in order of
arrival; prompts in chunks up to the step's token budget; a waiting request starts from the longest run of blocks in
HBM, extended by whole chunks that the offloader can load; when decoding runs out of blocks, the youngest running
request starts over later. Left out: speculation, LoRA scheduling, hybrid models, priorities.

A step is two calls, because events and outputs appear only when it is over: `begin_step` decides and says how long
the step takes, `end_step` yields its outputs and its events, HBM's first. Between the two the caller waits.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from connector.events import CPU, GPU, STORAGE, Event, Hash
from connector.sim.answers import first_state, next_state, pick_token
from connector.sim.blocks import Block, BlockPool
from connector.sim.model import ServiceModel
from connector.sim.offload import HBM_ONLY, OffloadConfig, Offloader
from connector.sim.requests import Phase, Request
from connector.sim.stats import EngineStats


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What the engine has room for.

    Attributes:
        block_size: tokens in an HBM block.
        hbm_blocks: physical blocks; one of them, the null block, holds nothing.
        max_num_seqs: how many requests run at once.
        max_num_batched_tokens: how many tokens one step computes.
        offload: the tiers below HBM.
        plain_events: say as little of resets as vLLM itself does.
    """

    block_size: int = 16
    hbm_blocks: int = 2048
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    offload: OffloadConfig = HBM_ONLY
    plain_events: bool = False

    @property
    def max_model_len(self) -> int:
        """The longest request, prompt and answer, that can ever run."""
        return (self.hbm_blocks - 1) * self.block_size


@dataclass(slots=True)
class Step:
    """A step under way: how many more tokens it may take, how long it lasts, and what it computes of which request."""

    budget: int
    seconds: float = 0.0
    scheduled: dict[Request, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Output:
    """One new token; `finished` once it was the last."""

    request: Request
    token: int
    finished: bool


class Engine:
    """One simulated engine.

    Args:
        config: sizes.
        model: how long steps and copies take.
        vocabulary: the token ids that answers are made of.
    """

    def __init__(self, config: EngineConfig, model: ServiceModel, vocabulary: Sequence[int]) -> None:
        self.config = config
        self.stats = EngineStats()
        self._model = model
        self._vocabulary = vocabulary
        self._pool = BlockPool(config.hbm_blocks)
        self._offloader = Offloader(config.offload, config.block_size, model) if config.offload.cpu_chunks else None
        self._waiting: deque[Request] = deque()
        self._loading: list[Request] = []
        self._running: list[Request] = []
        self._ended: list[Request] = []
        self._aborts: list[Request] = []

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything, now or after waiting for a copy."""
        queued = self._running or self._loading or self._waiting or self._ended or self._aborts
        return bool(queued) or (self._offloader is not None and self._offloader.busy)

    @property
    def running_count(self) -> int:
        return len(self._running)

    @property
    def waiting_count(self) -> int:
        return len(self._waiting) + len(self._loading)

    @property
    def usage(self) -> float:
        """The share of HBM blocks that requests hold, 0 to 1."""
        return self._pool.usage

    def add(self, request: Request, now: float) -> None:
        """Queue a request.

        Raises:
            ValueError: it can never run: nothing to compute, or more than HBM holds.
        """
        if not request.prompt or request.max_tokens < 1:
            raise ValueError("a request needs at least one prompt token and one output token")
        if len(request.prompt) + request.max_tokens > self.config.max_model_len:
            raise ValueError(
                f"{len(request.prompt)} prompt tokens and {request.max_tokens} output tokens exceed the maximum "
                f"model length of {self.config.max_model_len} tokens"
            )
        request.arrived_at = now
        request.extend_hashes(self.config.block_size)
        request.answer_state = first_state(request.prompt)
        self._waiting.append(request)

    def abort(self, request: Request) -> None:
        """End a request early; takes effect between steps, harmless if it is over already."""
        self._aborts.append(request)

    def begin_step(self, now: float) -> Step:
        """Decide what the next step computes and start it; `now` is the caller's clock in seconds."""
        self._end_aborted()
        if self._offloader is not None:
            self._offloader.start_step(now)
        step = Step(budget=self.config.max_num_batched_tokens)
        if self._schedule_running(step):
            self._admit(step, now)
        self._plan_stores(step)
        step.seconds = self._duration(step, now)
        for request, count in step.scheduled.items():
            request.computed += count
        return step

    def end_step(self, step: Step, now: float) -> tuple[list[Output], list[Event]]:
        """Finish the step: its new tokens, and its events in the order of the wire."""
        outputs = [self._output(request, now) for request in step.scheduled if request.computed == len(request.tokens)]
        for output in outputs:
            if output.finished:
                self._running.remove(output.request)
                self._end(output.request, "length")
        if self._offloader is not None:
            for request in self._offloader.finish_step(now):
                request.phase = Phase.LOADED
        return outputs, self.take_events()

    def reset_prefix_cache(self, external: bool) -> bool:
        """Empty HBM and, if `external`, the CPU tier; refused (False) while any request holds blocks."""
        silently = self.config.plain_events
        if not self._pool.clear(silently=silently):
            return False
        if external and self._offloader is not None:
            self._offloader.clear(silently=silently)
        return True

    def take_events(self) -> list[Event]:
        """What the wire has to say by now: a step's at its end, a reset's at once."""
        events, self._pool.events = self._pool.events, []
        if self._offloader is not None:
            events += self._offloader.take_events()
        return events

    def residency(self) -> dict[str, Counter[Hash]]:
        """Per medium, how many copies of each block hash it holds: what a consumer of all events should believe."""
        held: dict[str, Counter[Hash]] = {GPU: self._pool.residency()}
        if self._offloader is not None:
            held[CPU] = self._offloader.cpu.residency()
            if self._offloader.storage is not None:
                held[STORAGE] = self._offloader.storage.residency()
        return held

    # scheduling

    def _schedule_running(self, step: Step) -> bool:
        """Give running requests their tokens; False if one had to be preempted, so that nothing new starts."""
        before = self.stats.preemptions
        index = 0
        while index < len(self._running) and step.budget:
            request = self._running[index]
            count = min(len(request.tokens) - request.computed, step.budget)
            if not self._allocate_or_preempt(request, request.computed + count):
                break
            self._schedule(step, request, count)
            index += 1
        return self.stats.preemptions == before

    def _allocate_or_preempt(self, request: Request, tokens: int) -> bool:
        """Find blocks at the cost of younger requests; False if the request itself had to go."""
        while not self._allocate(request, tokens):
            if self._preempt_youngest() is request:
                return False
        return True

    def _preempt_youngest(self) -> Request:
        """Take the blocks of the request that started last; it starts over before all others that wait."""
        request = self._running.pop()
        self._free(request)
        request.phase = Phase.WAITING
        request.computed = 0
        request.preemptions += 1
        self.stats.preemptions += 1
        self._waiting.appendleft(request)
        return request

    def _admit(self, step: Step, now: float) -> None:
        """Start waiting requests in order until one does not fit; those whose tiers are not ready are passed over."""
        for request in [*self._loading, *self._waiting]:
            if not step.budget or len(self._running) >= self.config.max_num_seqs:
                return
            if request.phase is Phase.WAITING:
                admitted = self._start(request, step, now)
            elif request.phase is Phase.LOADED:
                admitted = self._resume_loaded(request, step)
            else:
                continue
            if not admitted:
                return

    def _start(self, request: Request, step: Step, now: float) -> bool:
        """Start a request from what the tiers hold of it; False if HBM has no room for it now."""
        hits = self._pool.hits(request.hashes, (len(request.tokens) - 1) // self.config.block_size)
        local = len(hits) * self.config.block_size
        if request.report_reused and hits:
            self._pool.events.append(request.gpu_stored_event(0, len(hits), self.config.block_size))
        external = self._offloader.match(request, local, now) if self._offloader is not None else 0
        if external is None:
            return True
        count = 0 if external else min(len(request.tokens) - local, step.budget)
        spare = self._reserved_blocks() if external else 0
        if not self._fits(request, len(request.tokens), hits):
            return False
        if not self._allocate(request, local + external + count, hits, spare):
            return False
        self._waiting.remove(request)
        self._count_hit(request, local, external)
        request.cached_blocks = len(hits)
        request.computed = local + external
        if external and self._offloader is not None:
            request.phase = Phase.LOADING
            self._loading.append(request)
            self._offloader.load(request, local, external, now)
        else:
            self._run(request, step, count)
        return True

    def _resume_loaded(self, request: Request, step: Step) -> bool:
        """Start computing behind the blocks that were loaded; at least the last token is always computed."""
        self._cache_full_blocks(request, request.computed)
        request.computed = min(request.computed, len(request.tokens) - 1)
        count = min(len(request.tokens) - request.computed, step.budget)
        if not self._allocate(request, request.computed + count):
            return False
        self._loading.remove(request)
        self._run(request, step, count)
        return True

    def _run(self, request: Request, step: Step, count: int) -> None:
        request.phase = Phase.RUNNING
        self._running.append(request)
        self._schedule(step, request, count)

    def _schedule(self, step: Step, request: Request, count: int) -> None:
        self._cache_full_blocks(request, request.computed + count)
        step.scheduled[request] = count
        step.budget -= count

    def _count_hit(self, request: Request, local: int, external: int) -> None:
        if not request.preemptions:
            request.cached_tokens = local + external
        self.stats.count_lookup(len(request.tokens), local, external, offloading=self._offloader is not None)

    def _plan_stores(self, step: Step) -> None:
        ended, self._ended = self._ended, []
        if self._offloader is not None:
            scheduled = [(request, request.computed + count) for request, count in step.scheduled.items()]
            self._offloader.plan_stores(scheduled, ended)

    def _duration(self, step: Step, now: float) -> float:
        if not step.scheduled:
            return self._offloader.idle_seconds(now) if self._offloader is not None else 0.0
        decoding = [request for request, count in step.scheduled.items() if request.output_count and count == 1]
        prefill_tokens = sum(step.scheduled.values()) - len(decoding)
        return self._model.step_seconds(prefill_tokens, len(decoding))

    # blocks

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.config.block_size)

    def _fits(self, request: Request, tokens: int, hits: Sequence[Block] = (), spare: int = 0) -> bool:
        """Whether the first `tokens` tokens can have blocks, leaving `spare` free; hits in the free queue cost too."""
        new = self._blocks_for(tokens) - len(request.blocks) - len(hits)
        return max(new, 0) + sum(not block.refs for block in hits) <= self._pool.free_count - spare

    def _allocate(self, request: Request, tokens: int, hits: Sequence[Block] = (), spare: int = 0) -> bool:
        if not self._fits(request, tokens, hits, spare):
            return False
        self._pool.touch(hits)
        request.blocks += hits
        request.blocks += self._pool.take(max(self._blocks_for(tokens) - len(request.blocks), 0))
        return True

    def _reserved_blocks(self) -> int:
        """Blocks that requests already started still need for their prompts: a load must leave them free."""
        started = [*self._loading, *(request for request in self._running if request.prefilling)]
        return sum(max(self._blocks_for(len(request.tokens)) - len(request.blocks), 0) for request in started)

    def _cache_full_blocks(self, request: Request, computed: int) -> None:
        """Make the blocks that `computed` tokens fill addressable, and say so."""
        first = request.cached_blocks
        end = min(computed, len(request.tokens)) // self.config.block_size
        if end <= first:
            return
        self._pool.cache(request.blocks[first:end], request.hashes[first:end])
        request.cached_blocks = end
        self._pool.events.append(request.gpu_stored_event(first, end, self.config.block_size))

    def _free(self, request: Request) -> None:
        self._pool.free(reversed(request.blocks))
        request.blocks = []
        request.cached_blocks = 0

    # ends

    def _output(self, request: Request, now: float) -> Output:
        said = request.output_count
        if not said:
            self.stats.count_first_token(len(request.prompt), request.cached_tokens, now - request.arrived_at)
        self.stats.generation_tokens += 1
        scripted = said < len(request.script)
        token = request.script[said] if scripted else pick_token(request.answer_state, self._vocabulary)
        request.answer_state = next_state(request.answer_state, token)
        request.append(token, self.config.block_size)
        return Output(request, token, finished=said + 1 == request.max_tokens)

    def _end(self, request: Request, reason: str) -> None:
        request.phase = Phase.FINISHED
        self.stats.ended[reason] += 1
        self._free(request)
        self._ended.append(request)

    def _end_aborted(self) -> None:
        aborts, self._aborts = self._aborts, []
        for request in aborts:
            if request.phase is Phase.FINISHED:
                continue
            if request.phase is Phase.LOADING:
                self._aborts.append(request)
                continue
            queue = {Phase.RUNNING: self._running, Phase.LOADED: self._loading, Phase.WAITING: self._waiting}
            queue[request.phase].remove(request)
            self._end(request, "abort")
