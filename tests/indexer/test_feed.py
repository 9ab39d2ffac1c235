"""Feeds on real ZMQ sockets over loopback, against a publisher like an engine's: PUB for live, ROUTER for replay."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import uvloop
import zmq
import zmq.asyncio

from indexer import stream as stream_module
from indexer.feed import Feed, FeedAddress, Hub, SharedFeed
from indexer.index import PrefixIndex
from indexer.stream import State
from tests.waiting import until

BLOCK = 16
MODEL = "tiny"


def stored(*hashes: int) -> dict[str, Any]:
    """Unrelated first blocks, one token repeated each."""
    return {
        "type": "BlockStored",
        "block_hashes": list(hashes[:1]),
        "parent_block_hash": None,
        "token_ids": [hashes[0]] * BLOCK,
        "block_size": BLOCK,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None],
    }


def removed(*hashes: int) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU"}


class Publisher:
    """`topics=False` answers replays as vLLM did before 0.26 and SGLang does; `answers=False` never does."""

    def __init__(self, *, topics: bool = True, answers: bool = True, memory: int = 10_000) -> None:
        self.context = zmq.asyncio.Context()
        self.topic = f"kv@10.0.0.1:8000@{MODEL}".encode()
        self.topics, self.answers, self.memory = topics, answers, memory
        self.batches: list[bytes] = []
        self.asked: list[int] = []
        self.pub = self._socket(zmq.XPUB)
        self.router = self._socket(zmq.ROUTER)
        port = self.pub.bind_to_random_port("tcp://127.0.0.1")
        replay_port = self.router.bind_to_random_port("tcp://127.0.0.1")
        self.address = FeedAddress(f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{replay_port}", "kv@")
        self._serving = asyncio.create_task(self._serve())

    def _socket(self, kind: int) -> zmq.asyncio.Socket:
        socket = self.context.socket(kind)
        socket.linger = 0
        return socket

    async def subscribed(self) -> None:
        """Until a feed's subscription has arrived: what is sent before that is lost."""
        while await self.pub.recv() != b"\1kv@":
            pass

    async def publish(self, *events: dict[str, Any], lost: bool = False) -> None:
        seq = len(self.batches)
        self.batches.append(msgspec.msgpack.encode([float(seq), list(events), 0]))
        if not lost:
            await self.send(seq)

    async def send(self, seq: int) -> None:
        await self.pub.send_multipart([self.topic, seq.to_bytes(8, "big"), self.batches[seq]])

    def restart(self) -> None:
        self.batches.clear()

    async def _serve(self) -> None:
        while True:
            peer, _, start = await self.router.recv_multipart()
            self.asked.append(int.from_bytes(start, "big"))
            if self.answers:
                await self._answer(peer, int.from_bytes(start, "big"))

    async def _answer(self, peer: bytes, start: int) -> None:
        head = [peer, b"", self.topic] if self.topics else [peer, b""]
        for seq in range(max(start, len(self.batches) - self.memory), len(self.batches)):
            await self.router.send_multipart([*head, seq.to_bytes(8, "big"), self.batches[seq]])
        end = [peer, b"", b""] if self.topics else [peer, b""]
        await self.router.send_multipart([*end, b"\xff" * 8, b""])

    async def close(self) -> None:
        self._serving.cancel()
        self.context.destroy(linger=0)


class Bench:
    """A hub, an index and what was opened on them."""

    def __init__(self) -> None:
        self.hub = Hub()
        self.index = PrefixIndex()
        self.feeds: list[Feed] = []
        self.publishers: list[Publisher] = []

    def publisher(self, **options: Any) -> Publisher:
        self.publishers.append(Publisher(**options))
        return self.publishers[-1]

    def feed(self, address: FeedAddress) -> Feed:
        feed = Feed(lambda: self.index.publisher("pod"), address)
        self.feeds.append(feed)
        feed.open(self.hub)
        return feed

    async def connected(self, publisher: Publisher, *, replay: bool = True) -> Feed:
        address = publisher.address if replay else FeedAddress(publisher.address.events, "", "kv@")
        feed = self.feed(address)
        await publisher.subscribed()
        await until(lambda: feed.state is not State.SYNCING or not publisher.answers)
        return feed

    async def close(self) -> None:
        for feed in self.feeds:
            feed.close()
        assert len(self.hub.reader) == 0
        self.hub.close()
        for publisher in self.publishers:
            await publisher.close()


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    await bench.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "REPAIR_PATIENCE", 0.1)
    monkeypatch.setattr(stream_module, "REBUILD_PATIENCE", 0.1)


