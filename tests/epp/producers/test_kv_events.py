"""The shared feeds follow the fleet, over real sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from connector.events import GPU, BlockStored, Load, Tier
from connector.journal import About
from connector.publisher import Publisher
from epp.config.environment import Environment
from epp.config.loader import load
from epp.fleet.endpoint import Endpoint, EndpointSpec, EngineLoad
from epp.fleet.fleet import Fleet
from epp.producers.kv_events import KvEvents, KvEventsConfig, PodDiscoveryConfig, feed_address
from epp.requests.model import InferenceRequest
from epp.scheduling.plugin import Scheduling
from epp.scheduling.scheduler import Scheduler
from epp.telemetry import Telemetry
from indexer.feed import FeedAddress
from indexer.stream import State
from tests.epp.scheduling.scheduled import schedule
from tests.waiting import until


def config(**fields: Any) -> KvEventsConfig:
    return KvEventsConfig(**fields)


class TestFeedAddress:
    def test_the_rank_is_added_to_both_ports(self) -> None:
        pods = PodDiscoveryConfig(socket_port=5557, replay_socket_port=5600)
        spec = EndpointSpec("10.0.0.7:8002", rank=2)
        wanted = FeedAddress("tcp://10.0.0.7:5559", "tcp://10.0.0.7:5602", "kv@")
        assert feed_address(spec, config(pod_discovery_config=pods)) == wanted

    @pytest.mark.parametrize("port", [0, -1])
    def test_no_replay_port_is_no_replay(self, port: int) -> None:
        pods = PodDiscoveryConfig(replay_socket_port=port)
        assert feed_address(EndpointSpec("10.0.0.7:8000"), config(pod_discovery_config=pods)).replay == ""

    def test_what_discovery_says_comes_first(self) -> None:
        spec = EndpointSpec("10.0.0.7:8000", rank=1, kv_events="tcp://10.0.0.7:9", kv_replay="tcp://10.0.0.7:10")
        assert feed_address(spec, config()) == FeedAddress("tcp://10.0.0.7:9", "tcp://10.0.0.7:10", "kv@")

    def test_ipv6_keeps_its_brackets(self) -> None:
        assert feed_address(EndpointSpec("[fd00::7]:8000"), config()).events == "tcp://[fd00::7]:5557"

    def test_without_pod_discovery_only_named_addresses_count(self) -> None:
        assert feed_address(EndpointSpec("10.0.0.7:8000"), config(discover_pods=False)) == FeedAddress(topic="kv@")

    def test_a_bound_socket_replaces_connections(self) -> None:
        assert feed_address(EndpointSpec("10.0.0.7:8000"), config(zmq_endpoint="tcp://*:5557")) == FeedAddress()

    def test_a_port_that_no_rank_can_have_is_an_error(self) -> None:
        pods = PodDiscoveryConfig(socket_port=65535)
        with pytest.raises(ValueError, match="out of range"):
            feed_address(EndpointSpec("10.0.0.7:8000", rank=1), config(pod_discovery_config=pods))


def stored(block_hash: int, medium: str = "GPU") -> bytes:
    event = {
        "type": "BlockStored",
        "block_hashes": [block_hash],
        "parent_block_hash": None,
        "token_ids": [block_hash] * 16,
        "block_size": 16,
        "medium": medium,
        "lora_name": None,
        "extra_keys": [None],
    }
    return msgspec.msgpack.encode([0.0, [event], 0])


class Engine:
    """Publishes on a port of its own; `number` is its only block."""

    def __init__(self, number: int) -> None:
        self.address = f"10.0.0.{number}:8000"
        self.number = number
        self.context = zmq.asyncio.Context()
        self.pub = self.context.socket(zmq.XPUB)
        port = self.pub.bind_to_random_port("tcp://127.0.0.1")
        self.spec = EndpointSpec(self.address, f"pod-{number}", kv_events=f"tcp://127.0.0.1:{port}")

    async def publish(self, medium: str = "GPU") -> None:
        assert await self.pub.recv() == b"\1kv@"
        await self.pub.send_multipart([f"kv@{self.address}@m".encode(), bytes(8), stored(self.number, medium)])

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture
def environment() -> Environment:
    return Environment(Fleet(), Telemetry())


@pytest.fixture
async def engines() -> AsyncIterator[list[Engine]]:
    engines = [Engine(number) for number in (1, 2)]
    yield engines
    for engine in engines:
        engine.close()


@pytest.fixture
async def events(environment: Environment) -> AsyncIterator[KvEvents]:
    events = KvEvents.of(environment)
    await events.start()
    yield events
    await events.stop()


def test_there_is_one_for_all_and_it_is_a_service(environment: Environment) -> None:
    events = KvEvents.of(environment)
    assert KvEvents.of(environment) is events
    assert environment.services == [events]
    assert environment.shared["kv-events"] is events


def test_instances_must_agree_on_the_feeds(environment: Environment) -> None:
    events = KvEvents.of(environment)
    events.configure("a", config(topic_filter="kv@"))
    events.configure("b", config(topic_filter="kv@"))
    with pytest.raises(ValueError, match=r'"c" differs from that of "b"'):
        events.configure("c", config(topic_filter="other@"))


async def test_endpoints_come_and_go(environment: Environment, events: KvEvents, engines: list[Engine]) -> None:
    fleet = environment.fleet
    fleet.apply([engine.spec for engine in engines])
    for engine in engines:
        await engine.publish()
    await until(lambda: [feed.residency.held("gpu") for feed in events.feeds.values()] == [1, 1])
    gone = events.feeds[fleet.endpoints[0]]
    fleet.apply([engines[1].spec])
    assert list(events.feeds) == list(fleet.endpoints)
    assert gone.residency.held("gpu") == 0
    assert [entry["endpoint"] for entry in events.snapshot()] == ["10.0.0.2:8000"]


async def test_a_changed_event_address_is_followed(
    environment: Environment, events: KvEvents, engines: list[Engine]
) -> None:
    one, two = engines
    environment.fleet.apply([one.spec])
    await one.publish()
    moved = EndpointSpec(one.address, one.spec.name, kv_events=two.spec.kv_events)
    environment.fleet.apply([moved])
    await two.publish()
    (feed,) = events.feeds.values()
    await until(lambda: feed.residency.held("gpu") == 1)
    labelled = EndpointSpec(one.address, one.spec.name, kv_events=two.spec.kv_events, labels={"a": "b"})
    environment.fleet.apply([labelled])
    assert list(events.feeds.values()) == [feed], "other changes leave the feed alone"


async def test_an_impossible_port_concerns_its_endpoint_only(environment: Environment, events: KvEvents) -> None:
    events.config = config(pod_discovery_config=PodDiscoveryConfig(socket_port=65535))
    environment.fleet.apply([EndpointSpec("127.0.0.1:8000", "a"), EndpointSpec("127.0.0.1:8001", "b", rank=1)])
    states = {entry["endpoint"]: (entry["state"], entry["reason"]) for entry in events.snapshot()}
    assert states["127.0.0.1:8001"] == ("lost", "event port 65535 + rank 1 is out of range")
    assert states["127.0.0.1:8000"][0] == "syncing"


async def test_engines_metrics_tell_the_chunk(environment: Environment, events: KvEvents) -> None:
    environment.fleet.apply([EndpointSpec("127.0.0.1:8000", kv_events="tcp://127.0.0.1:9")])
    (endpoint,) = environment.fleet.endpoints
    assert events.feeds[endpoint].residency.blocks_per_chunk == 1
    endpoint.load.cpu_blocks_per_chunk = 4
    await until(lambda: events.feeds[endpoint].residency.blocks_per_chunk == 4)


@pytest.mark.parametrize(("tier", "medium"), [("cpu", "CPU"), ("storage", "STORAGE")])
async def test_labels_name_what_engines_share_that_cannot_say_so(
    environment: Environment, events: KvEvents, engines: list[Engine], tier: str, medium: str
) -> None:
    def labelled(**pools: str) -> None:
        environment.fleet.apply(
            replace(engine.spec, labels={f"tierpick.ai/{tier}-pool": name})
            for engine, name in zip(engines, pools.values(), strict=True)
        )

    def lanes() -> list[int]:
        """That count for each."""
        return [feed.residency.bits(tier).bit_count() for feed in events.feeds.values()]

    labelled(one="nfs", two="nfs")
    for engine in engines:
        await engine.publish(medium)
    await until(lambda: lanes() == [2, 2])
    labelled(one="nfs", two="another")
    await until(lambda: lanes() == [1, 0])


async def test_a_bound_socket_tells_engines_apart_by_topic(environment: Environment) -> None:
    events = KvEvents.of(environment)
    events.configure("precise", config(zmq_endpoint="tcp://127.0.0.1:*"))
    environment.fleet.apply([EndpointSpec("10.0.0.1:8000"), EndpointSpec("10.0.0.2:8000"), EndpointSpec("10.0.0.2:1")])
    await events.start()
    assert events.shared_feed is not None
    context = zmq.asyncio.Context()
    pub = context.socket(zmq.XPUB)
    pub.connect(events.shared_feed.endpoint)
    assert await pub.recv() == b"\1kv@"
    # a full identity, a bare IP that is unique, one that is not, one that nobody has
    for pod in ("10.0.0.2:8000", "10.0.0.1", "10.0.0.2", "10.9.9.9:8000"):
        await pub.send_multipart([f"kv@{pod}@m".encode(), bytes(8), stored(7)])
    await until(lambda: events.shared_feed and events.shared_feed.unknown == 2)
    held = {endpoint.address: feed.residency.held("gpu") for endpoint, feed in events.feeds.items()}
    assert held == {"10.0.0.1:8000": 1, "10.0.0.2:8000": 1, "10.0.0.2:1": 0}
    await events.stop()
    context.destroy(linger=0)


async def test_a_socket_that_cannot_be_bound_is_a_start_error(environment: Environment) -> None:
    events = KvEvents.of(environment)
    events.configure("precise", config(zmq_endpoint="tcp://192.0.2.1:5557"))
    with pytest.raises(OSError, match=r"zmqEndpoint.*192\.0\.2\.1"):
        await events.start()
    await events.stop()


async def test_a_scrape_shows_every_publisher(
    environment: Environment, events: KvEvents, engines: list[Engine]
) -> None:
    environment.fleet.apply([engines[0].spec])
    await engines[0].publish()
    await until(lambda: next(iter(events.feeds.values())).counters.messages == 1)
    value = environment.telemetry.registry.get_sample_value
    assert value("llm_d_epp_kv_cache_events_active_subscribers") == 1
    pod = {"pod_identifier": "10.0.0.1:8000"}
    assert value("llm_d_epp_kv_cache_events_messages_received_total", pod) == 1
    odd = msgspec.msgpack.encode([0.0, [{"type": "NewThing"}], 0])
    await engines[0].pub.send_multipart([b"kv@p@m", (1).to_bytes(8, "big"), odd])
    await until(lambda: next(iter(events.feeds.values())).counters.messages == 2)
    skipped = "llm_d_epp_kv_cache_events_stores_skipped_total", {"cache_kind": "", "reason": "unknown_type"}
    assert value(*skipped) == 1
    msgspec.json.encode(events.snapshot())
    removed = [{"type": "BlockRemoved", "block_hashes": [1], "medium": tier} for tier in ("GPU", "CPU")]
    await engines[0].pub.send_multipart(
        [b"kv@p@m", (2).to_bytes(8, "big"), msgspec.msgpack.encode([0.0, [removed[0], removed[1]], 0])]
    )
    await until(lambda: next(iter(events.feeds.values())).counters.messages == 3)
    counted = {
        "index_admissions": 1,
        "index_evictions": 1,
        "events_dedup_removed_hashes_suppressed": 0,
        "events_dedup_removed_hashes_forwarded": 1,
    }
    assert {name: value(f"llm_d_epp_kv_cache_{name}_total") for name in counted} == counted
    unplaced = "llm_d_epp_kv_cache_events_removals_skipped_total", {"cache_kind": "", "reason": "not_indexed"}
    assert value(*unplaced) == 1
    environment.fleet.apply([])
    assert value(*skipped) == value(*unplaced) == 1, "a counter does not go back when an endpoint leaves"
    assert {name: value(f"llm_d_epp_kv_cache_{name}_total") for name in counted} == counted


async def test_stopping_twice_or_unstarted_is_harmless(environment: Environment) -> None:
    events = KvEvents.of(environment)
    await events.stop()
    await events.start()
    await events.stop()
    await events.stop()


class Streaming:
    """An engine with our connector: it sends its load with its events."""

    def __init__(self, number: int, **load: Any) -> None:
        self.about = About(heartbeat=0.05, tiers={GPU: Tier(1000), "CPU": Tier(600, chunk=4)})
        self.about.load = Load(**load)
        self.publisher = Publisher(
            self.about,
            endpoint="tcp://127.0.0.1:*",
            bind=True,
            replay_endpoint="tcp://127.0.0.1:*",
            topic=f"kv@10.0.0.{number}:8000@m",
        )
        assert self.publisher.replay_endpoint is not None
        self.spec = EndpointSpec(
            f"10.0.0.{number}:8000", kv_events=self.publisher.endpoint, kv_replay=self.publisher.replay_endpoint
        )


@pytest.fixture
def streaming() -> Iterator[Callable[..., Streaming]]:
    started: list[Streaming] = []

    def start(number: int, **load: Any) -> Streaming:
        started.append(Streaming(number, **load))
        return started[-1]

    yield start
    for engine in started:
        engine.publisher.close()


class TestStreamedLoad:
    async def test_it_becomes_the_endpoints_load(
        self, environment: Environment, events: KvEvents, streaming: Callable[..., Streaming]
    ) -> None:
        engine = streaming(1, waiting=3, running=2, kv_usage=0.5)
        engine.publisher.publish([BlockStored([7], None, [7] * 16, 16, None, GPU, None)])
        environment.fleet.apply([engine.spec])
        (endpoint,) = environment.fleet.endpoints
        await until(lambda: endpoint.load.updated_at and endpoint.load.block_size)
        seen = endpoint.load
        wanted = EngineLoad(
            waiting=3,
            running=2,
            kv_usage=0.5,
            block_size=16,
            num_blocks=1000,
            cpu_blocks_per_chunk=4,
            cpu_chunks=150,
            updated_at=seen.updated_at,
            streamed_until=seen.updated_at + 3.0,
        )
        assert seen == wanted
        engine.about.load = Load(0, 1, 0.25)
        await until(lambda: endpoint.load.waiting == 0)
        assert seen.waiting == 3, "a decision keeps what it saw"

    async def test_a_newer_scrape_is_not_undone(
        self, environment: Environment, events: KvEvents, streaming: Callable[..., Streaming]
    ) -> None:
        engine = streaming(1, waiting=3, running=2, kv_usage=0.5)
        engine.about.heartbeat = 0.0
        engine.publisher.publish([BlockStored([7], None, [7] * 16, 16, None, GPU, None)])
        environment.fleet.apply([engine.spec])
        (endpoint,) = environment.fleet.endpoints
        await until(lambda: endpoint.load.updated_at)
        endpoint.load = scraped = EngineLoad(waiting=9, updated_at=environment.clock() + 1)
        events._tidy()
        assert endpoint.load is scraped

    async def test_with_the_connection_its_precedence_ends(
        self, environment: Environment, events: KvEvents, streaming: Callable[..., Streaming]
    ) -> None:
        engine = streaming(1, waiting=3, running=2, kv_usage=0.5)
        environment.fleet.apply([engine.spec])
        (endpoint,) = environment.fleet.endpoints
        await until(lambda: endpoint.load.streamed_until)
        engine.publisher.close()
        await until(lambda: not endpoint.load.streamed_until)
        assert endpoint.load.waiting == 3

    async def test_the_chunk_that_is_streamed_counts_not_one_scraped_before(
        self, environment: Environment, events: KvEvents, streaming: Callable[..., Streaming]
    ) -> None:
        engine = streaming(1, waiting=0, running=0, kv_usage=0.0)
        engine.about.load = None
        environment.fleet.apply([engine.spec])
        (endpoint,) = environment.fleet.endpoints
        endpoint.load = EngineLoad(cpu_blocks_per_chunk=16)
        (feed,) = events.feeds.values()
        await until(lambda: feed.stream.told.tiers.cpu)
        events._tidy()
        assert feed.residency.blocks_per_chunk == 4

    async def test_silence_is_noticed(
        self, environment: Environment, events: KvEvents, streaming: Callable[..., Streaming]
    ) -> None:
        engine = streaming(1, waiting=0, running=0, kv_usage=0.0)
        environment.fleet.apply([engine.spec])
        (feed,) = events.feeds.values()
        await until(lambda: feed.state is State.LIVE and feed.stream.told.heartbeat)
        engine.about.heartbeat = 0.0
        await until(lambda: feed.stream.reason == "silent")

    async def test_metrics_show_tiers_snapshots_and_silence(
        self, environment: Environment, events: KvEvents, streaming: Callable[..., Streaming]
    ) -> None:
        engine = streaming(1, waiting=0, running=0, kv_usage=0.0)
        engine.publisher.publish([BlockStored([7], None, [7] * 16, 16, None, GPU, None)])
        environment.fleet.apply([engine.spec])
        (feed,) = events.feeds.values()
        await until(lambda: feed.state is State.LIVE and feed.stream.told.tiers.gpu and feed.counters.messages)
        await until(lambda: feed.stream.told.tiers.gpu.held == 1)
        value, pod = environment.telemetry.registry.get_sample_value, {"pod_identifier": engine.spec.address}
        assert value("tierpick_tier_capacity_blocks", {**pod, "tier": "gpu"}) == 1000
        assert value("tierpick_tier_held_blocks", {**pod, "tier": "gpu"}) == 1
        assert value("tierpick_tier_capacity_blocks", {**pod, "tier": "cpu"}) == 600
        taken = value("tierpick_feed_snapshots_total", {**pod, "result": "taken"})
        assert taken == feed.counters.snapshots
        assert value("tierpick_feed_snapshots_total", {**pod, "result": "failed"}) == 0
        silence = value("tierpick_feed_silence_seconds", pod)
        assert silence is not None
        assert 0 <= silence < 5

    async def test_metrics_show_the_feed_as_long_as_its_endpoint_is_there(
        self, environment: Environment, events: KvEvents, streaming: Callable[..., Streaming]
    ) -> None:
        engine = streaming(1, waiting=0, running=0, kv_usage=0.0)
        engine.about.heartbeat = 0.0
        environment.fleet.apply([engine.spec])
        (feed,) = events.feeds.values()
        await until(lambda: feed.state is State.LIVE)
        registry, pod = environment.telemetry.registry, engine.spec.address

        def shown() -> dict[str, float]:
            samples = [sample for family in registry.collect() for sample in family.samples]
            of_pod = [sample for sample in samples if sample.labels.get("pod_identifier") == pod]
            return {s.name.removeprefix("tierpick_feed_") + s.labels.get("state", ""): s.value for s in of_pod}

        live = {"statelive": 1, "stateunsure": 0, "statelost": 0, "statesyncing": 0, "trust": 1, "lag_batches": 0}
        assert live.items() <= shown().items()
        engine.publisher.close()
        await until(lambda: feed.state is State.LOST)
        assert {**live, "statelive": 0, "statelost": 1, "trust": 0}.items() <= shown().items()
        counted = (
            "gaps",
            "missed_batches",
            "duplicates",
            "unreadable_batches",
            "losses",
            "restarts",
            "truncated_replays",
        )
        assert {name: shown()[f"{name}_total"] for name in counted} == dict.fromkeys(counted, 0)
        assert shown()["replays_total"] >= 1
        environment.fleet.apply([])
        assert shown() == {}

    async def test_metrics_show_what_the_index_takes(
        self, environment: Environment, events: KvEvents, streaming: Callable[..., Streaming]
    ) -> None:
        value = environment.telemetry.registry.get_sample_value
        parts = {part: value("tierpick_index_memory_bytes", {"part": part}) for part in events.index.memory()}
        assert parts == dict(events.index.memory())
        assert value("tierpick_index_budget_bytes") == events.index.budget
        assert value("tierpick_index_forgotten_blocks_total") == 0
        assert value("tierpick_index_dropped_orphans_total") == 0


WITHOUT_SCRAPING = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins: [{type: precise-prefix-cache-producer}, {type: SCORER}]
dataLayer: {injectDefaults: false}
schedulingProfiles: [{name: default, plugins: [{pluginRef: SCORER}]}]
"""


