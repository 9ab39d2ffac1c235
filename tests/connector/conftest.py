from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq


class Sockets:
    """A ZMQ context that closes all its sockets in the end."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []

    def socket(self, kind: int) -> zmq.Socket[bytes]:
        self._sockets.append(self._context.socket(kind))
        return self._sockets[-1]

    def close(self) -> None:
        for socket in self._sockets:
            socket.close(linger=0)
        self._context.term()


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    sockets = Sockets()
    yield sockets
    sockets.close()
