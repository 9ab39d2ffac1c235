"""Scorers over what engines report of themselves: waiting and running requests, KV memory in use.

A figure never heard is 0, so an endpoint that has just come looks idle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from epp.config.environment import Environment
from epp.config.registry import Parameters, plugin
from epp.fleet.endpoint import Endpoint
from epp.scheduling.plugin import Scheduling


def fewest_best(counts: Sequence[int]) -> Sequence[float]:
    """(max − n) / (max − min); all equal: 1."""
    low, high = min(counts, default=0), max(counts, default=0)
    if low == high:
        return [1.0] * len(counts)
    span = high - low
    return [(high - count) / span for count in counts]


@plugin("queue-scorer")
class QueueScorer:
    """Requests waiting in the engine."""

    name: str
    type: str

    def __init__(self, name: str, parameters: Parameters, environment: Environment) -> None: ...

    def score(self, scheduling: Scheduling, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        return fewest_best([endpoint.load.waiting for endpoint in endpoints])


@plugin("running-requests-size-scorer")
class RunningRequestsSizeScorer:
    """Requests the engine computes at the moment."""

    name: str
    type: str

    def __init__(self, name: str, parameters: Parameters, environment: Environment) -> None: ...

    def score(self, scheduling: Scheduling, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        return fewest_best([endpoint.load.running for endpoint in endpoints])


@plugin("kv-cache-utilization-scorer")
class KvCacheUtilizationScorer:
    """1 − share of HBM blocks in use."""

    name: str
    type: str

    def __init__(self, name: str, parameters: Parameters, environment: Environment) -> None: ...

    def score(self, scheduling: Scheduling, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        return [1.0 - endpoint.load.kv_usage for endpoint in endpoints]


class LoadAwareParameters(Parameters, frozen=True):
    threshold: Annotated[int, msgspec.Meta(ge=1)] = 128
    """Waiting requests at which the score reaches 0."""


@plugin("load-aware-scorer", LoadAwareParameters)
class LoadAwareScorer:
    """0.5 · (1 − min(waiting, threshold) / threshold)."""

    name: str
    type: str

    def __init__(self, name: str, parameters: LoadAwareParameters, environment: Environment) -> None:
        self._threshold = parameters.threshold

    def score(self, scheduling: Scheduling, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        most = self._threshold
        return [0.5 * (1.0 - min(endpoint.load.waiting, most) / most) for endpoint in endpoints]
