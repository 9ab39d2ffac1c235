"""vLLM's ZMQ event wire from a thread of its own: PUB for messages as they come, ROUTER for those who ask again.

A message is `[topic, number (8 bytes, big-endian), payload]`. The engine's thread only puts events in a queue and never
waits. What peers send, or are slow to take, costs them alone: live messages go out first, answers in between.
"""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
from collections.abc import Sequence
from math import ceil, inf
from typing import overload

import zmq

from connector.answers import Answers
from connector.curve import Curve, Doorkeeper
from connector.events import Load
from connector.journal import About, Journal, Message

logger = logging.getLogger(__name__)

RETRY_AFTER = 0.005
"""Seconds, when all who wait for answers are slow to take them."""
CLOSE_PATIENCE = 2.0
"""Seconds for what is queued to be sent."""
LINGER_MS = 1000
"""For what is sent to reach its subscribers, behind the scenes."""
MAX_SUBSCRIPTION_BYTES = 1024
LOAD_EVERY = 0.1
"""Seconds after which a change of the load is told, at the latest; until then an idle engine may look busy."""
DEAF_FOR = 0.02
"""Seconds for which nobody is listened to after a flood of requests."""
DEAD_AFTER_MS = 30_000
"""A connection that takes nothing of what is to be sent ends then, and what waits for it is dropped."""
KEEPALIVE = {
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 30,
    zmq.TCP_KEEPALIVE_INTVL: 5,
    zmq.TCP_KEEPALIVE_CNT: 3,
}
"""So half-open connections end within 45 s. Not by ZMTP's heartbeats, which not every subscriber understands."""


@overload
def of_rank(endpoint: str, rank: int) -> str: ...
@overload
def of_rank(endpoint: None, rank: int) -> None: ...
def of_rank(endpoint: str | None, rank: int) -> str | None:
    """vLLM's rule for data-parallel ranks: each has the next TCP port, or an inproc name of its own.

    Raises:
        ValueError: another transport, which ranks would have to share.
    """
    if not endpoint or not rank:
        return endpoint
    if endpoint.startswith("inproc:"):
        return f"{endpoint}_dp{rank}"
    if not endpoint.startswith("tcp:"):
        raise ValueError(f"{endpoint}: only tcp and inproc endpoints can be told apart by rank")
    address, _, port = endpoint.rpartition(":")
    return endpoint if port in ("0", "*") else f"{address}:{int(port) + rank}"


