"""prefix-cache-affinity-filter: keep to the endpoints that hold most of the prompt, unless they are too busy.

Sticky endpoints hold at least `affinityThreshold` of the prompt. They are left alone in the running, except: nobody is
sticky; by chance `explorationProbability`; or the least busy of them would answer more than `maxTTFTPenaltyMs` later
than the least busy other one, where time is in-flight tokens over `peakPrefillThroughput`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec

from epp.config.environment import Environment
from epp.config.registry import Parameters, plugin
from epp.fleet.endpoint import Endpoint
from epp.scheduling.plugin import Scheduling
from epp.scheduling.prefix import DEFAULT_PRODUCER, matched_shares

Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class PrefixAffinityParameters(Parameters, frozen=True):
    affinity_threshold: Share = 0.80
    """0 = never sticky."""
    exploration_probability: Share = 0.0
    max_ttft_penalty_ms: Annotated[float, msgspec.Meta(ge=0)] = msgspec.field(name="maxTTFTPenaltyMs", default=18_000.0)
    """0 = sticky however busy."""
    ttft_source: Literal["prefillThroughput", "latencyPredictor"] = "prefillThroughput"
    peak_prefill_throughput: Annotated[float, msgspec.Meta(gt=0)] = 15_928.0
    """Tokens a second of one endpoint."""
    prefix_match_info_producer_name: str = ""
    in_flight_load_producer_name: str = ""
    """Accepted for llm-d's files: there is one account of tokens in flight."""
    latency_prediction_info_producer_name: str = ""

    def __post_init__(self) -> None:
        if self.ttft_source == "latencyPredictor":
            raise ValueError("ttftSource latencyPredictor is not available in tierpick yet")


@plugin("prefix-cache-affinity-filter", PrefixAffinityParameters)
class PrefixCacheAffinityFilter:
    name: str
    type: str

    def __init__(self, name: str, parameters: PrefixAffinityParameters, environment: Environment) -> None:
        self._producer = parameters.prefix_match_info_producer_name or DEFAULT_PRODUCER
        self._threshold = parameters.affinity_threshold
        self._exploration = parameters.exploration_probability
        self._penalty_tokens = parameters.max_ttft_penalty_ms / 1000.0 * parameters.peak_prefill_throughput
        self._rng = environment.rng

    def requires(self) -> Sequence[str]:
        return (self._producer,)

    def filter(self, scheduling: Scheduling, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        if len(endpoints) <= 1 or self._threshold <= 0.0 or self._rng.random() < self._exploration:
            return endpoints
        shares = matched_shares(scheduling, self._producer, endpoints)
        sticky = [e for e, share in zip(endpoints, shares, strict=True) if share >= self._threshold]
        if not sticky or (len(sticky) < len(endpoints) and self._too_busy(sticky, endpoints)):
            return endpoints
        return sticky

    def _too_busy(self, sticky: Sequence[Endpoint], endpoints: Sequence[Endpoint]) -> bool:
        if not self._penalty_tokens:
            return False
        # over all instead of over the others: where the least busy one is sticky the difference is 0 or less either way
        ahead = min(e.inflight_tokens for e in sticky) - min(e.inflight_tokens for e in endpoints)
        return ahead > self._penalty_tokens
