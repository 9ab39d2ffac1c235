"""The picker's gRPC ports: ext_proc, health, and an orderly end. What a stream means is stream.py's affair."""

from __future__ import annotations

import asyncio
import functools
import logging
from dataclasses import dataclass

import grpc

from epp import grpc_core, tls
from epp.exchange.machine import MAX_REQUEST_BYTES, PeerError
from epp.health import Health
from epp.logs import Brake
from epp.routing import Director
from epp.stream import Stream
from epp.wire import METHOD, SERVICE

logger = logging.getLogger(__name__)

_ENVELOPE_BYTES = 1 << 20
"""Room for what a message carries besides a body, so that a body over the limit is answered, not cut off."""
_STOP_GRACE = 0.5


@dataclass(slots=True, frozen=True)
class ServerOptions:
    bind: str = "0.0.0.0"
    port: int = 9002
    """ext_proc; 0 = a free port."""
    health_port: int = 9003
    """Plaintext health; 0 = a free port."""
    secure_serving: bool = True
    cert_path: str = ""
    """Directory with tls.crt and tls.key; "" = self-signed."""
    enable_cert_reload: bool = False
    max_body_bytes: int = MAX_REQUEST_BYTES
    """Request bodies above it are answered 413."""
    quiet_period: float = 2.0
    """Seconds without a stream after which a drain is over: a gateway may be that late to notice that it is one."""


class ExtProcServer:
    """Serves one director. `start`, then `drain` or `stop`, once."""

    def __init__(self, director: Director, options: ServerOptions | None = None) -> None:
        self.options = options or ServerOptions()
        self.health = Health()
        """Not ready until the owner says so."""
        self.port = 0
        """The ext_proc port in use, once started."""
        self.health_port = 0
        self._brake = Brake(logger)  # a misconfigured data plane errs on every request
        self._director = director
        self._streams: set[Stream] = set()
        self._opened = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._pump = grpc_core.Pump()
        self._servers: list[grpc_core.Server] = []

    @property
    def in_flight(self) -> int:
        """Open ext_proc streams."""
        return len(self._streams)

    async def start(self) -> None:
        """Raises OSError for a port in use or an unreadable certificate, ValueError for one that is none."""
        options = self.options
        credentials = (
            tls.credentials(options.cert_path, reload=options.enable_cert_reload) if options.secure_serving else None
        )
        limit = ("grpc.max_receive_message_length", options.max_body_bytes + _ENVELOPE_BYTES)
        methods = {f"/{SERVICE}/{METHOD}": self._accept, **self.health.methods}
        ext_proc = grpc_core.Server(
            self._pump, options.bind, options.port, methods, credentials=credentials, options=(*_GRPC_OPTIONS, limit)
        )
        health = grpc_core.Server(
            self._pump, options.bind, options.health_port, self.health.methods, options=_GRPC_OPTIONS
        )
        self.port, self.health_port = ext_proc.port, health.port
        self._pump.start()
        for server in (ext_proc, health):
            server.start()
            self._servers.append(server)

    async def drain(self, at_most: float) -> None:
        """Not ready at once; stop when no stream has come or is left for the quiet period, or after `at_most` seconds.

        New streams are served all that time. Those left at its end are ended in good order, so that answers that do
        not pass through us go on.
        """
        try:
            async with asyncio.timeout(at_most):
                self.health.set_ready(False)
                await self._quiet()
        except TimeoutError:
            if self._streams:
                logger.warning("end of the drain: %d streams are let go", len(self._streams))
            for stream in tuple(self._streams):
                stream.release()
        await self.stop()

    async def stop(self) -> None:
        await asyncio.gather(*(server.stop(_STOP_GRACE) for server in self._servers))
        self._servers.clear()
        await self._pump.stop()

    async def _quiet(self) -> None:
        while True:
            while self._streams:  # one may have come since the last one went
                await self._idle.wait()
            self._opened.clear()
            try:
                async with asyncio.timeout(self.options.quiet_period):
                    await self._opened.wait()
            except TimeoutError:
                return

    def _accept(self, call: grpc_core.Call) -> Stream:
        closed = functools.partial(self._closed, call)
        stream = Stream(self._director, call, closed, max_request_bytes=self.options.max_body_bytes)
        self._streams.add(stream)
        self._opened.set()
        self._idle.clear()
        return stream

    def _closed(self, call: grpc_core.Call, stream: Stream, error: PeerError | None) -> None:
        self._streams.discard(stream)
        if not self._streams:
            self._idle.set()
        if error is None:
            call.end()
        else:
            self._brake.log(logging.WARNING, str(error), f"ext_proc stream ended, protocol error: {error}")
            call.end(grpc.StatusCode.INTERNAL, str(error))


_GRPC_OPTIONS = (
    ("grpc.so_reuseport", 0),  # two pickers on one port would share the traffic silently
    ("grpc.keepalive_time_ms", 60_000),  # streams of a gateway that vanished without a word end some time
)