@pytest.mark.parametrize(
    "scorer", ["queue-scorer", "running-requests-size-scorer", "kv-cache-utilization-scorer", "load-aware-scorer"]
)
async def test_a_fleet_is_scheduled_by_its_streams_alone_where_nothing_is_scraped(
    environment: Environment, streaming: Callable[..., Streaming], scorer: str
) -> None:
    configuration = load(WITHOUT_SCRAPING.replace("SCORER", scorer), environment)
    assert not configuration.data_layer.scrape
    events = KvEvents.of(environment)
    await events.start()
    busy, idle = streaming(1, waiting=9, running=8, kv_usage=0.9), streaming(2, waiting=0, running=1, kv_usage=0.1)
    environment.fleet.apply([busy.spec, idle.spec])
    scheduler = Scheduler(
        producers=configuration.producers,
        profiles=configuration.profiles,
        handler=configuration.handler,
        plugins=list(configuration.plugins.values()),
        telemetry=environment.telemetry,
        rng=environment.rng,
    )

    async def picked() -> Endpoint:
        request = InferenceRequest("r", "/v1/completions", {}, b"", target_model="m")
        result = await schedule(scheduler, Scheduling(request, environment.fleet.endpoints, now=environment.clock()))
        return result.target.picked[0]

    await until(lambda: all(endpoint.load.updated_at for endpoint in environment.fleet.endpoints))
    assert {(await picked()).address for _ in range(20)} == {idle.spec.address}
    busy.about.load, idle.about.load = idle.about.load, busy.about.load
    await until(lambda: [endpoint.load.waiting for endpoint in environment.fleet.endpoints] == [0, 9])
    assert {(await picked()).address for _ in range(20)} == {busy.spec.address}
    await events.stop()


async def test_an_engine_that_fell_asleep_holds_nothing_though_no_event_says_so(
    environment: Environment, events: KvEvents, engines: list[Engine]
) -> None:
    environment.fleet.apply([engine.spec for engine in engines])
    for engine in engines:
        await engine.publish()
    sleeper, other = environment.fleet.endpoints
    await until(lambda: events.index.blocks("gpu") == 2)
    sleeper.load = EngineLoad(asleep=True)
    await until(lambda: events.feeds[sleeper].residency.held("gpu") == 0)
    assert events.feeds[other].residency.held("gpu") == 1
