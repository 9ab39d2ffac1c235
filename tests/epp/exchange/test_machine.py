"""One case per row of the table, and per way an exchange can end."""

from __future__ import annotations

import pytest

from epp.errors import Code, Refusal
from epp.exchange import actions as act
from epp.exchange import events as ev
from epp.exchange.chunks import MAX_CHUNK
from epp.exchange.events import BodyMode
from epp.exchange.machine import MAX_OBSERVED_BYTES, Exchange, PeerError, State
from epp.routing import Answer, Observe, Outcome, RequestHead, ResponseHead, Route, Termination

HEAD = RequestHead({":method": "POST", ":path": "/v1/completions"}, received_at=1.0)
GET = RequestHead({":method": "GET", ":path": "/v1/models"}, received_at=1.0, end_of_stream=True)
ROUTE = Route("10.0.0.7:8000")
JSON = ResponseHead(200, {":status": "200"}, at=2.0)
CLOSED = ev.StreamClosed(at=9.0)
PICKED = ev.EndpointPicked(ROUTE)
BODY = ev.RequestBody(b"body", end_of_stream=True)


def duplex(head: RequestHead = HEAD, **fields: object) -> ev.RequestHeaders:
    return ev.RequestHeaders(head, **fields)  # type: ignore[arg-type]


def buffered(head: RequestHead = HEAD, response: BodyMode = BodyMode.NONE) -> ev.RequestHeaders:
    return ev.RequestHeaders(head, BodyMode.BUFFERED, response)


def answer(observe: Observe = Observe.NOTHING, *headers: tuple[str, str]) -> ev.AnswerGiven:
    return ev.AnswerGiven(Answer(observe, headers))


def ended(actions: list[act.Action]) -> Outcome:
    [finish] = actions
    assert isinstance(finish, act.Finish)
    return finish.outcome


class TestDuplexRequest:
    def test_nothing_is_answered_before_the_body_is_complete(self, play):
        assert play(duplex()) == []
        assert play(ev.RequestBody(b"bo", False)) == []

    def test_the_pick_sees_the_whole_body(self, play):
        actions = play(duplex(), ev.RequestBody(b"bo", False), ev.RequestBody(b"dy", False), ev.RequestBody(b"", True))
        assert actions == [act.PickEndpoint(HEAD, b"body", None)]

    def test_headers_then_body_are_sent_back(self, play):
        assert play(duplex(), BODY, PICKED) == [
            act.RouteRequest(ROUTE, act.Phase.HEADERS),
            act.ForwardRequestBody(b"body", True),
        ]

    def test_an_empty_body_is_one_empty_final_chunk(self, play):
        _, *body = play(duplex(), ev.RequestBody(b"", True), PICKED)
        assert body == [act.ForwardRequestBody(b"", True)]

    def test_a_long_body_is_cut(self, play):
        _, *body = play(duplex(), ev.RequestBody(b"x" * (MAX_CHUNK + 1), True), PICKED)
        assert body == [act.ForwardRequestBody(b"x" * MAX_CHUNK, False), act.ForwardRequestBody(b"x", True)]

    def test_a_replaced_body_goes_instead_of_the_clients(self, play):
        _, *body = play(duplex(), BODY, ev.EndpointPicked(Route("10.0.0.7:8000", body=b"other")))
        assert body == [act.ForwardRequestBody(b"other", True)]

    def test_trailers_end_a_body(self, play):
        assert play(duplex(), ev.RequestBody(b"body", False), ev.RequestTrailers()) == [
            act.PickEndpoint(HEAD, b"body", None)
        ]
        assert play(PICKED) == [
            act.RouteRequest(ROUTE, act.Phase.HEADERS),
            act.ForwardRequestBody(b"body", False),
            act.ForwardRequestTrailers(),
        ]

    def test_trailers_without_a_body(self, play):
        assert play(duplex(), ev.RequestTrailers(), PICKED) == [
            act.RouteRequest(ROUTE, act.Phase.HEADERS),
            act.ForwardRequestTrailers(),
        ]

    @pytest.mark.parametrize("before", [(), (ev.ResponseHeaders(JSON), answer())])
    def test_a_repeated_end_of_the_body_is_ignored(self, play, before):
        assert play(duplex(), BODY, PICKED, *before, ev.RequestBody(b"", True)) == []

    def test_late_trailers_are_answered(self, play):
        assert play(duplex(), BODY, PICKED, ev.RequestTrailers()) == [act.ForwardRequestTrailers()]


