from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import zmq

from indexer.sockets import (
    BURST,
    REPLAY_QUEUE,
    SLICE,
    SNAPSHOT_QUEUE,
    SUBSCRIBER_QUEUE,
    Reader,
    Turns,
    replayer,
    subscriber,
)
from indexer.wire import MAX_PAYLOAD


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


def pair(context: zmq.Context[zmq.Socket[bytes]], name: str) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    near, far = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    for socket in (near, far):
        socket.set_hwm(0)
    near.bind(f"inproc://{name}")
    far.connect(f"inproc://{name}")
    return near, far


class SlowClock:
    """Time passes only by reading messages."""

    def __init__(self, per_message: float) -> None:
        self.now, self.per_message = 0.0, per_message

    def __call__(self) -> float:
        return self.now

    def message(self, frames: list[bytes]) -> None:
        self.now += self.per_message


async def test_every_message_is_read_whatever_the_number(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    near, far = pair(context, "all")
    got: list[bytes] = []
    done = asyncio.Event()

    def receive(frames: list[bytes]) -> None:
        got.append(frames[0])
        if len(got) == 1000:
            done.set()

    reader = Reader(asyncio.get_running_loop())
    reader.add(near, receive)
    for n in range(1000):
        far.send(b"%d" % n)
        if n % 100 == 0:
            await asyncio.sleep(0)
    await asyncio.wait_for(done.wait(), 5)
    assert got == [b"%d" % n for n in range(1000)]
    reader.close(near)
    far.close()


async def test_a_storm_leaves_the_loop_its_turn_after_each_slice(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    near, far = pair(context, "storm")
    for _ in range(2000):
        far.send(b"event")
    clock = SlowClock(SLICE / 4)
    reader = Reader(asyncio.get_running_loop(), clock)
    reader.add(near, clock.message)
    turns = []
    while clock.now < 2000 * SLICE / 4 - 1e-9:
        before = clock.now
        await asyncio.sleep(0)
        turns.append(clock.now - before)
    assert max(turns) < SLICE + 2 * clock.per_message
    reader.close(near)
    far.close()


async def test_a_busy_socket_does_not_starve_another(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    busy, busy_far = pair(context, "busy")
    calm, calm_far = pair(context, "calm")
    for _ in range(1000):
        busy_far.send(b"event")
    calm_far.send(b"event")
    read: list[str] = []
    done = asyncio.Event()

    def calm_read(frames: list[bytes]) -> None:
        read.append("calm")
        done.set()

    reader = Reader(asyncio.get_running_loop())
    reader.add(busy, lambda frames: read.append("busy"))
    reader.add(calm, calm_read)
    await asyncio.wait_for(done.wait(), 5)
    assert read.index("calm") <= BURST
    for socket in (busy, calm):
        reader.close(socket)
    for socket in (busy_far, calm_far):
        socket.close()


async def test_a_callback_that_fails_costs_its_message_only(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    near, far = pair(context, "fails")
    got: list[bytes] = []
    failures: list[object] = []
    done = asyncio.Event()
    asyncio.get_running_loop().set_exception_handler(lambda loop, what: failures.append(what))

    def receive(frames: list[bytes]) -> None:
        if frames[0] == b"bad":
            raise ValueError("bad")
        got.append(frames[0])
        if frames[0] == b"2":
            done.set()

    reader = Reader(asyncio.get_running_loop())
    reader.add(near, receive)
    for data in (b"1", b"bad", b"2"):
        far.send(data)
    await asyncio.wait_for(done.wait(), 5)
    assert (got, len(failures)) == ([b"1", b"2"], 1)
    reader.close(near)
    far.close()


async def test_a_socket_may_be_closed_from_its_own_callback(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    near, far = pair(context, "own")
    reader = Reader(asyncio.get_running_loop())
    closed = asyncio.Event()

    def receive(frames: list[bytes]) -> None:
        reader.close(near)
        closed.set()

    reader.add(near, receive)
    for _ in range(3):
        far.send(b"event")
    await asyncio.wait_for(closed.wait(), 5)
    await asyncio.sleep(0)
    assert len(reader) == 0
    far.close()


async def test_a_socket_waits_for_the_one_it_comes_after(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    news, news_far = pair(context, "news")
    data, data_far = pair(context, "data")
    order: list[str] = []
    done = asyncio.Event()
    reader = Reader(asyncio.get_running_loop())
    reader.add(data, lambda frames: (order.append("data"), done.set()), after=news)  # type: ignore[func-returns-value]
    reader.add(news, lambda frames: order.append("news"))
    data_far.send(b"data")
    news_far.send(b"news")
    await asyncio.wait_for(done.wait(), 5)
    assert order == ["news", "data"]
    for socket in (news, data):
        reader.close(socket)
    for socket in (news_far, data_far):
        socket.close()


def test_turns_are_limited_and_taken_in_order() -> None:
    turns, taken = Turns(2), []
    names = "abcde"
    thens = {name: (lambda name=name: taken.append(name)) for name in names}  # type: ignore[misc]
    for name in names:
        turns.take(thens[name])
    assert taken == ["a", "b"]
    turns.leave(thens["c"])
    turns.give_back()
    assert taken == ["a", "b", "d"]
    turns.give_back()
    turns.give_back()
    turns.give_back()
    turns.take(thens["a"])
    assert taken == ["a", "b", "d", "e", "a"]


def test_sockets_are_bounded_and_notice_a_dead_peer(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    made = {
        subscriber(context, "kv@"): SUBSCRIBER_QUEUE,
        replayer(context): REPLAY_QUEUE,
        replayer(context, for_snapshot=True): SNAPSHOT_QUEUE,
    }
    for socket, queue in made.items():
        assert socket.getsockopt(zmq.RCVHWM) == queue
        assert socket.getsockopt(zmq.MAXMSGSIZE) == MAX_PAYLOAD, "what is longer would not be read anyway"
        assert socket.getsockopt(zmq.LINGER) == 0
        assert socket.getsockopt(zmq.TCP_KEEPALIVE) == 1
        assert socket.getsockopt(zmq.HEARTBEAT_IVL) > 0
        socket.close()
