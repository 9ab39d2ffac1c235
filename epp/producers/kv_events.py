"""The event-fed index of a process: one `PrefixIndex`, a `Feed` for each endpoint, and what is soon to be there.

All instances of the precise producer share it, so events are received and applied once. It follows the fleet while it
runs, and passes on the load that engines send with their events. What a prompt finds there is precise.py's affair; what
the events mean is the indexer's.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import zmq

from epp.config.environment import Environment
from epp.config.registry import Parameters
from epp.fleet.endpoint import Endpoint, EndpointSpec, EngineLoad
from epp.telemetry import OCCUPANCY, Reading
from indexer.feed import Feed, FeedAddress, Hub, SharedFeed
from indexer.index import PrefixIndex
from indexer.residency import Residency
from indexer.speculative import Speculation

logger = logging.getLogger(__name__)

SHARED = "kv-events"
TICK = 0.1
"""Seconds between two rounds of housekeeping."""
SWEEP_PAUSE = 0.002
"""Seconds that requests have to themselves between two slices of cleaning up."""
LOAD_FRESH = 3.0
"""Seconds for which a streamed load is better than a scraped one; three heartbeats if that is more."""

POOL_LABELS = {"cpu": "tierpick.ai/cpu-pool", "storage": "tierpick.ai/storage-pool"}
"""Tier → label of endpoints whose engines cannot say that they share it: all with the same value can load from it."""

T = TypeVar("T")
U = TypeVar("U")
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]


class PodDiscoveryConfig(Parameters, frozen=True):
    """`podLabelSelector` and `podNamespace` are without effect: the fleet's discovery decides which pods there are."""

    pod_label_selector: str = "llm-d.ai/inference-serving=true"
    pod_namespace: str = ""
    socket_port: Port = 5557
    """Where an engine publishes; a data-parallel rank adds its number."""
    replay_socket_port: int = 0
    """Where it answers replays, likewise; not above 0 = nowhere."""


class KvEventsConfig(Parameters, frozen=True):
    """`concurrency` is without effect: events are applied on the one thread there is, in their order. `engineType` too:
    every engine's events are understood by what they look like."""

    zmq_endpoint: str = ""
    """Bind one socket here, to which engines connect, instead of connecting to each engine."""
    topic_filter: str = "kv@"
    """Prefix of the topics that are received. vLLM's own default topic is "", which "kv@" does not receive."""
    concurrency: int = 4
    engine_type: Literal["vllm", "sglang"] = "vllm"
    discover_pods: bool = True
    """False: connect only to endpoints whose discovery names an event address."""
    pod_discovery_config: PodDiscoveryConfig = PodDiscoveryConfig()


def feed_address(spec: EndpointSpec, config: KvEventsConfig) -> FeedAddress:
    """Raises ValueError if a rank's port is out of range."""
    if config.zmq_endpoint:
        return FeedAddress()
    pods = config.pod_discovery_config
    events, replay = spec.kv_events, spec.kv_replay
    if not events and config.discover_pods:
        events = _beside(spec, pods.socket_port)
    if not replay and events and pods.replay_socket_port > 0:
        replay = _beside(spec, pods.replay_socket_port)
    return FeedAddress(events, replay if events else "", config.topic_filter)


def _beside(spec: EndpointSpec, port: int) -> str:
    if port + spec.rank > 65535:
        raise ValueError(f"event port {port} + rank {spec.rank} is out of range")
    return f"tcp://{spec.address.rpartition(':')[0]}:{port + spec.rank}"


class Candidates:
    """Endpoints that have a feed, of those given. Columns by slot cover all that were given."""

    def __init__(self, endpoints: Sequence[Endpoint], feeds: Mapping[Endpoint, Feed]) -> None:
        self.endpoints = [endpoint for endpoint in endpoints if endpoint in feeds]
        self.streams = [feeds[endpoint].stream for endpoint in self.endpoints]
        self._slots = [endpoint.slot for endpoint in self.endpoints]
        self._size = 1 + max((endpoint.slot for endpoint in endpoints), default=-1)
        self._dense = self._slots == list(range(self._size))

    def by_slot(self, column: list[T], absent: U) -> list[T | U]:
        """What is aligned with `endpoints`, as a list indexed by slot."""
        if self._dense:
            return list(column)
        result: list[T | U] = [absent] * self._size
        for slot, value in zip(self._slots, column, strict=True):
            result[slot] = value
        return result