class Publisher:
    """Binds when constructed, publishes until closed.

    Args:
        about: what the engine says of itself; None publishes as vLLM itself does.
        endpoint: bound to or connected to; `tcp://*:0` is any free port.
        bind: None goes by vLLM's rule: bound if the endpoint has a `*` or `::`, or is ipc or inproc.
        replay_endpoint: always bound; None answers nobody.
        buffer_steps: messages that can be asked for again.
        hwm: messages that wait for a slow subscriber before it misses some.
        max_queue_size: batches that wait for the thread; one more, and all are dropped and everything told as cleared.
        old_replay_form: answer as vLLM did before 0.26, without the topic.
        curve: who may connect; None: everybody.

    Raises:
        zmq.ZMQError: an endpoint cannot be had.
    """

    def __init__(
        self,
        about: About | None,
        *,
        endpoint: str,
        bind: bool | None = None,
        replay_endpoint: str | None = None,
        topic: str = "",
        rank: int = 0,
        buffer_steps: int = 10_000,
        hwm: int = 100_000,
        max_queue_size: int = 100_000,
        old_replay_form: bool = False,
        curve: Curve | None = None,
    ) -> None:
        self.topic = topic
        self.buffer_steps = buffer_steps
        self.hwm = hwm
        self.max_queue_size = max_queue_size
        self.overflows = 0
        """Times that the queue had no room, so that everything was told as cleared."""
        self._about = about
        self._journal = Journal(about, rank=rank, buffer_steps=buffer_steps)
        self._queue: queue.Queue[tuple[Sequence[object], float]] = queue.Queue(max_queue_size)
        self._topic = topic.encode()
        self._closing = False
        self._overflown = False
        self._has_takers = True
        self._deaf_until = 0.0
        self._sent_at = time.monotonic()
        self._load_seen: Load | None = None
        self._load_told: Load | None = None
        # clients are let in or not by context, and inproc endpoints, which have none, are those of the shared one
        self._context = zmq.Context.instance() if curve is None else zmq.Context()
        self._doorkeeper: Doorkeeper | None = None
        self._pub = self._context.socket(zmq.PUB)
        self._router = self._context.socket(zmq.ROUTER) if replay_endpoint else None
        try:
            if curve is not None and curve.client_keys_dir:
                self._doorkeeper = Doorkeeper(self._context, curve.client_keys_dir)
            for peer in (self._pub, self._router):
                if peer is not None:
                    _guard(peer, curve)
            self._pub.setsockopt(zmq.SNDHWM, hwm)
            self._pub.setsockopt(zmq.MAXMSGSIZE, MAX_SUBSCRIPTION_BYTES)
            self.endpoint = _open(self._pub, endpoint, bind=_is_bound(endpoint) if bind is None else bind)
            self.replay_endpoint: str | None = None
            self._answers: Answers | None = None
            if self._router is not None and replay_endpoint:
                self._answers = Answers(self._router, self._journal, topic, old_form=old_replay_form)
                self.replay_endpoint = _open(self._router, replay_endpoint, bind=True)
        except zmq.ZMQError:
            self._close_sockets()
            raise
        self._wakes, self._waker = socket.socketpair()
        self._wakes.setblocking(False)
        self._waker.setblocking(False)
        self._poller = zmq.Poller()
        self._poller.register(self._wakes.fileno(), zmq.POLLIN)
        self._deaf_poller = zmq.Poller()
        self._deaf_poller.register(self._wakes.fileno(), zmq.POLLIN)
        if self._router is not None:
            self._poller.register(self._router, zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, name="kv-event-publisher", daemon=True)
        self._thread.start()

    def publish(self, events: Sequence[object], at: float | None = None) -> None:
        """Queue one batch, from any thread; `at` is its Unix time in seconds (None: now). Never waits: see `overflows`.
        Does nothing once closed."""
        if self._closing:
            return
        try:
            self._queue.put_nowait((events, time.time() if at is None else at))
        except queue.Full:
            self._overflown = True
        self._wake()

    def flush(self, timeout: float) -> bool:
        """Wait until all that was published before has been sent; False if that takes more than `timeout` seconds."""
        with self._queue.all_tasks_done:
            return self._queue.all_tasks_done.wait_for(lambda: not self._queue.unfinished_tasks, timeout)

    def close(self) -> None:
        """Send what is queued, stop the thread, close the sockets."""
        self._closing = True
        self._wake()
        self._thread.join(CLOSE_PATIENCE)
        if self._thread.is_alive():
            logger.warning("the event publisher is still busy; its last events may be lost")

    def _wake(self) -> None:
        try:
            self._waker.send(b"\0")
        except OSError:
            pass  # full: it will wake; closed: it has ended

    # --- the thread

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except zmq.ContextTerminated:
            pass
        except Exception:
            logger.exception("the event publisher failed; no more events are published")
        finally:
            self._closing = True
            self._close_sockets()
            self._wakes.close()
            self._waker.close()

    def _turn(self) -> bool:
        """False after the last one."""
        self._wait()
        closing = self._closing
        if self._about is not None:
            self._load_seen = self._about.load
        for _ in range(self._queue.qsize()):
            entry = self._queue.get_nowait()
            if not self._overflown:  # else a batch before or after this one was dropped, which makes it useless
                self._send(self._journal.batch(*entry))
            self._queue.task_done()
        if self._overflown:
            self._start_over()
        if closing:
            return False
        if self._until_due() <= 0:
            self._send(self._journal.heartbeat(time.time()))
        if self._answers is not None:
            if time.monotonic() >= self._deaf_until and self._answers.receive():
                self._deaf_until = time.monotonic() + DEAF_FOR
            self._has_takers = self._answers.send(self._queue.empty)
        return True

    def _start_over(self) -> None:
        self._overflown = False  # first: what is dropped from now on counts again
        self.overflows += 1
        waiting = self._queue.qsize()
        for _ in range(waiting):
            self._queue.get_nowait()
        logger.warning("events came faster than they could be told: everything is told as cleared")
        self._send(self._journal.start_over(time.time()))
        for _ in range(waiting):
            self._queue.task_done()

    def _wait(self) -> None:
        """For a batch, a request, or time to do something."""
        seconds = self._until_due()
        if self._load_seen is not None:
            seconds = min(seconds, LOAD_EVERY)  # nobody wakes us when the load has changed
        if self._answers:
            seconds = 0 if self._has_takers else min(seconds, RETRY_AFTER)
        poller, deaf = self._poller, self._deaf_until - time.monotonic()
        if deaf > 0:
            poller, seconds = self._deaf_poller, min(seconds, deaf)
        poller.poll(None if seconds == inf else max(0, ceil(seconds * 1000)))
        try:
            self._wakes.recv(4096)
        except BlockingIOError:
            pass

    def _until_due(self) -> float:
        """Seconds until there must be a message, if only for the load; infinite where no heartbeat was promised."""
        if self._about is None or not self._about.heartbeat:
            return inf
        news = _differ(self._about.load, self._load_told)
        patience = min(self._about.heartbeat, LOAD_EVERY) if news else self._about.heartbeat
        return self._sent_at + patience - time.monotonic()

    def _send(self, message: Message | None) -> None:
        if message is not None:
            number, payload = message
            self._pub.send_multipart([self._topic, number.to_bytes(8, "big"), payload], zmq.NOBLOCK)
            self._sent_at = time.monotonic()
            self._load_told = self._load_seen

    def _close_sockets(self) -> None:
        self._pub.close(linger=LINGER_MS)
        if self._router is not None:
            self._router.close(linger=0)
        if self._doorkeeper is not None:
            self._doorkeeper.close()
        if self._context is not zmq.Context.instance():
            self._context.term()


def _is_bound(endpoint: str) -> bool:
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


def _differ(load: Load | None, told: Load | None) -> bool:
    """By requests; the use of the cache changes with every token."""
    if load is None or told is None:
        return load is not told
    return (load.waiting, load.running) != (told.waiting, told.running)


def _guard(peer: zmq.Socket[bytes], curve: Curve | None) -> None:
    """Options of both sockets. They go before any connection: later ones would not count for it."""
    for option, value in KEEPALIVE.items():
        peer.setsockopt(option, value)
    peer.setsockopt(zmq.TCP_MAXRT, DEAD_AFTER_MS)
    if curve is not None:
        curve.apply(peer)


def _open(peer: zmq.Socket[bytes], endpoint: str, *, bind: bool) -> str:
    """The endpoint as bound: with the port, where it was left open."""
    if "[" in endpoint:
        peer.setsockopt(zmq.IPV6, 1)
    if not bind:
        peer.connect(endpoint)
        return endpoint
    peer.bind(endpoint)
    return peer.getsockopt_string(zmq.LAST_ENDPOINT)
