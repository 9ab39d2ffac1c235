"""The driver against a scripted stream and a scripted director."""

from __future__ import annotations

import asyncio
import logging

import pytest

from epp.errors import Code, Refusal
from epp.exchange import events as ev
from epp.exchange.machine import PeerError
from epp.routing import Answer, Observe, Outcome, RequestHead, ResponseHead, Route, Termination
from epp.stream import Stream, _warn_unseen_bodies
from proto import ext_proc_pb2 as pb

BUFFERED = pb.ProtocolConfiguration(request_body_mode=pb.ProcessingMode.BUFFERED)


def request_headers(modes=BUFFERED, end_of_stream=False, **headers):
    message = pb.ProcessingRequest(protocol_config=modes)
    message.request_headers.end_of_stream = end_of_stream
    for key, value in headers.items():
        message.request_headers.headers.headers.add(key=key, raw_value=value.encode())
    return message


def request_body(data=b"body", end_of_stream=True):
    return pb.ProcessingRequest(request_body=pb.HttpBody(body=data, end_of_stream=end_of_stream))


def response_headers(status="200"):
    message = pb.ProcessingRequest()
    message.response_headers.headers.headers.add(key=":status", raw_value=status.encode())
    return message


def response_body(data=b"{}", end_of_stream=True):
    return pb.ProcessingRequest(response_body=pb.HttpBody(body=data, end_of_stream=end_of_stream))


class ScriptedCall:
    """Gives the messages put into it, one a read; keeps the replies. `closed` is the exchange's end."""

    def __init__(self, *messages):
        self.replies = []
        self.closed = asyncio.get_running_loop().create_future()
        self.reading = False
        self._inbox = []
        for message in messages:
            self.put(message)

    def put(self, message):
        self._inbox.append(message and message.SerializeToString())
        self._deliver()

    def read(self):
        assert not self.reading
        self.reading = True
        self._deliver()

    def send(self, data):
        self.replies.append(pb.ProcessingResponse.FromString(data))

    def exchange(self, data):
        self.send(data)
        self.read()

    def _deliver(self):
        if self.reading and self._inbox:
            self.reading = False
            asyncio.get_running_loop().call_soon(self.stream.received, self._inbox.pop(0))

    @property
    def kinds(self):
        return [reply.WhichOneof("response") for reply in self.replies]


class ScriptedDirector:
    """Routes to one endpoint, or does what `picks` does. Keeps what it was told."""

    def __init__(self, picks=None, observe=Observe.WHOLE):
        self.picks = picks
        self.observe_what = observe
        self.picking = asyncio.Event()
        self.asked = []
        self.observed = []
        self.outcomes = []

    def pick(self, head, body, subset):
        self.asked.append((head, body, subset))
        self.picking.set()
        return Route("10.0.0.7:8000") if self.picks is None else self.picks()

    def answered(self, route, response):
        return Answer(self.observe_what)

    def observe(self, route, data, end_of_stream):
        self.observed.append((data, end_of_stream))

    def finish(self, head, route, outcome):
        self.outcomes.append((route, outcome))

    @property
    def terminations(self):
        return [outcome.termination for _, outcome in self.outcomes]


def run(director, call):
    """What to await for the exchange's end; raises what it ended with."""

    def closed(stream, error):
        assert stream is call.stream
        call.closed.set_exception(error) if error else call.closed.set_result(None)

    call.stream = Stream(director, call, closed, clock=lambda: 7.0)
    call.read()
    return call.closed


async def forever():
    await asyncio.Event().wait()


async def test_a_whole_exchange():
    director = ScriptedDirector()
    call = ScriptedCall(request_headers(), request_body(), response_headers(), response_body(), None)
    await run(director, call)
    assert call.kinds == ["request_headers", "request_body", "response_headers", "response_body"]
    assert director.asked == [(RequestHead({}, 7.0), b"body", None)]
    assert director.observed == [(b"{}", True)]
    assert director.outcomes == [(Route("10.0.0.7:8000"), Outcome(Termination.NATURAL, 200, 2, 7.0, 7.0))]


async def test_a_pick_that_does_not_wait_needs_no_task():
    director = ScriptedDirector()
    before = asyncio.all_tasks()
    call = ScriptedCall(request_headers(), request_body())
    run(director, call)
    await director.picking.wait()
    assert asyncio.all_tasks() == before
    assert call.kinds == ["request_headers", "request_body"]


def at_once(pick):
    return pick


def later(pick):
    async def picks():
        await asyncio.sleep(0)
        return pick()

    return picks


