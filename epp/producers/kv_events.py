"""The event-fed index of a process: one `PrefixIndex`, a `Feed` for each endpoint, and what is soon to be there.

All instances of the precise producer share it, so events are received and applied once. It follows the fleet while it
runs, and passes on the load that engines send with their events. What a prompt finds there is precise.py's affair; what
the events mean is the indexer's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import msgspec
import zmq

from epp.config.environment import Environment
from epp.config.registry import Parameters
from epp.fleet.endpoint import Endpoint, EndpointSpec, EngineLoad
from epp.fleet.model_names import Kind, ModelNames
from epp.producers import readings
from epp.producers.candidates import Candidates
from epp.telemetry import Reading
from indexer.budget import capacity
from indexer.curve import Curve, load_curve
from indexer.feed import Feed, FeedAddress, Hub, SharedFeed
from indexer.index import PrefixIndex
from indexer.names import NOBODYS
from indexer.plan import is_full
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

MUTE = 100
"""Requests that an endpoint has served without a single event message, after which the log says so."""

POOL_LABELS = {"cpu": "tierpick.ai/cpu-pool", "storage": "tierpick.ai/storage-pool"}
"""Tier → label of endpoints whose engines cannot say that they share it: all with the same value can load from it."""

Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]


class PodDiscoveryConfig(Parameters, frozen=True):
    """`podLabelSelector` and `podNamespace` are without effect: the fleet's discovery decides which pods there are."""

    pod_label_selector: str = "llm-d.ai/inference-serving=true"
    pod_namespace: str = ""
    socket_port: Port = 5557
    """Where an engine publishes; a data-parallel rank adds its number."""
    replay_socket_port: int = 0
    """Where it answers replays, likewise; not above 0 = nowhere."""


class CurveConfig(Parameters, frozen=True):
    """ZMQ CURVE towards all engines: one that does not have it, or another key, is not heard. Key files are those of
    `zmq.auth.create_certificates`."""

    server_key_file: str
    """The engines' public key, which all of them have."""
    secret_key_file: str = ""
    """The picker's own, by which engines know it that let in known pickers only; "" = one made at start."""


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
    curve: CurveConfig | None = None


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