class TestBufferedRequest:
    def test_the_headers_are_acknowledged_at_once(self, play):
        assert play(buffered()) == [act.AckRequestHeaders()]

    def test_the_route_is_the_reply_to_the_body(self, play):
        assert play(buffered(), BODY) == [act.PickEndpoint(HEAD, b"body", None)]
        assert play(PICKED) == [act.RouteRequest(ROUTE, act.Phase.BODY)]

    def test_a_body_before_trailers_has_no_end_flag_and_is_whole(self, play):
        assert play(buffered(), ev.RequestBody(b"body", False)) == [act.PickEndpoint(HEAD, b"body", None)]

    def test_trailers_after_the_body_are_answered(self, play):
        actions = play(buffered(), ev.RequestBody(b"body", False), PICKED, ev.RequestTrailers())
        assert actions == [act.ForwardRequestTrailers()]

    def test_trailers_before_the_body_are_a_protocol_error(self, play):
        with pytest.raises(PeerError, match="trailers before the body"):
            play(buffered(), ev.RequestTrailers())


class TestRoutedByHeaders:
    @pytest.mark.parametrize("start", [duplex, buffered])
    def test_a_request_without_a_body(self, play, start):
        assert play(start(GET)) == [act.PickEndpoint(GET, b"", None)]
        assert play(PICKED) == [act.RouteRequest(ROUTE, act.Phase.HEADERS)]

    @pytest.mark.parametrize(
        "headers",
        [
            {":method": "GET", "connection": "upgrade", "upgrade": "websocket"},
            {":method": "CONNECT", ":protocol": "websocket"},
            {":method": "POST", "expect": "100-continue"},
        ],
    )
    @pytest.mark.parametrize("start", [duplex, buffered])
    def test_a_client_that_waits_for_the_answer_is_not_waited_for(self, play, start, headers):
        [pick] = play(start(RequestHead(headers, 1.0)))
        assert isinstance(pick, act.PickEndpoint)

    def test_envoy_is_told_not_to_buffer_what_follows(self, play):
        upgrade = RequestHead({"upgrade": "websocket"}, 1.0)
        [route] = play(buffered(upgrade), PICKED)
        assert route == act.RouteRequest(ROUTE, act.Phase.HEADERS, response_mode=BodyMode.NONE)

    def test_a_buffered_body_that_comes_all_the_same_is_acknowledged(self, play):
        upgrade = RequestHead({"upgrade": "websocket"}, 1.0)
        assert play(buffered(upgrade), PICKED, BODY) == [act.AckRequestBody()]

    def test_what_follows_passes_through_in_duplex(self, play):
        upgrade = RequestHead({"upgrade": "websocket"}, 1.0)
        play(duplex(upgrade), PICKED)
        assert play(ev.RequestBody(b"frame", False)) == [act.ForwardRequestBody(b"frame", False)]
        assert play(ev.ResponseHeaders(JSON), answer(), ev.RequestBody(b"more", True)) == [
            act.ForwardRequestBody(b"more", True)
        ]

    def test_a_data_plane_that_sends_no_bodies(self, play):
        assert play(ev.RequestHeaders(HEAD, BodyMode.NONE, BodyMode.NONE)) == [act.PickEndpoint(HEAD, b"", None)]
        assert play(PICKED) == [act.RouteRequest(ROUTE, act.Phase.HEADERS)]

    @pytest.mark.parametrize("mode", [BodyMode.STREAMED, BodyMode.BUFFERED_PARTIAL, BodyMode.GRPC])
    def test_a_mode_that_cannot_work_is_named(self, play, exchange, mode):
        with pytest.raises(PeerError, match=f"{mode.name}: use BUFFERED or FULL_DUPLEX_STREAMED"):
            play(ev.RequestHeaders(HEAD, mode))
        assert ended(play(CLOSED)).termination is Termination.ERROR


