"""Drives one exchange over one ext_proc stream: read, feed, carry out, always close.

Everything runs in the stream's own task. A pick that completes without waiting costs no task and no queue; while one
waits, the stream is read ahead, so that a client that leaves ends the pick.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable
from typing import Protocol

from epp import wire
from epp.errors import Code, Refusal
from epp.exchange import actions as act
from epp.exchange import events as ev
from epp.exchange.machine import MAX_REQUEST_BYTES, Exchange, State
from epp.routing import Answer, Director

logger = logging.getLogger(__name__)


class CallLost(Exception):
    """The call is over: its peer has given it up, or the connection is gone."""


class Call(Protocol):
    """The transport's side of a stream."""

    async def read(self) -> bytes | None:
        """The next message; None after the peer's last."""

    async def write(self, data: bytes) -> None:
        """Raises `CallLost`."""


class Stream:
    def __init__(
        self,
        director: Director,
        call: Call,
        *,
        max_request_bytes: int = MAX_REQUEST_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._director = director
        self._call = call
        self._clock = clock
        self._exchange = Exchange(max_request_bytes)
        self._ahead: asyncio.Task[bytes | None] | None = None
        self._interrupted = False
        self._task: asyncio.Task[object] | None = None
        self._released = False

    def release(self) -> None:
        """Make `run` return now: the data plane goes on without us."""
        self._released = True
        if self._task is not None:
            self._task.cancel()

    async def run(self) -> None:
        """Returns when the stream may be ended with OK.

        Raises:
            PeerError: end it with an error.
            asyncio.CancelledError: the peer reset it.
        """
        self._task = task = asyncio.current_task()
        assert task is not None
        failed = True
        try:
            await self._serve()
            failed = False
        except CallLost:
            failed = False
        except asyncio.CancelledError:
            failed = False
            if not self._released or task.uncancel():
                raise
        finally:
            if self._ahead is not None:
                self._ahead.cancel()
            for action in self._exchange.receive(ev.StreamClosed(self._clock(), failed)):
                assert isinstance(action, act.Finish)
                self._director.finish(action.head, action.route, action.outcome)

    async def _serve(self) -> None:
        exchange, read, clock = self._exchange, self._call.read, self._clock
        while exchange.state is not State.REFUSED:
            message = await (read() if self._ahead is None else self._take_ahead(self._ahead))
            if message is None:
                return
            await self._feed(wire.decode(message, clock()))

    async def _feed(self, event: ev.Event | None) -> None:
        while event is not None:
            actions = self._exchange.receive(event)
            event = None
            for action in actions:
                if isinstance(action, act.Reply):
                    await self._call.write(wire.encode(action))
                elif isinstance(action, act.ObserveBody):
                    self._observe(action)
                elif isinstance(action, act.AskDirector):
                    event = self._ask(action)
                elif isinstance(action, act.PickEndpoint):
                    event = await self._pick(action)

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

    async def _pick(self, action: act.PickEndpoint) -> ev.Event | None:
        """None: look at the message read ahead first."""
        if self._exchange.request_mode is ev.BodyMode.NONE and not action.head.end_of_stream:
            _warn_unseen_bodies()
        task = asyncio.current_task()
        assert task is not None
        watch = asyncio.get_running_loop().call_soon(self._read_ahead, task)
        try:
            return ev.EndpointPicked(await self._director.pick(action.head, action.body, action.subset))
        except Refusal as refusal:
            return ev.PickRefused(refusal)
        except asyncio.CancelledError:
            if task.cancelling() > int(self._interrupted):
                raise
            if self._interrupted:
                return None
            logger.exception("picking an endpoint was cancelled from within")
        except Exception:
            logger.exception("picking an endpoint failed")
        finally:
            watch.cancel()
            if self._interrupted:
                task.uncancel()
                self._interrupted = False
        return ev.PickRefused(Refusal(Code.Internal, "internal error while picking an endpoint"))

    # Reading

    async def _take_ahead(self, ahead: asyncio.Task[bytes | None]) -> bytes | None:
        try:
            return await ahead
        finally:
            self._ahead = None

    def _read_ahead(self, picking: asyncio.Task[object]) -> None:
        """Called by the event loop, and so only if the pick has to wait."""
        self._ahead = asyncio.create_task(self._call.read())
        self._ahead.add_done_callback(functools.partial(self._interrupt, picking))

    def _interrupt(self, picking: asyncio.Task[object], ahead: asyncio.Task[bytes | None]) -> None:
        """End a pick that nobody waits for any more: the client left, or the data plane answered it."""
        if self._exchange.state is not State.PICKING or ahead.cancelled() or ahead.exception():
            return
        message = ahead.result()
        if message is None or wire.is_response_headers(message):
            self._interrupted = True
            picking.cancel()


@functools.cache
def _warn_unseen_bodies() -> None:
    logger.warning(
        "requests are routed by their headers alone: the data plane does not send bodies"
        " (set request_body_mode to BUFFERED or FULL_DUPLEX_STREAMED)"
    )
