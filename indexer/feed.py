"""The sockets of one publisher: a subscription, a look at its connection, and a replay connection while one is needed.

What the messages mean is stream.py's affair, when the sockets are read is sockets.py's. A feed without an address has
no sockets: a `SharedFeed`, one bound socket to which all engines connect, hands it its messages.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from indexer.frames import replay_request
from indexer.residency import Residency
from indexer.sockets import Reader, Turns, replayer, subscriber
from indexer.stream import Counters, State, Stream
from indexer.wire import parse_topic

logger = logging.getLogger(__name__)

CONCURRENT_REBUILDS = 8
"""A publisher answers replays from the thread that publishes, so a fleet is not asked all at once."""

_DOWN = {
    zmq.Event.DISCONNECTED: "the connection broke",
    zmq.Event.CONNECT_RETRIED: "cannot connect",
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: "the peer does not speak ZMTP",
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: "the peer does not speak ZMTP",
    zmq.Event.HANDSHAKE_FAILED_AUTH: "the peer refused us",
}
_WATCHED = sum(_DOWN) | zmq.Event.HANDSHAKE_SUCCEEDED


class FeedAddress(msgspec.Struct, frozen=True):
    """Where a publisher is reached: ZMQ addresses; "" = there is none."""

    events: str = ""
    replay: str = ""
    topic: str = ""
    """Prefix of the topics wanted."""


class Hub:
    """What the feeds of a process share: a ZMQ context, one reader, turns for rebuilding. Made on a running loop."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.context.max_sockets = 65_536
        self.reader = Reader(self.loop)
        self.rebuilds = Turns(CONCURRENT_REBUILDS)

    def close(self) -> None:
        """After all feeds were closed."""
        self.context.destroy(linger=0)


