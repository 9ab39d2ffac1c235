"""A link between real ZMQ sockets: cut, stalled, and made to lose messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import zmq
import zmq.asyncio

from epp.toolbox.demo.chaos.links import Link
from epp.toolbox.demo.fleet import HOST
from epp.toolbox.processes import free_ports

SHORT_S = 0.1


class Ends:
    def __init__(self, link: Link, publisher: zmq.asyncio.Socket, subscriber: zmq.asyncio.Socket) -> None:
        self.link = link
        self.publisher = publisher
        self.subscriber = subscriber

    async def joined(self) -> None:
        """Returns once what is published is received."""
        async with asyncio.timeout(5):
            while not await self.subscriber.poll(10):
                await self.publisher.send_multipart([b"hello", b""])
            while await self.subscriber.poll(50):
                await self.subscriber.recv_multipart()

    async def publish(self, *numbers: int) -> None:
        for number in numbers:
            await self.publisher.send_multipart([b"topic", b"%d" % number])

    async def received(self) -> int:
        async with asyncio.timeout(5):
            return int((await self.subscriber.recv_multipart())[1])


@asynccontextmanager
async def ends() -> AsyncIterator[Ends]:
    port, target = free_ports(2)
    context, link = zmq.asyncio.Context(), Link(port, target)
    publisher, subscriber = context.socket(zmq.PUB), context.socket(zmq.SUB)
    try:
        publisher.bind(f"tcp://{HOST}:{target}")
        await link.mend()
        subscriber.subscribe(b"")
        subscriber.connect(link.address)
        yield Ends(link, publisher, subscriber)
    finally:
        await link.cut()
        context.destroy(linger=0)


async def test_so_many_messages_are_lost_and_no_more() -> None:
    async with ends() as both:
        await both.joined()
        losing = asyncio.create_task(both.link.lose(2))
        await asyncio.sleep(0)
        await both.publish(1, 2, 3)
        await asyncio.wait_for(losing, 5)
        assert await both.received() == 3


async def test_a_stalled_link_holds_back_and_then_delivers_all_in_order() -> None:
    async with ends() as both:
        await both.joined()
        both.link.stall()
        await both.publish(1, 2)
        assert not await both.subscriber.poll(int(SHORT_S * 1000))
        both.link.resume()
        assert [await both.received(), await both.received()] == [1, 2]


async def test_a_cut_link_refuses_and_a_mended_one_is_found_again() -> None:
    async with ends() as both:
        await both.joined()
        await both.link.cut()
        try:
            await asyncio.open_connection(HOST, both.link.port)
        except ConnectionRefusedError:
            pass
        else:
            raise AssertionError("the link is cut, and yet it accepts")
        await both.link.mend()
        await both.joined()
        await both.publish(7)
        assert await both.received() == 7


async def test_a_link_to_nobody_breaks_at_once() -> None:
    port, target = free_ports(2)
    link = Link(port, target)
    await link.mend()
    try:
        reader, writer = await asyncio.open_connection(HOST, port)
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()
    finally:
        await link.cut()
