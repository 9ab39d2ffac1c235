"""token-load-scorer: prompt tokens the endpoint would have to compute, ours in flight plus this request's.

t ≤ 0: 1; else 1 − min(t, threshold) / threshold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from epp.config.environment import Environment
from epp.config.registry import Parameters, plugin
from epp.fleet.endpoint import Endpoint
from epp.producers.inflight import InFlight
from epp.scheduling.plugin import Scheduling


class TokenLoadParameters(Parameters, frozen=True):
    queue_threshold_tokens: Annotated[int, msgspec.Meta(ge=1)] = 4_194_304
    in_flight_load_producer_name: str = ""


@plugin("token-load-scorer", TokenLoadParameters)
class TokenLoadScorer:
    name: str
    type: str

    def __init__(self, name: str, parameters: TokenLoadParameters, environment: Environment) -> None:
        self._producer = parameters.in_flight_load_producer_name or "inflight-load-producer"
        self._threshold = parameters.queue_threshold_tokens
        self._in_flight = InFlight.of(environment)

    def requires(self) -> Sequence[str]:
        return (self._producer, "token-producer")

    def score(self, scheduling: Scheduling, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        most, estimate = self._threshold, self._in_flight.estimate
        return [1.0 - min(e.inflight_tokens + estimate(scheduling, e).prompt, most) / most for e in endpoints]
