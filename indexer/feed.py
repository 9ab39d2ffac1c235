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

from indexer.curve import Curve
from indexer.frames import SNAPSHOT, replay_request
from indexer.recovery import Allowance
from indexer.residency import Residency
from indexer.sockets import Reader, Turns, replayer, subscriber
from indexer.stream import Counters, State, Stream
from indexer.wire import parse_topic

logger = logging.getLogger(__name__)

CONCURRENT_REBUILDS = 8
"""A publisher answers replays from the thread that publishes, so a fleet is not asked all at once."""

REDIAL_AFTER = 5.0
"""Seconds from the end of a connection that ZMQ does not try again: it gives up on peers that break its protocol, send
too large a message or refuse our key. What is at the address may be another process by then."""

_CONNECTED = zmq.Event.HANDSHAKE_SUCCEEDED
_RETRIED = zmq.Event.CONNECT_RETRIED
_WHY = {
    zmq.Event.DISCONNECTED: "the connection broke",
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: "the peer broke off the handshake",
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: "the peer does not speak ZMTP",
    zmq.Event.HANDSHAKE_FAILED_AUTH: "the peer refused our key",
}
_OTHER_MECHANISM = zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH
_WATCHED = sum(_WHY) | _CONNECTED | _RETRIED


class FeedAddress(msgspec.Struct, frozen=True):
    """Where a publisher is reached: ZMQ addresses; "" = there is none."""

    events: str = ""
    replay: str = ""
    topic: str = ""
    """Prefix of the topics wanted."""


class Hub:
    """What the feeds of a process share: a ZMQ context, one reader, turns for rebuilding, room for batches that wait.
    Made on a running loop.

    Args:
        curve: keys for all connections; a peer without CURVE is not heard then. None: no connection is protected.
    """

    def __init__(self, curve: Curve | None = None) -> None:
        self.curve = curve
        self.loop = asyncio.get_running_loop()
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.context.max_sockets = 65_536
        self.reader = Reader(self.loop)
        self.rebuilds = Turns(CONCURRENT_REBUILDS)
        self.allowance = Allowance()

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
        self._redial: asyncio.TimerHandle | None = None
        self._explained = False
        """It is known why there is no connection; that it is tried again is no news then."""
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
            "trust": round(stream.trust, 3),
            "last_seq": stream.last_seq,
            "lag_batches": stream.lag_batches,
            "delay_seconds": round(stream.delay, 3),
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
        self.stream.allowance = hub.allowance
        if self.address.events:
            self._subscribe(hub)

    def close(self) -> None:
        """Closes every socket, then the residency."""
        if self._hub is not None:
            self.hang_up()
            self.alarm(None)
            self._unsubscribe(self._hub.reader)
        self.stream.close()
        self._hub = None

    def _subscribe(self, hub: Hub) -> None:
        self._explained = False
        try:
            self._subscription = subscriber(hub.context, self.address.topic, hub.curve)
            self._monitor = self._subscription.get_monitor_socket(_WATCHED)
            hub.reader.add(self._monitor, self._monitored)
            # a message of a new connection must not be read before the news of the connection
            hub.reader.add(self._subscription, self.stream.live, after=self._monitor)
            self._subscription.connect(self.address.events)
        except zmq.ZMQError as error:  # a bad address, or no more file descriptors
            self._down(f"{self.address.events}: {error}")

    def _unsubscribe(self, reader: Reader) -> None:
        self._redial_in(None)
        if self._subscription is not None and self._monitor is not None:
            self._subscription.disable_monitor()
            reader.close(self._subscription)
            reader.close(self._monitor)
        elif self._subscription is not None:
            self._subscription.close()
        self._subscription = self._monitor = None

    def _subscribe_anew(self) -> None:
        if self._hub is not None:
            self._unsubscribe(self._hub.reader)
            self._subscribe(self._hub)

    def _redial_in(self, seconds: float | None) -> None:
        if self._redial is not None:
            self._redial.cancel()
            self._redial = None
        if seconds is not None and self._hub is not None:
            self._redial = self._hub.loop.call_later(seconds, self._subscribe_anew)

    def _monitored(self, frames: list[bytes]) -> None:
        message = parse_monitor_message(frames)
        event = zmq.Event(message["event"])
        if event == _CONNECTED:
            self._explained = False
            self._redial_in(None)
            self.stream.connected()
        elif event == _RETRIED:
            if not self._explained:
                self.stream.disconnected("cannot connect")
            self._explained = False
            self._redial_in(None)
        elif not self._explained:
            self._down(self._why(event, message["value"]))

    def _down(self, why: str) -> None:
        self._explained = True
        self._redial_in(REDIAL_AFTER)
        self.stream.disconnected(why)

    def _why(self, event: zmq.Event, detail: int) -> str:
        protected = self._hub is not None and self._hub.curve is not None
        if event == zmq.Event.HANDSHAKE_FAILED_PROTOCOL and detail == _OTHER_MECHANISM:
            return "the peer has no CURVE" if protected else "the peer asks for CURVE"
        if event == zmq.Event.HANDSHAKE_FAILED_NO_DETAIL:  # of two that do not agree, either may be the first to leave
            return f"{_WHY[event]}: {'has it CURVE, and the key we expect?' if protected else 'does it ask for CURVE?'}"
        return _WHY[event]

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
        try:
            self._replay = replayer(self._hub.context, self._hub.curve, for_snapshot=self._start == SNAPSHOT)
            # reading begins in a moment, after the sending, which may swallow the edge
            self._hub.reader.add(self._replay, self.stream.replay)
            self._replay.connect(self.address.replay)
            self._replay.send_multipart(replay_request(self._start), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            logger.warning("cannot ask %s: %s", self.address.replay, error)
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

    def __init__(
        self,
        hub: Hub,
        endpoint: str,
        topic: str,
        find: Callable[[str], Feed | None],
        drained: Callable[[], None] = lambda: None,
    ) -> None:
        """Raises ZMQError if `endpoint` cannot be bound. `drained` is called whenever all that had come was read."""
        self._hub = hub
        self._topics = Topics(find)
        self._socket = subscriber(hub.context, topic, hub.curve)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError:
            self._socket.close()
            raise
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        """As bound: with the port, where `endpoint` left it open."""
        hub.reader.add(self._socket, self._topics.receive, drained=drained)

    @property
    def unknown(self) -> int:
        """Messages of pods that are not in the fleet."""
        return self._topics.unknown

    def close(self) -> None:
        self._hub.reader.close(self._socket)

    def drain(self) -> None:
        """Read what has come, soon; `drained` is called in any case."""
        self._hub.reader.wake(self._socket)


class Topics:
    """Messages of all engines, each handed to the feed that its topic names."""

    def __init__(self, find: Callable[[str], Feed | None]) -> None:
        self._find = find
        self.unknown = 0
        """Messages of pods without a feed."""

    def receive(self, frames: list[bytes]) -> None:
        pod = parse_topic(frames[0].decode("utf-8", "replace"))[0]
        feed = self._find(pod)
        if feed is None:
            self.unknown += 1
            return
        if feed.state is State.SYNCING:
            feed.stream.connected()
        feed.stream.live(frames)
