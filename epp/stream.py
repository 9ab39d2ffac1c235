"""Drives one exchange over one ext_proc call: read, feed, carry out, always close.

Nothing here waits. A pick that needs time is a task of its own; meanwhile the next message is read ahead, so that a
client that leaves ends the pick.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from epp import wire
from epp.errors import Code, Refusal
from epp.exchange import actions as act
from epp.exchange import events as ev
from epp.exchange.machine import MAX_REQUEST_BYTES, Exchange, PeerError, State
from epp.routing import Answer, Director, Route

logger = logging.getLogger(__name__)


class Call(Protocol):
    """The transport's side. What is read comes to `Stream.received`; messages to a peer that is gone are lost."""

    def read(self) -> None: ...

    def send(self, message: bytes) -> None: ...

    def exchange(self, message: bytes) -> None:
        """`send` and `read`, at the price of one."""


class Stream:
    """`closed` is called once, when the exchange has finished; without an error the call may be ended with OK."""

    def __init__(
        self,
        director: Director,
        call: Call,
        closed: Callable[[Stream, PeerError | None], None],
        *,
        max_request_bytes: int = MAX_REQUEST_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._director = director
        self._call = call
        self._closed = closed
        self._clock = clock
        self._exchange = Exchange(max_request_bytes)
        self._picking: asyncio.Task[None] | None = None
        self._ahead: tuple[bytes | None, ...] = ()
        """The message that came while a pick took its time."""

    def received(self, message: bytes | None) -> None:
        """The peer's next message; None after its last, or if it is gone. Asks for the one after it."""
        if self._picking is not None:
            if message is None or not self._ahead:  # the end is the last that counts, also if it is ours
                self._ahead = (message,)
            if message is None or wire.is_response_headers(message):
                # nobody waits for it any more: the client left, or the data plane answered it. A pick that has not
                # even begun would not learn of it
                asyncio.get_running_loop().call_soon(self._picking.cancel)
        elif message is None:
            self.release()
        elif self._exchange.state is not State.CLOSED:
            self._feed(message)

    def release(self) -> None:
        """End it, at once or as soon as a pick is: the data plane goes on without us."""
        if self._picking is not None:
            self.received(None)
        elif self._exchange.state is not State.CLOSED:
            self._close()

    def _feed(self, message: bytes | ev.Event, *, read: bool = True) -> None:
        replies: list[bytes] = []
        try:
            self._carry_out(wire.decode(message, self._clock()) if isinstance(message, bytes) else message, replies)
        except PeerError as error:
            self._end(replies, error)
        except Exception:
            logger.exception("an exchange failed")
            self._end(replies, PeerError("internal error"))
        else:
            if self._exchange.state is State.REFUSED:
                self._end(replies)
            elif read:
                self._reply_and_read(replies)
            else:
                self._reply(replies)

    def _carry_out(self, event: ev.Event | None, replies: list[bytes]) -> None:
        """What the event leads to. The replies, encoded, are left for the caller."""
        while event is not None:
            actions = self._exchange.receive(event)
            event = None
            for action in actions:
                if isinstance(action, act.Reply):
                    replies.append(wire.encode(action))
                elif isinstance(action, act.ObserveBody):
                    self._observe(action)
                elif isinstance(action, act.AskDirector):
                    event = self._ask(action)
                elif isinstance(action, act.PickEndpoint):
                    event = self._pick(action)

    def _reply(self, replies: Sequence[bytes]) -> None:
        for reply in replies:
            self._call.send(reply)

    def _reply_and_read(self, replies: list[bytes]) -> None:
        if replies and self._picking is None:
            last = replies.pop()
            self._reply(replies)
            self._call.exchange(last)
        else:
            self._reply(replies)
            self._call.read()

    def _end(self, replies: Sequence[bytes], error: PeerError | None = None) -> None:
        self._reply(replies)
        self._close(error)

    def _close(self, error: PeerError | None = None) -> None:
        for action in self._exchange.receive(ev.StreamClosed(self._clock(), failed=error is not None)):
            assert isinstance(action, act.Finish)
            self._director.finish(action.head, action.route, action.outcome)
        self._closed(self, error)

    # The director's part. A fault of its own never ends a stream.

    def _ask(self, action: act.AskDirector) -> ev.Event:
        try:
            return ev.AnswerGiven(self._director.answered(action.route, action.response))
        except Exception:
            logger.exception("reading response headers failed")
            return ev.AnswerGiven(Answer())

    def _observe(self, action: act.ObserveBody) -> None:
        try:
            self._director.observe(action.route, action.data, action.end_of_stream)
        except Exception:
            logger.exception("reading a response body failed")

    def _pick(self, action: act.PickEndpoint) -> ev.Event | None:
        """None: it takes its time."""
        if self._exchange.request_mode is ev.BodyMode.NONE and not action.head.end_of_stream:
            _warn_unseen_bodies()
        try:
            route = self._director.pick(action.head, action.body, action.subset)
        except Exception as error:
            return _refused(error)
        if isinstance(route, Route):
            return ev.EndpointPicked(route)
        self._picking = asyncio.get_running_loop().create_task(self._wait_for(route))
        return None

    async def _wait_for(self, picked: Awaitable[Route]) -> None:
        event: ev.Event | None
        try:
            event = ev.EndpointPicked(await picked)
        except asyncio.CancelledError as error:
            event = None if self._ahead else _refused(error)
        except Exception as error:
            event = _refused(error)
        ahead, self._ahead, self._picking = self._ahead, (), None
        if event is not None:
            self._feed(event, read=False)
        for message in ahead:
            self.received(message)


def _refused(error: BaseException) -> ev.PickRefused:
    if isinstance(error, Refusal):
        return ev.PickRefused(error)
    logger.error("picking an endpoint failed", exc_info=error)
    return ev.PickRefused(Refusal(Code.Internal, "internal error while picking an endpoint"))


@functools.cache
def _warn_unseen_bodies() -> None:
    logger.warning(
        "requests are routed by their headers alone: the data plane does not send bodies"
        " (set request_body_mode to BUFFERED or FULL_DUPLEX_STREAMED)"
    )
