"""Random walks of vLLM's own KV-cache manager, with any groups: no model, no GPU, and the scheduler reduced to what
decides when blocks are cached. A picker hears the manager's events and says of each request what will be found.

    python -m tests.connector.vllm.walks [SEEDS [FIRST]]     walks every layout so often, and prints what went wrong
"""

from __future__ import annotations

import random
import sys
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    get_group_id,
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.kv_offload.base import OffloadingSpec
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.request import Request

from connector.events import Notes, Tier, encode_batch
from connector.ledger import Ledger
from connector.vllm.described import describe_extra_keys, describe_sparse_blocks
from connector.vllm.layout import groups_of
from indexer import PrefixIndex, Prompt, decode_batch, match

ADAPTER = LoRARequest("sql", 1, "/adapters/sql")
_HEADS = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.bfloat16}
MODEL = "tiny"


def full(block: int, heads: int = 1) -> KVCacheSpec:
    return FullAttentionSpec(block, **_HEADS | {"num_kv_heads": heads})


def mla(block: int) -> KVCacheSpec:
    return MLAAttentionSpec(block, **_HEADS)


def window(block: int, tokens: int, heads: int = 1) -> KVCacheSpec:
    return SlidingWindowSpec(block, **_HEADS | {"num_kv_heads": heads}, sliding_window=tokens)


def window_mla(block: int, tokens: int) -> KVCacheSpec:
    return SlidingWindowMLASpec(block, **_HEADS, sliding_window=tokens)


def local(block: int, tokens: int) -> KVCacheSpec:
    return ChunkedLocalAttentionSpec(block, **_HEADS, attention_chunk_size=tokens)


def mamba(block: int, mode: str = "align", speculative: int = 0) -> KVCacheSpec:
    return MambaSpec(
        block, shapes=((8,),), dtypes=(torch.float32,), mamba_cache_mode=mode, num_speculative_blocks=speculative
    )


@dataclass(frozen=True)
class Layout:
    """What an engine's groups are."""

    specs: Sequence[KVCacheSpec]
    eagle: bool = False
    draft: frozenset[int] = frozenset()
    """Groups that have a draft model's layers."""
    unit: int | None = None
    """vLLM's `prefix_match_unit`."""
    retention: int | None = None
    """vLLM's `prefix_cache_retention_interval`."""
    blocks: int = 80
    chunk: int = 0
    """Blocks a chunk that is offloaded; 0 = nothing is."""
    chunks: int = 120
    """Of CPU RAM."""

    @property
    def is_known_by_events(self) -> bool:
        """Do vLLM's own events say enough?"""
        sizes = {spec.block_size for spec in self.specs}
        chunked = any(isinstance(spec, ChunkedLocalAttentionSpec) for spec in self.specs)
        below = self.chunk and len(self.specs) > 1
        return len(sizes) == 1 and not (self.eagle or self.unit or chunked or below)

    @property
    def has_full_attention(self) -> bool:
        return any(isinstance(spec, FullAttentionSpec) for spec in self.specs)


class OffloadingSpecOfCPU(OffloadingSpec):
    """The scheduler's side of vLLM's CPU tier."""

    def __init__(self, config: Any, chunks: int) -> None:
        super().__init__(config)
        self._manager = CPUOffloadingManager(chunks, enable_events=True)

    def get_manager(self) -> CPUOffloadingManager:
        return self._manager

    def get_worker(self, kv_caches: Any) -> Any:
        raise NotImplementedError


@dataclass
class Running:
    request: Request
    computed: int
    outputs: int


