"""A loop that stands still while an engine publishes far more than the queues between them hold, on real sockets."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from functools import partial

import pytest

from connector.events import GPU, BlockRemoved, BlockStored
from connector.journal import About
from connector.publisher import Publisher
from indexer import sockets
from indexer.feed import Feed, FeedAddress, Hub
from indexer.index import PrefixIndex
from indexer.match import Prompt, match
from indexer.stream import State

from . import test_feed

until = partial(test_feed.until, seconds=20.0)

BLOCK, BLOCKS = 16, 256
QUEUE = 32
"""Messages, at either end."""
STORM = 1500
"""Messages of some 20 kB: several times what sockets and queues hold together."""
KEPT = 4
"""Prompts that the engine has room for."""


class Engine:
    """Stores a prompt of `BLOCKS` blocks a batch, and evicts the one `KEPT` before it."""

    def __init__(self, *, connector: bool, memory: int) -> None:
        about = About(heartbeat=0.0) if connector else None
        self.published = 0
        self.publisher = Publisher(
            about,
            endpoint="tcp://127.0.0.1:*",
            bind=True,
            replay_endpoint="tcp://127.0.0.1:*" if memory else None,
            topic="kv@@m",
            buffer_steps=memory,
            hwm=QUEUE,
        )

    def step(self) -> None:
        number, self.published = self.published, self.published + 1
        tokens = list(struct.unpack(f"<{BLOCK * BLOCKS}I", prompt(number)[:-4]))
        events: list[object] = [BlockStored(hashes(number), None, tokens, BLOCK, None, GPU, None, [None] * BLOCKS)]
        if number >= KEPT:
            events.append(BlockRemoved(hashes(number - KEPT), GPU))
        self.publisher.publish(events)

    def storm(self) -> None:
        """Returns once all of it was sent, or dropped where nobody took it. The loop does not turn meanwhile."""
        for _ in range(STORM):
            self.step()
        assert self.publisher.flush(30)


def prompt(number: int) -> bytes:
    """And one token more: the last one is always computed."""
    return struct.pack("<I", 1_000_000 + number) * (BLOCK * BLOCKS + 1)


def hashes(number: int) -> list[int]:
    return [number * 1000 + block for block in range(1, BLOCKS + 1)]


class Picker:
    def __init__(self) -> None:
        self.hub, self.index = Hub(), PrefixIndex()
        self.feed: Feed | None = None

    async def follow(self, engine: Engine) -> Feed:
        publisher = engine.publisher
        address = FeedAddress(publisher.endpoint, publisher.replay_endpoint or "", "kv@")
        feed = self.feed = Feed(lambda: self.index.publisher("pod"), address)
        feed.open(self.hub)
        await until(lambda: engine.step() or feed.counters.messages)
        await until(lambda: feed.state is not State.SYNCING)
        return feed

    def predicted(self, number: int) -> int:
        assert self.feed is not None
        return match(self.index, Prompt(prompt(number), "m"), [self.feed.residency]).blocks(0)

    def close(self) -> None:
        if self.feed is not None:
            self.feed.close()
        assert len(self.hub.reader) == 0
        self.hub.close()


@pytest.fixture
async def picker(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Picker]:
    monkeypatch.setattr(sockets, "SUBSCRIBER_QUEUE", QUEUE)
    picker = Picker()
    yield picker
    picker.close()


@pytest.mark.parametrize(
    ("connector", "memory", "state"),
    [
        pytest.param(True, 10, State.LIVE, id="which gives snapshots"),
        pytest.param(False, 100_000, State.LIVE, id="which remembers all of it"),
        pytest.param(False, 10, State.UNSURE, id="which remembers little"),
        pytest.param(False, 0, State.UNSURE, id="which remembers nothing"),
    ],
)
async def test_a_slow_reader_of_an_engine(picker: Picker, connector: bool, memory: int, state: State) -> None:
    engine = Engine(connector=connector, memory=memory)
    feed = await picker.follow(engine)
    engine.storm()
    received, last = feed.counters.messages, engine.published - 1
    async with asyncio.timeout(20):
        while feed.stream.last_seq <= last:  # a later batch tells that something is missing, once there is room for it
            engine.step()
            await asyncio.sleep(0.05)
    newest = engine.published - 1
    await until(lambda: feed.stream.last_seq == newest and feed.state is state)
    assert feed.counters.messages - received < STORM / 2, "what waited is bounded; the rest was never taken"
    # a snapshot may overtake what waits to be read, and with it the gaps in that
    assert feed.counters.missed > (0 if connector else STORM / 2), "and counted"
    truth = [BLOCKS if number > newest - KEPT else 0 for number in range(newest + 1)]
    found = [picker.predicted(number) for number in range(newest + 1)]
    if state is State.LIVE:
        assert found == truth
        assert (feed.stream.trust, feed.stream.lag_batches) == (1, 0)
    else:
        assert all(seen <= there for seen, there in zip(found, truth, strict=True)), "never more than there is"
        assert feed.counters.lost
        assert feed.stream.trust < 1
    assert picker.hub.allowance.taken == 0
    engine.publisher.close()
