"""Feeds against the connector's own publisher, on real ZMQ sockets: snapshots, instances, heartbeats."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

import pytest
import zmq

from connector.events import CPU, GPU, AllBlocksCleared, BlockRemoved, BlockStored, Load, Tier
from connector.journal import About
from connector.publisher import Publisher
from epp.toolbox.demo.chaos.links import Link
from epp.toolbox.processes import free_ports
from indexer import stream as stream_module
from indexer.feed import Feed, FeedAddress, Hub
from indexer.index import PrefixIndex
from indexer.stream import State

from . import test_feed

until = partial(test_feed.until, seconds=20.0)

BLOCK = 16
PROMPT = 32
"""Blocks."""


class Engine:
    """Publishes prompts of random tokens, with hashes of its own. `buffer` is what its replay socket remembers."""

    def __init__(
        self, *, seed: int = 1, buffer: int = 10_000, stock: bool = False, heartbeat: float = 0.05, ports: str = "*,*"
    ) -> None:
        self.rng = random.Random(seed)
        self.about = None if stock else About(heartbeat=heartbeat, tiers={GPU: Tier(90_000), CPU: Tier(chunk=2)})
        live, replay = ports.split(",")
        self.publisher = Publisher(
            self.about,
            endpoint=f"tcp://127.0.0.1:{live}",
            bind=True,
            replay_endpoint=f"tcp://127.0.0.1:{replay}",
            topic="kv@10.0.0.1:8000@tiny",
            buffer_steps=buffer,
        )
        assert self.publisher.replay_endpoint is not None
        self.address = FeedAddress(self.publisher.endpoint, self.publisher.replay_endpoint, "kv@")

    @property
    def last_number(self) -> int:
        """Of what has been published until now, heartbeats included."""
        assert self.publisher.flush(10)
        return self.publisher._journal._next - 1

    @property
    def ports(self) -> str:
        return ",".join(address.rpartition(":")[2] for address in (self.address.events, self.address.replay))

    def publish(self, *events: Any) -> None:
        self.publisher.publish(events)

    def prompt(self, blocks: int = PROMPT, *, parent: int | None = None, salt: str = "") -> BlockStored:
        rng = self.rng
        return BlockStored(
            block_hashes=[rng.getrandbits(64) for _ in range(blocks)],
            parent_block_hash=parent,
            token_ids=[rng.randrange(150_000) for _ in range(blocks * BLOCK)],
            block_size=BLOCK,
            lora_id=None,
            medium=GPU,
            lora_name=None,
            extra_keys=[[salt] if salt and not n else None for n in range(blocks)],
        )

    def offloaded(self, stored: BlockStored) -> Iterator[BlockStored]:
        """The same blocks in CPU RAM, chunks of two: hashes and tokens, as vLLM describes them."""
        hashes, tokens = stored.block_hashes, stored.token_ids
        for i in range(0, len(hashes), 2):
            parent = hashes[i - 1] if i else stored.parent_block_hash
            chunk = tokens[i * BLOCK : (i + 2) * BLOCK]
            yield BlockStored(hashes[i : i + 2], parent, chunk, BLOCK, None, CPU, None)

    def work(self, prompts: int) -> None:
        """Prompts that come, grow, are offloaded, exist twice, and go again."""
        for n in range(prompts):
            stored = self.prompt(salt="pepper" if n % 5 == 0 else "")
            events: list[Any] = [stored]
            if n % 2:
                events += self.offloaded(stored)
            if n % 3 == 0:
                events.append(self.prompt(4, parent=int.from_bytes(_as_bytes(stored.block_hashes[-1]), "big")))
            if n % 7 == 0:
                events.append(stored)
            if n % 11 == 0:
                events.append(BlockRemoved(stored.block_hashes[20:][::-1], GPU))
            self.publish(*events)

    def close(self) -> None:
        self.publisher.close()


def _as_bytes(block_hash: int | bytes) -> bytes:
    return block_hash if isinstance(block_hash, bytes) else block_hash.to_bytes(8, "big")


class Picker:
    def __init__(self) -> None:
        self.hub = Hub()
        self.index = PrefixIndex()
        self.feeds: list[Feed] = []
        self.engines: list[Engine] = []

    def engine(self, **options: Any) -> Engine:
        self.engines.append(Engine(**options))
        return self.engines[-1]

    def feed(self, engine: Engine, address: FeedAddress | None = None) -> Feed:
        feed = Feed(lambda: self.index.publisher("pod"), address or engine.address)
        self.feeds.append(feed)
        feed.open(self.hub)
        return feed

    async def live(self, engine: Engine, address: FeedAddress | None = None) -> Feed:
        """Live, and by all that the engine has published until now."""
        feed = self.feed(engine, address)
        await self.caught_up(feed, engine)
        return feed

    async def caught_up(self, feed: Feed, engine: Engine) -> None:
        last = engine.last_number
        await until(lambda: feed.state is State.LIVE and feed.stream.last_seq >= last)

    async def warm(self, engine: Engine, prompts: int) -> Feed:
        """Have the engine work; returns once that is published, a feed that has heard all of it."""
        witness = await self.live(engine)
        engine.work(prompts)
        await self.caught_up(witness, engine)
        return witness

    def content(self, feed: Feed) -> dict[str, dict[int, int]]:
        """Tier → block key → copies."""
        lanes = feed.residency._lanes
        return {
            tier: {key: 1 + lane.surplus.get(key, 0) for key, mask in self.index.masks.items() if mask & lane.bit}
            for (tier, _), lane in lanes.items()
            if lane.held
        }

    async def close(self) -> None:
        for feed in self.feeds:
            feed.close()
        self.hub.close()
        for engine in self.engines:
            engine.close()


@pytest.fixture
async def picker() -> AsyncIterator[Picker]:
    picker = Picker()
    yield picker
    await picker.close()


async def test_a_late_joiner_knows_what_one_from_the_start_knows(picker: Picker) -> None:
    engine = picker.engine(buffer=5)
    early = await picker.warm(engine, 60)
    late = await picker.live(engine)
    assert picker.content(late) == picker.content(early)
    assert picker.content(late)["gpu"]
    assert (late.counters.snapshots, late.counters.replayed) == (1, 0)
    engine.work(30)
    engine.publish(AllBlocksCleared())
    engine.work(10)
    for feed in (early, late):
        await picker.caught_up(feed, engine)
    assert picker.content(late) == picker.content(early)
    assert set(picker.content(late)) == {"gpu", "cpu"}
    assert late.counters.gaps == late.counters.lost == 0


async def test_it_says_what_the_publisher_said_of_itself(picker: Picker) -> None:
    engine = picker.engine(heartbeat=0.02)
    assert engine.about is not None
    engine.about.load = Load(waiting=3, running=2, kv_usage=0.5)
    await picker.warm(engine, 3)
    feed = await picker.live(engine)
    await until(lambda: feed.counters.messages > 0)
    shown = feed.snapshot()
    assert shown["instance"] == engine.about.instance
    assert shown["heartbeat"] == 0.02
    assert shown["load"] == {"waiting": 3, "running": 2, "kv_usage": 0.5}
    assert shown["tiers"]["gpu"]["capacity"] == 90_000
    assert shown["tiers"]["gpu"]["held"] == shown["held"]["gpu"]
    assert shown["tiers"]["cpu"]["chunk"] == shown["blocks_per_chunk"] == 2
    assert shown["counters"]["snapshots"] == 1


async def test_50_000_blocks_a_publisher_are_exact_soon_after_the_first_contact(picker: Picker) -> None:
    engines = [picker.engine(seed=seed, buffer=10) for seed in (1, 2)]
    early = [await picker.live(engine) for engine in engines]
    for feed, engine in zip(early, engines, strict=True):
        while feed.residency.held("gpu") < 50_000:
            engine.work(200)
            await picker.caught_up(feed, engine)
    late, began = [picker.feed(engine) for engine in engines], time.monotonic()
    pauses, last = [0.0], began
    while not all(feed.state is State.LIVE for feed in late):
        assert time.monotonic() - began < 60
        await asyncio.sleep(0)
        pauses.append(time.monotonic() - last)
        last = time.monotonic()
    print(f"\nexact after {last - began:.2f} s; the loop paused {1000 * max(pauses):.0f} ms at most")
    for feed, original in zip(late, early, strict=True):
        assert picker.content(feed) == picker.content(original)
        assert feed.residency.held("gpu") >= 50_000


async def test_nothing_held_is_known_at_once(picker: Picker) -> None:
    engine = picker.engine(buffer=1)
    witness = await picker.warm(engine, 3)
    engine.publish(AllBlocksCleared(["GPU", "CPU"]))
    await picker.caught_up(witness, engine)
    feed = await picker.live(engine)
    assert feed.counters.snapshots == 1
    assert picker.content(feed) == {}


@pytest.mark.parametrize(("buffer", "snapshots"), [(10, 1), (10_000, 0)])
async def test_a_loss_is_made_good_by_a_snapshot_only_if_the_replay_buffer_lacks_it(
    picker: Picker, buffer: int, snapshots: int
) -> None:
    engine = picker.engine(buffer=buffer)
    link = Link(*free_ports(1), int(engine.address.events.rpartition(":")[2]))
    await link.mend()
    witness = await picker.live(engine)
    feed = await picker.live(engine, FeedAddress(link.address, engine.address.replay, "kv@"))
    engine.work(5)
    await picker.caught_up(feed, engine)
    before = feed.counters.snapshots
    await link.cut()
    await until(lambda: feed.state is State.LOST)
    engine.work(60)
    await picker.caught_up(witness, engine)
    await link.mend()
    await picker.caught_up(feed, engine)
    assert picker.content(feed) == picker.content(witness)
    assert (feed.counters.truncated, feed.counters.snapshots - before) == (snapshots, snapshots)
    assert feed.counters.reconnections == 1
    await link.cut()


async def test_a_restart_in_place_is_noticed_though_all_numbers_continue(picker: Picker) -> None:
    first = picker.engine(seed=1)
    feed = await picker.live(first)
    first.work(10)
    await picker.caught_up(feed, first)
    last = feed.stream.last_seq
    first.close()
    await until(lambda: feed.state is State.LOST)
    second = picker.engine(seed=2, ports=first.ports, buffer=last + 2, heartbeat=0.0)
    second.work(last + 1)  # unheard, or not: the next to be heard has a number that follows the last of the old life
    second.work(1)
    await picker.caught_up(feed, second)
    witness = await picker.live(second)
    assert picker.content(feed) == picker.content(witness)
    assert second.about is not None
    assert feed.stream.instance == second.about.instance
    assert feed.counters.restarts == 1


async def test_a_stock_publisher_is_learned_from_its_memory(picker: Picker) -> None:
    engine = picker.engine(stock=True)
    early = await picker.warm(engine, 40)
    late = await picker.live(engine)
    assert picker.content(late) == picker.content(early)
    assert (late.counters.snapshots, late.counters.snapshots_failed) == (0, 0)
    assert late.counters.replayed == 40


async def test_a_stock_publisher_that_forgot_its_first_batches_leaves_us_unsure(picker: Picker) -> None:
    engine = picker.engine(stock=True, buffer=10)
    await picker.warm(engine, 40)
    feed = picker.feed(engine)
    await until(lambda: feed.state is State.UNSURE and feed.stream.last_seq == 39)
    assert "before batch 30" in feed.stream.reason
    engine.work(1)
    await until(lambda: feed.stream.last_seq == 40)
    assert feed.counters.replays == 2, "nothing more is to be had, so nothing more is asked for"


async def test_a_dead_replay_socket_keeps_no_live_batch_back(picker: Picker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "REBUILD_PATIENCE", 0.05)
    engine = picker.engine(buffer=5)
    await picker.warm(engine, 20)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as dead:
        port = dead.bind_to_random_port("tcp://127.0.0.1")
        feed = picker.feed(engine, FeedAddress(engine.address.events, f"tcp://127.0.0.1:{port}", "kv@"))
        await until(lambda: feed.counters.messages > 0)
        engine.work(5)
        await until(lambda: feed.stream.last_seq >= 24 and feed.state is State.UNSURE)
        assert len(picker.content(feed)["gpu"]) > 5 * PROMPT // 2
        assert feed.counters.replays_failed == 1
        assert feed.counters.snapshots_failed > 0


async def test_a_silent_publisher_is_unsure_until_it_is_heard_again(
    picker: Picker, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = picker.engine(heartbeat=0.05)
    engine.work(3)
    feed = await picker.live(engine)
    await until(lambda: feed.counters.messages > 0)
    now = feed.stream.heard_at
    monkeypatch.setattr(feed.stream, "_clock", lambda: now + 1.2)
    feed.stream.tick()
    assert (feed.state, feed.stream.reason) == (State.UNSURE, "silent")
    await until(lambda: feed.state is State.LIVE)


async def test_many_pickers_may_ask_at_once(picker: Picker) -> None:
    engine = picker.engine(buffer=5)
    witness = await picker.warm(engine, 300)
    feeds = [picker.feed(engine) for _ in range(12)]
    for feed in feeds:
        await picker.caught_up(feed, engine)
    assert all(picker.content(feed) == picker.content(witness) for feed in feeds)
