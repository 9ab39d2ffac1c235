"""The picker's gRPC ports: ext_proc, health, and an orderly end. What a stream means is stream.py's affair.

Messages are raw bytes to gRPC, and a stream is served by `read` and `write` calls of its own task: of what grpc.aio
offers, this costs least.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from dataclasses import dataclass

import grpc
from grpc import aio

from epp import tls
from epp.exchange.machine import MAX_REQUEST_BYTES, PeerError
from epp.health import Health
from epp.logs import Brake
from epp.routing import Director
from epp.stream import CallLost, Stream
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
        self._servers: list[aio.Server] = []

    @property
    def in_flight(self) -> int:
        """Open ext_proc streams."""
        return len(self._streams)

    async def start(self) -> None:
        """Raises OSError for a port in use or an unreadable certificate, ValueError for one that is none."""
        options = self.options
        await self.health.set_ready(False)
        credentials = (
            tls.credentials(options.cert_path, reload=options.enable_cert_reload) if options.secure_serving else None
        )
        self.port = await self._serve(self._ext_proc(), options.port, credentials)
        self.health_port = await self._serve(aio.server(options=_GRPC_OPTIONS), options.health_port)

    async def drain(self, at_most: float) -> None:
        """Not ready at once; stop when no stream has come or is left for the quiet period, or after `at_most` seconds.

        New streams are served all that time. Those left at its end are ended in good order, so that answers that do
        not pass through us go on.
        """
        try:
            async with asyncio.timeout(at_most):
                await self.health.set_ready(False)
                await self._quiet()
        except TimeoutError:
            if self._streams:
                logger.warning("end of the drain: %d streams are let go", len(self._streams))
            for stream in self._streams:
                stream.release()
        await self.stop()

    async def stop(self) -> None:
        await asyncio.gather(*(server.stop(_STOP_GRACE) for server in self._servers))
        self._servers.clear()

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

    def _ext_proc(self) -> aio.Server:
        limit = ("grpc.max_receive_message_length", self.options.max_body_bytes + _ENVELOPE_BYTES)
        server = aio.server(options=(*_GRPC_OPTIONS, limit))
        handler = grpc.stream_stream_rpc_method_handler(self._process)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
        return server

    async def _serve(self, server: aio.Server, port: int, credentials: grpc.ServerCredentials | None = None) -> int:
        self.health.add_to(server)
        port = _listen(server, self.options.bind, port, credentials)
        await server.start()
        self._servers.append(server)
        return port

    async def _process(self, _requests: object, context: aio.ServicerContext[bytes, bytes]) -> None:
        stream = Stream(self._director, _Call(context), max_request_bytes=self.options.max_body_bytes)
        self._streams.add(stream)
        self._opened.set()
        self._idle.clear()
        try:
            await stream.run()
        except PeerError as error:
            self._brake.log(logging.WARNING, str(error), f"ext_proc stream ended, protocol error: {error}")
            await context.abort(grpc.StatusCode.INTERNAL, str(error))
        finally:
            self._streams.discard(stream)
            if not self._streams:
                self._idle.set()


class _Call:
    """`stream.Call` on grpc.aio, whose own errors all mean that the call is over."""

    __slots__ = ("_context",)

    def __init__(self, context: aio.ServicerContext[bytes, bytes]) -> None:
        self._context = context

    async def read(self) -> bytes | None:
        try:
            message = await self._context.read()
        except aio.BaseError:
            return None
        return None if message is aio.EOF else message

    async def write(self, data: bytes) -> None:
        try:
            await self._context.write(data)
        except aio.BaseError as error:
            raise CallLost from error


_GRPC_OPTIONS = (
    ("grpc.so_reuseport", 0),  # two pickers on one port would share the traffic silently
    ("grpc.keepalive_time_ms", 60_000),  # streams of a gateway that vanished without a word end some time
)


def _listen(server: aio.Server, host: str, port: int, credentials: grpc.ServerCredentials | None) -> int:
    """The port in use; `port` 0 takes a free one. Raises OSError."""
    host = host.removeprefix("[").removesuffix("]")
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        return int(server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address))
    except RuntimeError as error:
        _try(host, port)
        raise OSError(f"cannot listen on {address}: {error}") from error


def _try(host: str, port: int) -> None:
    """Raises OSError with the reason, which gRPC keeps to itself, if the address cannot be listened on."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    socket.create_server((host, port), family=family).close()