@pytest.mark.parametrize("when", [at_once, later])
async def test_a_refusal_is_answered_and_ends_the_stream(when):
    def refuse():
        raise Refusal(Code.ServiceUnavailable, "nobody")

    director = ScriptedDirector(when(refuse))
    call = ScriptedCall(request_headers(), request_body())
    await run(director, call)
    assert call.replies[-1].immediate_response.status.code == 503
    assert director.terminations == [Termination.REFUSED]


@pytest.mark.parametrize("when", [at_once, later])
async def test_a_fault_while_picking_is_a_500_logged_once(caplog, when):
    def fail():
        raise KeyError("fault")

    director = ScriptedDirector(when(fail))
    call = ScriptedCall(request_headers(), request_body())
    await run(director, call)
    assert call.replies[-1].immediate_response.status.code == 500
    assert b"fault" not in call.replies[-1].immediate_response.body
    [record] = caplog.records
    assert record.exc_info
    assert record.levelno == logging.ERROR
    assert director.terminations == [Termination.REFUSED]


async def test_a_pick_cancelled_from_within_is_a_fault_too(caplog):
    async def cancelled():
        raise asyncio.CancelledError

    director = ScriptedDirector(cancelled)
    call = ScriptedCall(request_headers(), request_body())
    await run(director, call)
    assert call.replies[-1].immediate_response.status.code == 500
    assert len(caplog.records) == 1


@pytest.mark.parametrize("method", ["answered", "observe"])
async def test_a_fault_while_watching_the_answer_does_not_touch_it(caplog, method):
    def fail(*_):
        raise KeyError("fault")

    director = ScriptedDirector()
    setattr(director, method, fail)
    call = ScriptedCall(request_headers(), request_body(), response_headers(), response_body(), None)
    await run(director, call)
    assert call.kinds[-1] == "response_body"
    assert director.terminations == [Termination.NATURAL]
    assert len(caplog.records) == 1


async def test_a_fault_of_our_own_ends_the_stream_with_an_error(caplog, monkeypatch):
    director = ScriptedDirector()
    call = ScriptedCall(request_headers(), request_body())
    ended = run(director, call)
    monkeypatch.setattr(
        call.stream._exchange,
        "receive",
        lambda event, receive=call.stream._exchange.receive: (
            receive(event) if isinstance(event, ev.StreamClosed) else {}["fault"]
        ),
    )
    with pytest.raises(PeerError, match="internal error"):
        await ended
    [record] = caplog.records
    assert record.exc_info


