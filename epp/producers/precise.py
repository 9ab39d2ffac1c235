"""precise-prefix-cache-producer: which endpoint holds which prefix, as the engines' own events say, tier by tier.

An instance publishes one tier, or all of them weighted. Instances with different names share the event feeds, the index
and, within a request, the look-up; so two scorers can weigh HBM and CPU RAM differently at no further cost.

Parameters are llm-d's, and `tier`. Accepted, but without effect here: `hashSeed` and `hashAlgorithm` (keys are internal
and never compared with other processes'), `inMemoryConfig` and `costAwareMemoryConfig` (there is one kind of index,
and it holds what the engines hold), `enableMetrics` (always on), `metricsLoggingInterval`. `blockSizeTokens` only
counts while no engine has said its block size.

What a publisher's blocks weigh is multiplied by the trust in its feed, those that speculation expects too: with an
engine that cannot be heard the request that made them likely may be gone as well, and no event would ever say so. A
lost endpoint is thus chosen by its load alone. Proven tokens are never weighed.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from operator import add, mul, truediv
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec

from epp.config.environment import Environment
from epp.config.registry import Parameters, plugin
from epp.config.units import Duration, seconds
from epp.fleet.endpoint import Endpoint
from epp.producers.candidates import NOTHING, Candidates
from epp.producers.kv_events import KvEvents, KvEventsConfig
from epp.routing import Outcome
from epp.scheduling.plugin import PrefixMatch, Scheduling, SchedulingResult, TierHit
from indexer.index import PrefixIndex
from indexer.match import Match, Prompt, match
from indexer.speculative import Speculation
from indexer.wire import canonical_tier

PREFILL = "prefill"
DEFAULT_WEIGHTS: Mapping[str, float] = {"gpu": 1.0, "cpu": 0.8, "storage": 0.5}
UNKNOWN_WEIGHT = 0.5
"""Of a medium that has neither a default nor a configured weight: no more than the slowest known one."""

T = TypeVar("T", int, float)
Positive = Annotated[int, msgspec.Meta(ge=1)]
Weight = Annotated[float, msgspec.Meta(ge=0)]


class TokenProcessorConfig(Parameters, frozen=True):
    block_size_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    """0 = `blockSize`, or 16."""
    block_size: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Deprecated name of blockSizeTokens."""
    hash_seed: str = ""
    hash_algorithm: Literal["", "cbor-fnv", "xxh64"] = ""

    @property
    def block(self) -> int:
        return self.block_size_tokens or self.block_size or 16


class InMemoryConfig(Parameters, frozen=True):
    size: Positive = 100_000_000
    pod_cache_size: Positive = 10


class CostAwareMemoryConfig(Parameters, frozen=True):
    size: int | str = "2GiB"


class KvBlockIndexConfig(Parameters, frozen=True):
    in_memory_config: InMemoryConfig | None = None
    cost_aware_memory_config: CostAwareMemoryConfig | None = None
    redis_config: dict[str, Any] | None = None
    enable_metrics: bool = False
    metrics_logging_interval: Annotated[int, msgspec.Meta(ge=0)] | Duration = 0
    """Nanoseconds, or a duration."""


class KvCacheBackendConfig(Parameters, frozen=True):
    name: str
    """A medium, as engines name it: gpu, cpu, storage, …"""
    weight: Weight


class IndexerConfig(Parameters, frozen=True):
    kv_block_index_config: KvBlockIndexConfig = KvBlockIndexConfig()
    kv_cache_backend_configs: list[KvCacheBackendConfig] = msgspec.field(default_factory=list)
    tokenizers_pool_config: dict[str, Any] | None = None


class PrecisePrefixParameters(Parameters, frozen=True):
    token_processor_config: TokenProcessorConfig = TokenProcessorConfig()
    indexer_config: IndexerConfig = IndexerConfig()
    kv_events_config: KvEventsConfig | None = None
    """None = as another instance says, or the defaults."""
    speculative_indexing: bool = False
    """Count a prompt's blocks as held by the picked endpoint until its events come."""
    speculative_ttl: Duration = msgspec.field(default="2s", name="speculativeTTL")
    tier: Literal["gpu", "cpu", "storage", "all"] = "all"
    """gpu: blocks in HBM. cpu: those and what CPU RAM adds. storage: those and what storage adds. all: everything,
    weighted by tier (`kvCacheBackendConfigs`)."""

    def __post_init__(self) -> None:
        if self.indexer_config.kv_block_index_config.redis_config is not None:
            raise ValueError("redisConfig is not supported: every replica builds its own index from events")
        if self.indexer_config.tokenizers_pool_config is not None:
            raise ValueError("tokenizersPoolConfig is not supported: configure a token-producer plugin")


