"""Families whose values live elsewhere (feeds, indexes, in-flight accounts) and are read when somebody scrapes.

A source is a callable that yields readings: family name without the `llm_d_epp_` prefix, label values in the family's
order, value. Equal label values are added up.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from prometheus_client import Metric

logger = logging.getLogger(__name__)

Reading = tuple[str, Sequence[str], float]
Source = Callable[[], Iterable[Reading]]

OCCUPANCY = "tierpick_occupancy_ratio"


class _Declared(NamedTuple):
    kind: str
    text: str
    labels: tuple[str, ...] = ()


_POD = ("pod_identifier",)
_SKIPPED = ("cache_kind", "reason")
_FLOW = ("endpoint_name", "namespace", "producer_name", "fairness_id", "priority")

DECLARED: Mapping[str, _Declared] = {
    "prefix_indexer_size": _Declared("gauge", "Entries in a prefix index.", ("plugin_name", "plugin_type")),
    "kv_cache_index_admissions_total": _Declared("counter", "Block keys added to the index."),
    "kv_cache_index_evictions_total": _Declared("counter", "Block keys removed from the index."),
    "kv_cache_events_dedup_removed_hashes_suppressed_total": _Declared(
        "counter", "Removed hashes held back because another copy of the block remains."
    ),
    "kv_cache_events_dedup_removed_hashes_forwarded_total": _Declared(
        "counter", "Removed hashes that took the last copy of the block."
    ),
    "kv_cache_events_stores_skipped_total": _Declared("counter", "Stored events not applied.", _SKIPPED),
    "kv_cache_events_removals_skipped_total": _Declared("counter", "Removed events not applied.", _SKIPPED),
    "kv_cache_events_active_subscribers": _Declared("gauge", "Event subscriptions that are open."),
    "kv_cache_events_subscriber_reconnections_total": _Declared("counter", "Subscriptions opened again.", _POD),
    "kv_cache_events_messages_received_total": _Declared("counter", "Event messages received.", _POD),
    "kv_cache_events_zmq_errors_total": _Declared(
        "counter", "Socket errors of event feeds.", ("pod_identifier", "operation")
    ),
    "inflight_requests": _Declared("gauge", "Requests sent to the endpoint and not ended.", _FLOW),
    "inflight_tokens": _Declared("gauge", "Uncached prompt tokens sent to the endpoint and not answered.", _FLOW),
    "tierpick_feed_state": _Declared(
        "gauge", "1 for the state an event feed is in: syncing, live, unsure or lost.", (*_POD, "state")
    ),
    "tierpick_feed_trust": _Declared(
        "gauge", "What blocks held by the engine count when scored, of what they would if its feed were live.", _POD
    ),
    "tierpick_feed_lag_batches": _Declared(
        "gauge", "Event batches that are known to exist and are not in the index yet.", _POD
    ),
    "tierpick_feed_delay_seconds": _Declared(
        "gauge", "Time the last event message took, more than the fastest one of late.", _POD
    ),
    "tierpick_feed_silence_seconds": _Declared("gauge", "Time since an engine's last event message.", _POD),
    "tierpick_feed_requests_since_heard": _Declared(
        "gauge", "Requests that ended at an endpoint since its last event message; more and more = it is mute.", _POD
    ),
    "tierpick_feed_gaps_total": _Declared("counter", "Gaps in an engine's numbered event batches.", _POD),
    "tierpick_feed_missed_batches_total": _Declared("counter", "Event batches in gaps, recovered or not.", _POD),
    "tierpick_feed_duplicates_total": _Declared("counter", "Event batches that came again.", _POD),
    "tierpick_feed_unreadable_batches_total": _Declared("counter", "Event batches that could not be read.", _POD),
    "tierpick_feed_losses_total": _Declared(
        "counter", "Losses that could not be repaired: everything known of the engine was forgotten.", _POD
    ),
    "tierpick_feed_restarts_total": _Declared("counter", "Restarts of an engine, as its events tell.", _POD),
    "tierpick_feed_replays_total": _Declared("counter", "Questions put to an engine's replay socket.", _POD),
    "tierpick_feed_truncated_replays_total": _Declared(
        "counter", "Replays that began later than asked: the engine remembers no more.", _POD
    ),
    "tierpick_feed_snapshots_total": _Declared(
        "counter", "Snapshots of an engine's caches that were asked for, by what came of it.", (*_POD, "result")
    ),
    "tierpick_tier_held_blocks": _Declared("gauge", "KV blocks in a tier, as the engine says.", (*_POD, "tier")),
    "tierpick_tier_capacity_blocks": _Declared(
        "gauge", "KV blocks that fit into a tier, as the engine says.", (*_POD, "tier")
    ),
    "tierpick_index_memory_bytes": _Declared("gauge", "Memory of the event-fed index, by part of it.", ("part",)),
    "tierpick_index_budget_bytes": _Declared("gauge", "Memory that the index may take in all; 0 = any."),
    "tierpick_index_forgotten_blocks_total": _Declared(
        "counter", "Blocks that the index gave up, the least useful first, to keep to its budget."
    ),
    "tierpick_index_dropped_orphans_total": _Declared(
        "counter", "Blocks given up that waited for the event which says what they are, as too many did."
    ),
    OCCUPANCY: _Declared(
        "gauge", "Fill of a bounded structure; at 1 new entries push out old ones or are refused.", ("name",)
    ),
}


class Sources:
    def __init__(self, failed: Callable[[str], None]) -> None:
        """`failed(name)` is told of each reading round in which that source raised."""
        self._sources: dict[str, Source] = {}
        self._failed = failed

    def add(self, name: str, source: Source) -> None:
        """A second source of the same name replaces the first."""
        self._sources[name] = source

    def collect(self) -> Iterator[Metric]:
        totals: dict[str, dict[tuple[str, ...], float]] = {}
        for name, source in self._sources.items():
            try:
                _add_up(source(), totals)
            except Exception:
                logger.exception("a metrics source failed", extra={"source": name})
                self._failed(name)
        for family, values in totals.items():
            yield _metric(family, values)


def _add_up(readings: Iterable[Reading], totals: dict[str, dict[tuple[str, ...], float]]) -> None:
    for family, labels, value in readings:
        if len(labels) != len(DECLARED[family].labels):
            raise ValueError(f"{family} has labels {DECLARED[family].labels}, got {labels}")
        series = totals.setdefault(family, {})
        key = tuple(labels)
        series[key] = series.get(key, 0.0) + value


def _metric(family: str, values: Mapping[tuple[str, ...], float]) -> Metric:
    kind, text, labels = DECLARED[family]
    name = family if family.startswith("tierpick_") else f"llm_d_epp_{family}"
    metric = Metric(name.removesuffix("_total"), text, kind)
    for key, value in values.items():
        metric.add_sample(name, dict(zip(labels, key, strict=True)), value)
    return metric
