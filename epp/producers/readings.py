"""What the event feeds and their index say of themselves, as readings for the metrics page.

Series of an endpoint are there as long as it is; totals over all endpoints remember those that have left, since
counters never go back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from epp.fleet.endpoint import Endpoint
from epp.telemetry import OCCUPANCY, Reading
from indexer.feed import Feed
from indexer.index import PrefixIndex
from indexer.speculative import Speculation
from indexer.stream import State

_STATES = tuple((state, state.value) for state in State)


class Totals:
    """Counters of all feeds together, those that have ended included."""

    def __init__(self) -> None:
        self._skipped: Counter[str] = Counter()
        self._counted: Counter[str] = Counter()

    def ended(self, feed: Feed) -> None:
        """To be called once, while its residency is still there."""
        _skipped(feed, self._skipped)
        _counted(feed, self._counted)

    def readings(self, feeds: Mapping[Endpoint, Feed]) -> Iterator[Reading]:
        skipped, total = self._skipped.copy(), self._counted.copy()
        for feed in feeds.values():
            _skipped(feed, skipped)
            _counted(feed, total)
        for reason, count in skipped.items():
            yield "kv_cache_events_stores_skipped_total", ("", reason), count
        yield "kv_cache_events_removals_skipped_total", ("", "not_indexed"), total["skipped_removals"]
        removed, copies = total["removed_blocks"], total["removed_copies"]
        yield "kv_cache_events_dedup_removed_hashes_suppressed_total", (), copies
        yield "kv_cache_events_dedup_removed_hashes_forwarded_total", (), removed - copies
        yield "kv_cache_index_evictions_total", (), removed
        yield "kv_cache_index_admissions_total", (), total["stored_blocks"]
        yield "tierpick_index_dropped_orphans_total", (), total["dropped"]


def _skipped(feed: Feed, total: Counter[str]) -> None:
    """By reason: what could not be read, and what could not be indexed."""
    for counter in (feed.counters.skipped, feed.counters.not_indexed, feed.residency.skipped):
        total.update(counter)


def _counted(feed: Feed, total: Counter[str]) -> None:
    total.update(feed.counters.former)
    total.update(feed.residency.counted())


def of_feed(pod: str, feed: Feed, requests_since_heard: int, now: float) -> Iterator[Reading]:
    stream, counters, labels = feed.stream, feed.counters, (pod,)
    for state, name in _STATES:
        yield "tierpick_feed_state", (pod, name), float(stream.state is state)
    yield "tierpick_feed_trust", labels, stream.trust
    yield "tierpick_feed_lag_batches", labels, stream.lag_batches
    yield "tierpick_feed_delay_seconds", labels, stream.delay
    yield "tierpick_feed_requests_since_heard", labels, requests_since_heard
    if stream.heard_at:
        yield "tierpick_feed_silence_seconds", labels, now - stream.heard_at
    yield "kv_cache_events_messages_received_total", labels, counters.messages
    yield "kv_cache_events_subscriber_reconnections_total", labels, counters.reconnections
    yield "kv_cache_events_zmq_errors_total", (pod, "recv"), counters.malformed
    yield "kv_cache_events_zmq_errors_total", (pod, "replay-incomplete"), counters.replays_failed
    yield "tierpick_feed_gaps_total", labels, counters.gaps
    yield "tierpick_feed_missed_batches_total", labels, counters.missed
    yield "tierpick_feed_duplicates_total", labels, counters.duplicates
    yield "tierpick_feed_unreadable_batches_total", labels, counters.unreadable
    yield "tierpick_feed_losses_total", labels, counters.lost
    yield "tierpick_feed_restarts_total", labels, counters.restarts
    yield "tierpick_feed_replays_total", labels, counters.replays
    yield "tierpick_feed_truncated_replays_total", labels, counters.truncated
    yield "tierpick_feed_snapshots_total", (pod, "taken"), counters.snapshots
    yield "tierpick_feed_snapshots_total", (pod, "failed"), counters.snapshots_failed
    for tier, figures in stream.told.tiers.items():
        if figures.held is not None:
            yield "tierpick_tier_held_blocks", (pod, tier), figures.held
        if figures.capacity is not None:
            yield "tierpick_tier_capacity_blocks", (pod, tier), figures.capacity


def of_index(index: PrefixIndex, speculation: Speculation) -> Iterator[Reading]:
    yield OCCUPANCY, ("speculative keys",), speculation.occupancy
    for part, size in index.memory().items():
        yield "tierpick_index_memory_bytes", (part,), size
    yield "tierpick_index_budget_bytes", (), index.budget
    yield "tierpick_index_forgotten_blocks_total", (), index.forgotten
