"""ZMQ sockets read from an event loop: any loop with `add_reader`, no thread, no task a socket.

A ZMQ socket signals new input by one edge on a file descriptor, so it is read until it has no more. All sockets of a
`Reader` together are read for no longer than a slice at a time; then the loop gets its turn, so that a storm of events
does not keep requests waiting.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable

import zmq

from indexer.curve import Curve
from indexer.wire import MAX_PAYLOAD

logger = logging.getLogger(__name__)

SLICE = 0.001
"""Seconds."""
BURST = 16
"""Messages of one socket before the next one has its turn."""
MAX_MESSAGE_BYTES = MAX_PAYLOAD
"""Of one frame. ZMQ ends the connection to a peer that sends more, before it has taken it in."""
SUBSCRIBER_QUEUE = 64
"""Messages; beyond it the publisher's own queue fills, and when that overflows there is a gap, which is noticed."""
REPLAY_QUEUE = 4096
"""Messages. The replay socket of vLLM drops what its peer is slow to take, which must be asked for again, and it may
remember 10 000."""
SNAPSHOT_QUEUE = 64
"""Messages. They are large, and whoever gives snapshots waits for who takes them."""
_INPUT = int(zmq.POLLIN)
"""A plain integer: arithmetic with flags is slow."""
HEARTBEAT_MS = 5_000
DEAD_AFTER_MS = 10_000
"""Without an answer to a heartbeat: so a peer that vanished is noticed within 15 s, also behind a proxy that keeps the
connection open."""


class Reader:
    """Calls back with the frames of each message. Not thread-safe: everything happens on the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Callable[[], float] = time.perf_counter) -> None:
        self._loop = loop
        self._clock = clock
        self._callbacks: dict[zmq.Socket[bytes], Callable[[list[bytes]], None]] = {}
        self._after: dict[zmq.Socket[bytes], zmq.Socket[bytes]] = {}
        self._drained: dict[zmq.Socket[bytes], Callable[[], None]] = {}
        self._ready: dict[zmq.Socket[bytes], None] = {}
        self._scheduled = False

    def __len__(self) -> int:
        return len(self._callbacks)

    def add(
        self,
        socket: zmq.Socket[bytes],
        callback: Callable[[list[bytes]], None],
        *,
        after: zmq.Socket[bytes] | None = None,
        drained: Callable[[], None] | None = None,
    ) -> None:
        """`after`: another socket of this reader that has its turn before each of this one's. `drained` is called
        whenever the socket was read until it had no more."""
        self._callbacks[socket] = callback
        if drained is not None:
            self._drained[socket] = drained
        if after is not None:
            self._after[socket] = after
        self._loop.add_reader(socket.FD, self.wake, socket)
        self.wake(socket)

    def close(self, socket: zmq.Socket[bytes]) -> None:
        """Stop reading and close. May be called from a callback, for any socket."""
        del self._callbacks[socket]
        self._after.pop(socket, None)
        self._drained.pop(socket, None)
        self._ready.pop(socket, None)
        self._loop.remove_reader(socket.FD)
        socket.close(linger=0)

    def wake(self, socket: zmq.Socket[bytes]) -> None:
        """There may be input. To be called after sending too: that may swallow the edge."""
        if socket not in self._callbacks:
            return
        self._ready[socket] = None
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._scheduled = False
        deadline = self._clock() + SLICE
        while self._ready:
            socket = next(iter(self._ready))
            del self._ready[socket]
            more = True
            try:
                first = self._after.get(socket)
                if first is not None and _has_input(first):
                    self._read(first, deadline)
                more = socket in self._callbacks and self._read(socket, deadline)
            finally:
                if more:
                    self.wake(socket)
            if self._clock() >= deadline:
                break
        if self._ready:
            self.wake(next(iter(self._ready)))

    def _read(self, socket: zmq.Socket[bytes], deadline: float) -> bool:
        """True if there may be more."""
        callback = self._callbacks[socket]
        for number in range(BURST):
            # mostly there is one message, and asking costs half of what trying in vain does
            frames = _receive(socket) if number != 1 or _has_input(socket) else None
            if frames is None:
                if socket in self._drained:
                    self._drained[socket]()
                return False
            callback(frames)
            if socket not in self._callbacks:
                return False
            if self._clock() >= deadline:
                break
        return True


def _has_input(socket: zmq.Socket[bytes]) -> bool:
    return bool(int(socket.get(zmq.EVENTS)) & _INPUT)


def _receive(socket: zmq.Socket[bytes]) -> list[bytes] | None:
    """`recv_multipart` without waiting, at half its cost: a frame knows whether there are more. None: there is none."""
    frames, receive = [], socket.recv
    try:
        while True:
            frame = receive(zmq.NOBLOCK, False)
            frames.append(frame.bytes)
            if not frame.more:
                return frames
    except zmq.Again:
        return None


class Turns:
    """At most `limit` holders at a time; the others wait in order."""

    def __init__(self, limit: int) -> None:
        self._free = limit
        self._waiting: deque[Callable[[], None]] = deque()

    def take(self, then: Callable[[], None]) -> None:
        """Calls `then` when it is its turn, perhaps at once; `give_back` after that, `leave` before."""
        if self._free:
            self._free -= 1
            then()
        else:
            self._waiting.append(then)

    def leave(self, then: Callable[[], None]) -> None:
        """Stop waiting."""
        self._waiting.remove(then)

    def give_back(self) -> None:
        if self._waiting:
            self._waiting.popleft()()
        else:
            self._free += 1


def subscriber(context: zmq.Context[zmq.Socket[bytes]], topic: str, curve: Curve | None = None) -> zmq.Socket[bytes]:
    """A SUB socket, neither connected nor bound yet."""
    socket = _socket(context, zmq.SUB, SUBSCRIBER_QUEUE, curve)
    socket.setsockopt(zmq.SUBSCRIBE, topic.encode())
    return socket


def replayer(
    context: zmq.Context[zmq.Socket[bytes]], curve: Curve | None = None, *, for_snapshot: bool = False
) -> zmq.Socket[bytes]:
    return _socket(context, zmq.DEALER, SNAPSHOT_QUEUE if for_snapshot else REPLAY_QUEUE, curve)


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int, queue: int, curve: Curve | None) -> zmq.Socket[bytes]:
    """Options go before any connection: later ones would not count for it."""
    socket = context.socket(kind)
    options = {
        zmq.LINGER: 0,
        zmq.RCVHWM: queue,
        zmq.MAXMSGSIZE: MAX_MESSAGE_BYTES,
        zmq.IPV6: 1,
        zmq.HEARTBEAT_IVL: HEARTBEAT_MS,
        zmq.HEARTBEAT_TIMEOUT: DEAD_AFTER_MS,
        zmq.TCP_KEEPALIVE: 1,
        zmq.TCP_KEEPALIVE_IDLE: 30,
        zmq.TCP_KEEPALIVE_INTVL: 5,
        zmq.TCP_KEEPALIVE_CNT: 3,
        zmq.CONNECT_TIMEOUT: 5_000,
        zmq.RECONNECT_IVL: 100,
        zmq.RECONNECT_IVL_MAX: 5_000,
    }
    for option, value in options.items():
        socket.setsockopt(option, value)
    if curve is not None:
        curve.apply(socket)
    return socket