class TestSubset:
    @pytest.mark.parametrize(
        ("hints", "merged"),
        [
            ((None, None), None),
            (("a",), "a"),
            ((None, "a"), "a"),
            (("a", None), "a"),
            (("a", "b"), "b"),
            (("a", ()), "a"),
            ((None, ()), ()),
            (((), None), ()),
        ],
    )
    def test_the_last_that_is_not_empty_wins(self, play, hints, merged):
        first, *rest = hints
        play(duplex(subset=first))
        for hint in rest:
            play(ev.RequestBody(b"", False, hint))
        assert play(ev.RequestBody(b"", True)) == [act.PickEndpoint(HEAD, b"", merged)]

    def test_trailers_may_carry_it(self, play):
        assert play(duplex(), ev.RequestTrailers(("a",))) == [act.PickEndpoint(HEAD, b"", ("a",))]


class TestRefusal:
    REFUSAL = Refusal(Code.BadRequest, "no")

    @pytest.mark.parametrize("start", [duplex, buffered])
    def test_a_refused_pick_is_answered_and_ends_as_refused(self, play, start):
        assert play(start(), BODY, ev.PickRefused(self.REFUSAL)) == [act.Reject(self.REFUSAL)]
        assert ended(play(CLOSED)) == Outcome(Termination.REFUSED, status=400, at=9.0)

    @pytest.mark.parametrize("start", [duplex, buffered])
    def test_a_body_over_the_limit_is_413_and_names_it(self, start):
        exchange = Exchange(max_request_bytes=3)
        exchange.receive(start())
        [reject] = exchange.receive(ev.RequestBody(b"body", False))
        assert isinstance(reject, act.Reject)
        assert reject.refusal.status == 413
        assert "limit of 3 bytes" in reject.refusal.message

    def test_empty_pieces_of_a_body_are_not_kept(self, exchange, play):
        play(duplex(), *[ev.RequestBody(b"", False)] * 1000)
        assert not exchange._body

    def test_a_body_at_the_limit_is_picked(self):
        exchange = Exchange(max_request_bytes=4)
        exchange.receive(duplex())
        [pick] = exchange.receive(BODY)
        assert isinstance(pick, act.PickEndpoint)


