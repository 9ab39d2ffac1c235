"""vLLM's ZMQ event wire: a PUB socket for batches as they come, a ROUTER socket that repeats the recent ones.

A message is `[topic, sequence (8 bytes, big-endian), payload]`, sequence from 0 a process. A DEALER that sends
`["", first sequence]` gets every buffered message from there on as `["", topic, sequence, payload]`, then the end
marker `["", "", 0xFF x 8, ""]`. Engines before about 0.26 left the topic out of both; `old_replay_form` does too.
"""

from __future__ import annotations

from collections import deque

import zmq
import zmq.asyncio

END_OF_REPLAY = b"\xff" * 8
SEND_HIGH_WATER = 100_000


class Publisher:
    """Binds both sockets when constructed; `serve_replay` must run as a task for replay to be answered.

    Args:
        context: shared by all publishers of a process.
        host: address to bind.
        port, replay_port: 0 for any free port.
        buffer_steps: how many messages replay can repeat.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        host: str,
        port: int = 0,
        replay_port: int = 0,
        *,
        buffer_steps: int = 10_000,
        old_replay_form: bool = False,
    ) -> None:
        self.topic = b""
        self.buffer_steps = buffer_steps
        self._old_form = old_replay_form
        self._sequence = 0
        self._buffer: deque[tuple[bytes, bytes]] = deque(maxlen=buffer_steps)
        self._pub: zmq.Socket[bytes] = zmq.Context.shadow(context.underlying).socket(zmq.PUB)
        self._router = context.socket(zmq.ROUTER)
        self._pub.setsockopt(zmq.SNDHWM, SEND_HIGH_WATER)
        self._router.setsockopt(zmq.SNDHWM, buffer_steps + 1)
        try:
            self.endpoint = _bind(self._pub, host, port)
            self.replay_endpoint = _bind(self._router, host, replay_port)
        except zmq.ZMQError:
            self.close()  # or the context would never end
            raise

    def publish(self, payload: bytes) -> None:
        """Send one batch; never blocks (a subscriber that is too slow misses it)."""
        sequence = self._sequence.to_bytes(8, "big")
        self._sequence += 1
        self._buffer.append((sequence, payload))
        self._pub.send_multipart([self.topic, sequence, payload])

    async def serve_replay(self) -> None:
        """Answer replay requests until cancelled; what is not one is ignored."""
        while True:
            frames = await self._router.recv_multipart()
            if len(frames) == 3 and len(frames[2]) == 8:
                await self._replay(frames[0], first=frames[2])

    async def _replay(self, peer: bytes, first: bytes) -> None:
        topic = [] if self._old_form else [self.topic]
        for sequence, payload in [entry for entry in self._buffer if entry[0] >= first]:
            await self._router.send_multipart([peer, b"", *topic, sequence, payload])
        end = [] if self._old_form else [b""]
        await self._router.send_multipart([peer, b"", *end, END_OF_REPLAY, b""])

    def close(self) -> None:
        self._pub.close(linger=0)
        self._router.close(linger=0)


def _bind(socket: zmq.Socket[bytes] | zmq.asyncio.Socket, host: str, port: int) -> str:
    socket.bind(f"tcp://{host}:{port or '*'}")
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)