class Feed:
    """`open` on a running loop, `stream.tick` every now and then, `close` when the endpoint is gone. `residency` is a
    new object after a rebuild."""

    def __init__(
        self,
        publisher: Callable[[], Residency],
        address: FeedAddress,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.address = address
        self._clock = clock
        self.stream = Stream(publisher, self, replayable=bool(address.replay), clock=clock)
        self._hub: Hub | None = None
        self._subscription: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._replay: zmq.Socket[bytes] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._start = 0
        self._queued = False
        self._has_turn = False

    def __repr__(self) -> str:
        return f"<Feed {self.address.events or 'shared'} {self.stream!r}>"

    @property
    def residency(self) -> Residency:
        return self.stream.residency

    @property
    def state(self) -> State:
        return self.stream.state

    @property
    def counters(self) -> Counters:
        return self.stream.counters

    def snapshot(self) -> dict[str, Any]:
        """For people and for metrics: plain values."""
        stream, residency, now = self.stream, self.residency, self._clock()
        return {
            "events": self.address.events,
            "replay": self.address.replay,
            "state": stream.state.value,
            "reason": stream.reason,
            "state_seconds": round(now - stream.since, 3),
            "heard_seconds_ago": round(now - stream.heard_at, 3) if stream.heard_at else None,
            "last_seq": stream.last_seq,
            "instance": stream.instance or "",
            "heartbeat": stream.told.heartbeat,
            "load": msgspec.to_builtins(stream.told.load),
            "tiers": {name: msgspec.to_builtins(tier) for name, tier in stream.told.tiers.items()},
            "model": residency.model,
            "block_size": residency.block_size,
            "blocks_per_chunk": residency.blocks_per_chunk,
            "held": {tier: residency.held(tier) for tier in sorted(residency.tiers())},
            "stored_blocks": residency.stored_blocks,
            "removed_blocks": residency.removed_blocks,
            "not_indexed": dict(residency.skipped),
            "counters": msgspec.to_builtins(stream.counters),
        }

    # -- the subscription -------------------------------------------------------------------------------------------

    def open(self, hub: Hub) -> None:
        self._hub = hub
        if not self.address.events:
            return
        self._subscription = subscriber(hub.context, self.address.topic)
        self._monitor = self._subscription.get_monitor_socket(_WATCHED)
        hub.reader.add(self._monitor, self._monitored)
        # a message of a new connection must not be read before the news of the connection
        hub.reader.add(self._subscription, self.stream.live, after=self._monitor)
        try:
            self._subscription.connect(self.address.events)
        except zmq.ZMQError as error:
            self.stream.disconnected(f"{self.address.events}: {error}")

    def close(self) -> None:
        """Closes every socket, then the residency."""
        if self._hub is not None:
            self.hang_up()
            self.alarm(None)
            self._unsubscribe(self._hub.reader)
        self.stream.close()
        self._hub = None

    def _unsubscribe(self, reader: Reader) -> None:
        if self._subscription is None or self._monitor is None:
            return
        self._subscription.disable_monitor()
        reader.close(self._subscription)
        reader.close(self._monitor)
        self._subscription = self._monitor = None

    def _monitored(self, frames: list[bytes]) -> None:
        event = zmq.Event(parse_monitor_message(frames)["event"])
        if event == zmq.Event.HANDSHAKE_SUCCEEDED:
            self.stream.connected()
        elif event in _DOWN:
            self.stream.disconnected(_DOWN[event])

    # -- what the stream wants of the outside -----------------------------------------------------------------------

    def ask(self, start: int, *, urgent: bool) -> None:
        self._close_replay()
        self._leave_queue()
        self._start = start
        if urgent or self._has_turn:
            self._send_request()
        elif self._hub is not None:
            self._queued = True
            self._hub.rebuilds.take(self._on_turn)

    def _on_turn(self) -> None:
        self._queued = False
        self._has_turn = True
        self._send_request()

    def _send_request(self) -> None:
        if self._hub is None:
            return
        self._replay = replayer(self._hub.context)
        try:
            self._replay.connect(self.address.replay)
            self._replay.send_multipart(replay_request(self._start), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            logger.warning("cannot ask %s: %s", self.address.replay, error)
        # reading begins after the sending, which may have swallowed the edge
        self._hub.reader.add(self._replay, self.stream.replay)
        self.stream.asked()

    def hang_up(self) -> None:
        self._close_replay()
        self._leave_queue()
        if self._has_turn and self._hub is not None:
            self._has_turn = False
            self._hub.rebuilds.give_back()

    def _leave_queue(self) -> None:
        if self._queued and self._hub is not None:
            self._hub.rebuilds.leave(self._on_turn)
            self._queued = False

    def _close_replay(self) -> None:
        if self._replay is not None and self._hub is not None:
            self._hub.reader.close(self._replay)
            self._replay = None

    def alarm(self, seconds: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if seconds is not None and self._hub is not None:
            self._timer = self._hub.loop.call_later(seconds, self.stream.alarm)


class SharedFeed:
    """One bound socket for all engines (llm-d's `zmqEndpoint`): whose message it is, only the topic says. There is no
    replay and no connection to watch, so a feed counts as connected from its first message on."""

    def __init__(self, hub: Hub, endpoint: str, topic: str, find: Callable[[str], Feed | None]) -> None:
        """Raises ZMQError if `endpoint` cannot be bound."""
        self._hub = hub
        self._find = find
        self.unknown = 0
        """Messages of pods that are not in the fleet."""
        self._socket = subscriber(hub.context, topic)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError:
            self._socket.close()
            raise
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        """As bound: with the port, where `endpoint` left it open."""
        hub.reader.add(self._socket, self._receive)

    def close(self) -> None:
        self._hub.reader.close(self._socket)

    def _receive(self, frames: list[bytes]) -> None:
        pod = parse_topic(frames[0].decode("utf-8", "replace"))[0]
        feed = self._find(pod)
        if feed is None:
            self.unknown += 1
            return
        if feed.state is State.SYNCING:
            feed.stream.connected()
        feed.stream.live(frames)
