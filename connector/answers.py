"""Answers of the replay socket: remembered messages from a number on, or a snapshot; as fast as each peer takes them.

A request is `["", start (8 bytes, big-endian)]`. The answer is `["", topic, number, payload]` for each message, then
`["", "", 0xFF x 8, ""]`. A start of 2**64 - 1 asks for a snapshot; vLLM's own publisher answers with the end alone. A
peer that does not take its answer, or is gone, loses it. Nobody waits for that but those who want a snapshot too: one
is made at a time. What one peer asks is answered in order.

Peers cost the engine what the constants here say, and no more, however they ask or read.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain

import zmq

from connector.journal import Journal

logger = logging.getLogger(__name__)

END = b"\xff" * 8
SNAPSHOT = 2**64 - 1
"""The start that asks for a snapshot."""
MAX_ASKERS = 64
"""Requests that are being answered or wait for it; more are ignored."""
REQUESTS_AT_ONCE = 16
MESSAGES_AT_ONCE = 64
PEER_QUEUE = 64
"""Messages that wait in memory for one peer."""
PATIENCE = 5.0
"""Seconds in which a peer has to take another message."""
BURST_BYTES = 512 << 20
BYTES_PER_S = 16 << 20
"""Of all answers together: so much at once, then so much a second. Making them takes time from the engine's process."""
MAX_FRAME_BYTES = 1024
"""Of what peers send: requests, and what ZMQ says when connecting."""


class Answer:
    """One request, and what is still to be sent to it."""

    def __init__(self, peer: bytes, start: int) -> None:
        self.peer = peer
        self.start = start
        self.next: list[bytes] = []
        self.rest: Iterator[list[bytes]] = iter(())
        self.moved_at = 0.0

    @property
    def is_snapshot(self) -> bool:
        return self.start == SNAPSHOT

    def is_like(self, other: Answer) -> bool:
        return (self.peer, self.start) == (other.peer, other.start)


class Answers:
    """Reads and writes `router`, a ROUTER that is not bound yet, when called; never waits.

    Args:
        old_form: leave the topic out, as vLLM did before 0.26.
    """

    def __init__(
        self,
        router: zmq.Socket[bytes],
        journal: Journal,
        topic: str,
        *,
        old_form: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._router = router
        self._journal = journal
        self._topic = [] if old_form else [topic.encode()]
        self._end = [b"", *([] if old_form else [b""]), END, b""]
        self._clock = clock
        self._waiting: list[Answer] = []
        self._begun: deque[Answer] = deque()
        self._allowed: float = BURST_BYTES
        self._allowed_at = clock()
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a peer that is gone, or whose queue is full, is an error
        router.setsockopt(zmq.SNDHWM, PEER_QUEUE)
        router.setsockopt(zmq.RCVHWM, REQUESTS_AT_ONCE)
        router.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)

    def __len__(self) -> int:
        """Answers under way or waiting."""
        return len(self._begun) + len(self._waiting)

    def receive(self) -> bool:
        """Take in some requests; what is none, or one too many, or there already, is ignored. True if there may be
        more."""
        for _ in range(REQUESTS_AT_ONCE):
            try:
                frames = self._frames()
            except zmq.Again:
                return False
            if len(frames) == 3 and len(frames[2]) == 8 and len(self) < MAX_ASKERS:
                answer = Answer(frames[0], int.from_bytes(frames[2], "big"))
                if not any(map(answer.is_like, chain(self._begun, self._waiting))):
                    self._waiting.append(answer)
        return True

    def _frames(self) -> list[bytes]:
        """The next message; of one that is too long to be a request, the beginning."""
        frames = [self._router.recv(zmq.NOBLOCK)]
        while self._router.getsockopt(zmq.RCVMORE):
            frame = self._router.recv(zmq.NOBLOCK)
            if len(frames) < 4:
                frames.append(frame)
        return frames

    def send(self, may_go_on: Callable[[], bool]) -> bool:
        """Send a message, and some more as long as that is fine. False if nobody takes, or may have, any now."""
        now = self._clock()
        self._allowed = min(BURST_BYTES, self._allowed + (now - self._allowed_at) * BYTES_PER_S)
        self._allowed_at = now
        for _ in range(MESSAGES_AT_ONCE):
            self._begin()
            if self._allowed <= 0 or not self._send_one():
                return False
            if not may_go_on():
                break
        return True

    def _begin(self) -> None:
        busy = {answer.peer for answer in self._begun}
        picturing = any(answer.is_snapshot for answer in self._begun)
        for answer in self._waiting.copy():
            if answer.peer not in busy and not (answer.is_snapshot and picturing):
                picturing |= answer.is_snapshot
                self._waiting.remove(answer)
                self._begun.append(answer)
                answer.moved_at = self._clock()
                answer.rest = self._messages(answer)
            busy.add(answer.peer)

    def _messages(self, answer: Answer) -> Iterator[list[bytes]]:
        at = time.time()
        for number, payload in self._journal.snapshot(at) if answer.is_snapshot else self._journal.replay(answer.start):
            yield [answer.peer, b"", *self._topic, number.to_bytes(8, "big"), payload]
        yield [answer.peer, *self._end]

    def _send_one(self) -> bool:
        """To the first who takes one; the others have their turn before it has its next."""
        for _ in range(len(self._begun)):
            answer = self._begun.popleft()
            try:
                sent = self._moved(answer)
            except StopIteration:
                continue
            except Exception as error:
                if not isinstance(error, zmq.ZMQError):
                    logger.exception("an answer could not be made")
                continue
            if sent or self._clock() - answer.moved_at < PATIENCE:
                self._begun.append(answer)
            if sent:
                return True
        return False

    def _moved(self, answer: Answer) -> bool:
        """False if the peer's queue is full. Raises StopIteration at the end, ZMQError if the peer is gone."""
        if not answer.next:
            answer.next = next(answer.rest)
        try:
            self._router.send_multipart(answer.next, zmq.NOBLOCK)
        except zmq.Again:
            return False
        self._allowed -= len(answer.next[-1])
        answer.next = []
        answer.moved_at = self._clock()
        return True