class TestEnds:
    async def test_a_peer_that_leaves_during_the_pick_cancels_it_and_leaves_no_task(self):
        cancelled = asyncio.Event()

        async def pick():
            try:
                await forever()
            finally:
                cancelled.set()

        director = ScriptedDirector(pick)
        before = asyncio.all_tasks()
        call = ScriptedCall(request_headers(), request_body())
        ended = run(director, call)
        await director.picking.wait()
        await asyncio.sleep(0)
        call.put(None)
        await ended
        assert cancelled.is_set()
        assert director.terminations == [Termination.CLIENT]
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == before

    async def test_a_peer_that_leaves_when_the_pick_is_made_has_left_after_it(self):
        """A pick that gets through in spite of being cancelled counts: it is finished, with its route."""

        async def pick():
            try:
                await forever()
            except asyncio.CancelledError:
                return Route("10.0.0.7:8000")

        director = ScriptedDirector(pick)
        call = ScriptedCall(request_headers(), request_body())
        ended = run(director, call)
        await director.picking.wait()
        await asyncio.sleep(0)
        call.put(None)
        await ended
        assert [route for route, _ in director.outcomes] == [Route("10.0.0.7:8000")]
        assert director.terminations == [Termination.CLIENT]

    async def test_an_answer_of_envoy_itself_during_the_pick_cancels_it(self):
        director = ScriptedDirector(forever)
        call = ScriptedCall(request_headers(), request_body())
        ended = run(director, call)
        await director.picking.wait()
        call.put(response_headers("504"))
        call.put(None)
        await ended
        assert call.kinds == ["request_headers", "response_headers"]
        [(route, outcome)] = director.outcomes
        assert route is None
        assert outcome.status == 504

    @pytest.mark.parametrize("ahead", [request_body(b"", True), pb.ProcessingRequest()], ids=["body", "empty"])
    async def test_a_message_read_ahead_is_not_lost(self, ahead):
        release = asyncio.Event()

        async def slowly():
            await release.wait()
            return Route("10.0.0.7:8000")

        director = ScriptedDirector(slowly)
        call = ScriptedCall(request_headers(pb.ProtocolConfiguration(request_body_mode=4)), request_body())
        ended = run(director, call)
        await director.picking.wait()
        call.put(ahead)
        call.put(response_headers())
        call.put(None)
        await asyncio.sleep(0)
        release.set()
        if ahead.WhichOneof("request"):
            await ended
            assert call.kinds == ["request_headers", "request_body", "response_headers"]
        else:
            with pytest.raises(PeerError, match="without a known request"):
                await ended

    async def test_a_half_close_before_the_response(self):
        director = ScriptedDirector()
        await run(director, ScriptedCall(request_headers(), request_body(), None))
        assert director.terminations == [Termination.CLIENT]

    @pytest.mark.parametrize("end", [response_body(b"end"), pb.ProcessingRequest(response_trailers=pb.HttpTrailers())])
    async def test_the_last_reply_is_sent_when_all_has_been_observed(self, end):
        """The peer may be gone as soon as it has it."""

        class Watching(ScriptedCall):
            def send(self, data):
                super().send(data)
                observed.append(len(director.observed))

        observed = []
        director = ScriptedDirector(observe=Observe.CHUNKS)
        await run(director, Watching(request_headers(), request_body(), response_headers(), end, None))
        assert observed == [0, 0, 0, 1]
        assert [end_of_stream for _, end_of_stream in director.observed] == [True]
        assert director.terminations == [Termination.NATURAL]

    async def test_a_protocol_error(self):
        director = ScriptedDirector()
        with pytest.raises(PeerError):
            await run(director, ScriptedCall(request_headers(), response_body()))
        assert director.terminations == [Termination.ERROR]

    @pytest.mark.parametrize("picks", [None, forever], ids=["routed", "picking"])
    async def test_a_stream_let_go_ends_and_hears_no_more(self, picks):
        director = ScriptedDirector(picks)
        call = ScriptedCall(request_headers(), request_body())
        ended = run(director, call)
        await director.picking.wait()  # a pick that waits has not begun yet
        call.stream.release()
        await ended
        assert len(director.outcomes) == 1
        for late in (response_headers().SerializeToString(), None):
            call.stream.received(late)
        call.stream.release()
        assert len(director.outcomes) == 1

    async def test_what_still_comes_after_a_stream_was_let_go_during_its_pick_does_not_matter(self):
        director = ScriptedDirector(forever)
        call = ScriptedCall(request_headers(pb.ProtocolConfiguration(request_body_mode=4)), request_body())
        ended = run(director, call)
        await director.picking.wait()
        call.stream.release()
        call.stream.received(request_body(b"more").SerializeToString())
        await ended
        assert director.terminations == [Termination.CLIENT]

    async def test_replies_are_sent_in_order_and_the_last_one_reads_on(self):
        body = b"x" * 200_000
        modes = pb.ProtocolConfiguration(request_body_mode=pb.ProcessingMode.FULL_DUPLEX_STREAMED)
        call = ScriptedCall(request_headers(modes), request_body(body))
        director = ScriptedDirector()
        run(director, call)
        await director.picking.wait()
        assert call.kinds == ["request_headers"] + ["request_body"] * 4
        chunks = [reply.request_body.response.body_mutation.streamed_response for reply in call.replies[1:]]
        assert b"".join(chunk.body for chunk in chunks) == body
        assert call.reading

    async def test_an_empty_stream_is_no_request(self):
        director = ScriptedDirector()
        await run(director, ScriptedCall(None))
        assert director.outcomes == []


async def test_requests_routed_without_their_bodies_are_reported_once(caplog):
    _warn_unseen_bodies.cache_clear()
    modes = pb.ProtocolConfiguration(request_body_mode=pb.ProcessingMode.NONE)
    for _ in range(2):
        await run(ScriptedDirector(), ScriptedCall(request_headers(modes), None))
    await run(ScriptedDirector(), ScriptedCall(request_headers(modes, end_of_stream=True), None))
    [record] = caplog.records
    assert "request_body_mode" in record.message


async def test_the_response_phase_reports_who_served():
    served = []

    class Director(ScriptedDirector):
        def answered(self, route, response):
            served.append(response)
            return Answer()

    message = response_headers()
    fields = message.metadata_context.filter_metadata["envoy.lb"].fields
    fields["x-gateway-destination-endpoint-served"].string_value = "10.0.0.8:8000"
    await run(Director(), ScriptedCall(request_headers(), request_body(), message, None))
    assert served == [ResponseHead(200, {":status": "200"}, "10.0.0.8:8000", 7.0)]
