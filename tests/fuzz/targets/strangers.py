"""What strangers send to an engine's replay socket."""

from __future__ import annotations

from collections import deque

import msgspec
import zmq

from connector.answers import MAX_ASKERS, Answers
from connector.events import CPU, GPU, BlockRemoved, BlockStored
from connector.journal import About, Journal
from tests.fuzz.source import Source
from tests.fuzz.target import Script, Target
from tests.fuzz.targets.engines import frames

_GONE, _FULL = b"gone", b"full"


class Router:
    """A ROUTER in memory: requests as they come, and peers that take answers, take none, or have left."""

    def __init__(self) -> None:
        self.requests: deque[list[bytes]] = deque()
        self._rest: deque[bytes] = deque()
        self.sent = 0

    def setsockopt(self, option: int, value: int) -> None: ...

    def recv(self, flags: int = 0) -> bytes:
        if not self._rest:
            if not self.requests:
                raise zmq.Again
            self._rest.extend(self.requests.popleft() or [b""])
        return self._rest.popleft()

    def getsockopt(self, option: int) -> int:
        assert option == zmq.RCVMORE
        return bool(self._rest)

    def send_multipart(self, message: list[bytes], flags: int = 0) -> None:
        peer = message[0]
        if peer.startswith(_GONE):
            raise zmq.ZMQError(zmq.EHOSTUNREACH)
        if peer.startswith(_FULL):
            raise zmq.Again
        self.sent += 1


def _journal() -> Journal:
    """With some batches behind it, of which it remembers the last eight."""
    journal = Journal(About("life"), buffer_steps=8)
    for n in range(12):
        stored = BlockStored([n], n - 1 if n else None, [n] * 4, 4, None, GPU, None, [None])
        journal.batch([stored, BlockStored([n], None, [], 0, None, CPU, None)], float(n))
    journal.batch([BlockRemoved([3], GPU)], 20.0)
    return journal


class Replays(Target):
    """Requests in any form and number, while the clock goes on."""

    share = 2

    def __init__(self) -> None:
        self._now = 0.0
        self._router = Router()
        self._answers = Answers(self._router, _journal(), "kv@a@m", clock=lambda: self._now)  # type: ignore[arg-type]

    def script(self, source: Source) -> Script:
        return tuple(self._request(source) for _ in range(source.pick((1, 3, 3, 10, source.size(10, 90)))))

    @staticmethod
    def _request(source: Source) -> bytes:
        peer = source.pick((b"a", b"b", _GONE, _FULL + bytes([source.below(200)]), source.noise(5, 300)))
        start = source.pick((0, 5, 11, 12, 2**64 - 1, 2**64 - 2, source.integer() % 2**64)).to_bytes(8, "big")
        request = (
            [peer, b"", start] if source.chance(0.8) else [source.noise(8, 1000) for _ in range(source.size(4, 200))]
        )
        return b"q" + msgspec.msgpack.encode(request)

    def run(self, script: Script) -> bool:
        sent = self._router.sent
        for piece in script:
            self._router.requests.append(frames(piece))
            self._answers.receive()
            self._answers.send(lambda: True)
            assert len(self._answers) <= MAX_ASKERS
        self._end()
        return self._router.sent > sent

    def _end(self) -> None:
        """Nobody is waited for longer than allowed."""
        for _ in range(1000):
            self._now += 1.0
            self._answers.receive()
            self._answers.send(lambda: True)
            if not len(self._answers) and not self._router.requests:
                return
        raise AssertionError(f"{len(self._answers)} answers have no end")
