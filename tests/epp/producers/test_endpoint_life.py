"""Endpoints that come, go, and come back as somebody else: what is known of one never becomes another's.

Over real sockets, with our own publisher's thread at the other end: it goes on sending while this loop does not turn.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import random
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import zmq
import zmq.asyncio

from connector.events import GPU, BlockStored
from connector.journal import About
from connector.publisher import Publisher
from epp.config.environment import Environment
from epp.fleet.endpoint import Endpoint, EndpointSpec
from epp.fleet.fleet import Fleet
from epp.producers.kv_events import KvEvents, KvEventsConfig
from epp.producers.precise import PrecisePrefixCacheProducer, PrecisePrefixParameters
from epp.requests.model import InferenceRequest
from epp.routing import Outcome, Termination
from epp.scheduling.plugin import ProfileResult, Scheduling, SchedulingResult
from epp.telemetry import Telemetry
from indexer import wire
from indexer.feed import CONCURRENT_REBUILDS, Feed
from indexer.residency import Residency
from indexer.stream import State, Stream
from tests import waiting

BLOCK = 16
TOPIC = "kv@10.0.0.1:8000@m"


until = functools.partial(waiting.until, seconds=10)


def block(number: int) -> BlockStored:
    """The first block of a prompt, `number` again and again."""
    return BlockStored([number], None, [number] * BLOCK, BLOCK, None, GPU, None)


class Engine:
    """Publishes like vLLM itself, or with our notes and snapshots if it has an `instance`."""

    def __init__(self, *, endpoint: str = "tcp://127.0.0.1:*", topic: str = TOPIC, instance: str = "") -> None:
        about = About(instance=instance, heartbeat=0.0) if instance else None
        self.publisher = Publisher(
            about, endpoint=endpoint, bind=True, replay_endpoint="tcp://127.0.0.1:*", topic=topic
        )
        self.addresses = {"kv_events": self.publisher.endpoint, "kv_replay": self.publisher.replay_endpoint}

    def store(self, *numbers: int) -> None:
        for number in numbers:
            self.publisher.publish([block(number)])
        assert self.publisher.flush(5)

    def spec(self, address: str = "10.0.0.1:8000", name: str = "pod", **fields: Any) -> EndpointSpec:
        return EndpointSpec(address, name, **{**self.addresses, **fields})


@pytest.fixture
def engine() -> Iterator[Callable[..., Engine]]:
    started: list[Engine] = []

    def start(**options: Any) -> Engine:
        started.append(Engine(**options))
        return started[-1]

    yield start
    for each in started:
        each.publisher.close()


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


@pytest.fixture
def environment(fleet: Fleet) -> Environment:
    return Environment(fleet, Telemetry())


@pytest.fixture
async def events(environment: Environment) -> AsyncIterator[KvEvents]:
    events = KvEvents.of(environment)
    events.configure("precise", KvEventsConfig(topic_filter=""))
    await events.start()
    yield events
    await events.stop()


def held(events: KvEvents) -> dict[str, int]:
    return {endpoint.address: feed.residency.held("gpu") for endpoint, feed in events.feeds.items()}


def predicted(events: KvEvents, environment: Environment, number: int) -> list[int]:
    """Tokens of the prompt that begins with this block, by slot."""
    producer = PrecisePrefixCacheProducer("precise", PrecisePrefixParameters(), environment)
    producer.name = "precise"
    tokens = b"".join(number.to_bytes(4, "little") for _ in range(BLOCK + 1))
    request = InferenceRequest("r", "/v1/completions", {}, b"", tokens=[tokens], target_model="m")
    scheduling = Scheduling(request, environment.fleet.endpoints, now=environment.clock())
    producer.produce(scheduling)
    return scheduling.matches["precise"].cached_tokens


class TestAnotherPodAtTheSameAddress:
    @pytest.mark.parametrize("other", [{"name": "pod-2"}, {"uid": "2"}, {"namespace": "elsewhere"}])
    async def test_inherits_nothing(
        self, events: KvEvents, environment: Environment, engine: Callable[..., Engine], other: dict[str, str]
    ) -> None:
        old, new = engine(), engine()
        environment.fleet.apply([old.spec()])
        old.store(*range(1, 51))
        await until(lambda: held(events) == {"10.0.0.1:8000": 50})
        assert predicted(events, environment, 1) == [BLOCK]
        old.store(*range(51, 501))  # on their way, or already here, when the pod is replaced
        environment.fleet.apply([new.spec(**other)])
        assert predicted(events, environment, 1) == [0]
        new.store(1000)
        await until(lambda: held(events) == {"10.0.0.1:8000": 1})
        assert predicted(events, environment, 1) == [0]
        assert predicted(events, environment, 1000) == [BLOCK]
        while events.index.sweep():
            pass
        assert len(events.index.masks) == 1, "nothing of the old pod is left"

    @pytest.mark.parametrize("other", [{"name": "pod-2"}, {"uid": "2"}, {"namespace": "elsewhere"}])
    async def test_is_told_from_the_old_one_by_more_than_its_event_address(
        self, events: KvEvents, environment: Environment, engine: Callable[..., Engine], other: dict[str, str]
    ) -> None:
        one = engine()
        environment.fleet.apply([one.spec()])
        one.store(1)
        await until(lambda: held(events) == {"10.0.0.1:8000": 1})
        environment.fleet.apply([one.spec(**other)])
        assert held(events) == {"10.0.0.1:8000": 0}
        assert predicted(events, environment, 1) == [0]

    async def test_is_not_expected_to_hold_what_was_sent_to_the_old_one(
        self, events: KvEvents, environment: Environment, engine: Callable[..., Engine]
    ) -> None:
        one = engine()
        environment.fleet.apply([one.spec()])
        (old,) = environment.fleet.endpoints
        request = object()
        events.speculation.add(request, old, [1, 2, 3], environment.clock())
        environment.fleet.apply([one.spec(uid="2")])
        assert events.speculation.keys == 0
        (new,) = environment.fleet.endpoints
        assert new is not old
        events.speculation.drop(request)

    async def test_a_pod_that_only_changed_its_labels_keeps_what_it_has(
        self, events: KvEvents, environment: Environment, engine: Callable[..., Engine]
    ) -> None:
        one = engine()
        environment.fleet.apply([one.spec()])
        one.store(1)
        await until(lambda: held(events) == {"10.0.0.1:8000": 1})
        environment.fleet.apply([one.spec(labels={"a": "b"})])
        assert predicted(events, environment, 1) == [BLOCK]


class TestOneOfSeveralRanks:
    """Of one pod, on neighbouring ports, all of which publish under one topic."""

    async def started(self, events: KvEvents, fleet: Fleet, engine: Callable[..., Engine]) -> list[EndpointSpec]:
        engines = [engine() for _ in range(4)]
        specs = [each.spec(f"10.0.0.1:{8000 + rank}", f"pod-{rank}", rank=rank) for rank, each in enumerate(engines)]
        fleet.apply(specs)
        for rank, each in enumerate(engines):
            each.store(*range(100 * (rank + 1), 101 * (rank + 1)))
        await until(lambda: held(events) == {spec.address: rank + 1 for rank, spec in enumerate(specs)})
        return specs

    async def test_has_what_came_over_its_own_socket(
        self, events: KvEvents, environment: Environment, engine: Callable[..., Engine]
    ) -> None:
        await self.started(events, environment.fleet, engine)
        assert predicted(events, environment, 301) == [0, 0, BLOCK, 0]

    async def test_leaves_the_others_as_they_are(
        self, events: KvEvents, environment: Environment, engine: Callable[..., Engine]
    ) -> None:
        specs = await self.started(events, environment.fleet, engine)
        feeds = dict(events.feeds)
        for gone in (2, 0, 3):
            specs = [spec for spec in specs if spec.rank != gone]
            environment.fleet.apply(specs)
            assert held(events) == {spec.address: spec.rank + 1 for spec in specs}
            assert predicted(events, environment, 100 * (gone + 1)) == [0] * max(e.slot + 1 for e in events.feeds)
        assert all(feeds[endpoint] is feed for endpoint, feed in events.feeds.items())

    async def test_that_says_nothing_is_told_from_one_that_does(
        self, events: KvEvents, environment: Environment, engine: Callable[..., Engine]
    ) -> None:
        talking, silent = engine(), engine()
        nowhere = {"kv_events": "tcp://127.0.0.1:9", "kv_replay": ""}
        ranks = [talking.spec(rank=0), silent.spec("10.0.0.1:8001", rank=1)]
        ranks += [EndpointSpec(f"10.0.0.1:{8000 + rank}", f"pod-{rank}", rank=rank, **nowhere) for rank in (2, 3)]
        environment.fleet.apply(ranks)
        (feed, *_) = events.feeds.values()
        await until(lambda: talking.store(1) or feed.counters.messages)
        for number in range(1, 6):
            heard = feed.counters.messages
            talking.store(number)
            await until(lambda heard=heard: feed.counters.messages > heard)
            for endpoint in environment.fleet.endpoints:
                events.served(endpoint)
        shown = {feed["endpoint"]: feed for feed in events.snapshot()}
        assert [shown[spec.address]["requests_since_heard"] for spec in ranks] == [0, 5, 5, 5]
        assert [shown[spec.address]["heard_seconds_ago"] is None for spec in ranks] == [False, True, True, True]
        await until(lambda: [feed.state for feed in events.feeds.values()][2:] == [State.LOST] * 2)
        assert predicted(events, environment, 1) == [BLOCK, 0, 0, 0]


@pytest.mark.parametrize("topic", ["", "kv@10.9.9.9@m", "kv@10.0.0.1:8000@m", "kv@10.0.0.1@m", "m"])
async def test_whatever_a_topic_says_of_the_pod_the_socket_decides(
    events: KvEvents, environment: Environment, engine: Callable[..., Engine], topic: str
) -> None:
    one, two = engine(topic=topic), engine(topic=topic)
    environment.fleet.apply([one.spec(), two.spec("10.0.0.2:8000", "pod-2")])
    two.store(7, 8)
    await until(lambda: held(events) == {"10.0.0.1:8000": 0, "10.0.0.2:8000": 2})


class TestEndpointsThatFlap:
    async def test_end_with_what_their_engines_hold(
        self, events: KvEvents, environment: Environment, engine: Callable[..., Engine]
    ) -> None:
        """Whatever was under way when one left: connecting, waiting for its turn, asking, reading."""
        one = engine()
        one.store(*range(1, 101))
        chance = random.Random(4)
        for _ in range(200):
            environment.fleet.apply([one.spec()])
            for _ in range(chance.randrange(6)):
                await asyncio.sleep(0)
            environment.fleet.apply([])
        assert held(events) == {}
        environment.fleet.apply([one.spec()])
        await until(lambda: held(events) == {"10.0.0.1:8000": 100})
        (feed,) = events.feeds.values()
        assert feed.state is State.LIVE

    async def test_keep_nobody_waiting_for_a_turn(self, events: KvEvents, environment: Environment) -> None:
        """More than may ask at once, at a replay socket that does not answer; all leave, while some have their turn and
        others wait for it, and then others come who must find every turn free."""
        context = zmq.asyncio.Context()
        pub, router = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        ports = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in (pub, router)]
        addresses = dict(zip(("kv_events", "kv_replay"), (f"tcp://127.0.0.1:{port}" for port in ports), strict=True))
        for _ in range(3):
            asked = set()
            environment.fleet.apply(
                EndpointSpec(f"10.0.0.{n}:8000", **addresses) for n in range(CONCURRENT_REBUILDS + 4)
            )
            while len(asked) < CONCURRENT_REBUILDS:
                peer, *_ = await asyncio.wait_for(router.recv_multipart(), 5)
                asked.add(peer)
            environment.fleet.apply([])
        context.destroy(linger=0)

    async def test_leave_no_object_behind(
        self, events: KvEvents, environment: Environment, engine: Callable[..., Engine]
    ) -> None:
        """Neither a timer nor a socket nor a turn holds a feed that was closed, whatever it was doing."""

        def there_are() -> list[object]:
            return [thing for thing in gc.get_objects() if isinstance(thing, (Endpoint, Feed, Stream, Residency))]

        others = {id(thing): thing for thing in there_are()}  # of other tests
        one = engine()
        one.store(*range(1, 101))
        for rounds in range(20):
            environment.fleet.apply(one.spec(f"10.0.0.{n}:8000", f"pod-{n}") for n in range(12))
            for _ in range(rounds):
                await asyncio.sleep(0)
            environment.fleet.apply([])
        gc.collect()
        assert [thing for thing in there_are() if id(thing) not in others] == []

    async def test_a_random_walk_of_changes_ends_where_discovery_does(
        self, events: KvEvents, environment: Environment, engine: Callable[..., Engine]
    ) -> None:
        engines = [engine() for _ in range(3)]
        for number, each in enumerate(engines):
            each.store(*range(1, number + 2))
        chance, wanted = random.Random(5), dict[str, tuple[int, EndpointSpec]]()
        for step in range(1000):
            address = f"10.0.0.{chance.randrange(20)}:8000"
            if address in wanted and chance.random() < 0.4:
                del wanted[address]
            else:
                which = chance.randrange(3)
                wanted[address] = which, engines[which].spec(address, "pod", uid=str(chance.randrange(2)))
            environment.fleet.apply([spec for _, spec in wanted.values()])
            if step % 50 == 0:
                await asyncio.sleep(0.01)
        assert {endpoint.address for endpoint in events.feeds} == wanted.keys()
        await until(lambda: held(events) == {address: which + 1 for address, (which, _) in wanted.items()})
        assert all(feed.state is State.LIVE for feed in events.feeds.values())


async def test_half_a_fleet_that_leaves_at_once_is_cleaned_up_later(events: KvEvents, environment: Environment) -> None:
    """Else requests would wait while everything that the index holds is looked through, again and again."""
    environment.fleet.apply(
        EndpointSpec(f"10.0.{n // 250}.{n % 250}:8000", f"pod-{n}", kv_events="tcp://127.0.0.1:9") for n in range(500)
    )
    for number, feed in enumerate(events.feeds.values(), 1):
        tokens = number.to_bytes(4, "little") * BLOCK
        feed.residency.apply(
            [wire.BlockStored([number], parent=None, tokens=tokens, block_size=BLOCK, tier="gpu", extras={})]
        )
    environment.fleet.apply([])
    assert (len(events.index), events.index.blocks("gpu")) == (500, 0)
    while events.index.sweep():
        pass
    assert len(events.index) == 0


class TestOneSocketForAll:
    @pytest.fixture
    async def events(self, environment: Environment) -> AsyncIterator[KvEvents]:
        events = KvEvents.of(environment)
        events.configure("precise", KvEventsConfig(zmq_endpoint="tcp://127.0.0.1:*"))
        await events.start()
        yield events
        await events.stop()

    @pytest.fixture
    def connected(self, events: KvEvents) -> Iterator[Publisher]:
        assert events.shared_feed is not None
        publisher = Publisher(None, endpoint=events.shared_feed.endpoint, bind=False, topic=TOPIC)
        yield publisher
        publisher.close()

    async def warm(self, events: KvEvents, environment: Environment, publisher: Publisher) -> None:
        environment.fleet.apply([EndpointSpec("10.0.0.1:8000", "pod")])
        (feed,) = events.feeds.values()
        published = 0
        while not feed.counters.messages:  # until the subscription has reached the publisher
            publisher.publish([block(1)])
            published += 1
            await asyncio.sleep(0.01)
        await until(lambda: feed.stream.last_seq == published - 1)

    async def test_what_an_old_pod_said_is_not_taken_for_a_new_ones(
        self, events: KvEvents, environment: Environment, connected: Publisher
    ) -> None:
        await self.warm(events, environment, connected)
        assert events.shared_feed is not None
        connected.publish([block(2)])
        assert events.shared_feed._socket.poll(5000), "it is here, and the loop has not read it"
        environment.fleet.apply([EndpointSpec("10.0.0.1:8000", "another pod")])
        await until(lambda: events.shared_feed and events.shared_feed.unknown == 1)
        assert held(events) == {"10.0.0.1:8000": 0}
        connected.publish([block(3)])
        await until(lambda: held(events) == {"10.0.0.1:8000": 1})
        assert predicted(events, environment, 2) == [0]

    async def test_a_pod_that_is_gone_stays_gone(
        self, events: KvEvents, environment: Environment, connected: Publisher
    ) -> None:
        await self.warm(events, environment, connected)
        connected.publish([block(2)])
        environment.fleet.apply([])
        await until(lambda: events.shared_feed and events.shared_feed.unknown == 1)
        assert events.index.blocks("gpu") == 0

    async def test_an_ip_of_two_endpoints_names_neither_even_if_one_refuses_requests(
        self, events: KvEvents, environment: Environment
    ) -> None:
        assert events.shared_feed is not None
        publisher = Publisher(None, endpoint=events.shared_feed.endpoint, bind=False, topic="kv@10.0.0.1@m")
        environment.fleet.apply([EndpointSpec("10.0.0.1:8000", "a"), EndpointSpec("10.0.0.1:8001", "b")])
        environment.fleet.reached(environment.fleet.endpoints[0], False)
        while not events.shared_feed.unknown:
            publisher.publish([block(1)])
            await asyncio.sleep(0.01)
        publisher.close()
        assert set(held(events).values()) == {0}


async def test_a_thousand_requests_are_one_connection_an_endpoint(events: KvEvents, environment: Environment) -> None:
    """Whatever is asked of it: a feed lives as long as its endpoint."""
    context = zmq.asyncio.Context()
    pub = context.socket(zmq.XPUB)
    pub.setsockopt(zmq.XPUB_VERBOSER, 1)
    port = pub.bind_to_random_port("tcp://127.0.0.1")
    environment.fleet.apply(EndpointSpec(f"10.0.0.{n}:8000", kv_events=f"tcp://127.0.0.1:{port}") for n in (1, 2))
    assert [await asyncio.wait_for(pub.recv(), 5) for _ in range(2)] == [b"\1", b"\1"]
    producer = PrecisePrefixCacheProducer("precise", PrecisePrefixParameters(speculative_indexing=True), environment)
    producer.name = "precise"
    for number in range(1000):
        tokens = number.to_bytes(4, "little") * (BLOCK + 1)
        request = InferenceRequest("r", "/", {}, b"", tokens=[tokens], target_model="m")
        scheduling = Scheduling(request, environment.fleet.endpoints, now=environment.clock())
        producer.produce(scheduling)
        target = ProfileResult([], [], {}, [environment.fleet.endpoints[number % 2]])
        result = SchedulingResult({"default": target}, "default")
        producer.picked(scheduling, result)
        producer.finished(scheduling, result, Outcome(Termination.NATURAL, status=200))
        if number % 100 == 0:
            await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not await pub.poll(100)
    assert events.speculation.keys == 0
    context.destroy(linger=0)
