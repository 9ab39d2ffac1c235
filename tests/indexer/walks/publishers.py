"""The publishers of the walks: the connector's own code without its sockets, and one like vLLM's own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol, cast

import zmq

from connector.answers import Answers
from connector.events import CPU, GPU, STORAGE, Tier
from connector.journal import About, Journal

END = b"\xff" * 8


class Publisher(Protocol):
    """One life of one. `answer` begins to answer a question; the frames are taken one by one, [] if there are none at
    the moment."""

    journal: Journal

    def answer(self, start: int, topic: bytes) -> Iterator[list[bytes]]: ...


class Stock:
    """As vLLM's: no notes, no snapshots; answers from a bounded memory, in one form or the other."""

    def __init__(self, memory: int, *, old_form: bool) -> None:
        self.journal = Journal(None, buffer_steps=memory)
        self._old_form = old_form

    def answer(self, start: int, topic: bytes) -> Iterator[list[bytes]]:
        topics = [] if self._old_form else [topic]
        for number, payload in self.journal.replay(start):
            yield [b"", *topics, number.to_bytes(8, "big"), payload]
        yield [b"", *(b"" for _ in topics), END, b""]


class Router:
    """What `Answers` needs of a ROUTER socket, for one peer at a time."""

    def __init__(self) -> None:
        self.questions: deque[list[bytes]] = deque()
        self.peer = b""
        self.sent: deque[list[bytes]] = deque()
        self._rest: list[bytes] = []

    def setsockopt(self, option: int, value: int) -> None:
        pass

    def getsockopt(self, option: int) -> int:
        assert option == zmq.RCVMORE
        return bool(self._rest)

    def recv(self, flags: int) -> bytes:
        if not self._rest:
            if not self.questions:
                raise zmq.Again
            self._rest = self.questions.popleft()
        return self._rest.pop(0)

    def send_multipart(self, frames: list[bytes], flags: int) -> None:
        if frames[0] != self.peer:
            raise zmq.ZMQError(zmq.EHOSTUNREACH)
        self.sent.append(frames[1:])


class Ours:
    """The connector's."""

    def __init__(
        self,
        memory: int,
        *,
        old_form: bool,
        instance: str,
        heartbeat: float,
        chunk: int,
        pool: str | None,
        clock: Callable[[], float],
    ) -> None:
        tiers = {GPU: Tier(1000), CPU: Tier(1000, chunk=chunk), STORAGE: Tier(chunk=chunk, pool=pool)}
        self.journal = Journal(About(instance=instance, heartbeat=heartbeat, tiers=tiers), buffer_steps=memory)
        self._old_form = old_form
        self._clock = clock
        self._peers = 0
        self._router = Router()
        self._answers: dict[bytes, Answers] = {}

    def answer(self, start: int, topic: bytes) -> Iterator[list[bytes]]:
        answers = self._answers.get(topic)
        if answers is None:
            answers = self._answers[topic] = Answers(
                cast(Any, self._router), self.journal, topic.decode(), old_form=self._old_form, clock=self._clock
            )
        self._peers += 1
        router = self._router
        router.peer = self._peers.to_bytes(4, "big")
        router.sent.clear()
        router.questions.append([router.peer, b"", start.to_bytes(8, "big")])
        answers.receive()
        while len(answers):
            answers.send(lambda: bool(not router.sent))
            if not router.sent:
                answers.send(lambda: False)  # the first attempt went to a peer that is gone
            yield router.sent.popleft() if router.sent else []
