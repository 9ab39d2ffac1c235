"""What becomes of a feed when its connection, or who is at the other end of it, does what it should not."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import msgspec
import pytest
import zmq

from epp.toolbox.demo.chaos.links import Link
from epp.toolbox.processes import free_ports
from indexer import feed as feed_module
from indexer import sockets
from indexer.feed import FeedAddress, SharedFeed
from indexer.sockets import MAX_MESSAGE_BYTES
from indexer.stream import State

from .test_feed import Bench, bench, held, impatient, removed, stored, until  # noqa: F401

HOST = "127.0.0.1"


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "HEARTBEAT_MS", 50)
    monkeypatch.setattr(sockets, "DEAD_AFTER_MS", 200)
    monkeypatch.setattr(feed_module, "REDIAL_AFTER", 0.1)


async def test_a_half_open_connection_is_noticed_and_what_was_missed_is_made_up(bench: Bench) -> None:  # noqa: F811
    publisher = bench.publisher()
    link = Link(*free_ports(1), urlsplit(publisher.address.events).port or 0)
    await link.mend()
    feed = bench.feed(FeedAddress(link.address, publisher.address.replay, "kv@"))
    await publisher.subscribed()
    await publisher.publish(stored(1))
    await until(lambda: held(feed) == 1)

    link.stall()
    await publisher.publish(removed(1))
    await publisher.publish(stored(2), stored(3))
    await until(lambda: feed.state is State.LOST)
    assert feed.stream.reason == "the connection broke"

    link.resume()
    await until(lambda: feed.state is State.LIVE)
    assert held(feed) == 2
    await link.cut()


async def test_a_frame_beyond_the_limit_ends_the_connection_and_is_a_loss_like_any_other(bench: Bench) -> None:  # noqa: F811
    publisher = bench.publisher()
    feed = await bench.connected(publisher)
    await publisher.publish(stored(1))
    await until(lambda: held(feed) == 1)

    publisher.batches.append(bytes(MAX_MESSAGE_BYTES + 1))
    await publisher.send(1)
    await until(lambda: feed.state is State.LOST)

    publisher.restart()  # else the replay would bring the same
    await publisher.subscribed()
    await publisher.publish(stored(5), stored(6))
    await until(lambda: feed.state is State.LIVE)
    assert held(feed) == 2
    assert feed.counters.reconnections == 1


async def test_a_frame_of_the_limit_passes(bench: Bench) -> None:  # noqa: F811
    publisher = bench.publisher()
    feed = await bench.connected(publisher)
    publisher.batches.append(bytes(MAX_MESSAGE_BYTES))
    await publisher.send(0)
    await until(lambda: feed.counters.unreadable == 1)
    assert feed.counters.reconnections == 0


async def test_an_engine_is_found_where_something_else_answered_before(bench: Bench) -> None:  # noqa: F811
    publisher = bench.publisher()
    events = publisher.address.events
    publisher.pub.close()
    port = urlsplit(events).port

    async def web(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n" + bytes(100))
        writer.close()

    server = None
    while server is None:  # ZMQ lets go of ports in the background
        with contextlib.suppress(OSError):
            server = await asyncio.start_server(web, HOST, port)
    feed = bench.feed(publisher.address)
    await until(lambda: feed.state is State.LOST)
    server.close()

    publisher.pub = publisher._socket(zmq.XPUB)
    publisher.pub.bind(events)
    await publisher.subscribed()
    await publisher.publish(stored(1))
    await until(lambda: held(feed) == 1)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("room", [0, 1, 2, 3])
async def test_without_sockets_to_be_had_a_feed_is_not_live_until_there_are_some(bench: Bench, room: int) -> None:  # noqa: F811
    publisher = bench.publisher()
    await publisher.publish(stored(1), lost=True)
    bench.hub.context.max_sockets = 10
    taken = [bench.hub.context.socket(zmq.PAIR) for _ in range(10 - room)]
    feed = bench.feed(publisher.address)
    if room < 3:
        await until(lambda: feed.state is State.LOST)
        assert "Too many open files" in feed.stream.reason
    else:
        await until(lambda: feed.counters.replays)
        await until(lambda: feed.counters.messages or feed.state is State.UNSURE)
    for one in taken:
        one.close()
    if room < 3:
        await until(lambda: feed.state is State.LIVE and held(feed) == 1)


@pytest.fixture
def canary() -> Iterator[socket.socket]:
    with socket.create_server((HOST, 0)) as listening:
        listening.setblocking(False)
        yield listening


async def test_no_address_that_an_engine_names_is_ever_connected_to(
    bench: Bench,  # noqa: F811
    canary: socket.socket,
) -> None:
    there = f"{HOST}:{canary.getsockname()[1]}"
    publisher = bench.publisher()
    publisher.topic = f"kv@{there}@tcp://{there}".encode()
    feed = await bench.connected(publisher)
    shared = SharedFeed(bench.hub, f"tcp://{HOST}:*", "kv@", lambda pod: None)
    engine = publisher._socket(zmq.PUB)
    engine.connect(shared.endpoint)
    event = stored(1) | {"lora_name": f"tcp://{there}", "extra_keys": [[f"tcp://{there}"]]}
    notes = {"instance": f"tcp://{there}", "tiers": {"CPU": {"pool": f"tcp://{there}"}}, "replay": f"tcp://{there}"}
    payload = msgspec.msgpack.encode([0.0, [event], 0, notes])
    publisher.batches.append(payload)
    while not shared.unknown or feed.counters.messages < 1:
        await publisher.send(0)
        await engine.send_multipart([publisher.topic, bytes(8), payload])
        await asyncio.sleep(0.01)
    for _ in range(5):
        feed.stream.tick()
        await asyncio.sleep(0.02)
    with pytest.raises(BlockingIOError):
        canary.accept()
    shared.close()
    engine.close()
