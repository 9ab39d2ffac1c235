"""Everything the picker counts, by llm-d's names and buckets, with a handful of our own under `tierpick_`.

Written by the event loop's thread only. Values that other parts keep anyway are pulled when scraped (`add_source`,
`watch`), not copied on the request path. What a page looks like on the wire is `epp.debug`'s affair.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, GCCollector, Metric, PlatformCollector, ProcessCollector
from prometheus_client.registry import Collector

from epp.fleet.endpoint import Endpoint
from epp.fleet.fleet import Fleet
from epp.scheduling.plugin import TierHit
from epp.telemetry import buckets
from epp.telemetry.families import Counter, Group, Histogram, Names, counter, gauge, histogram
from epp.telemetry.pool import PoolGauges, endpoint_name
from epp.telemetry.pulled import OCCUPANCY, Reading, Source, Sources
from epp.telemetry.requests import RequestFamilies, RequestMetrics

_PLUGIN = ("plugin_name", "plugin_type")
_UNSCORED_REASONS = 50
FOLDED = 128
"""Requests after which what their histograms have noted is counted."""


class Telemetry(Collector):
    """`commit` and `build_ref` are what the info metric says of this build."""

    def __init__(self, registry: CollectorRegistry | None = None, *, commit: str = "", build_ref: str = "") -> None:
        self._requests = RequestFamilies()
        self._scheduling = _SchedulingFamilies()
        self._prefix = _PrefixFamilies()
        self._prediction = _PredictionFamilies()
        self._data_layer = _DataLayerFamilies()
        self._groups = (self._requests, self._scheduling, self._prefix, self._prediction, self._data_layer)
        self._until_fold = FOLDED
        self._unscored_reasons = Names(_UNSCORED_REASONS)
        self._info = gauge("llm_d_epp_info", "The running build.", ("commit", "build_ref"))
        self._info.child(commit, build_ref).set(1)
        self._sources = Sources(lambda name: self.plugin_failed(name, "Metrics"))
        self._sources.add("telemetry", self._occupancy)
        self._pools: list[PoolGauges] = []
        self.registry = registry or _registry_with_process_metrics()
        self.registry.register(self)

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        for group in self._groups:
            yield from group.collect()
        yield from self._info.collect()
        for pool in self._pools:
            yield from pool.collect()
        yield from self._sources.collect()

    # requests

    def requests(self, model: str, target: str, fairness_id: str, priority: int) -> RequestMetrics:
        """`started` and `finished` of one request must go to the same object."""
        self._until_fold -= 1
        if not self._until_fold:
            self._until_fold = FOLDED
            for group in self._groups:
                group.fold()
        return self._requests.resolve(model, target, fairness_id, priority)

    def bounded_fairness_id(self, fairness_id: str) -> str:
        return self._requests.fairness_ids.bound(fairness_id)

    def request_processed(self, seconds: float) -> None:
        """Our own time from request headers to the routing answer."""
        self._scheduling.request_processed.observe(seconds)

    def response_processed(self, seconds: float) -> None:
        self._scheduling.response_processed.observe(seconds)

    def unscored(self, reason: str) -> None:
        """`reason` is one of a few words; past 50 different ones it becomes "other"."""
        self._prediction.unscored.child(self._unscored_reasons.bound(reason)).inc()

    # scheduling

    def scheduled(self, target_model: str, endpoint: Endpoint | None, seconds: float) -> None:
        """One scheduling attempt; `endpoint` None = none was found."""
        self._scheduling.scheduled.observe(seconds)
        self._scheduling.attempt(self._requests.models.bound(target_model), endpoint).value += 1

    def plugin_duration(self, extension_point: str, plugin_type: str, plugin_name: str) -> Histogram:
        """To be resolved once and kept; observe seconds. Extension points are llm-d's: Filter, Scorer, Picker, …"""
        return self._scheduling.plugin_duration.child(extension_point, plugin_type, plugin_name)

    def plugin_failed(self, plugin_name: str, extension_point: str) -> None:
        self._scheduling.plugin_failures.child(plugin_name, extension_point).inc()

    # prefix caches and predictions

    def prefix_indexer(
        self, plugin_name: str, plugin_type: str, size: Callable[[], float] = lambda: 0.0
    ) -> PrefixIndexerMetrics:
        """To be resolved once and kept. `size` is asked at scrape time for the entries in the index."""
        labels = (plugin_name, plugin_type)
        self._sources.add(f"{plugin_name} size", lambda: [("prefix_indexer_size", labels, size())])
        return PrefixIndexerMetrics(self._prefix.ratio.child(*labels), self._prefix.bytes.child(*labels))

    def looked_up(self, seconds: float, longest: int) -> None:
        """One walk of the event-fed index; `longest` = blocks in a row that the best endpoint has."""
        self._prefix.looked_up(seconds, longest)

    def predicted(self, chosen: TierHit, best: int, prompt_tokens: int) -> None:
        """What the chosen endpoint should find, what the best candidate would have found, and out of how many."""
        self._prediction.predict(chosen, best, prompt_tokens)

    def delivered(self, predicted: int, delivered: int, feed: str) -> None:
        """What the engine reports it found, beside what was predicted for that request; `feed` is the state that the
        endpoint's event feed was in at that time, "" = it has none."""
        self._prediction.deliver(predicted, delivered, feed)

    # fleet

    def watch(
        self, fleet: Fleet, pool: str, *, staleness: float = 2.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Export the gauges of `fleet`, and drop an endpoint's series when it goes."""
        self._pools.append(PoolGauges(fleet, pool, staleness, clock))
        fleet.subscribe(self._scheduling)

    def poll_failed(self, source_type: str) -> None:
        self._data_layer.poll_errors.child(source_type).inc()

    def extract_failed(self, source_type: str, extractor_type: str) -> None:
        self._data_layer.extract_errors.child(source_type, extractor_type).inc()

    # figures kept elsewhere

    def add_source(self, name: str, source: Source) -> None:
        """`source()` is called at scrape time on the loop's thread; its families are declared in
        `epp.telemetry.pulled`. One that raises is counted as a failed plugin of that name, the page goes on."""
        self._sources.add(name, source)

    def _occupancy(self) -> Iterator[Reading]:
        requests = self._requests
        for name, names in (("model names", requests.models), ("fairness ids", requests.fairness_ids)):
            yield OCCUPANCY, (name,), len(names) / names.limit
        yield OCCUPANCY, ("request label sets",), len(requests) / requests.limit


class _SchedulingFamilies(Group):
    """Listens to the fleet, since attempts are counted by endpoint."""

    def __init__(self) -> None:
        self.e2e = histogram("llm_d_epp_scheduler_e2e_duration_seconds", "One scheduling run.", buckets.SCHEDULER)
        self.attempts = counter(
            "llm_d_epp_scheduler_attempts_total",
            "Scheduling runs by their result.",
            ("status", "target_model_name", "endpoint_name", "namespace", "port"),
            limit=10_000,
        )
        self.plugin_duration = histogram(
            "llm_d_epp_plugin_duration_seconds",
            "One call of a plugin.",
            buckets.SCHEDULER,
            ("extension_point", "plugin_type", "plugin_name"),
        )
        self.plugin_failures = counter(
            "tierpick_plugin_failures_total",
            "Calls of a plugin that raised; the plugin was skipped for that request.",
            ("plugin_name", "extension_point"),
        )
        self.request_processing = histogram(
            "llm_d_epp_request_processing_duration_seconds",
            "The picker's own time for the request side of an exchange.",
            buckets.REQUEST_PROCESSING,
        )
        self.response_processing = histogram(
            "llm_d_epp_response_processing_duration_seconds",
            "The picker's own time for the response side of an exchange.",
            buckets.RESPONSE_PROCESSING,
        )
        self.scheduled = self.e2e.child()
        self.request_processed = self.request_processing.child()
        self.response_processed = self.response_processing.child()
        self._by_endpoint: dict[Endpoint | None, dict[str, Counter]] = {None: {}}

    def attempt(self, target_model: str, endpoint: Endpoint | None) -> Counter:
        models = self._by_endpoint.get(endpoint)
        if models is None:  # gone since it was picked: its series must not come back
            return self.attempts.child("success", target_model, "", "", "")
        found = models.get(target_model)
        if found is None:
            found = models[target_model] = self.attempts.child(*_attempt_labels(target_model, endpoint))
        return found

    def endpoint_added(self, endpoint: Endpoint) -> None:
        self._by_endpoint[endpoint] = {}

    def endpoint_removed(self, endpoint: Endpoint) -> None:
        for target_model in self._by_endpoint.pop(endpoint, {}):
            self.attempts.forget(*_attempt_labels(target_model, endpoint))

    def endpoint_updated(self, endpoint: Endpoint) -> None:
        pass


def _attempt_labels(target_model: str, endpoint: Endpoint | None) -> tuple[str, ...]:
    if endpoint is None:
        return ("failure", target_model, "", "", "")
    port = endpoint.address.rpartition(":")[2]
    return ("success", target_model, endpoint_name(endpoint), endpoint.spec.namespace, port)


class PrefixIndexerMetrics:
    """One producer instance's view of how much it finds."""

    __slots__ = ("_bytes", "_ratio")

    def __init__(self, ratio: Histogram, hit_bytes: Histogram) -> None:
        self._ratio = ratio
        self._bytes = hit_bytes

    def matched(self, blocks: float, total: int, block_bytes: int) -> None:
        """`blocks` of the prompt's `total` were found at the best endpoint; llm-d counts 4 bytes a token."""
        self._ratio.observe(blocks / total if total else 0.0)
        self._bytes.observe(blocks * block_bytes)


class _PrefixFamilies(Group):
    def __init__(self) -> None:
        self.ratio = histogram(
            "llm_d_epp_prefix_indexer_hit_ratio",
            "Share of the prompt that the best endpoint holds.",
            buckets.HIT_RATIO,
            _PLUGIN,
        )
        self.bytes = histogram(
            "llm_d_epp_prefix_indexer_hit_bytes",
            "Prompt bytes that the best endpoint holds, 4 a token.",
            buckets.HIT_BYTES,
            _PLUGIN,
        )
        self.requests = counter("llm_d_epp_kv_cache_index_lookup_requests_total", "Walks of the event-fed index.")
        self.hits = counter("llm_d_epp_kv_cache_index_lookup_hits_total", "Blocks in a row found at the best endpoint.")
        self.longest = counter(
            "llm_d_epp_kv_cache_index_max_pod_hit_count_total", "Blocks in a row found at the best endpoint."
        )
        self.latency = histogram(
            "llm_d_epp_kv_cache_index_lookup_latency_seconds", "One walk of the index.", buckets.PROMETHEUS_DEFAULT
        )
        self._took = self.latency.child()

    def looked_up(self, seconds: float, longest: int) -> None:
        self.requests.child().value += 1
        self.hits.child().value += longest
        self.longest.child().value += longest
        self._took.observe(seconds)


class _PredictionFamilies(Group):
    """Available, predicted, delivered: which of the three falls short says where hits are lost."""

    def __init__(self) -> None:
        self.prompt = counter("tierpick_prompt_tokens_total", "Prompt tokens of requests with a prediction.")
        self.best = counter(
            "tierpick_best_available_tokens_total", "Cached tokens of the candidate that held most of the prompt."
        )
        self.tokens = counter(
            "tierpick_predicted_tokens_total", "Cached tokens predicted for the chosen endpoint, by tier.", ("tier",)
        )
        self.reported = counter(
            "tierpick_delivered_cached_tokens_total", "Cached tokens that engines reported for predicted requests."
        )
        self.results = counter(
            "tierpick_prediction_total",
            "Reported cached tokens against the prediction, by the state of the endpoint's event feed at that time.",
            ("result", "feed"),
        )
        self.unscored = counter("tierpick_unscored_requests_total", "Requests routed without a prompt.", ("reason",))
        self._gpu, self._cpu, self._storage = map(self.tokens.child, ("gpu", "cpu", "storage"))
        for result in ("exact", "below", "above"):
            self.results.child(result, "live")

    def predict(self, chosen: TierHit, best: int, prompt_tokens: int) -> None:
        self._gpu.value += chosen.gpu
        self._cpu.value += chosen.cpu
        self._storage.value += chosen.storage
        self.best.child().value += best
        self.prompt.child().value += prompt_tokens

    def deliver(self, predicted: int, delivered: int, feed: str) -> None:
        self.reported.child().value += delivered
        self.results.child(comparison(predicted, delivered), feed).value += 1


def comparison(predicted: int, delivered: int) -> str:
    """How the delivered tokens stand to the predicted: "exact", "below" or "above"."""
    if delivered == predicted:
        return "exact"
    return "below" if delivered < predicted else "above"


class _DataLayerFamilies(Group):
    def __init__(self) -> None:
        self.poll_errors = counter(
            "llm_d_epp_datalayer_poll_errors_total", "Reads of a data source that failed.", ("source_type",)
        )
        self.extract_errors = counter(
            "llm_d_epp_datalayer_extract_errors_total",
            "Answers of a data source that lacked a required figure.",
            ("source_type", "extractor_type"),
        )


def _registry_with_process_metrics() -> CollectorRegistry:
    registry = CollectorRegistry()
    collectors: tuple[Any, ...] = (ProcessCollector, PlatformCollector, GCCollector)
    for collector in collectors:
        collector(registry=registry)
    return registry
