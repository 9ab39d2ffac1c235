"""gRPC's core without `grpc.aio`: servers, calls, and the one queue that tells what has become of their operations.

For an ext_proc exchange `grpc.aio` spends twice what the core itself does: a task, several futures and changes of
thread for each message. Here the loop's own thread starts the core's operations and handles their completions, with
nothing between; to send a reply and to read the next message is one operation. It stands on the classes that
`grpc.server` stands on, and is the only importer of `grpc._cython`.

Waiting for the core is a thread's work, but only while there is nothing to do: it takes one completion to the loop and
rests. The loop takes all that follow, and when none is left it sends the thread to wait again. A busy picker thus
changes threads once for a burst of completions.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

# A socket is then read by who waits for completions, not by a further thread that hands them over. Of no effect in a
# core that does not know the name. The core looks when it is first used.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_listener")

import grpc
from grpc._cython import cygrpc

logger = logging.getLogger(__name__)

THREAD = "grpc"
BURST = 16
"""Completions handled in a row before the loop's other work gets its turn."""

_NO_FLAGS = 0
_COMPLETE = cygrpc.CompletionType.operation_complete
_SHUTDOWN = cygrpc.CompletionType.queue_shutdown

_Receive = cygrpc.ReceiveMessageOperation
_ReceiveClose = cygrpc.ReceiveCloseOnServerOperation
_Send = cygrpc.SendMessageOperation
_SendMetadata = cygrpc.SendInitialMetadataOperation
_SendStatus = cygrpc.SendStatusFromServerOperation


class Handler(Protocol):
    """Who answers a call."""

    def received(self, message: bytes | None) -> None:
        """What the call was told to read; None = no more will come, as the peer has closed its side or is gone."""


class Call:
    """One call as its handler sees it. Nothing here waits or fails: to a peer that is gone, or after the pump's end,
    messages are lost.

    One read at a time. Messages are sent in the order given; after `end`, nothing is sent or told any more.
    """

    __slots__ = ("_core", "_exchanging", "_handler", "_opened", "_outbox", "_pump", "_sending", "_watched")

    def __init__(self, core: Any, pump: Pump) -> None:
        self._core = core
        self._pump = pump
        self._handler: Handler | None = None
        self._opened = False
        self._sending = False
        """The core takes one message at a time; the rest is in the outbox: operations, and what follows them."""
        self._exchanging = False
        """Sending ends with a read."""
        self._watched = False
        self._outbox: deque[tuple[list[Any], Callable[[Any], None]]] = deque()

    def begin(self, handler: Handler) -> None:
        """Tell it the first message."""
        self._handler = handler
        self.read()

    def read(self) -> None:
        self._do((_Receive(_NO_FLAGS),), self._received)

    def watch(self) -> None:
        """Once, instead of further reads: tell the handler None when the peer is gone, not when it closes its side."""
        self._watched = True
        self._do((_ReceiveClose(_NO_FLAGS),), self._gone)

    def send(self, message: bytes) -> None:
        self._put([_Send(message, _NO_FLAGS)], self._sent)

    def exchange(self, message: bytes) -> None:
        """Send, then read, for the price of one. What is sent besides waits until something has been read."""
        self._put([_Send(message, _NO_FLAGS), _Receive(_NO_FLAGS)], self._exchanged)

    def end(self, code: grpc.StatusCode = grpc.StatusCode.OK, details: str = "") -> None:
        if self._handler is not None:
            self._handler = None
            if self._exchanging:  # what it sends is on its way; what it reads nobody waits for any more
                self._sending = False
            status = _SendStatus((), code.value[0], details.encode(), _NO_FLAGS)
            self._put([status] if self._watched else [status, _ReceiveClose(_NO_FLAGS)], self._sent)

    def _put(self, operations: list[Any], done: Callable[[Any], None]) -> None:
        if self._sending:
            self._outbox.append((operations, done))
        else:
            self._start(operations, done)

    def _start(self, operations: list[Any], done: Callable[[Any], None]) -> None:
        self._sending = True
        self._exchanging = done == self._exchanged
        if not self._opened:  # together with what is sent first: alone it would be a packet more
            self._opened = True
            operations.insert(0, _SendMetadata(None, _NO_FLAGS))
        self._do(operations, done)

    def _do(self, operations: Sequence[Any], done: Callable[[Any], None]) -> None:
        if self._pump.is_open:  # the core ends the process if asked for something that nobody would hear of
            self._core.start_server_batch(operations, done)

    def _sent(self, _: object) -> None:
        self._sending = False
        if self._outbox:
            self._start(*self._outbox.popleft())

    def _exchanged(self, event: Any) -> None:
        self._sent(event)
        self._received(event)

    def _received(self, event: Any) -> None:
        if self._handler is not None:
            self._handler.received(event.batch_operations[-1].message() if event.success else None)

    def _gone(self, _: object) -> None:
        if self._handler is not None:
            self._handler.received(None)