class Weights(NamedTuple):
    """What a token in each tier counts, in the order of `match.TIERS`. 0 = the tier does not count, nor as cached."""

    gpu: float
    cpu: float
    storage: float
    other: float

    @classmethod
    def of(cls, parameters: PrecisePrefixParameters) -> Weights:
        if parameters.tier == "all":
            configs = parameters.indexer_config.kv_cache_backend_configs
            configured = {canonical_tier(config.name): config.weight for config in configs}
            known = {tier: configured.pop(tier, weight) for tier, weight in DEFAULT_WEIGHTS.items()}
            return cls(**known, other=min(configured.values(), default=UNKNOWN_WEIGHT))
        return cls(1.0, float(parameters.tier in ("cpu", "storage")), float(parameters.tier == "storage"), 0.0)


class Lookup(msgspec.Struct, eq=False):
    """What the index says of a request. Columns are aligned with `candidates.endpoints`."""

    candidates: Candidates
    index: PrefixIndex
    block_size: int
    """Tokens; that of most candidates."""
    total: int
    """Blocks of all prompts."""
    prompts: Sequence[Prompt]
    matches: Sequence[Match]
    """One a prompt."""
    tokens: Sequence[list[int]]
    """For each of `match.TIERS`, the tokens found there, of all prompts; empty = none at any candidate."""
    speculative: Sequence[Mapping[int, int]] = ()
    """For each prompt: candidate → blocks after its HBM run that it will probably hold soon. Empty = none at all."""
    noted: bool = False

    def keys(self, prompt: Prompt, shape: tuple[int, int, int]) -> list[int]:
        """`shape`: of `candidates.shapes`."""
        size, *roots = shape
        return prompt.keys(size or self.block_size, self.index.root_for(prompt.model, *roots))