def held(feed: Feed) -> int:
    return feed.residency.held("gpu")


async def test_events_become_visible(bench: Bench) -> None:
    publisher = bench.publisher()
    feed = await bench.connected(publisher)
    await publisher.publish(stored(1), stored(2))
    await publisher.publish(removed(1))
    await until(lambda: feed.counters.messages == 2)
    assert held(feed) == 1
    assert feed.residency.model == MODEL
    assert feed.state is State.LIVE


@pytest.mark.parametrize("topics", [True, False])
async def test_a_late_joiner_learns_the_history(bench: Bench, topics: bool) -> None:
    publisher = bench.publisher(topics=topics)
    for n in range(1, 51):
        await publisher.publish(stored(n), lost=True)
    feed = await bench.connected(publisher)
    await publisher.publish(stored(51))
    await until(lambda: held(feed) == 51)
    await until(lambda: feed.state is State.LIVE)
    assert feed.residency.model == MODEL


@pytest.mark.parametrize("topics", [True, False])
async def test_a_gap_is_repaired_by_replay(bench: Bench, topics: bool) -> None:
    await repair_a_gap(bench, topics=topics)


def test_uvloop_does_as_well() -> None:
    async def main() -> None:
        bench = Bench()
        await repair_a_gap(bench, topics=True)
        await bench.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


async def repair_a_gap(bench: Bench, *, topics: bool) -> None:
    publisher = bench.publisher(topics=topics)
    feed = await bench.connected(publisher)
    await publisher.publish(stored(1))
    await publisher.publish(stored(2), lost=True)
    await publisher.publish(removed(1), lost=True)
    await publisher.publish(stored(3))
    await until(lambda: feed.stream.last_seq == 3)
    assert held(feed) == 2
    assert feed.state is State.LIVE
    assert publisher.asked[-1] == 0, "asked for from the last batch we had"
    assert (feed.counters.gaps, feed.counters.missed) == (1, 2)


@pytest.mark.usefixtures("impatient")
async def test_live_events_flow_while_the_replay_socket_is_dead(bench: Bench) -> None:
    publisher = bench.publisher(answers=False)
    feed = await bench.connected(publisher)
    await publisher.publish(stored(1))
    await until(lambda: held(feed) == 1)
    await publisher.publish(removed(1), lost=True)
    await publisher.publish(stored(2))
    for n in range(3, 20):
        await publisher.publish(stored(n))
    await until(lambda: held(feed) == 18)
    await until(lambda: feed.state is State.UNSURE)
    await publisher.publish(stored(20))
    await until(lambda: held(feed) == 19)


async def test_a_truncated_history_counts_from_its_oldest_batch(bench: Bench) -> None:
    publisher = bench.publisher(memory=10)
    for n in range(1, 51):
        await publisher.publish(stored(n), lost=True)
    feed = await bench.connected(publisher)
    assert held(feed) == 10
    assert feed.state is State.UNSURE
    assert "before batch 40" in feed.stream.reason


async def test_a_truncated_repair_forgets_and_counts_from_the_oldest(bench: Bench) -> None:
    publisher = bench.publisher(memory=3)
    feed = await bench.connected(publisher)
    await publisher.publish(stored(1))
    await until(lambda: held(feed) == 1)
    for n in range(2, 12):
        await publisher.publish(stored(n), lost=True)
    await publisher.publish(stored(12))
    await until(lambda: feed.counters.truncated == 2 and feed.state is State.UNSURE)
    assert held(feed) == 3, "of the repair and of the rebuild that followed"


