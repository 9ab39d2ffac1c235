"""The driver against a scripted stream and a scripted director."""

from __future__ import annotations

import asyncio
import logging

import pytest

from epp.errors import Code, Refusal
from epp.exchange.machine import PeerError
from epp.routing import Answer, Observe, Outcome, RequestHead, ResponseHead, Route, Termination
from epp.stream import CallLost, Stream, _warn_unseen_bodies
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
    """Gives the messages put into it; keeps the replies."""

    def __init__(self, *messages):
        self.replies = []
        self.lost = False
        self._inbox = asyncio.Queue()
        for message in messages:
            self.put(message)

    def put(self, message):
        self._inbox.put_nowait(message and message.SerializeToString())

    async def read(self):
        return await self._inbox.get()

    async def write(self, data):
        if self.lost:
            raise CallLost
        self.replies.append(pb.ProcessingResponse.FromString(data))

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

    async def pick(self, head, body, subset):
        self.asked.append((head, body, subset))
        self.picking.set()
        if self.picks is not None:
            return await self.picks()
        return Route("10.0.0.7:8000")

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
    return asyncio.create_task(Stream(director, call, clock=lambda: 7.0).run())


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


async def test_a_pick_that_does_not_wait_needs_no_task_of_its_own():
    director = ScriptedDirector()
    before = asyncio.all_tasks()
    call = ScriptedCall(request_headers(), request_body(), None)
    task = run(director, call)
    await director.picking.wait()
    assert asyncio.all_tasks() - before <= {task}
    await task


async def test_a_refusal_is_answered_and_ends_the_stream():
    async def refuse():
        raise Refusal(Code.ServiceUnavailable, "nobody")

    director = ScriptedDirector(refuse)
    call = ScriptedCall(request_headers(), request_body())
    await run(director, call)
    assert call.replies[-1].immediate_response.status.code == 503
    assert director.terminations == [Termination.REFUSED]


async def test_a_fault_while_picking_is_a_500_logged_once(caplog):
    async def fail():
        raise KeyError("fault")

    director = ScriptedDirector(fail)
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


class TestEnds:
    async def test_a_reset_during_the_pick_cancels_it(self):
        director = ScriptedDirector(forever)
        task = run(director, ScriptedCall(request_headers(), request_body()))
        await director.picking.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert director.terminations == [Termination.CLIENT]

    async def test_a_reset_while_reading_ahead_leaves_no_task(self):
        director = ScriptedDirector(forever)
        before = asyncio.all_tasks()
        task = run(director, ScriptedCall(request_headers(), request_body()))
        await director.picking.wait()
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks() - before) == 2  # the stream, and its reader ahead
        task.cancel()
        await asyncio.wait([task])
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == before

    async def test_a_half_close_during_the_pick_cancels_it(self):
        cancelled = asyncio.Event()

        async def pick():
            try:
                await forever()
            finally:
                cancelled.set()

        director = ScriptedDirector(pick)
        call = ScriptedCall(request_headers(), request_body())
        task = run(director, call)
        await director.picking.wait()
        call.put(None)
        await task
        assert cancelled.is_set()
        assert task.cancelling() == 0
        assert director.terminations == [Termination.CLIENT]

    async def test_an_answer_of_envoy_itself_during_the_pick_cancels_it(self):
        director = ScriptedDirector(forever)
        call = ScriptedCall(request_headers(), request_body())
        task = run(director, call)
        await director.picking.wait()
        call.put(response_headers("504"))
        call.put(None)
        await task
        assert call.kinds == ["request_headers", "response_headers"]
        [(route, outcome)] = director.outcomes
        assert route is None
        assert outcome.status == 504

    async def test_a_message_read_ahead_is_not_lost(self):
        release = asyncio.Event()

        async def slowly():
            await release.wait()
            return Route("10.0.0.7:8000")

        director = ScriptedDirector(slowly)
        call = ScriptedCall(request_headers(pb.ProtocolConfiguration(request_body_mode=4)), request_body())
        task = run(director, call)
        await director.picking.wait()
        call.put(request_body(b"", True))
        call.put(response_headers())
        call.put(None)
        await asyncio.sleep(0)
        release.set()
        await task
        assert call.kinds == ["request_headers", "request_body", "response_headers"]

    async def test_a_half_close_before_the_response(self):
        director = ScriptedDirector()
        await run(director, ScriptedCall(request_headers(), request_body(), None))
        assert director.terminations == [Termination.CLIENT]

    @pytest.mark.parametrize("end", [response_body(b"end"), pb.ProcessingRequest(response_trailers=pb.HttpTrailers())])
    async def test_a_peer_that_leaves_with_its_last_reply_has_been_heard_to_the_end(self, end):
        class Leaving(ScriptedCall):
            async def write(self, data):
                await super().write(data)
                if len(self.replies) == 4:
                    task.cancel()
                    await asyncio.sleep(0)

        director = ScriptedDirector(observe=Observe.CHUNKS)
        task = run(director, Leaving(request_headers(), request_body(), response_headers(), end))
        await asyncio.wait([task])
        assert [end_of_stream for _, end_of_stream in director.observed] == [True]
        assert director.terminations == [Termination.NATURAL]

    async def test_a_stream_lost_while_writing(self, caplog):
        director = ScriptedDirector()
        call = ScriptedCall(request_headers(), request_body())
        call.lost = True
        await run(director, call)
        assert director.terminations == [Termination.CLIENT]
        assert not caplog.records

    async def test_a_protocol_error(self):
        director = ScriptedDirector()
        with pytest.raises(PeerError):
            await run(director, ScriptedCall(request_headers(), response_body()))
        assert director.terminations == [Termination.ERROR]

    @pytest.mark.parametrize("picks", [None, forever], ids=["routed", "picking"])
    async def test_a_stream_let_go_returns(self, picks):
        director = ScriptedDirector(picks)
        stream = Stream(director, ScriptedCall(request_headers(), request_body()))
        task = asyncio.create_task(stream.run())
        await director.picking.wait()
        stream.release()
        await task
        assert len(director.outcomes) == 1

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
