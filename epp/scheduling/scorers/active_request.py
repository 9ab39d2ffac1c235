"""active-request-scorer: our own requests in flight, which are known at once, before any scrape.

n ≤ `idleThreshold`: 1; else (max − n) / max · `maxBusyScore`, max over the candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from epp.config.environment import Environment
from epp.config.registry import Parameters, plugin
from epp.config.units import Duration
from epp.fleet.endpoint import Endpoint
from epp.scheduling.plugin import Scheduling


class ActiveRequestParameters(Parameters, frozen=True):
    idle_threshold: Annotated[int, msgspec.Meta(ge=0)] = 0
    max_busy_score: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0
    in_flight_load_producer_name: str = ""
    """Accepted for llm-d's files: there is one account of requests in flight."""
    request_timeout: Duration | None = None
    """Accepted for llm-d's files, which ignore it too: a request ends when its stream does."""


@plugin("active-request-scorer", ActiveRequestParameters)
class ActiveRequestScorer:
    name: str
    type: str
    without_effect = ("requestTimeout",)

    def __init__(self, name: str, parameters: ActiveRequestParameters, environment: Environment) -> None:
        self._idle = parameters.idle_threshold
        self._best = parameters.max_busy_score

    def score(self, scheduling: Scheduling, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        counts = [endpoint.inflight_requests for endpoint in endpoints]
        idle, best, most = self._idle, self._best, max(counts, default=0)
        return [1.0 if count <= idle else (most - count) / most * best for count in counts]