async def test_a_restart_forgets_the_former_life(bench: Bench) -> None:
    publisher = bench.publisher()
    feed = await bench.connected(publisher)
    for n in range(1, 6):
        await publisher.publish(stored(n))
    await until(lambda: held(feed) == 5)
    publisher.restart()
    await publisher.publish(stored(100))
    await until(lambda: feed.counters.restarts == 1)
    assert held(feed) == 1
    assert feed.state is State.LIVE


async def test_duplicates_are_ignored(bench: Bench) -> None:
    publisher = bench.publisher()
    feed = await bench.connected(publisher)
    await publisher.publish(stored(1))
    await publisher.send(0)
    await publisher.publish(removed(1))
    await until(lambda: feed.counters.messages == 3)
    assert held(feed) == 0, "the store counted once, so one removal ends it"
    assert feed.counters.duplicates == 1


async def test_malformed_messages_are_counted_and_skipped_alone(bench: Bench) -> None:
    publisher = bench.publisher()
    feed = await bench.connected(publisher)
    await publisher.publish(stored(1))
    for frames in ([publisher.topic], [publisher.topic, b"\0\0\1", b"x"], [publisher.topic, b"\0" * 8, b"x", b"y"]):
        await publisher.pub.send_multipart(frames)
    await publisher.publish(stored(2))
    await until(lambda: held(feed) == 2)
    assert feed.counters.malformed == 3
    assert feed.state is State.LIVE


async def test_other_topics_are_not_subscribed(bench: Bench) -> None:
    publisher = bench.publisher()
    feed = await bench.connected(publisher)
    await publisher.pub.send_multipart([b"metrics", b"\0" * 8, b"x"])
    await publisher.publish(stored(1))
    await until(lambda: held(feed) == 1)
    assert feed.counters.malformed == feed.counters.duplicates == 0
    assert feed.counters.messages == 1


async def test_an_engine_that_goes_away_is_lost_and_comes_back_with_its_new_life(bench: Bench) -> None:
    publisher = bench.publisher()
    feed = await bench.connected(publisher)
    for n in range(1, 4):
        await publisher.publish(stored(n))
    await until(lambda: held(feed) == 3)
    publisher.pub.unbind(publisher.address.events)
    publisher.pub.close()
    await until(lambda: feed.state is State.LOST)
    assert held(feed) == 3
    publisher.restart()
    for n in range(10, 20):
        await publisher.publish(stored(n), lost=True)  # its numbers pass the old ones unheard
    publisher.pub = publisher._socket(zmq.XPUB)
    publisher.pub.bind(publisher.address.events)
    await publisher.subscribed()
    await until(lambda: feed.state is State.LIVE)
    assert held(feed) == 10
    assert feed.counters.reconnections == 1


async def test_an_engine_that_is_not_there_is_lost(bench: Bench) -> None:
    publisher = bench.publisher()
    await publisher.close()
    feed = bench.feed(publisher.address)
    assert feed.state is State.SYNCING
    await until(lambda: feed.state is State.LOST)
    assert feed.stream.reason == "cannot connect"


async def test_an_impossible_address_is_lost_and_closes_cleanly(bench: Bench) -> None:
    feed = bench.feed(FeedAddress("10.0.0.7:5557", "", "kv@"))
    assert feed.state is State.LOST
    assert "10.0.0.7:5557" in feed.stream.reason


async def test_200_endpoints_that_come_and_go_leave_no_socket_behind(bench: Bench) -> None:
    publisher = bench.publisher()
    await publisher.publish(stored(1), lost=True)

    async def once(*, connected: bool) -> None:
        feed = Feed(lambda: bench.index.publisher("pod"), publisher.address)
        feed.open(bench.hub)
        if connected:
            await until(lambda: feed.state is State.LIVE)
        feed.close()

    async def settled() -> int:
        """Open files, once ZMQ's own thread has closed what we closed."""
        counts = [-1, -2]
        while counts[-1] != counts[-2]:
            await asyncio.sleep(0.05)
            counts.append(len(os.listdir("/proc/self/fd")))
        return counts[-1]

    await once(connected=True)
    before = await settled()
    for _ in range(180):
        await once(connected=False)
    for _ in range(20):
        await once(connected=True)
    assert len(bench.hub.reader) == 0
    await until(lambda: len(os.listdir("/proc/self/fd")) <= before)
    assert bench.index.blocks("gpu") == 0 or not bench.index.sweep()


