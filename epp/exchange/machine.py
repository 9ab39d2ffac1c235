"""One HTTP exchange as seen through ext_proc: events in, actions out, one table of states.

Knows no gRPC, no asyncio, no protobuf and no clock; what a driver must do is in `Exchange.receive`. All transitions are
in this file. What the two body modes have in common is one machine; where they differ:

- BUFFERED: Envoy waits for the reply to the headers before it sends the body, whole. The route goes onto the reply to
  the body. What we may see of the response is decided in the reply to its headers (`mode_override`).
- DUPLEX (FULL_DUPLEX_STREAMED): nothing is answered until the whole body is here; then headers and body are sent back,
  in this order. The response passes through us, chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

from epp.errors import Code, Refusal
from epp.exchange import actions as act
from epp.exchange import events as ev
from epp.exchange.chunks import MAX_CHUNK, split_body
from epp.exchange.events import BodyMode
from epp.routing import Observe, Outcome, RequestHead, Route, Termination

MAX_REQUEST_BYTES = 64 << 20
MAX_OBSERVED_BYTES = 8 << 20
"""A longer answer that comes in pieces is not kept for the director."""

_REQUEST_MODES = frozenset({BodyMode.NONE, BodyMode.BUFFERED, BodyMode.DUPLEX})
_WANTED_MODE = {Observe.NOTHING: BodyMode.NONE, Observe.WHOLE: BodyMode.BUFFERED, Observe.CHUNKS: BodyMode.STREAMED}

Actions = Sequence[act.Action]
_NOTHING: Actions = ()


class PeerError(Exception):
    """The data plane sent what the protocol does not allow at this point. Final: the stream must be ended."""


class State(Enum):
    __hash__ = object.__hash__  # Enum's own is Python code, and the table is looked up for every message

    IDLE = "idle"
    READING_REQUEST = "reading request"
    PICKING = "picking"
    AWAITING_RESPONSE = "awaiting response"
    ANSWERING = "answering"
    """The director is looking at the response headers."""
    READING_RESPONSE = "reading response"
    DONE = "done"
    """The response is complete. Left to come: the end of the stream."""
    REFUSED = "refused"
    """The response was ours."""
    FAILED = "failed"
    CLOSED = "closed"


class Exchange:
    def __init__(self, max_request_bytes: int = MAX_REQUEST_BYTES) -> None:
        self.state = State.IDLE
        self._max_request_bytes = max_request_bytes
        self._head: RequestHead | None = None
        self.request_mode = self._response_mode = BodyMode.DUPLEX
        self._subset: Sequence[str] | None = None
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._ended_by: type[ev.Event] = ev.RequestHeaders
        self._request_over = False
        self._route: Route | None = None
        self._observe = Observe.NOTHING
        self._observed: list[bytes] = []
        self._observed_bytes = 0
        self._status = 0
        self._response_bytes = 0
        self._first_byte_at = 0.0
        self._ended_at = 0.0

    def __repr__(self) -> str:
        return f"<Exchange {self.state.value}, request {self._body_bytes} B, response {self._response_bytes} B>"

    def receive(self, event: ev.Event) -> Actions:
        """Actions to carry out now, in order, before the next event is fed.

        `PickEndpoint` and `AskDirector` are always the last of theirs: the event they ask for comes next (or
        `StreamClosed`). After `Reject` only `StreamClosed` may be fed. Feed `StreamClosed` exactly when the stream
        ends, whatever ended it: it alone gives `Finish`.

        Raises:
            PeerError: the event is not allowed here. Final.
        """
        handler = _TABLE.get((self.state, type(event)))
        if handler is None:
            assert not isinstance(event, _ANSWERS), f"{event} was not asked for in {self}"
            raise self._fail(f"{type(event).__name__} in state {self.state.value!r}")
        return handler(self, event)

    def _fail(self, reason: str) -> PeerError:
        if self.state is not State.CLOSED:
            self.state = State.FAILED
        return PeerError(reason)

    # The request

    def _start(self, event: ev.RequestHeaders) -> Actions:
        self._head = event.head
        self.request_mode, self._response_mode = event.request_mode, event.response_mode
        self._merge_subset(event.subset)
        if event.request_mode not in _REQUEST_MODES:
            raise self._fail(f"request body mode {event.request_mode.name}: use BUFFERED or FULL_DUPLEX_STREAMED")
        if event.head.end_of_stream or event.request_mode is BodyMode.NONE or _waits_for_response(event.head):
            return self._pick(ev.RequestHeaders)
        self.state = State.READING_REQUEST
        return _NOTHING if event.request_mode is BodyMode.DUPLEX else _ACK_REQUEST_HEADERS

    def _read_body(self, event: ev.RequestBody) -> Actions:
        self._merge_subset(event.subset)
        self._body_bytes += len(event.data)
        if self._body_bytes > self._max_request_bytes:
            limit = f"the request body is larger than the limit of {self._max_request_bytes} bytes"
            return self._refuse(ev.PickRefused(Refusal(Code.PayloadTooLarge, limit)))
        if event.data:
            self._body.append(event.data)
        # a buffered body is whole even without the end flag: trailers follow then, and those are not sent to us
        if event.end_of_stream or self.request_mode is BodyMode.BUFFERED:
            return self._pick(ev.RequestBody)
        return _NOTHING

    def _read_trailers(self, event: ev.RequestTrailers) -> Actions:
        self._merge_subset(event.subset)
        if self.request_mode is not BodyMode.DUPLEX:
            raise self._fail("request trailers before the body")
        return self._pick(ev.RequestTrailers)

    def _merge_subset(self, subset: Sequence[str] | None) -> None:
        if subset or self._subset is None:
            self._subset = subset

    def _pick(self, ended_by: type[ev.Event]) -> Actions:
        assert self._head is not None
        self._ended_by = ended_by
        self.state = State.PICKING
        return (act.PickEndpoint(self._head, b"".join(self._body), self._subset),)

    def _send_request(self, event: ev.EndpointPicked) -> Actions:
        self._route = route = event.route
        self.state = State.AWAITING_RESPONSE
        body = b"".join(self._body) if route.body is None else route.body
        self._body.clear()
        self._request_over = self._ended_by is not ev.RequestHeaders
        if not self._request_over:
            return (act.RouteRequest(route, act.Phase.HEADERS, self._unread_body_override()),)
        if self.request_mode is BodyMode.BUFFERED:
            return (act.RouteRequest(route, act.Phase.BODY),)
        trailers = self._ended_by is ev.RequestTrailers
        actions: list[act.Action] = [act.RouteRequest(route, act.Phase.HEADERS)]
        actions.extend(act.ForwardRequestBody(data, end) for data, end in split_body(body, not trailers))
        if trailers:
            actions.append(_FORWARD_REQUEST_TRAILERS)
        return actions

    def _unread_body_override(self) -> BodyMode | None:
        """A body that was not waited for must not be held back by Envoy either, or an upgrade never gets through."""
        assert self._head is not None
        buffered = self.request_mode is BodyMode.BUFFERED and not self._head.end_of_stream
        return self._response_mode if buffered else None

    def _refuse(self, event: ev.PickRefused) -> Actions:
        self._status = event.refusal.status
        self._body.clear()
        self.state = State.REFUSED
        return (act.Reject(event.refusal),)

    def _pass_body(self, event: ev.RequestBody) -> Actions:
        if self.request_mode is not BodyMode.DUPLEX:
            return _ACK_REQUEST_BODY
        if self._request_over:
            return _NOTHING  # Envoy may repeat the end of a large body (envoyproxy/envoy#46237)
        self._request_over = event.end_of_stream
        return [act.ForwardRequestBody(data, end) for data, end in split_body(event.data, event.end_of_stream)]

    def _pass_trailers(self, _: ev.RequestTrailers) -> Actions:
        self._request_over = True
        return (_FORWARD_REQUEST_TRAILERS,)

    # The response

    def _start_response(self, event: ev.ResponseHeaders) -> Actions:
        assert self._route is not None
        self._note_response(event)
        self.state = State.ANSWERING
        return (act.AskDirector(self._route, event.response),)

    def _start_local_reply(self, event: ev.ResponseHeaders) -> Actions:
        """The data plane answers by itself (a timeout, a body too large) before there is a route."""
        self._note_response(event)
        self._body.clear()
        return self._send_response_headers(())

    def _note_response(self, event: ev.ResponseHeaders) -> None:
        self._status = event.response.status
        self._first_byte_at = event.response.at
        self._ended_at = event.response.at if event.end_of_stream else 0.0

    def _answer(self, event: ev.AnswerGiven) -> Actions:
        self._observe = event.answer.observe
        return self._send_response_headers(event.answer.set_headers)

    def _send_response_headers(self, set_headers: Sequence[tuple[str, str]]) -> Actions:
        if self._ended_at:
            self.state = State.DONE
            return (act.ForwardResponseHeaders(set_headers),)
        self.state = State.READING_RESPONSE
        wanted = _WANTED_MODE[self._observe]
        if wanted is self._response_mode or self._response_mode is BodyMode.DUPLEX:
            return (act.ForwardResponseHeaders(set_headers),)
        self._response_mode = wanted
        return (act.ForwardResponseHeaders(set_headers, wanted),)

    def _read_response(self, event: ev.ResponseBody) -> Actions:
        if not self._response_bytes and self._response_mode is not BodyMode.BUFFERED:
            self._first_byte_at = event.at
        self._response_bytes += len(event.data)
        if event.end_of_stream:
            self._ended_at = event.at
            self.state = State.DONE
        # the data plane may be gone as soon as it has the last reply, so that comes last
        return (*self._observations(event.data, event.end_of_stream), *self._pass_response(event))

    def _pass_response(self, event: ev.ResponseBody) -> Actions:
        if self._response_mode is not BodyMode.DUPLEX:
            return _ACK_RESPONSE_BODY
        if len(event.data) <= MAX_CHUNK:
            return (act.ForwardResponseBody(event.data, event.end_of_stream),)
        return [act.ForwardResponseBody(data, end) for data, end in split_body(event.data, event.end_of_stream)]

    def _end_by_trailers(self, event: ev.ResponseTrailers) -> Actions:
        self._ended_at = event.at
        self.state = State.DONE
        return (*self._observations(b"", True), _FORWARD_RESPONSE_TRAILERS)

    def _observations(self, data: bytes, end_of_stream: bool) -> Actions:
        if self._route is None or self._observe is Observe.NOTHING or not (data or end_of_stream):
            return _NOTHING
        if self._observe is Observe.CHUNKS:
            return (act.ObserveBody(self._route, data, end_of_stream),)
        return self._gather(self._route, data, end_of_stream)

    def _gather(self, route: Route, data: bytes, end_of_stream: bool) -> Actions:
        self._observed_bytes += len(data)
        if self._observed_bytes > MAX_OBSERVED_BYTES:
            self._observed.clear()
            return _NOTHING
        self._observed.append(data)
        return (act.ObserveBody(route, b"".join(self._observed), True),) if end_of_stream else _NOTHING

    def _ignore_surplus_chunk(self, _: ev.ResponseBody) -> Actions:
        return _NOTHING if self._response_mode is BodyMode.DUPLEX else _ACK_RESPONSE_BODY

    def _pass_response_trailers(self, _: ev.ResponseTrailers) -> Actions:
        return (_FORWARD_RESPONSE_TRAILERS,)

    # The end

    def _close(self, event: ev.StreamClosed) -> Actions:
        termination = self._termination(event)
        self.state = State.CLOSED
        if self._head is None:
            return _NOTHING
        outcome = Outcome(
            termination, self._status, self._response_bytes, self._first_byte_at, at=self._ended_at or event.at
        )
        return (act.Finish(self._head, self._route, outcome),)

    def _termination(self, event: ev.StreamClosed) -> Termination:
        if self.state is State.REFUSED:
            return Termination.REFUSED
        if event.failed or self.state is State.FAILED:
            return Termination.ERROR
        # with a body that Envoy does not show us, its end and the client's leaving look the same
        unseen = self.state is State.READING_RESPONSE and self._response_mode is BodyMode.NONE
        return Termination.NATURAL if unseen or self.state is State.DONE else Termination.CLIENT

    def _ignore(self, _: ev.Event) -> Actions:
        return _NOTHING


def _waits_for_response(head: RequestHead) -> bool:
    """Whether the client holds its body back until it is answered: upgrades, CONNECT, `Expect: 100-continue`."""
    return "upgrade" in head.headers or head.method == "CONNECT" or "expect" in head.headers


_ACK_REQUEST_HEADERS: Actions = (act.AckRequestHeaders(),)
_ACK_REQUEST_BODY: Actions = (act.AckRequestBody(),)
_ACK_RESPONSE_BODY: Actions = (act.AckResponseBody(),)
_FORWARD_REQUEST_TRAILERS = act.ForwardRequestTrailers()
_FORWARD_RESPONSE_TRAILERS = act.ForwardResponseTrailers()

_ANSWERS = (ev.EndpointPicked, ev.PickRefused, ev.AnswerGiven)

_TABLE: dict[tuple[State, type[ev.Event]], Callable[[Exchange, Any], Actions]] = {
    (State.IDLE, ev.RequestHeaders): Exchange._start,
    (State.READING_REQUEST, ev.RequestBody): Exchange._read_body,
    (State.READING_REQUEST, ev.RequestTrailers): Exchange._read_trailers,
    (State.READING_REQUEST, ev.ResponseHeaders): Exchange._start_local_reply,
    (State.PICKING, ev.EndpointPicked): Exchange._send_request,
    (State.PICKING, ev.PickRefused): Exchange._refuse,
    (State.PICKING, ev.ResponseHeaders): Exchange._start_local_reply,
    (State.AWAITING_RESPONSE, ev.RequestBody): Exchange._pass_body,
    (State.AWAITING_RESPONSE, ev.RequestTrailers): Exchange._pass_trailers,
    (State.AWAITING_RESPONSE, ev.ResponseHeaders): Exchange._start_response,
    (State.ANSWERING, ev.AnswerGiven): Exchange._answer,
    (State.READING_RESPONSE, ev.RequestBody): Exchange._pass_body,
    (State.READING_RESPONSE, ev.RequestTrailers): Exchange._pass_trailers,
    (State.READING_RESPONSE, ev.ResponseBody): Exchange._read_response,
    (State.READING_RESPONSE, ev.ResponseTrailers): Exchange._end_by_trailers,
    (State.DONE, ev.RequestBody): Exchange._pass_body,
    (State.DONE, ev.RequestTrailers): Exchange._pass_trailers,
    (State.DONE, ev.ResponseBody): Exchange._ignore_surplus_chunk,
    (State.DONE, ev.ResponseTrailers): Exchange._pass_response_trailers,
    **{(state, ev.StreamClosed): Exchange._close for state in State if state is not State.CLOSED},
    (State.CLOSED, ev.StreamClosed): Exchange._ignore,
}