class TestResponse:
    ROUTED = (buffered(), BODY, PICKED)

    def test_the_director_is_asked_first(self, play):
        assert play(*self.ROUTED, ev.ResponseHeaders(JSON)) == [act.AskDirector(ROUTE, JSON)]

    @pytest.mark.parametrize(
        ("configured", "observe", "override"),
        [
            (BodyMode.NONE, Observe.NOTHING, None),
            (BodyMode.NONE, Observe.WHOLE, BodyMode.BUFFERED),
            (BodyMode.NONE, Observe.CHUNKS, BodyMode.STREAMED),
            (BodyMode.BUFFERED, Observe.NOTHING, BodyMode.NONE),
            (BodyMode.BUFFERED, Observe.CHUNKS, BodyMode.STREAMED),
            (BodyMode.STREAMED, Observe.CHUNKS, None),
            (BodyMode.DUPLEX, Observe.WHOLE, None),
        ],
    )
    def test_the_body_is_asked_for_as_it_is_wanted(self, play, configured, observe, override):
        actions = play(buffered(response=configured), BODY, PICKED, ev.ResponseHeaders(JSON), answer(observe))
        assert actions == [act.ForwardResponseHeaders((), override)]

    def test_headers_of_the_director_are_set(self, play):
        actions = play(*self.ROUTED, ev.ResponseHeaders(JSON), answer(Observe.NOTHING, ("x-a", "1")))
        assert actions == [act.ForwardResponseHeaders((("x-a", "1"),))]

    def test_a_response_without_a_body_asks_for_none(self, play):
        actions = play(*self.ROUTED, ev.ResponseHeaders(JSON, end_of_stream=True), answer(Observe.WHOLE))
        assert actions == [act.ForwardResponseHeaders(())]
        assert ended(play(CLOSED)) == Outcome(Termination.NATURAL, 200, 0, 2.0, at=2.0)

    def test_a_buffered_answer_is_observed_whole_and_only_acknowledged(self, play):
        actions = play(
            *self.ROUTED, ev.ResponseHeaders(JSON), answer(Observe.WHOLE), ev.ResponseBody(b"{}", True, at=3.0)
        )
        assert actions == [act.ObserveBody(ROUTE, b"{}", True), act.AckResponseBody()]
        assert ended(play(CLOSED)) == Outcome(Termination.NATURAL, 200, 2, 2.0, at=3.0)

    def test_chunks_are_observed_as_they_pass(self, play):
        play(*self.ROUTED, ev.ResponseHeaders(JSON), answer(Observe.CHUNKS))
        assert play(ev.ResponseBody(b"a", False, at=3.0)) == [
            act.ObserveBody(ROUTE, b"a", False),
            act.AckResponseBody(),
        ]
        assert play(ev.ResponseBody(b"", True, at=4.0)) == [act.ObserveBody(ROUTE, b"", True), act.AckResponseBody()]
        assert ended(play(CLOSED)) == Outcome(Termination.NATURAL, 200, 1, 3.0, at=4.0)

    def test_in_duplex_chunks_pass_through(self, play):
        play(duplex(), BODY, PICKED, ev.ResponseHeaders(JSON), answer())
        assert play(ev.ResponseBody(b"a", False, at=3.0)) == [act.ForwardResponseBody(b"a", False)]
        assert play(ev.ResponseBody(b"", True, at=4.0)) == [act.ForwardResponseBody(b"", True)]

    def test_in_duplex_a_whole_answer_is_gathered_while_it_passes(self, play):
        play(duplex(), BODY, PICKED, ev.ResponseHeaders(JSON), answer(Observe.WHOLE))
        assert play(ev.ResponseBody(b'{"a"', False, at=3.0)) == [act.ForwardResponseBody(b'{"a"', False)]
        assert play(ev.ResponseBody(b":1}", True, at=4.0)) == [
            act.ObserveBody(ROUTE, b'{"a":1}', True),
            act.ForwardResponseBody(b":1}", True),
        ]

    def test_an_answer_too_long_to_keep_passes_unobserved(self, play):
        play(duplex(), BODY, PICKED, ev.ResponseHeaders(JSON), answer(Observe.WHOLE))
        play(ev.ResponseBody(b"x" * MAX_OBSERVED_BYTES, False, at=3.0))
        assert play(ev.ResponseBody(b"x", True, at=4.0)) == [act.ForwardResponseBody(b"x", True)]

    @pytest.mark.parametrize("observe", [Observe.WHOLE, Observe.CHUNKS])
    def test_trailers_end_a_body(self, play, observe):
        play(duplex(), BODY, PICKED, ev.ResponseHeaders(JSON), answer(observe), ev.ResponseBody(b"a", False, at=3.0))
        seen = b"a" if observe is Observe.WHOLE else b""
        assert play(ev.ResponseTrailers(at=4.0)) == [
            act.ObserveBody(ROUTE, seen, True),
            act.ForwardResponseTrailers(),
        ]
        assert ended(play(CLOSED)).termination is Termination.NATURAL

    def test_a_repeated_end_is_ignored_in_duplex_and_acknowledged_else(self, play):
        end = ev.ResponseBody(b"", True, at=3.0)
        assert play(duplex(), BODY, PICKED, ev.ResponseHeaders(JSON), answer(), end, end) == []
        other = Exchange()
        for event in (*self.ROUTED, ev.ResponseHeaders(JSON), answer(Observe.CHUNKS), end):
            other.receive(event)
        assert other.receive(end) == (act.AckResponseBody(),)

    def test_trailers_after_the_end_are_answered(self, play):
        play(*self.ROUTED, ev.ResponseHeaders(JSON, end_of_stream=True), answer())
        assert play(ev.ResponseTrailers(at=3.0)) == [act.ForwardResponseTrailers()]

    @pytest.mark.parametrize("before", [(buffered(),), (buffered(), BODY)])
    def test_an_answer_of_the_data_plane_itself_needs_no_route(self, play, before):
        timeout = ResponseHead(504, {":status": "504"}, at=2.0)
        assert play(*before, ev.ResponseHeaders(timeout)) == [act.ForwardResponseHeaders(())]
        [finish] = play(CLOSED)
        assert finish.route is None
        assert finish.outcome.status == 504

    def test_a_local_answer_in_duplex_passes_through_unobserved(self, play):
        play(duplex(), ev.ResponseHeaders(ResponseHead(408, {}, at=2.0)))
        assert play(ev.ResponseBody(b"late", True, at=3.0)) == [act.ForwardResponseBody(b"late", True)]


