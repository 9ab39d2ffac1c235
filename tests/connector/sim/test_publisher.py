from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
import zmq
import zmq.asyncio

from connector.sim.publisher import END_OF_REPLAY, Publisher
from connector.sim.runner import cancel


@pytest.fixture
async def context() -> AsyncIterator[zmq.asyncio.Context]:
    context = zmq.asyncio.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
async def publish(context: zmq.asyncio.Context) -> AsyncIterator[Callable[..., Publisher]]:
    """Makes publishers that answer replay requests until the test ends."""
    started: list[tuple[Publisher, asyncio.Task[None]]] = []

    def make(**options: object) -> Publisher:
        publisher = Publisher(context, "127.0.0.1", **options)
        publisher.topic = b"kv@a@m"
        started.append((publisher, asyncio.create_task(publisher.serve_replay())))
        return publisher

    yield make
    for publisher, task in started:
        await cancel(task)
        publisher.close()


async def replay(context: zmq.asyncio.Context, endpoint: str, *request: bytes) -> list[list[bytes]]:
    """All replies up to and including the end marker."""
    dealer = context.socket(zmq.DEALER)
    dealer.connect(endpoint)
    await dealer.send_multipart(request)
    replies = []
    async with asyncio.timeout(5):
        while not replies or END_OF_REPLAY not in replies[-1]:
            replies.append(await dealer.recv_multipart())
    dealer.close(linger=0)
    return replies


def seq(number: int) -> bytes:
    return number.to_bytes(8, "big")


async def test_messages_have_three_frames_and_count_from_zero(context, publish) -> None:
    publisher = publish()
    subscriber = context.socket(zmq.SUB)
    subscriber.connect(publisher.endpoint)
    subscriber.subscribe(b"kv@")
    received: list[list[bytes]] = []
    async with asyncio.timeout(5):
        while len(received) < 2 or not received:
            publisher.publish(b"payload")
            if await subscriber.poll(20):
                received.append(await subscriber.recv_multipart())
    subscriber.close(linger=0)
    topic, first, payload = received[0]
    assert (topic, payload) == (b"kv@a@m", b"payload")
    assert int.from_bytes(received[1][1], "big") == int.from_bytes(first, "big") + 1
    assert (await replay(context, publisher.replay_endpoint, b"", seq(0)))[0][2] == seq(0)


async def test_replay_repeats_from_the_asked_sequence_and_ends_with_a_marker(context, publish) -> None:
    publisher = publish()
    for payload in (b"x", b"y", b"z"):
        publisher.publish(payload)
    assert await replay(context, publisher.replay_endpoint, b"", seq(1)) == [
        [b"", b"kv@a@m", seq(1), b"y"],
        [b"", b"kv@a@m", seq(2), b"z"],
        [b"", b"", END_OF_REPLAY, b""],
    ]


async def test_the_old_form_leaves_the_topic_out(context, publish) -> None:
    publisher = publish(old_replay_form=True)
    publisher.publish(b"x")
    assert await replay(context, publisher.replay_endpoint, b"", seq(0)) == [
        [b"", seq(0), b"x"],
        [b"", END_OF_REPLAY, b""],
    ]


async def test_replay_holds_only_the_last_steps(context, publish) -> None:
    publisher = publish(buffer_steps=2)
    for payload in (b"x", b"y", b"z"):
        publisher.publish(payload)
    replies = await replay(context, publisher.replay_endpoint, b"", seq(0))
    assert [reply[3] for reply in replies[:-1]] == [b"y", b"z"]


async def test_a_malformed_request_is_ignored_and_the_next_one_answered(context, publish) -> None:
    publisher = publish()
    dealer = context.socket(zmq.DEALER)
    dealer.connect(publisher.replay_endpoint)
    await dealer.send_multipart([b"", b"short"])
    await dealer.send_multipart([b"only"])
    assert await replay(context, publisher.replay_endpoint, b"", seq(0)) == [[b"", b"", END_OF_REPLAY, b""]]
    dealer.close(linger=0)