async def test_a_closed_feed_holds_nothing(bench: Bench) -> None:
    publisher = bench.publisher()
    feed = await bench.connected(publisher)
    await publisher.publish(stored(1))
    await until(lambda: held(feed) == 1)
    bench.feeds.remove(feed)
    feed.close()
    assert held(feed) == 0
    assert len(bench.hub.reader) == 0


async def test_rebuilds_take_turns(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    silent = bench.publisher(answers=False)
    feeds = [bench.feed(silent.address) for _ in range(10)]
    await until(lambda: sum(feed.counters.replays for feed in feeds) == 10)
    await until(lambda: len(silent.asked) == 8)
    silent.answers = True
    for feed in feeds[:4]:
        bench.feeds.remove(feed)
        feed.close()
    await until(lambda: sum(feed.state is State.LIVE for feed in feeds[4:]) >= 2)


async def test_a_storm_does_not_keep_the_loop_from_others(bench: Bench) -> None:
    publisher = bench.publisher()
    feed = await bench.connected(publisher, replay=False)
    storm = 5000
    payload = msgspec.msgpack.encode([0.0, [stored(n) for n in range(1, 33)], 0])
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    source = context.socket(zmq.PUB)
    source.set_hwm(0)
    port = source.bind_to_random_port("tcp://127.0.0.1")
    stormy = bench.feed(FeedAddress(f"tcp://127.0.0.1:{port}", "", "kv@"))
    await until(lambda: stormy.state is State.UNSURE)

    def send() -> None:
        for seq in range(storm):
            source.send_multipart([publisher.topic, seq.to_bytes(8, "big"), payload])

    thread = threading.Thread(target=send)
    await until(lambda: stormy.stream.state is not State.SYNCING)
    thread.start()
    pauses, loop = [], asyncio.get_running_loop()
    while stormy.counters.messages < storm / 2:
        before = loop.time(), stormy.counters.messages
        await asyncio.sleep(0)
        pauses.append((loop.time() - before[0], stormy.counters.messages - before[1]))
    await publisher.publish(stored(1))
    await until(lambda: held(feed) == 1)
    thread.join()
    context.destroy(linger=0)
    assert max(messages for _, messages in pauses) < storm / 20
    assert sorted(seconds for seconds, _ in pauses)[len(pauses) // 2] < 0.01


async def test_one_bound_socket_serves_all_engines_by_topic(bench: Bench) -> None:
    feeds = {f"10.0.0.{n}:8000": bench.feed(FeedAddress()) for n in (1, 2)}
    shared = SharedFeed(bench.hub, "tcp://127.0.0.1:*", "kv@", feeds.get)
    context = zmq.asyncio.Context()
    engine = context.socket(zmq.PUB)
    engine.connect(shared.endpoint)
    payload = msgspec.msgpack.encode([0.0, [stored(1)], 0])
    while not feeds["10.0.0.2:8000"].counters.messages:
        await engine.send_multipart([f"kv@10.0.0.2:8000@{MODEL}".encode(), bytes(8), payload])
        await asyncio.sleep(0.01)
    await engine.send_multipart([f"kv@10.9.9.9:8000@{MODEL}".encode(), bytes(8), payload])
    await until(lambda: shared.unknown == 1)
    assert held(feeds["10.0.0.2:8000"]) == 1
    assert held(feeds["10.0.0.1:8000"]) == 0
    assert feeds["10.0.0.2:8000"].state is State.LIVE
    shared.close()
    context.destroy(linger=0)
