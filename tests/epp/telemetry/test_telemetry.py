"""The exported families: their names, labels and buckets are a promise to dashboards."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse

from epp.fleet.endpoint import EndpointSpec, EngineLoad
from epp.fleet.fleet import Fleet
from epp.scheduling.plugin import TierHit
from epp.telemetry import OCCUPANCY, Reading, Telemetry, comparison
from epp.telemetry.pulled import DECLARED
from epp.telemetry.telemetry import FOLDED

MODEL = "model_name target_model_name fairness_id priority"
LATENCY = (
    "0.005 0.025 0.05 0.1 0.2 0.4 0.6 0.8 1 1.25 1.5 2 3 4 5 6 8 10 15 20 30 45 60 120 180 240 300 360 480 600 900 "
    "1200 1800 2700 3600"
)
TOKENS = "1 8 16 32 64 128 256 512 1024 2048 4096 8192 16384 32778 65536 131072 262144 524288 1048576"
SCHEDULER = "0.0001 0.0002 0.0005 0.001 0.002 0.005 0.01 0.02 0.05 0.1"

HISTOGRAMS = {
    "request_duration_seconds": (MODEL, LATENCY),
    "request_size_bytes": (MODEL, " ".join(str(2**n) for n in range(6, 31))),
    "response_size_bytes": (MODEL, TOKENS.partition(" 131072")[0]),
    "request_input_tokens": (MODEL, TOKENS),
    "request_cached_tokens": (MODEL, TOKENS),
    "request_output_tokens": (MODEL, TOKENS.partition(" 16384")[0]),
    "request_ntpot_seconds": (MODEL, "0.001 0.002 0.005 0.01 0.02 0.05 0.1 0.2 0.5 1 2 5 10"),
    "request_ttft_seconds": (f"{MODEL} streaming", LATENCY.partition(" 180")[0]),
    "request_streaming_tpot_seconds": (
        MODEL,
        "0.0005 0.00205 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.125 0.15 0.2 0.3 0.4 0.5 0.6 0.8 1 2",
    ),
    "request_streaming_itl_seconds": (MODEL, "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.15 0.2 0.3 0.5 0.75 1 2"),
    "scheduler_e2e_duration_seconds": ("", SCHEDULER),
    "plugin_duration_seconds": ("extension_point plugin_type plugin_name", SCHEDULER),
    "request_processing_duration_seconds": (
        "",
        "0.0005 0.001 0.002 0.005 0.01 0.015 0.025 0.04 0.06 0.1 0.25 0.5 1 2.5 5 10",
    ),
    "response_processing_duration_seconds": (
        "",
        "0.0001 0.00025 0.0005 0.001 0.0025 0.005 0.01 0.025 0.05 0.1 0.25 0.5 1 2.5 5",
    ),
    "prefix_indexer_hit_ratio": ("plugin_name plugin_type", "0 0.1 0.2 0.3 0.4 0.5 0.6 0.7 0.8 0.9 1"),
    "prefix_indexer_hit_bytes": (
        "plugin_name plugin_type",
        "0 16 32 64 128 256 512 1024 2048 4096 8192 16384 32768 65536",
    ),
    "kv_cache_index_lookup_latency_seconds": ("", "0.005 0.01 0.025 0.05 0.1 0.25 0.5 1 2.5 5 10"),
}
COUNTERS = {
    "request_total": MODEL,
    "request_error_total": f"{MODEL} error_code",
    "scheduler_attempts_total": "status target_model_name endpoint_name namespace port",
    "datalayer_poll_errors_total": "source_type",
    "datalayer_extract_errors_total": "source_type extractor_type",
    "kv_cache_index_admissions_total": "",
    "kv_cache_index_evictions_total": "",
    "kv_cache_index_lookup_requests_total": "",
    "kv_cache_index_max_pod_hit_count_total": "",
    "kv_cache_index_lookup_hits_total": "",
    "kv_cache_events_dedup_removed_hashes_suppressed_total": "",
    "kv_cache_events_dedup_removed_hashes_forwarded_total": "",
    "kv_cache_events_stores_skipped_total": "cache_kind reason",
    "kv_cache_events_removals_skipped_total": "cache_kind reason",
    "kv_cache_events_subscriber_reconnections_total": "pod_identifier",
    "kv_cache_events_messages_received_total": "pod_identifier",
    "kv_cache_events_zmq_errors_total": "pod_identifier operation",
}
GAUGES = {
    "request_running": MODEL,
    "ready_endpoints": "name",
    "average_kv_cache_utilization": "name",
    "average_queue_size": "name",
    "average_running_requests": "name",
    "std_dev_kv_cache_utilization": "name",
    "std_dev_queue_size": "name",
    "std_dev_running_requests": "name",
    "per_endpoint_queue_size": "name model_server_endpoint",
    "prefix_indexer_size": "plugin_name plugin_type",
    "inflight_requests": "endpoint_name namespace producer_name fairness_id priority",
    "inflight_tokens": "endpoint_name namespace producer_name fairness_id priority",
    "kv_cache_events_active_subscribers": "",
    "info": "commit build_ref",
}
OURS = {
    "tierpick_predicted_tokens_total": "tier",
    "tierpick_delivered_cached_tokens_total": "",
    "tierpick_best_available_tokens_total": "",
    "tierpick_prompt_tokens_total": "",
    "tierpick_prediction_total": "result feed",
    "tierpick_plugin_failures_total": "plugin_name extension_point",
    "tierpick_unscored_requests_total": "reason",
    "tierpick_occupancy_ratio": "name",
    "tierpick_feed_state": "pod_identifier state",
    "tierpick_feed_trust": "pod_identifier",
    "tierpick_feed_lag_batches": "pod_identifier",
    "tierpick_feed_delay_seconds": "pod_identifier",
    "tierpick_feed_silence_seconds": "pod_identifier",
    "tierpick_feed_requests_since_heard": "pod_identifier",
    "tierpick_feed_gaps_total": "pod_identifier",
    "tierpick_feed_missed_batches_total": "pod_identifier",
    "tierpick_feed_duplicates_total": "pod_identifier",
    "tierpick_feed_unreadable_batches_total": "pod_identifier",
    "tierpick_feed_losses_total": "pod_identifier",
    "tierpick_feed_restarts_total": "pod_identifier",
    "tierpick_feed_replays_total": "pod_identifier",
    "tierpick_feed_truncated_replays_total": "pod_identifier",
    "tierpick_feed_snapshots_total": "pod_identifier result",
    "tierpick_index_memory_bytes": "part",
    "tierpick_index_budget_bytes": "",
    "tierpick_index_forgotten_blocks_total": "",
    "tierpick_index_dropped_orphans_total": "",
    "tierpick_tier_held_blocks": "pod_identifier tier",
    "tierpick_tier_capacity_blocks": "pod_identifier tier",
}


@pytest.fixture
def telemetry() -> Telemetry:
    return Telemetry(CollectorRegistry(), commit="abc", build_ref="v1")


def value(telemetry: Telemetry, name: str, /, **labels: str) -> float | None:
    return telemetry.registry.get_sample_value(name, labels)


def requests(telemetry: Telemetry, name: str, /, **labels: str) -> float | None:
    model = {"model_name": "m", "target_model_name": "t", "fairness_id": "f", "priority": "0"}
    return value(telemetry, f"llm_d_epp_{name}", **model, **labels)


def fleet(*loads: EngineLoad) -> Fleet:
    result = Fleet()
    result.apply(EndpointSpec(f"10.0.0.{i}:8000", f"pod-{i}") for i in range(len(loads)))
    for endpoint, load in zip(result.endpoints, loads, strict=True):
        endpoint.load = load
    return result


def everything() -> Telemetry:
    """One request and everything around it."""
    telemetry, now = Telemetry(CollectorRegistry(), commit="abc", build_ref="v1"), 1.0
    endpoints = fleet(EngineLoad(updated_at=now), EngineLoad(updated_at=now))
    telemetry.watch(endpoints, "pool", clock=lambda: now)
    metrics = telemetry.requests("m", "t", "f", 0)
    metrics.started(100)
    metrics.chunk_gap(0.01)
    metrics.finished(
        1.0,
        error="ModelServerError",
        ttft=0.5,
        streaming=True,
        response_bytes=9,
        input_tokens=3,
        output_tokens=3,
        cached_tokens=0,
    )
    telemetry.scheduled("t", endpoints.endpoints[0], 0.001)
    telemetry.plugin_duration("Scorer", "queue-scorer", "queue").observe(0.001)
    telemetry.plugin_failed("queue", "Scorer")
    telemetry.request_processed(0.001)
    telemetry.response_processed(0.001)
    telemetry.prefix_indexer("gpu", "approx-prefix-cache-producer", lambda: 12).matched(2, 4, 64)
    telemetry.looked_up(0.001, 2)
    telemetry.predicted(TierHit(1, 2, 3), 6, 10)
    telemetry.delivered(6, 6, "live")
    telemetry.unscored("path")
    telemetry.poll_failed("metrics-data-source")
    telemetry.extract_failed("metrics-data-source", "core-metrics-extractor")
    telemetry.add_source(
        "all", lambda: [(name, ["x"] * len(declared.labels), 1) for name, declared in DECLARED.items()]
    )
    return telemetry


class TestContract:
    """After one request every documented metric is there, under its name and with its labels."""

    page = generate_latest(everything().registry).decode()
    samples = tuple(sample for family in parse(page) for sample in family.samples)

    def labels_of(self, name: str) -> Iterator[set[str]]:
        return (set(sample.labels) for sample in self.samples if sample.name == name)

    @pytest.mark.parametrize("name", HISTOGRAMS)
    def test_histograms(self, name: str) -> None:
        labels, buckets = HISTOGRAMS[name]
        bounds = [s.labels["le"] for s in self.samples if s.name == f"llm_d_epp_{name}_bucket"]
        assert [float(bound) for bound in bounds[:-1]] == [float(bound) for bound in buckets.split()]
        assert bounds[-1] == "+Inf"
        assert next(self.labels_of(f"llm_d_epp_{name}_count")) == set(labels.split())

    @pytest.mark.parametrize("name", COUNTERS | GAUGES)
    def test_counters_and_gauges(self, name: str) -> None:
        kind = "counter" if name in COUNTERS else "gauge"
        assert next(self.labels_of(f"llm_d_epp_{name}")) == set((COUNTERS | GAUGES)[name].split())
        assert f"# TYPE llm_d_epp_{name} {kind}\n" in self.page

    @pytest.mark.parametrize("name", OURS)
    def test_our_own(self, name: str) -> None:
        assert next(self.labels_of(name)) == set(OURS[name].split())

    def test_nothing_is_exported_that_is_not_documented_here(self) -> None:
        documented = {f"llm_d_epp_{name}" for name in (*HISTOGRAMS, *COUNTERS, *GAUGES)} | set(OURS)
        assert set(re.findall(r"^# TYPE (\S+)", self.page, re.MULTILINE)) == documented

    def test_no_series_is_there_twice(self) -> None:
        keys = [(sample.name, *sorted(sample.labels.items())) for sample in self.samples]
        assert len(keys) == len(set(keys))

    def test_the_page_is_valid_openmetrics_too(self) -> None:
        text = generate_openmetrics(everything().registry).decode()  # type: ignore[no-untyped-call]
        families = list(parse_openmetrics(text))  # type: ignore[no-untyped-call]
        assert sum(len(family.samples) for family in families) > 100


def test_by_default_the_page_also_tells_of_the_process() -> None:
    assert "process_cpu_seconds_total" in generate_latest(Telemetry().registry).decode()


class TestRequests:
    def test_a_request_counts_as_running_from_start_to_finish(self, telemetry: Telemetry) -> None:
        metrics = telemetry.requests("m", "t", "f", 0)
        metrics.started(100)
        assert (requests(telemetry, "request_total"), requests(telemetry, "request_running")) == (1, 1)
        metrics.finished(1.0)
        assert (requests(telemetry, "request_total"), requests(telemetry, "request_running")) == (1, 0)
        assert requests(telemetry, "request_duration_seconds_sum") == 1.0

    def test_a_request_without_a_model_name_does_not_count_as_running(self, telemetry: Telemetry) -> None:
        telemetry.requests("", "", "f", 0).started(100)
        assert "llm_d_epp_request_running{" not in generate_latest(telemetry.registry).decode()

    def test_errors_are_counted_by_code(self, telemetry: Telemetry) -> None:
        telemetry.requests("m", "t", "f", 0).finished(1.0, error="ServiceUnavailable")
        assert requests(telemetry, "request_error_total", error_code="ServiceUnavailable") == 1

    def test_what_was_not_observed_is_not_counted(self, telemetry: Telemetry) -> None:
        telemetry.requests("m", "t", "f", 0).finished(1.0)
        for name in ("response_size_bytes", "request_input_tokens", "request_cached_tokens", "request_output_tokens"):
            assert requests(telemetry, f"{name}_count") is None

    def test_zero_cached_tokens_are_an_observation(self, telemetry: Telemetry) -> None:
        telemetry.requests("m", "t", "f", 0).finished(1.0, cached_tokens=0)
        assert requests(telemetry, "request_cached_tokens_count") == 1

    def test_times_per_token(self, telemetry: Telemetry) -> None:
        telemetry.requests("m", "t", "f", 0).finished(2.0, ttft=0.5, streaming=True, output_tokens=4)
        assert requests(telemetry, "request_ntpot_seconds_sum") == 0.5
        assert requests(telemetry, "request_streaming_tpot_seconds_sum") == 0.5
        assert requests(telemetry, "request_ttft_seconds_sum", streaming="true") == 0.5

    def test_a_whole_answer_or_a_single_token_has_no_time_between_tokens(self, telemetry: Telemetry) -> None:
        telemetry.requests("m", "t", "f", 0).finished(2.0, ttft=0.5, streaming=False, output_tokens=4)
        telemetry.requests("m", "t", "f", 0).finished(2.0, ttft=0.5, streaming=True, output_tokens=1)
        assert requests(telemetry, "request_streaming_tpot_seconds_count") is None
        assert requests(telemetry, "request_ttft_seconds_sum", streaming="false") == 0.5

    def test_what_is_noted_is_bounded_without_anybody_scraping(self, telemetry: Telemetry) -> None:
        for _ in range(3 * FOLDED):
            metrics = telemetry.requests("m", "t", "f", 0)
            metrics.started(1)
            metrics.finished(1.0)
            assert len(metrics._duration._noted) <= FOLDED
        assert requests(telemetry, "request_duration_seconds_count") == 3 * FOLDED

    def test_model_names_and_fairness_ids_are_bounded(self, telemetry: Telemetry) -> None:
        for number in range(1100):
            telemetry.requests("m", "t", f"user-{number}", 0).started(1)
        page = generate_latest(telemetry.registry).decode()
        assert page.count("llm_d_epp_request_total{") == 1001
        assert requests_of_other(telemetry) == 100

    def test_label_combinations_are_bounded_even_if_each_label_is(self, telemetry: Telemetry) -> None:
        for number in range(3000):
            telemetry.requests(f"m{number % 60}", "t", f"f{number // 60}", 0).started(1)
        assert generate_latest(telemetry.registry).decode().count("llm_d_epp_request_total{") == 2001
        assert value(telemetry, "tierpick_occupancy_ratio", name="request label sets") == pytest.approx(1, abs=0.01)


def requests_of_other(telemetry: Telemetry) -> float | None:
    labels = {"model_name": "m", "target_model_name": "t", "fairness_id": "other", "priority": "0"}
    return value(telemetry, "llm_d_epp_request_total", **labels)


class TestScheduling:
    LABELS = ("target_model_name", "endpoint_name", "namespace", "port")

    def attempts(self, telemetry: Telemetry, *labels: str, status: str = "success") -> float | None:
        named = dict(zip(self.LABELS, labels, strict=True))
        return value(telemetry, "llm_d_epp_scheduler_attempts_total", status=status, **named)

    def test_attempts_are_counted_by_endpoint_and_failures_without_one(self, telemetry: Telemetry) -> None:
        telemetry.watch(endpoints := fleet(EngineLoad()), "pool")
        telemetry.scheduled("t", endpoints.endpoints[0], 0.001)
        telemetry.scheduled("t", None, 0.001)
        assert self.attempts(telemetry, "t", "pod-0", "default", "8000") == 1
        assert self.attempts(telemetry, "t", "", "", "", status="failure") == 1
        assert value(telemetry, "llm_d_epp_scheduler_e2e_duration_seconds_count") == 2

    def test_an_endpoints_series_vanish_with_it_and_do_not_come_back(self, telemetry: Telemetry) -> None:
        telemetry.watch(endpoints := fleet(EngineLoad()), "pool")
        (gone,) = endpoints.endpoints
        telemetry.scheduled("t", gone, 0.001)
        endpoints.apply([])
        telemetry.scheduled("t", gone, 0.001)
        assert "pod-0" not in generate_latest(telemetry.registry).decode()
        assert self.attempts(telemetry, "t", "", "", "") == 1


class TestPool:
    def test_averages_and_deviations_are_over_fresh_endpoints_only(self, telemetry: Telemetry) -> None:
        loads = [
            EngineLoad(waiting=1, running=2, kv_usage=0.333, updated_at=98.5),
            EngineLoad(waiting=4, running=4, kv_usage=0.0, updated_at=100),
            EngineLoad(waiting=500, updated_at=50),
            EngineLoad(waiting=500),
        ]
        telemetry.watch(fleet(*loads), "pool", staleness=2.0, clock=lambda: 100.0)
        read = {name: value(telemetry, f"llm_d_epp_{name}", name="pool") for name in GAUGES if "queue_size" in name}
        assert value(telemetry, "llm_d_epp_ready_endpoints", name="pool") == 4
        assert read["average_queue_size"] == 2.5
        assert read["std_dev_queue_size"] == 2.12
        assert value(telemetry, "llm_d_epp_average_kv_cache_utilization", name="pool") == 0.17
        assert value(telemetry, "llm_d_epp_per_endpoint_queue_size", name="pool", model_server_endpoint="pod-1") == 4

    def test_without_a_fresh_endpoint_there_is_no_average(self, telemetry: Telemetry) -> None:
        telemetry.watch(fleet(EngineLoad()), "pool")
        assert value(telemetry, "llm_d_epp_ready_endpoints", name="pool") == 1
        assert value(telemetry, "llm_d_epp_average_queue_size", name="pool") is None

    def test_ranks_that_share_a_name_are_told_apart(self, telemetry: Telemetry) -> None:
        ranks = Fleet()
        ranks.apply([EndpointSpec("10.0.0.1:8000", "pod"), EndpointSpec("10.0.0.1:8001", "pod", rank=1)])
        for endpoint in ranks.endpoints:
            endpoint.load = EngineLoad(waiting=endpoint.slot, updated_at=1.0)
        telemetry.watch(ranks, "pool", clock=lambda: 1.0)
        queues = [
            value(telemetry, "llm_d_epp_per_endpoint_queue_size", name="pool", model_server_endpoint=name)
            for name in ("pod", "10.0.0.1:8001")
        ]
        assert queues == [0, 1]


class TestPredictions:
    @pytest.mark.parametrize(("predicted", "delivered", "result"), [(5, 5, "exact"), (5, 4, "below"), (5, 6, "above")])
    def test_delivered_against_predicted(
        self, telemetry: Telemetry, predicted: int, delivered: int, result: str
    ) -> None:
        telemetry.delivered(predicted, delivered, "live")
        assert comparison(predicted, delivered) == result
        counts = {
            name: value(telemetry, "tierpick_prediction_total", result=name, feed="live")
            for name in ("exact", "below", "above")
        }
        assert counts == {**dict.fromkeys(counts, 0), result: 1}
        assert value(telemetry, "tierpick_delivered_cached_tokens_total") == delivered

    def test_a_wrong_prediction_of_a_live_feed_is_told_from_that_of_a_doubtful_one(self, telemetry: Telemetry) -> None:
        for feed in ("live", "unsure", "unsure"):
            telemetry.delivered(5, 4, feed)
        assert value(telemetry, "tierpick_prediction_total", result="below", feed="live") == 1
        assert value(telemetry, "tierpick_prediction_total", result="below", feed="unsure") == 2

    @pytest.mark.parametrize(
        ("fault", "chosen", "best"),
        [("no reuse", 0, 0), ("diverted by load", 0, 90), ("none", 90, 90)],
    )
    def test_available_and_predicted_tell_workload_from_routing(
        self, telemetry: Telemetry, fault: str, chosen: int, best: int
    ) -> None:
        telemetry.predicted(TierHit(gpu=chosen), best, 100)
        assert value(telemetry, "tierpick_predicted_tokens_total", tier="gpu") == chosen
        assert value(telemetry, "tierpick_best_available_tokens_total") == best
        assert value(telemetry, "tierpick_prompt_tokens_total") == 100

    def test_unscored_reasons_are_bounded(self, telemetry: Telemetry) -> None:
        for number in range(100):
            telemetry.unscored(f"reason {number}")
        assert value(telemetry, "tierpick_unscored_requests_total", reason="other") == 50

    def test_an_indexer_reports_share_and_bytes_of_the_hit(self, telemetry: Telemetry) -> None:
        indexer = telemetry.prefix_indexer("gpu", "approx", lambda: 7)
        indexer.matched(2, 4, 64)
        indexer.matched(0, 0, 64)
        labels = {"plugin_name": "gpu", "plugin_type": "approx"}
        assert value(telemetry, "llm_d_epp_prefix_indexer_hit_ratio_sum", **labels) == 0.5
        assert value(telemetry, "llm_d_epp_prefix_indexer_hit_bytes_sum", **labels) == 128
        assert value(telemetry, "llm_d_epp_prefix_indexer_size", **labels) == 7


class TestSources:
    def test_readings_of_equal_labels_add_up_over_sources(self, telemetry: Telemetry) -> None:
        telemetry.add_source("a", lambda: [("kv_cache_events_active_subscribers", (), 2)])
        telemetry.add_source("b", lambda: [("kv_cache_events_active_subscribers", (), 3)])
        assert value(telemetry, "llm_d_epp_kv_cache_events_active_subscribers") == 5

    def test_a_source_is_asked_only_when_somebody_scrapes(self, telemetry: Telemetry) -> None:
        asked: list[str] = []

        def source() -> list[Reading]:
            asked.append("once more")
            return [(OCCUPANCY, ("ring",), 0.5)]

        telemetry.add_source("ring", source)
        assert asked == []
        assert value(telemetry, "tierpick_occupancy_ratio", name="ring") == 0.5

    @pytest.mark.parametrize(
        "reading", [("never_declared", (), 1), ("kv_cache_events_messages_received_total", (), 1), None]
    )
    def test_a_broken_source_costs_only_itself(self, telemetry: Telemetry, reading: Reading) -> None:
        telemetry.add_source("broken", lambda: [reading])
        telemetry.add_source("sound", lambda: [("kv_cache_events_active_subscribers", (), 9)])
        assert value(telemetry, "llm_d_epp_kv_cache_events_active_subscribers") == 9
        labels = {"plugin_name": "broken", "extension_point": "Metrics"}
        assert value(telemetry, "tierpick_plugin_failures_total", **labels)