@dataclass
class Engine:
    """A KV-cache manager with requests that run in it."""

    layout: Layout
    seed: int
    told: bool = True
    """Does it tell of its groups, and describe blocks as our connector does?"""
    predictions: list[tuple[int, int]] = field(default_factory=list)
    """Of each request, tokens: predicted and found."""

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        layout = self.layout
        groups = [
            KVCacheGroupSpec([f"layer {i}"], spec, is_eagle_group=i in layout.draft)
            for i, spec in enumerate(layout.specs)
        ]
        config = KVCacheConfig(layout.blocks, [], groups, prefix_cache_retention_interval=layout.retention)
        settings = self._settings()
        self.alignment, self.unit = resolve_kv_cache_block_sizes(config, settings)
        self.manager = KVCacheManager(
            config,
            max_model_len=4096,
            scheduler_block_size=self.alignment,
            hash_block_size=self.unit,
            use_eagle=layout.eagle,
            num_prefill_lookahead=int(layout.eagle),
            enable_kv_cache_events=True,
        )
        self.notes = None
        self.ledger = Ledger({"CPU": layout.chunk} if layout.chunk else {})
        self.offloading = None
        if self.told:
            describe_sparse_blocks(self.manager)
            tiers = {"CPU": Tier(chunk=layout.chunk)} if layout.chunk else None
            self.notes = Notes("me", tiers=tiers, groups=groups_of(self.manager))
        if layout.chunk:
            spec = OffloadingSpecOfCPU(build_offloading_config(settings, config), layout.chunks)
            self.offloading = OffloadingConnectorScheduler(spec, settings, config)
            describe_extra_keys(self.offloading)
        self.hasher = get_request_block_hasher(self.unit, sha256)
        self.running: list[Running] = []
        self._names = count()
        self.index = PrefixIndex()
        self.residency = self.index.publisher("engine", MODEL)
        self.index.names.root(ADAPTER.lora_name)  # known from /v1/models
        self.texts = [self._text(40 * self.alignment) for _ in range(3)]
        self._mamba = next((spec for spec in layout.specs if isinstance(spec, MambaSpec)), None)

    def _text(self, length: int) -> list[int]:
        return self.rng.choices(range(10, 500), k=length)

    def _settings(self) -> Any:
        """What vLLM asks its configuration for."""
        layout = self.layout
        return SimpleNamespace(
            cache_config=SimpleNamespace(
                block_size=layout.specs[0].block_size,
                prefix_match_unit=layout.unit,
                enable_prefix_caching=True,
                prefix_cache_retention_interval=layout.retention,
                cache_dtype="auto",
                kv_cache_layout=None,
            ),
            parallel_config=SimpleNamespace(
                decode_context_parallel_size=1,
                prefill_context_parallel_size=1,
                tensor_parallel_size=1,
                pipeline_parallel_size=1,
                world_size=1,
                rank=0,
                data_parallel_index=0,
                data_parallel_size=1,
                data_parallel_rank_local=None,
            ),
            model_config=SimpleNamespace(
                use_mla=False, model="tiny", dtype=torch.bfloat16, get_total_num_kv_heads=lambda: 1, max_model_len=4096
            ),
            use_v2_model_runner=True,
            kv_events_config=SimpleNamespace(enable_kv_cache_events=True),
            kv_transfer_config=SimpleNamespace(
                engine_id="walk",
                kv_connector_extra_config={
                    "blocks_per_chunk": max(1, layout.chunk),
                    "self_describing_kv_events": True,
                },
            ),
            speculative_config=SimpleNamespace(use_eagle_block_drop=lambda: True) if layout.eagle else None,
        )

    # --- what the picker hears, and says

    def publish(self) -> None:
        events = [*self.manager.take_events(), *(self.offloading.take_events() if self.offloading else ())]
        if self.told:
            events = self.ledger.apply(events)
        if not events:
            return
        batch = decode_batch(encode_batch(events, 1.0, notes=self.notes))
        assert not batch.skipped
        if batch.notes is not None:
            self.residency.told(batch.notes)
        self.residency.apply(batch)

    def late_picker(self) -> Engine:
        """One that starts with a snapshot: with an index of its own."""
        late = replace(self, predictions=[])
        assert self.notes is not None
        for part in self.ledger.freeze().parts():
            batch = decode_batch(encode_batch(part, 1.0, notes=self.notes))
            assert not batch.skipped
            assert batch.notes is not None
            late.residency.told(batch.notes)
            late.residency.apply(batch)
        return late

    def unaccounted(self) -> int:
        """Blocks in HBM of which the picker knows nothing, or that it has too much."""
        cached = Counter(get_group_id(key) for key in self.manager.block_pool.cached_block_hash_to_block._cache)
        lanes = self.residency._lanes_in("gpu")
        waiting = self.residency.parking._claims
        heard = {group: lane.held + len(waiting.get(lane, ())) for group, lane in lanes.items()}
        return sum(abs(count - heard.get(group, 0)) for group, count in cached.items())

    def predict(self, tokens: Sequence[int], salt: str = "", model: str = MODEL) -> int:
        prompt = Prompt(array("I", tokens).tobytes(), model, salt)
        return match(self.index, prompt, [self.residency]).cached_tokens(0)

    # --- what the scheduler does

    def arrive(self) -> None:
        text = self.rng.choice(self.texts)
        length = self.rng.choice((self.rng.randrange(1, len(text) // 4), self.rng.randrange(1, 12) * self.alignment))
        tokens = text[:length] + self._text(
            self.rng.choice((0, 0, 1, self.unit, self.rng.randrange(2 * self.alignment)))
        )
        kind = self.rng.choice(("plain", "plain", "plain", "salted", "adapted", "with media"))
        start = self.rng.randrange(len(tokens))
        picture = MultiModalFeatureSpec(None, "image", self.rng.choice("ab"), PlaceholderRange(start, 20), None)
        salt = "salt" if kind == "salted" else None
        request = Request(
            str(next(self._names)),
            tokens,
            vllm.SamplingParams(max_tokens=99),
            None,
            block_hasher=self.hasher,
            cache_salt=salt,
            lora_request=ADAPTER if kind == "adapted" else None,
            mm_features=[picture] if kind == "with media" else None,
        )
        predicted = self.predict(tokens, salt or "", ADAPTER.lora_name if kind == "adapted" else MODEL)
        self.manager.new_step_starts()
        blocks, found, request.shared_prefix_boundary = self.manager.get_computed_blocks(request)
        loaded = self._loadable(request, found)
        if kind != "with media":  # what is routed unscored
            self.predictions.append((predicted, found + loaded))
        outputs = self.rng.choice((0, 1, 3 * self.unit))
        new = self._chunk(request, found, len(tokens))
        allocated = self.manager.allocate_slots(request, new, found, blocks, num_lookahead_tokens=2 * self.layout.eagle)
        if allocated is not None:
            request.num_computed_tokens = found + new
            self.running.append(Running(request, found + new, outputs))
            self._offload(request)
        self.publish()

    def _loadable(self, request: Request, computed: int) -> int:
        """What would be loaded; it is computed anew here."""
        if self.offloading is None:
            return 0
        self.offloading.on_new_request(request)
        loaded, _ = self.offloading.get_num_new_matched_tokens(request, computed)
        del self.offloading._req_status[request.request_id]
        getattr(self.offloading, "_release_step", lambda: None)()  # 0.33 holds a lock until the step ends
        return loaded

    def _offload(self, request: Request) -> None:
        """Whichever chunks of what is computed."""
        if self.offloading is None:
            return
        self.offloading.on_new_request(request)
        state = self.offloading._req_status.pop(request.request_id)
        state.update_offload_keys()
        for config, group in zip(self.offloading.config.kv_group_configs, state.group_states, strict=True):
            keys = group.offload_keys[: request.num_computed_tokens // config.tokens_per_chunk]
            if keys and self.rng.random() < 0.7:
                first = self.rng.choice((0, 0, self.rng.randrange(len(keys))))
                self._store(keys[first : first + self.rng.randrange(1, 8)], state.req_context)

    def _store(self, keys: list[Any], context: Any) -> None:
        manager = self.offloading.manager
        output = manager.prepare_store(keys, context)
        if output is not None:
            manager.complete_store(output.keys_to_store, context)

    def _chunk(self, request: Request, start: int, end: int) -> int:
        """Tokens of the next step."""
        new = min(
            end - start, self.rng.choice((999, 999, 3 * self.alignment, self.rng.randrange(1, 5 * self.alignment)))
        )
        if self._mamba is None or self._mamba.mamba_cache_mode != "align":
            return new
        scheduler = SimpleNamespace(
            cache_config=SimpleNamespace(block_size=self._mamba.block_size),
            hash_block_size=self.unit,
            num_hash_lookahead_tokens=0,
            block_size=self.alignment,
            mamba_partial_cache_hit=self.manager.coordinator.enable_partial_hash_hits,
            mamba_has_prefill_checkpoint_blocks=False,
            mamba_prefill_checkpoint_alignment=None,
            mamba_shared_prefix_checkpoint=self.manager.mamba_shared_prefix_checkpoint,
            use_eagle_block_drop=self.layout.eagle,
            max_num_scheduled_tokens=4096,
            scheduler_config=SimpleNamespace(long_prefill_token_threshold=0),
        )
        new = max(new, self._mamba.block_size) if start + new < end else new
        return Scheduler._mamba_block_aligned_split(scheduler, request, min(new, end - start), start)

    def step(self, running: Running) -> None:
        """A request's next chunk, or token; it ends if there is no room for it."""
        request = running.request
        self.manager.new_step_starts()
        if running.computed < request.num_tokens:
            new = self._chunk(request, running.computed, request.num_tokens)
        elif running.outputs:
            request.append_output_token_ids(self.rng.randrange(10, 500))
            running.outputs -= 1
            new = 1
        else:
            self.finish(running)
            return
        request.num_computed_tokens = running.computed
        lookahead = 2 * self.layout.eagle
        if self.manager.allocate_slots(request, new, num_lookahead_tokens=lookahead) is None:
            self.finish(running)
            return
        running.computed += new
        request.num_computed_tokens = running.computed
        self.publish()

    def finish(self, running: Running) -> None:
        self.running.remove(running)
        self.manager.free(running.request)
        self.manager.take_kv_cache_block_copies()
        self.publish()

    def walk(self, steps: int) -> None:
        for _ in range(steps):
            act = self.rng.random()
            if self.running and (act < 0.6 or len(self.running) > 3):
                running = self.rng.choice(self.running)
                (self.finish if act < 0.05 else self.step)(running)
            elif act > 0.995 and not self.running:
                self.manager.reset_prefix_cache()
                self.publish()
            else:
                self.arrive()


LAYOUTS = {
    "full": Layout([full(16)]),
    "full, twice": Layout([full(16), full(16)]),
    "full, of two sorts": Layout([full(16), mla(16)]),
    "full, eagle": Layout([full(16)], eagle=True),
    "full and draft, eagle": Layout([full(16), full(16, 2)], eagle=True, draft=frozenset({1})),
    "full twice, eagle": Layout([full(16), full(16)], eagle=True),
    "window": Layout([window(16, 40)]),
    "window, eagle": Layout([window(16, 40)], eagle=True),
    "state": Layout([mamba(16)]),
    "local": Layout([local(16, 64)]),
    "window and full": Layout([window(16, 40), full(16)]),
    "full and window of MLA": Layout([mla(16), window_mla(16, 60)]),
    "full and two windows": Layout([full(16), window(16, 40), window(16, 100)]),
    "five windows to one": Layout([full(16), *[window(16, 70)] * 5], blocks=200),
    "full and windows, eagle": Layout([full(16), window(16, 40), window(16, 70)], eagle=True),
    "full and window, draft of its own": Layout(
        [full(16), window(16, 40), full(16, 2)], eagle=True, draft=frozenset({2})
    ),
    "full and state": Layout([full(16), mamba(16)]),
    "state twice and full": Layout([mamba(16), mamba(16), full(16)]),
    "full and state, eagle": Layout([full(16), mamba(16, speculative=2)], eagle=True),
    "full, window and state": Layout([full(16), window(16, 50), mamba(16)]),
    "full and local": Layout([full(16), local(16, 64)]),
    "full, local and window": Layout([full(16), local(16, 64), window(16, 40)]),
    "window in smaller blocks": Layout([full(32), window(16, 40)]),
    "window in larger blocks": Layout([full(16), window(32, 70)]),
    "blocks of three sizes": Layout([full(16), window(32, 70), window(48, 50)], blocks=120),
    "windows only, of two sizes": Layout([window(16, 40), window(32, 90)]),
    "window in smaller blocks, eagle": Layout([full(32), window(16, 40)], eagle=True),
    "window in larger blocks, eagle": Layout([full(16), window(32, 70)], eagle=True),
    "window and full, retained": Layout([window(16, 40), full(16)], retention=64),
    "window and full, hardly retained": Layout([window(16, 40), full(16)], retention=0),
    "state and full, retained": Layout([mamba(16), full(16)], retention=64),
    "state, hits inside blocks": Layout([full(32), mamba(32)], unit=16),
    "state, hits inside large blocks": Layout([full(64), mamba(64)], unit=16),
    "state, hits inside blocks, eagle": Layout([full(32), mamba(32, speculative=2)], eagle=True, unit=16),
    "state in larger blocks": Layout([full(16), mamba(32)]),
    "full, offloaded": Layout([full(16)], chunk=2),
    "full, eagle, offloaded": Layout([full(16)], eagle=True, chunk=2),
    "full and draft, eagle, offloaded": Layout([full(16), full(16, 2)], eagle=True, draft=frozenset({1}), chunk=1),
    "full and draft, eagle, in chunks": Layout([full(16), full(16, 2)], eagle=True, draft=frozenset({1}), chunk=2),
    "window, offloaded": Layout([window(16, 40)], chunk=1),
    "window and full, offloaded": Layout([window(16, 40), full(16)], chunk=1),
    "window and full, in chunks": Layout([window(16, 70), full(16)], chunk=2),
    "full and two windows, in chunks": Layout([full(16), window(16, 40), window(16, 100)], chunk=3),
    "full and state, offloaded": Layout([full(16), mamba(16)], chunk=1),
    "full and state, in chunks": Layout([full(16), mamba(16)], chunk=2),
    "full, window and state, in chunks": Layout([full(16), window(16, 50), mamba(16)], chunk=2),
    "full and local, in chunks": Layout([full(16), local(16, 64)], chunk=2),
    "window in smaller blocks, in chunks": Layout([full(32), window(16, 40)], chunk=2),
    "window in larger blocks, in chunks": Layout([full(16), window(32, 70)], chunk=2),
    "draft with a window, in chunks": Layout([full(16), window(16, 40)], eagle=True, draft=frozenset({1}), chunk=2),
    "hits inside blocks, offloaded": Layout([full(32), mamba(32)], unit=16, chunk=1),
}


def prepare() -> None:
    init_none_hash(sha256)
    if KVCacheSpecRegistry.get_manager_class(full(16)) is None:
        register_all_kvcache_specs(None)


def walk(layout: Layout, seed: int, *, told: bool = True, steps: int = 120) -> Engine:
    engine = Engine(layout, seed, told)
    engine.walk(steps)
    return engine


def differences(engine: Engine) -> list[tuple[int, int, int]]:
    """Prompts of which a picker that starts with a snapshot says something else: length, and both predictions."""
    late = engine.late_picker()
    prompts = [text[:length] for text in engine.texts for length in range(1, len(text) // 2, 7)]
    both = [(len(prompt), engine.predict(prompt), late.predict(prompt)) for prompt in prompts]
    return [said for said in both if said[1] != said[2]]


@dataclass
class Tally:
    requests: int = 0
    hits: int = 0
    too_high: int = 0
    too_low: int = 0
    late: int = 0
    """Prompts of which a picker that starts with a snapshot says something else."""
    odd: set[int] = field(default_factory=set)
    """Seeds of walks in which anything was wrong."""

    def add(self, engine: Engine) -> None:
        wrong = [predicted - found for predicted, found in engine.predictions if predicted != found]
        different = differences(engine) if engine.told else []
        self.requests += len(engine.predictions)
        self.hits += sum(found > 0 for _, found in engine.predictions)
        self.too_high += sum(by > 0 for by in wrong)
        self.too_low += sum(by < 0 for by in wrong)
        self.late += len(different)
        if wrong or different or (engine.told and engine.unaccounted()):
            self.odd.add(engine.seed)


def main() -> None:
    prepare()
    seeds, first = map(int, [*sys.argv[1:], *("20", "0")[len(sys.argv) - 1 :]])
    for name, layout in LAYOUTS.items():
        for told in (True, False):
            tally = Tally()
            for seed in range(first, first + seeds):
                tally.add(walk(layout, seed, told=told))
            print(f"{name:36} {'told' if told else 'stock':6} {tally}", flush=True)


if __name__ == "__main__":
    main()
