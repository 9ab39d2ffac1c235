"""A TCP path that can be cut and mended, to stand between a picker and one port of an engine."""

from __future__ import annotations

import asyncio
import contextlib

HOST = "127.0.0.1"


class Forwarder:
    """Listens at `port` and passes everything on to `target`, another local port."""

    def __init__(self, port: int, target: int) -> None:
        self.port = port
        self._target = target
        self._server: asyncio.Server | None = None
        self._passing: set[asyncio.Task[None]] = set()

    async def mend(self) -> None:
        self._server = await asyncio.start_server(self._accepted, HOST, self.port)

    async def cut(self) -> None:
        """Breaks every connection; new ones are refused."""
        if self._server is None:
            return
        self._server.close()
        self._server = None
        for task in self._passing:
            task.cancel()
        await asyncio.gather(*self._passing, return_exceptions=True)

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._connection(reader, writer))
        self._passing.add(task)
        task.add_done_callback(self._passing.discard)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            try:
                far_reader, far_writer = await asyncio.open_connection(HOST, self._target)
            except OSError:
                return  # nobody listens there: to the caller, a connection that breaks at once
            with contextlib.closing(far_writer):
                ways = {asyncio.create_task(_pump(reader, far_writer)), asyncio.create_task(_pump(far_reader, writer))}
                try:
                    await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for way in ways:
                        way.cancel()
                    await asyncio.gather(*ways, return_exceptions=True)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