class KvEvents:
    """Shared by producers: see `of`. A service: it connects in `start` and follows the fleet until `stop`."""

    def __init__(self, environment: Environment) -> None:
        self.index = PrefixIndex()
        self.index.budget = environment.index_budget
        self.speculation = Speculation()
        self.models = ModelNames(self.index.renew)
        self.feeds: dict[Endpoint, Feed] = {}
        self.config = KvEventsConfig()
        self._configured_by = ""
        self._totals = readings.Totals()
        self._requests: dict[Endpoint, tuple[int, int]] = {}
        """Requests that ended there since a message was heard, and how many messages that was the last of."""
        self._candidates: dict[tuple[Endpoint, ...], Candidates] = {}
        self._latest: Candidates | None = None
        """Of `_candidates`, those last asked for."""
        self._fleet = environment.fleet
        self._clock = environment.clock
        self._hub: Hub | None = None
        self.shared_feed: SharedFeed | None = None
        self._left: set[str] = set()
        """Addresses of endpoints that left since the shared socket was last read to its end. What is still in there of
        one of them is its own, not that of another pod which has come to the same address since."""
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
        """Remembered as long as nothing changes that is known of their feeds."""
        if self._latest is not None:
            if self._latest.changes != self.index.changes:
                self._forget_candidates()
            elif self._latest.given is endpoints:
                return self._latest
        these = tuple(endpoints)
        found = self._candidates.get(these)
        if found is None:
            if is_full(self._candidates, len(these)):
                self._forget_candidates()
            found = self._candidates[these] = Candidates(endpoints, self.feeds, self.index)
        found.given = endpoints
        self._latest = found
        return found

    def _forget_candidates(self) -> None:
        self._candidates.clear()
        self._latest = None

    def served(self, endpoint: Endpoint) -> None:
        """A prompt of at least a block was answered there, so that its engine should have had something to say."""
        feed = self.feeds.get(endpoint)
        if feed is None:
            return
        requests, before = self._requests.get(endpoint, (0, 0))
        heard = feed.counters.messages
        requests = requests + 1 if heard == before else 0
        self._requests[endpoint] = requests, heard
        if requests == MUTE and not heard:
            logger.warning("an endpoint serves requests, but its engine is mute", extra={"endpoint": endpoint.address})

    def requests_since_heard(self, endpoint: Endpoint) -> int:
        """Requests that ended there since its last message, heartbeats included: more and more where the engine does
        not publish, or we listen to the wrong port."""
        requests, heard = self._requests.get(endpoint, (0, 0))
        return requests if heard == self.feeds[endpoint].counters.messages else 0

    def served_as(self, model: str) -> str:
        """The name whose chains match prompts of a request for `model`: its own; "" = the base model's; or one that
        nobody has blocks of, if it may be an adapter that no event has named yet."""
        if not model or self.index.names.is_used(model):
            return model
        kind = self.models.kind(model)
        if kind is Kind.BASE:
            return ""
        if kind is Kind.ADAPTER and self.index.names.root(model) is not None:
            return model
        return model if kind is Kind.UNKNOWN else NOBODYS

    # -- the service ------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        _log_budget(self.index.budget)
        self._hub = Hub(self._curve())
        if self.config.zmq_endpoint:
            self.shared_feed = self._bind(self._hub)
        self._fleet.subscribe(self)
        self._housekeeping = asyncio.create_task(self._keep_house(), name="kv-events housekeeping")

    def _curve(self) -> Curve | None:
        keys = self.config.curve
        try:
            return None if keys is None else load_curve(keys.server_key_file, keys.secret_key_file)
        except ValueError as error:
            raise OSError(f"kvEventsConfig.curve: {error}") from error

    def _bind(self, hub: Hub) -> SharedFeed:
        endpoint = self.config.zmq_endpoint
        try:
            return SharedFeed(hub, endpoint, self.config.topic_filter, self._feed_of_pod, self._left.clear)
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
            self.shared_feed = None
        for endpoint in list(self.feeds):
            self.endpoint_removed(endpoint)
        self._hub.close()
        self._hub = self._housekeeping = None

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
        self._forget_candidates()
        feed = self.feeds[endpoint] = Feed(lambda: self._publisher(endpoint), address, self._clock)
        feed.stream.judged = self._forget_candidates
        feed.open(self._hub)
        if problem:
            feed.stream.disconnected(problem)

    def endpoint_removed(self, endpoint: Endpoint) -> None:
        self._forget_candidates()
        feed = self.feeds.pop(endpoint, None)
        if feed is not None:
            self._totals.ended(feed)
            self._requests.pop(endpoint, None)
            feed.close()
            self.speculation.forget(endpoint)
        if self.shared_feed is not None:
            self._left.add(endpoint.address)
            self.shared_feed.drain()

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
        """By `ip:port`, or by an IP that only one endpoint has."""
        endpoint = self._fleet.get(pod)
        if endpoint is None:
            of_host = self._fleet.at(pod)
            endpoint = of_host[0] if len(of_host) == 1 else None
        return None if endpoint is None or endpoint.address in self._left else self.feeds.get(endpoint)

    # -- to be looked at --------------------------------------------------------------------------------------------

    def snapshot(self) -> list[dict[str, Any]]:
        """JSON values: every publisher's state, counters and blocks held."""
        return [
            {
                "endpoint": endpoint.address,
                "requests_since_heard": self.requests_since_heard(endpoint),
                **feed.snapshot(),
            }
            for endpoint, feed in self.feeds.items()
        ]

    def _readings(self) -> Iterator[Reading]:
        yield "kv_cache_events_active_subscribers", (), sum(feed.stream.is_connected for feed in self.feeds.values())
        now = self._clock()
        for endpoint, feed in self.feeds.items():
            yield from readings.of_feed(endpoint.address, feed, self.requests_since_heard(endpoint), now)
        yield from self._totals.readings(self.feeds)
        yield from readings.of_index(self.index, self.speculation)


def _log_budget(budget: int) -> None:
    if budget:
        logger.info(
            "room for about %.1f million blocks in the index", capacity(budget) / 1e6, extra={"budget_bytes": budget}
        )
    else:
        logger.info("the index's memory is not bounded")


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
    events show it, the pools that the endpoint's labels name, and that it sleeps: the event that its caches are
    emptied comes with its next step, after it was woken."""
    chunk = endpoint.load.cpu_blocks_per_chunk
    if chunk:
        residency.blocks_per_chunk = chunk
    for tier, label in POOL_LABELS.items():
        residency.share(tier, endpoint.spec.labels.get(label))
    if endpoint.load.asleep and residency.tiers():
        residency.clear()