class KvEvents:
    """Shared by producers: see `of`. A service: it connects in `start` and follows the fleet until `stop`."""

    def __init__(self, environment: Environment) -> None:
        self.index = PrefixIndex()
        self.speculation = Speculation()
        self.feeds: dict[Endpoint, Feed] = {}
        self.config = KvEventsConfig()
        self._configured_by = ""
        self._skipped_before: Counter[str] = Counter()
        self._counted_before: Counter[str] = Counter()
        """Both of endpoints that have left: counters never go back."""
        self._candidates_of: Sequence[Endpoint] = ()
        self._candidates: Candidates | None = None
        self._fleet = environment.fleet
        self._clock = environment.clock
        self._hub: Hub | None = None
        self.shared_feed: SharedFeed | None = None
        self._housekeeping: asyncio.Task[None] | None = None
        environment.telemetry.add_source(SHARED, self._readings)

    @staticmethod
    def of(environment: Environment) -> KvEvents:
        found = environment.shared.get(SHARED)
        if not isinstance(found, KvEvents):
            found = environment.shared[SHARED] = KvEvents(environment)
            environment.services.append(found)
        return found

    def configure(self, name: str, config: KvEventsConfig) -> None:
        """By the producer instance `name`. All instances share the feeds, so what they say must not differ."""
        if self._configured_by and config != self.config:
            raise ValueError(
                f'kvEventsConfig of "{name}" differs from that of "{self._configured_by}"; '
                f"they share the event feeds: give it once, or alike"
            )
        self.config, self._configured_by = config, name

    def candidates(self, endpoints: Sequence[Endpoint]) -> Candidates:
        """Remembered for as long as neither the list (by identity) nor the feeds change."""
        if self._candidates_of is not endpoints or self._candidates is None:
            self._candidates_of, self._candidates = endpoints, Candidates(endpoints, self.feeds)
        return self._candidates

    # -- the service ------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        self._hub = Hub()
        if self.config.zmq_endpoint:
            self.shared_feed = self._bind(self._hub)
        self._fleet.subscribe(self)
        self._housekeeping = asyncio.create_task(self._keep_house(), name="kv-events housekeeping")

    def _bind(self, hub: Hub) -> SharedFeed:
        endpoint = self.config.zmq_endpoint
        try:
            return SharedFeed(hub, endpoint, self.config.topic_filter, self._feed_of_pod)
        except zmq.ZMQError as error:
            raise OSError(f"kvEventsConfig.zmqEndpoint: cannot bind {endpoint}: {error}") from error

    async def stop(self) -> None:
        if self._hub is None:
            return
        if self._housekeeping is not None:
            self._housekeeping.cancel()
            await asyncio.gather(self._housekeeping, return_exceptions=True)
        if self.shared_feed is not None:
            self.shared_feed.close()
        for endpoint in list(self.feeds):
            self.endpoint_removed(endpoint)
        self._hub.close()
        self._hub = self.shared_feed = self._housekeeping = None

    async def _keep_house(self) -> None:
        while True:
            more = False
            try:
                more = self._tidy()
            except Exception:
                logger.exception("housekeeping of the index failed")
            await asyncio.sleep(SWEEP_PAUSE if more else TICK)

    def _tidy(self) -> bool:
        """A little of it; True while there is more to do."""
        for endpoint, feed in self.feeds.items():
            feed.stream.tick()
            _take_load(endpoint, feed)
            if not feed.stream.instance:
                _tell(feed.residency, endpoint)
        self.speculation.expire(self._clock())
        return self.index.sweep()

    # -- the fleet --------------------------------------------------------------------------------------------------

    def endpoint_added(self, endpoint: Endpoint) -> None:
        if self._hub is None:
            return
        try:
            address, problem = feed_address(endpoint.spec, self.config), ""
        except ValueError as error:
            address, problem = FeedAddress(), str(error)
        self._candidates = None
        feed = self.feeds[endpoint] = Feed(lambda: self._publisher(endpoint), address, self._clock)
        feed.open(self._hub)
        if problem:
            feed.stream.disconnected(problem)

    def endpoint_removed(self, endpoint: Endpoint) -> None:
        self._candidates = None
        feed = self.feeds.pop(endpoint, None)
        if feed is not None:
            self._skipped_before += _skipped(feed)
            self._counted_before += _counted(feed)
            feed.close()
            self.speculation.forget(endpoint)

    def endpoint_updated(self, endpoint: Endpoint) -> None:
        feed = self.feeds.get(endpoint)
        try:
            moved = feed is None or feed.address != feed_address(endpoint.spec, self.config)
        except ValueError:
            moved = True
        if moved:
            self.endpoint_removed(endpoint)
            self.endpoint_added(endpoint)

    def _publisher(self, endpoint: Endpoint) -> Residency:
        residency = self.index.publisher(endpoint.address)
        _tell(residency, endpoint)
        return residency

    def _feed_of_pod(self, pod: str) -> Feed | None:
        """`ip:port`, or an IP that only one endpoint has."""
        endpoint = self._fleet.get(pod)
        if endpoint is None:
            of_host = self._fleet.subset([pod])
            endpoint = of_host[0] if len(of_host) == 1 else None
        return None if endpoint is None else self.feeds.get(endpoint)

    # -- to be looked at --------------------------------------------------------------------------------------------

    def snapshot(self) -> list[dict[str, Any]]:
        """JSON values: every publisher's state, counters and blocks held."""
        return [{"endpoint": endpoint.address, **feed.snapshot()} for endpoint, feed in self.feeds.items()]

    def _readings(self) -> Iterator[Reading]:
        yield "kv_cache_events_active_subscribers", (), sum(feed.stream.is_connected for feed in self.feeds.values())
        for endpoint, feed in self.feeds.items():
            pod, counters = (endpoint.address,), feed.counters
            yield "kv_cache_events_messages_received_total", pod, counters.messages
            yield "kv_cache_events_subscriber_reconnections_total", pod, counters.reconnections
            yield "kv_cache_events_zmq_errors_total", (endpoint.address, "recv"), counters.malformed
            yield "kv_cache_events_zmq_errors_total", (endpoint.address, "replay-incomplete"), counters.replays_failed
            yield "tierpick_event_snapshots_total", (endpoint.address, "taken"), counters.snapshots
            yield "tierpick_event_snapshots_total", (endpoint.address, "failed"), counters.snapshots_failed
            if feed.stream.heard_at:
                yield "tierpick_event_silence_seconds", pod, self._clock() - feed.stream.heard_at
            for tier, figures in feed.stream.told.tiers.items():
                if figures.held is not None:
                    yield "tierpick_tier_held_blocks", (endpoint.address, tier), figures.held
                if figures.capacity is not None:
                    yield "tierpick_tier_capacity_blocks", (endpoint.address, tier), figures.capacity
        for reason, count in sum((_skipped(feed) for feed in self.feeds.values()), self._skipped_before).items():
            yield "kv_cache_events_stores_skipped_total", ("", reason), count
        total = sum(map(_counted, self.feeds.values()), self._counted_before)
        yield "kv_cache_events_removals_skipped_total", ("", "not_indexed"), total["skipped_removals"]
        removed, copies = total["removed_blocks"], total["removed_copies"]
        yield "kv_cache_events_dedup_removed_hashes_suppressed_total", (), copies
        yield "kv_cache_events_dedup_removed_hashes_forwarded_total", (), removed - copies
        yield "kv_cache_index_admissions_total", (), total["stored_blocks"]
        yield "kv_cache_index_evictions_total", (), removed
        yield OCCUPANCY, ("speculative keys",), self.speculation.occupancy


