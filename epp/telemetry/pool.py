"""Gauges of the whole pool, worked out from the fleet when somebody scrapes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import Metric

from epp.fleet.endpoint import Endpoint
from epp.fleet.fleet import Fleet

_FIGURES: dict[str, tuple[str, Callable[[Endpoint], float]]] = {
    "kv_cache_utilization": ("HBM share of running requests (0 to 1)", lambda e: e.load.kv_usage),
    "queue_size": ("requests waiting in an engine", lambda e: e.load.waiting),
    "running_requests": ("requests running in an engine", lambda e: e.load.running),
}


def endpoint_name(endpoint: Endpoint) -> str:
    return endpoint.spec.name or endpoint.address


@dataclass(slots=True)
class PoolGauges:
    """Averages count only endpoints heard within `staleness` seconds; with none there is no average."""

    fleet: Fleet
    pool: str
    staleness: float
    clock: Callable[[], float]

    def collect(self) -> Iterator[Metric]:
        yield self._gauge("ready_endpoints", "Endpoints that may be picked.", len(self.fleet.endpoints))
        now = self.clock()
        fresh = [e for e in self.fleet.endpoints if e.load.updated_at and now - e.load.updated_at <= self.staleness]
        if not fresh:
            return
        for figure, (text, read) in _FIGURES.items():
            values = [read(e) for e in fresh]
            deviation = statistics.stdev(values) if len(values) > 1 else 0.0
            yield self._gauge(f"average_{figure}", f"Mean over fresh endpoints: {text}.", statistics.fmean(values))
            yield self._gauge(f"std_dev_{figure}", f"Sample standard deviation: {text}.", deviation)
        yield self._queues(fresh)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        metric = Metric(f"llm_d_epp_{name}", text, "gauge")
        metric.add_sample(metric.name, {"name": self.pool}, round(value, 2))
        return metric

    def _queues(self, fresh: Sequence[Endpoint]) -> Metric:
        metric = Metric("llm_d_epp_per_endpoint_queue_size", "Requests waiting in each engine.", "gauge")
        seen: set[str] = set()
        for endpoint in fresh:
            # one pod with several ranks may carry one name: two series alike would void the whole page
            name = endpoint.address if endpoint_name(endpoint) in seen else endpoint_name(endpoint)
            seen.add(name)
            labels = {"name": self.pool, "model_server_endpoint": name}
            metric.add_sample(metric.name, labels, endpoint.load.waiting)
        return metric