def look_up(events: KvEvents, scheduling: Scheduling, default_block: int) -> Lookup:
    request, index = scheduling.request, events.index
    candidates = events.candidates(scheduling.endpoints)
    model, block = events.served_as(request.target_model), candidates.block_size or default_block
    prompts = [Prompt(tokens, model, request.cache_salt) for tokens in request.tokens]
    matches = [match(index, prompt, candidates.residencies, candidates.plan) for prompt in prompts]
    tables = [found.tokens(candidates.sizes) for found in matches]
    tokens = tables[0] if len(tables) == 1 else [_sum(columns) for columns in zip(*tables, strict=True)]
    total = sum([len(prompt) // block for prompt in prompts])
    lookup = Lookup(candidates, index, block, total, prompts, matches, tokens)
    if events.speculation:
        lookup.speculative = [_runs(events.speculation, lookup, *each) for each in zip(prompts, matches, strict=True)]
    return lookup


def _sum(columns: Iterable[list[T]]) -> list[T]:
    """Row by row, of those that are not empty."""
    total: list[T] = []
    for column in columns:
        total = list(map(add, total, column)) if total and column else total or column
    return total


def _runs(speculation: Speculation, lookup: Lookup, prompt: Prompt, found: Match) -> Mapping[int, int]:
    """Of one prompt."""
    runs: dict[int, int] = {}
    for shape, positions in lookup.candidates.alike.items():
        runs |= speculation.runs(lookup.keys(prompt, shape), positions, found.gpu)
    return runs


def hits(lookup: Lookup) -> list[TierHit | None]:
    """Proven tokens by slot; None = not a candidate."""
    candidates = lookup.candidates
    if not any(lookup.tokens):
        return candidates.no_hits
    zeros = [0] * len(candidates.endpoints)
    columns = zip(*(column or zeros for column in lookup.tokens), strict=True)
    found: list[TierHit | None] = [
        TierHit(gpu, cpu, storage + other) if gpu or cpu or storage or other else NOTHING
        for gpu, cpu, storage, other in columns
    ]
    return candidates.by_slot(found, None)


def published(lookup: Lookup, weights: Weights, *, speculative: bool) -> PrefixMatch:
    candidates, block_size = lookup.candidates, lookup.block_size
    counting = [(column, weight) for column, weight in zip(lookup.tokens, weights, strict=True) if column and weight]
    expected = lookup.speculative if speculative and any(lookup.speculative) else ()
    if not counting and not expected:
        return PrefixMatch(lookup.total, block_size, candidates.no_blocks, candidates.no_tokens)
    columns = [list(map(mul, column, repeat(weight))) for column, weight in counting]
    weighted = _sum(columns) or [0.0] * len(candidates.endpoints)
    below = any(lookup.tokens[1:])
    for found, runs in zip(lookup.matches, expected, strict=False):
        for i, run in runs.items():
            gain = _speculative_gain(found, i, run, weights) if below else run * weights.gpu
            weighted[i] += gain * (candidates.sizes[i] or block_size)
    if candidates.trust:
        weighted = list(map(mul, weighted, candidates.trust))
    blocks = candidates.by_slot(list(map(truediv, weighted, repeat(block_size))), 0.0)
    counted = _sum(column for column, _ in counting)
    tokens = candidates.by_slot(counted, 0) if counted else candidates.no_tokens
    return PrefixMatch(lookup.total, block_size, blocks, tokens)


def _speculative_gain(found: Match, i: int, run: int, weights: Weights) -> float:
    """In blocks. The run will be in HBM: what lower tiers serve of it today is counted as HBM then, not twice."""
    gain, left = run * weights.gpu, run
    for blocks, weight in (
        (found.cpu[i], weights.cpu),
        (found.storage[i], weights.storage),
        (found.other[i], weights.other),
    ):
        if blocks:
            replaced = min(left, blocks)
            gain -= replaced * weight
            left -= replaced
    return gain


@plugin("precise-prefix-cache-producer", PrecisePrefixParameters)
class PrecisePrefixCacheProducer:
    name: str
    type: str

    def __init__(self, name: str, parameters: PrecisePrefixParameters, environment: Environment) -> None:
        self.name = name
        self._events = KvEvents.of(environment)
        if parameters.kv_events_config is not None:
            self._events.configure(name, parameters.kv_events_config)
        self._block = parameters.token_processor_config.block
        self._weights = Weights.of(parameters)
        self._speculative = parameters.speculative_indexing
        if self._speculative:
            self._events.speculation.time_to_live = seconds(parameters.speculative_ttl) or 2.0
        self._tiers = ("gpu", "cpu", "storage") if parameters.tier == "all" else (parameters.tier,)
        self._telemetry = environment.telemetry
        self._metrics = environment.telemetry.prefix_indexer(name, self.type, self._size)

    def requires(self) -> Sequence[str]:
        return ("token-producer",)

    def _size(self) -> int:
        return sum(self._events.index.blocks(tier) for tier in self._tiers)

    def produce(self, scheduling: Scheduling) -> None:
        if not scheduling.request.tokens:
            return
        lookup = self._look_up(scheduling)
        found = published(lookup, self._weights, speculative=self._speculative)
        scheduling.matches[self.name] = found
        self._metrics.matched(max(found.blocks, default=0.0), found.total, found.block_size * 4)

    def _look_up(self, scheduling: Scheduling) -> Lookup:
        """The first instance that a request comes to does it for all."""
        lookup: Lookup | None = scheduling.notes.get(self.type)
        if lookup is None:
            started = time.perf_counter()
            lookup = scheduling.notes[self.type] = look_up(self._events, scheduling, self._block)
            scheduling.hits, scheduling.certainty = hits(lookup), lookup.candidates.certainty
            scheduling.longest_hit = max(_sum(lookup.tokens), default=0)
            self._telemetry.looked_up(time.perf_counter() - started, scheduling.longest_hit // lookup.block_size)
        return lookup

    def picked(self, scheduling: Scheduling, result: SchedulingResult) -> None:
        """What the picked endpoint does not hold yet, it soon will."""
        lookup: Lookup | None = scheduling.notes.get(self.type)
        if not self._speculative or lookup is None or lookup.noted:
            return
        lookup.noted = True
        for profile in (result.target, result.profiles.get(PREFILL)):
            if profile is not None and profile.picked[0] in lookup.candidates.positions:
                self._note(scheduling, lookup, profile.picked[0])

    def _note(self, scheduling: Scheduling, lookup: Lookup, endpoint: Endpoint) -> None:
        candidates = lookup.candidates
        position = candidates.positions[endpoint]
        for prompt, found in zip(lookup.prompts, lookup.matches, strict=True):
            keys = lookup.keys(prompt, candidates.shapes[position])
            # not under the request's id: clients choose those, and may repeat them
            self._events.speculation.add(lookup, endpoint, keys, scheduling.now, found.gpu[position])

    def finished(self, scheduling: Scheduling, result: SchedulingResult, outcome: Outcome) -> None:
        lookup: Lookup | None = scheduling.notes.pop(self.type, None)
        if lookup is None:
            return
        self._events.speculation.drop(lookup)
        if lookup.total and outcome.status == 200:
            self._events.served(result.target.picked[0])