class TestEnd:
    def test_a_stream_that_never_carried_headers_gives_no_finish(self, play):
        assert play(CLOSED) == []

    @pytest.mark.parametrize(
        "before",
        [
            (duplex(),),
            (buffered(), BODY),
            (buffered(), BODY, PICKED),
            (buffered(), BODY, PICKED, ev.ResponseHeaders(JSON)),
            (buffered(), BODY, PICKED, ev.ResponseHeaders(JSON), answer(Observe.WHOLE)),
            (duplex(), BODY, PICKED, ev.ResponseHeaders(JSON), answer(), ev.ResponseBody(b"a", False, 3.0)),
        ],
        ids=["reading", "picking", "routed", "asking", "answer-unseen", "mid-stream"],
    )
    def test_an_early_end_is_the_clients(self, play, before):
        assert ended(play(*before, CLOSED)).termination is Termination.CLIENT

    def test_the_end_of_a_body_that_is_not_shown_counts_as_natural(self, play):
        outcome = ended(play(buffered(), BODY, PICKED, ev.ResponseHeaders(JSON), answer(), CLOSED))
        assert outcome == Outcome(Termination.NATURAL, 200, 0, 2.0, at=9.0)

    def test_a_failure_of_ours_is_an_error(self, play):
        assert ended(play(duplex(), ev.StreamClosed(at=9.0, failed=True))).termination is Termination.ERROR

    def test_the_second_end_is_nothing(self, play):
        assert play(duplex(), CLOSED, CLOSED) == []

    def test_finish_names_head_and_route(self, play):
        [finish] = play(duplex(), BODY, PICKED, CLOSED)
        assert (finish.head, finish.route) == (HEAD, ROUTE)


class TestProtocolErrors:
    def test_are_final(self, play, exchange):
        play(duplex())
        with pytest.raises(PeerError, match="ResponseBody in state 'reading request'"):
            play(ev.ResponseBody(b"", True, at=1.0))
        with pytest.raises(PeerError):
            play(BODY)
        assert exchange.state is State.FAILED
        assert ended(play(CLOSED)).termination is Termination.ERROR

    def test_headers_must_come_first(self, play):
        with pytest.raises(PeerError):
            play(BODY)

    def test_an_answer_nobody_asked_for_is_our_own_mistake(self, play):
        with pytest.raises(AssertionError):
            play(duplex(), PICKED)