def _skipped(feed: Feed) -> Counter[str]:
    return feed.counters.skipped + feed.counters.not_indexed + feed.residency.skipped


def _counted(feed: Feed) -> Counter[str]:
    return feed.counters.former + feed.residency.counted()


def _take_load(endpoint: Endpoint, feed: Feed) -> None:
    """What the engine last streamed becomes the endpoint's load, if it is news."""
    last, told, tiers = endpoint.load, feed.stream.told, feed.stream.told.tiers
    if not feed.stream.is_connected:
        if last.streamed_until:
            endpoint.load = replace(last, streamed_until=0.0)
        return
    if told.load is None or told.load_at <= last.updated_at:
        return
    endpoint.load = EngineLoad(
        waiting=told.load.waiting,
        running=told.load.running,
        kv_usage=told.load.kv_usage,
        block_size=feed.residency.block_size or last.block_size,
        num_blocks=(tiers.gpu and tiers.gpu.capacity) or last.num_blocks,
        cpu_blocks_per_chunk=tiers.cpu.chunk if tiers.cpu else last.cpu_blocks_per_chunk,
        cpu_chunks=tiers.cpu.capacity // tiers.cpu.chunk if tiers.cpu and tiers.cpu.capacity else last.cpu_chunks,
        updated_at=told.load_at,
        streamed_until=told.load_at + max(LOAD_FRESH, 3 * told.heartbeat),
    )


def _tell(residency: Residency, endpoint: Endpoint) -> None:
    """Of a publisher that says nothing of its tiers: the size of a CPU chunk, which the engine's metrics know before
    events show it, and the pools that the endpoint's labels name."""
    chunk = endpoint.load.cpu_blocks_per_chunk
    if chunk:
        residency.blocks_per_chunk = chunk
    for tier, label in POOL_LABELS.items():
        residency.share(tier, endpoint.spec.labels.get(label))
