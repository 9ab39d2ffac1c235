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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import add, mul
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from epp.config.environment import Environment
from epp.config.registry import Parameters, plugin
from epp.config.units import Duration, seconds
from epp.fleet.endpoint import Endpoint
from epp.producers.kv_events import Candidates, KvEvents, KvEventsConfig
from epp.routing import Outcome
from epp.scheduling.plugin import Certainty, PrefixMatch, Scheduling, SchedulingResult, TierHit
from indexer.match import Match, Prompt, match
from indexer.residency import Residency
from indexer.speculative import Speculation
from indexer.stream import State
from indexer.wire import canonical_tier

PREFILL = "prefill"
TIERS = ("gpu", "cpu", "storage", "other")
"""`other`: media that the indexer has no name for."""
DEFAULT_WEIGHTS: Mapping[str, float] = {"gpu": 1.0, "cpu": 0.8, "storage": 0.5}
UNKNOWN_WEIGHT = 0.5
"""Of a medium that has neither a default nor a configured weight: no more than the slowest known one."""

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
    """What a token in each tier counts; in the order of `TIERS`. 0 = the tier does not count, as cached neither."""

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


@dataclass(slots=True, eq=False)
class Lookup:
    """What the index says of a request. Columns are aligned with `candidates.endpoints`."""

    candidates: Candidates
    residencies: Sequence[Residency]
    states: Sequence[State]
    trust: Sequence[float]
    """In what the residencies show; empty = all of them are live."""
    block_size: int
    """Tokens; that of most candidates."""
    prompts: Sequence[Prompt]
    matches: Sequence[Match]
    """One a prompt."""
    tokens: Sequence[Sequence[int]]
    """For each of `TIERS`, the tokens found there, of all prompts; empty = none at any candidate."""
    speculative: Sequence[Mapping[int, int]]
    """For each prompt: candidate → blocks after its HBM run that it will probably hold soon. Empty = none at all."""
    noted: bool = False

    @property
    def total(self) -> int:
        return sum(len(prompt) // self.block_size for prompt in self.prompts)

    def keys(self, prompt: Prompt, i: int) -> list[int]:
        residency = self.residencies[i]
        return prompt.keys(residency.block_size or self.block_size, residency.root_for(prompt.model))


def look_up(events: KvEvents, scheduling: Scheduling, default_block: int) -> Lookup:
    request = scheduling.request
    candidates = events.candidates(scheduling.endpoints)
    streams = candidates.streams
    residencies = [stream.residency for stream in streams]
    states = [stream.state for stream in streams]
    trust = () if states.count(State.LIVE) == len(states) else [stream.trust for stream in streams]
    sizes = [residency.own_block_size or residency.block_size for residency in residencies]
    block = max(set(sizes) - {0}, key=sizes.count, default=default_block)
    model = events.served_as(request.target_model)
    prompts = [Prompt(tokens, model, request.cache_salt) for tokens in request.tokens]
    matches = [match(events.index, prompt, residencies) for prompt in prompts]
    tokens = [_tokens(matches, sizes, tier) for tier in TIERS]
    lookup = Lookup(candidates, residencies, states, trust, block, prompts, matches, tokens, ())
    if len(events.speculation):
        lookup.speculative = [_runs(events.speculation, lookup, number) for number in range(len(prompts))]
    return lookup


def _tokens(matches: Sequence[Match], sizes: Sequence[int], tier: str) -> Sequence[int]:
    columns = [found.tokens(tier, sizes) for found in matches if any(found.column(tier))]
    return columns[0] if len(columns) == 1 else list(map(sum, zip(*columns, strict=True)))


def _runs(speculation: Speculation, lookup: Lookup, number: int) -> Mapping[int, int]:
    """Of one prompt, for the candidates that have any notes."""
    prompt, found, holders = lookup.prompts[number], lookup.matches[number], speculation.holders()
    hopeful = [(i, e) for i, e in enumerate(lookup.candidates.endpoints) if e in holders]
    return {i: speculation.run(e, lookup.keys(prompt, i), found.gpu[i]) for i, e in hopeful}


def hits(lookup: Lookup) -> list[TierHit | None]:
    """Proven tokens by slot; None = not a candidate."""
    nothing = TierHit()  # shared: most endpoints of a large fleet hold nothing of a prompt
    zeros = [0] * len(lookup.residencies)
    columns = zip(*(column or zeros for column in lookup.tokens), strict=True)
    found = [
        TierHit(gpu, cpu, storage + other) if gpu or cpu or storage or other else nothing
        for gpu, cpu, storage, other in columns
    ]
    return lookup.candidates.by_slot(found, None)


def certainty(lookup: Lookup) -> Certainty:
    by_slot = lookup.candidates.by_slot
    return Certainty(by_slot(lookup.states, None), by_slot(lookup.trust, 0.0) if lookup.trust else ())


def published(lookup: Lookup, weights: Weights, *, speculative: bool) -> PrefixMatch:
    weighted, counted = [0.0] * len(lookup.residencies), [0] * len(lookup.residencies)
    for column, weight in zip(lookup.tokens, weights, strict=True):
        if column and weight:
            weighted = [before + tokens * weight for before, tokens in zip(weighted, column, strict=True)]
            counted = list(map(add, counted, column))
    if speculative:
        _add_speculative(weighted, lookup, weights)
    if lookup.trust:
        weighted = list(map(mul, weighted, lookup.trust))
    blocks = [tokens / lookup.block_size for tokens in weighted]
    by_slot = lookup.candidates.by_slot
    return PrefixMatch(lookup.total, lookup.block_size, by_slot(blocks, 0.0), by_slot(counted, 0))


def _add_speculative(weighted: list[float], lookup: Lookup, weights: Weights) -> None:
    for found, runs in zip(lookup.matches, lookup.speculative, strict=False):
        for i, run in runs.items():
            size = lookup.residencies[i].block_size or lookup.block_size
            weighted[i] += _speculative_gain(found, i, run, weights) * size


def _speculative_gain(found: Match, i: int, run: int, weights: Weights) -> float:
    """In blocks. The run will be in HBM: what lower tiers serve of it today is counted as HBM then, not twice."""
    gain, left = run * weights.gpu, run
    for blocks, weight in zip((found.cpu[i], found.storage[i], found.other[i]), weights[1:], strict=True):
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
            scheduling.hits, scheduling.certainty = hits(lookup), certainty(lookup)
            longest = max(map(sum, zip(*filter(None, lookup.tokens), strict=True)), default=0) // lookup.block_size
            self._telemetry.looked_up(time.perf_counter() - started, longest)
        return lookup

    def picked(self, scheduling: Scheduling, result: SchedulingResult) -> None:
        """What the picked endpoint does not hold yet, it soon will."""
        lookup: Lookup | None = scheduling.notes.get(self.type)
        if not self._speculative or lookup is None or lookup.noted:
            return
        lookup.noted = True
        for profile in (result.target, result.profiles.get(PREFILL)):
            if profile is not None and profile.picked[0] in lookup.candidates.endpoints:
                self._note(scheduling, lookup, profile.picked[0])

    def _note(self, scheduling: Scheduling, lookup: Lookup, endpoint: Endpoint) -> None:
        i = lookup.candidates.endpoints.index(endpoint)
        for prompt, found in zip(lookup.prompts, lookup.matches, strict=True):
            keys = lookup.keys(prompt, i)[found.gpu[i] :]
            # not under the request's id: clients choose those, and may repeat them
            self._events.speculation.add(lookup, endpoint, keys, scheduling.now)

    def finished(self, scheduling: Scheduling, result: SchedulingResult, outcome: Outcome) -> None:
        lookup: Lookup | None = scheduling.notes.pop(self.type, None)
        if lookup is None:
            return
        self._events.speculation.drop(lookup)
        if lookup.total and outcome.status == 200:
            self._events.served(result.target.picked[0])