Accept = Callable[[Call], Handler]


class Server:
    """One port. `methods`, by full name (`/service/method`), give a call its handler.

    Raises:
        OSError: the address cannot be listened on.
    """

    def __init__(
        self,
        pump: Pump,
        host: str,
        port: int,
        methods: Mapping[str, Accept],
        *,
        credentials: grpc.ServerCredentials | None = None,
        options: Sequence[tuple[str, int]] = (),
    ) -> None:
        self._pump = pump
        self._methods = {name.encode(): accept for name, accept in methods.items()}
        self._core = cygrpc.Server(tuple(options), False)
        self._core.register_completion_queue(pump.queue)
        self.port = _listen(self._core, host, port, credentials)
        """The one in use; `port` 0 takes a free one."""
        self._stopped: asyncio.Event | None = None

    def start(self) -> None:
        self._core.start()
        self._await_call()

    async def stop(self, grace: float) -> None:
        """After `start`. No new calls from now on; those left after `grace` seconds are cut off."""
        if self._stopped is None:
            self._stopped = asyncio.Event()
            self._core.shutdown(self._pump.queue, self._shut_down)
        try:
            async with asyncio.timeout(grace):
                await self._stopped.wait()
        except TimeoutError:
            self._core.cancel_all_calls()
            await self._stopped.wait()

    def _shut_down(self, _: object) -> None:
        self._core.destroy()
        assert self._stopped is not None
        self._stopped.set()

    def _await_call(self) -> None:
        self._core.request_call(self._pump.queue, self._pump.queue, self._called)

    def _called(self, event: Any) -> None:
        if not event.success:
            return
        if self._stopped is None:
            self._await_call()
        call, accept = Call(event.call, self._pump), self._methods.get(event.call_details.method)
        call.begin(accept(call) if accept is not None else _Unknown(call))


class _Unknown:
    """Of a method that is not there."""

    def __init__(self, call: Call) -> None:
        self._call = call

    def received(self, message: bytes | None) -> None:
        self._call.end(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")


class Pump:
    """Brings what the core has completed to the running loop: `start` it, and `stop` it after the servers."""

    def __init__(self) -> None:
        self.queue = cygrpc.CompletionQueue()
        self.is_open = True
        """Until it is stopped."""
        self._found: Any = None
        """What the thread brings."""
        self._resume = threading.Lock()
        """Released for the thread to wait again."""
        self._over = asyncio.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._resume.acquire()
        self._thread = threading.Thread(target=self._wait, args=(asyncio.get_running_loop(),), name=THREAD, daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        if self._thread is not None:
            self.is_open = False
            self.queue.shutdown()
            await self._over.wait()
            self._thread.join()
            self._thread = None

    def _wait(self, loop: asyncio.AbstractEventLoop) -> None:
        """In the thread."""
        while True:
            self._found = self.queue.poll()
            if self._found.completion_type == _SHUTDOWN:
                break
            loop.call_soon_threadsafe(self._handle, loop)
            self._resume.acquire()
        loop.call_soon_threadsafe(self._over.set)

    def _handle(self, loop: asyncio.AbstractEventLoop) -> None:
        event, self._found = self._found, None
        for _ in range(BURST):
            try:
                event.tag(event)
            except Exception:
                logger.exception("a completion of gRPC could not be handled")
            event = None  # the core is not to be asked while a call that is over is held here
            event = self.queue.poll(0)
            if event.completion_type != _COMPLETE:  # there is none, or there will be none
                self._resume.release()
                return
        self._found = event
        loop.call_soon(self._handle, loop)


def _listen(core: Any, host: str, port: int, credentials: grpc.ServerCredentials | None) -> int:
    host = host.removeprefix("[").removesuffix("]")
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    arguments = (address.encode(), *((credentials._credentials,) if credentials else ()))
    bound = int(core.add_http2_port(*arguments))
    if not bound:
        _try(host, port)
        raise OSError(f"cannot listen on {address}")
    return bound


def _try(host: str, port: int) -> None:
    """Raises OSError with the reason, which gRPC keeps to itself, if the address cannot be listened on."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    socket.create_server((host, port), family=family).close()
