"""A TCP path between the picker and one port of an engine that can be cut, stalled, and made to lose messages."""

from __future__ import annotations

import asyncio
import contextlib

from epp.toolbox.demo.chaos.zmtp import MessageSieve
from epp.toolbox.demo.fleet import HOST

_AT_ONCE = 65536


class Link:
    """Listens at `port` and passes everything on to `target`, another local port, and back."""

    def __init__(self, port: int, target: int) -> None:
        self.port = port
        self._target = target
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._flows = asyncio.Event()
        self._flows.set()
        self._to_lose = 0
        self._lost = asyncio.Event()

    @property
    def address(self) -> str:
        return f"tcp://{HOST}:{self.port}"

    async def mend(self) -> None:
        self._server = await asyncio.start_server(self._accepted, HOST, self.port)

    async def cut(self) -> None:
        """Break every connection; new ones are refused."""
        if self._server is not None:
            self._server.close()
            self._server = None
        connections = list(self._connections)
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    def stall(self) -> None:
        """Nothing passes in either direction any more, and nothing is closed."""
        self._flows.clear()

    def resume(self) -> None:
        """What has waited passes, in its order."""
        self._flows.set()

    async def lose(self, messages: int) -> None:
        """Drop the next whole messages from the target; returns once so many were."""
        self._to_lose, self._lost = messages, asyncio.Event()
        await self._lost.wait()

    def _is_lost(self) -> bool:
        if not self._to_lose:
            return False
        self._to_lose -= 1
        if not self._to_lose:
            self._lost.set()
        return True

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.create_task(self._connection(reader, writer), name=f"link at {self.port}")
        self._connections.add(connection)
        connection.add_done_callback(self._connections.discard)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            try:
                far_reader, far_writer = await asyncio.open_connection(HOST, self._target)
            except OSError:
                return  # nobody listens there: to the caller, a connection that breaks at once
            with contextlib.closing(far_writer):
                ways = {
                    asyncio.create_task(self._pump(reader, far_writer)),
                    asyncio.create_task(self._pump(far_reader, writer, MessageSieve(self._is_lost))),
                }
                try:
                    await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for way in ways:
                        way.cancel()
                    await asyncio.gather(*ways, return_exceptions=True)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, sieve: MessageSieve | None = None
    ) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(_AT_ONCE):
                await self._flows.wait()
                writer.write(sieve.feed(data) if sieve else data)
                await writer.drain()
