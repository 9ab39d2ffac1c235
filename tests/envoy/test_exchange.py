"""Whole exchanges through a real Envoy, in both profiles."""

from __future__ import annotations

import asyncio
import hashlib
import io
import random

import pytest

from epp.errors import Code, Refusal
from epp.routing import Observe, Route, Termination

from .conftest import Profile

pytestmark = pytest.mark.envoy

REFUSALS = [
    Refusal(Code.BadRequest, "prompt: must not be empty"),
    Refusal(Code.ResourceExhausted, "saturated", reason="rejected-saturated"),
    Refusal(Code.ServiceUnavailable, "nobody", reason="rejected-no-endpoints"),
]


async def test_a_json_request_goes_where_the_director_says(start, profile, upstream, director):
    proxy = await start(profile)
    async with proxy.post("/v1/completions?a=b", json={"prompt": "hello"}) as response:
        assert response.status == 200
        assert await response.json() == {"method": "POST", "size": 19}
    [(request, body)] = upstream.requests
    assert body == b'{"prompt": "hello"}'
    assert request.headers["x-gateway-destination-endpoint"] == upstream.address
    [(head, seen, subset)] = director.requests
    assert (head.method, head.path, seen, subset) == ("POST", "/v1/completions?a=b", body, None)
    finished = await director.finished.get()
    assert finished.route.destination == upstream.address
    assert (finished.outcome.termination, finished.outcome.status) == (Termination.NATURAL, 200)


@pytest.mark.parametrize("size", [32_769, 131_073, 300_000, 4_300_000])
async def test_long_bodies_arrive_byte_for_byte(start, profile, upstream, director, size):
    proxy = await start(profile)
    body = random.Random(size).randbytes(size)
    async with proxy.post("/v1/completions", data=io.BytesIO(body)) as response:
        assert (await response.json())["size"] == size
    assert hashlib.sha256(upstream.last[1]).digest() == hashlib.sha256(body).digest()
    assert director.requests[0][1] == body


async def test_a_body_in_pieces_is_picked_whole(start, profile, upstream, director):
    async def pieces():
        for piece in (b"one ", b"", b"two ", b"three"):
            yield piece
            await asyncio.sleep(0.01)

    proxy = await start(profile)
    async with proxy.post("/v1/completions", data=pieces()) as response:
        assert response.status == 200
    assert upstream.last[1] == director.requests[0][1] == b"one two three"


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "DELETE"])
async def test_requests_without_a_body(start, profile, upstream, director, method):
    proxy = await start(profile)
    async with proxy.request(method, "/v1/models") as response:
        await response.read()
        assert response.status == 200
    assert upstream.last[0].method == method
    assert (await director.finished.get()).outcome.termination is Termination.NATURAL


async def test_an_empty_post(start, profile, upstream, director):
    proxy = await start(profile)
    async with proxy.post("/v1/completions") as response:
        assert response.status == 200
    assert director.requests[0][1] == upstream.last[1] == b""


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: str(refusal.status))
@pytest.mark.parametrize("arguments", [{"data": b"{}"}, {}], ids=["body", "no-body"])
async def test_a_refusal_reaches_the_client(start, profile, upstream, director, refusal, arguments):
    async def refuse(*_):
        raise refusal

    director.picks = refuse
    proxy = await start(profile)
    async with proxy.post("/v1/completions", **arguments) as response:
        assert response.status == refusal.status
        assert await response.read() == refusal.body
        assert response.headers["content-type"] == "application/json"
        assert response.headers.get("x-llm-d-request-dropped-reason", "") == refusal.reason
    assert not upstream.requests
    assert (await director.finished.get()).outcome.termination is Termination.REFUSED


async def test_a_body_over_the_limit_is_413_with_a_reason(start, profile, upstream):
    proxy = await start(profile, max_body_bytes=100_000)
    async with proxy.post("/v1/completions", data=bytes(100_001)) as response:
        assert response.status == 413
        assert "limit of 100000 bytes" in (await response.json())["error"]["message"]
    async with proxy.post("/v1/completions", data=bytes(100_000)) as response:
        assert response.status == 200
    assert len(upstream.requests) == 1


async def test_a_body_over_envoys_own_limit_is_413_too(start, director):
    proxy = await start(Profile.BUFFERED, max_body_bytes=100_000)
    async with proxy.post("/v1/completions", data=io.BytesIO(bytes(4 << 20))) as response:
        assert response.status == 413
    finished = await director.finished.get()
    assert finished.route is None
    assert finished.outcome.status in (0, 413)


async def test_a_replaced_body_is_framed_right(start, profile, upstream, director):
    async def replace(head, body, subset):
        return Route(director.destination, body=b'{"model": "a much longer name"}')

    director.picks = replace
    proxy = await start(profile)
    async with proxy.post("/v1/completions", json={"model": "a"}) as response:
        assert response.status == 200
    request, body = upstream.last
    assert body == b'{"model": "a much longer name"}'
    assert request.headers.get("content-length", "31") == "31"


async def test_headers_are_set_and_removed(start, profile, upstream, director):
    async def pick(head, body, subset):
        return Route(director.destination, set_headers=[("x-added", "1")], remove_headers=["x-secret"])

    director.picks = pick
    proxy = await start(profile)
    async with proxy.post("/v1/completions", data=b"{}", headers={"x-secret": "s", "x-added": "0"}) as response:
        assert response.status == 200
    assert upstream.last[0].headers.getall("x-added") == ["1"]
    assert "x-secret" not in upstream.last[0].headers


class TestAnswers:
    async def test_an_event_stream_passes(self, start, profile, director):
        proxy = await start(profile)
        async with proxy.post("/sse", data=b"{}") as response:
            assert await response.read() == b"data: 0\n\ndata: 1\n\ndata: 2\n\ndata: [DONE]\n\n"
        assert (await director.finished.get()).outcome.termination is Termination.NATURAL

    async def test_events_are_not_held_back(self, start, profile, upstream, director):
        director.observe_what = Observe.CHUNKS
        upstream.release.clear()
        proxy = await start(profile)
        async with proxy.post("/sse", data=b"{}") as response:
            first = await asyncio.wait_for(response.content.readuntil(b"data: 2\n\n"), 5)
            assert first.startswith(b"data: 0")
            upstream.release.set()
            assert await response.content.read() == b"data: [DONE]\n\n"

    async def test_a_json_answer_is_observed_whole(self, start, profile, director):
        director.observe_what = Observe.WHOLE
        proxy = await start(profile)
        async with proxy.post("/v1/completions", data=b"{}") as response:
            body = await response.read()
        finished = await director.finished.get()
        assert director.observed == [(body, True)]
        assert finished.outcome.termination is Termination.NATURAL
        assert finished.outcome.response_bytes == len(body)

    async def test_an_event_stream_is_observed_chunk_by_chunk(self, start, profile, director):
        director.observe_what = Observe.CHUNKS
        proxy = await start(profile)
        async with proxy.post("/sse?events=50", data=b"{}") as response:
            body = await response.read()
        await director.finished.get()
        assert b"".join(data for data, _ in director.observed) == body
        assert [end for _, end in director.observed][-1]

    async def test_an_unobserved_answer_does_not_pass_through_the_picker(self, start, director):
        proxy = await start(Profile.BUFFERED)
        async with proxy.post("/v1/completions", data=b"{}") as response:
            await response.read()
        assert (await director.finished.get()).outcome.response_bytes == 0

    async def test_a_dead_engine_is_an_answer_of_envoy(self, start, profile, director):
        director.destination = "127.0.0.1:1"
        proxy = await start(profile)
        async with proxy.post("/v1/completions", data=b"{}") as response:
            assert response.status == 503
        assert (await director.finished.get()).outcome.status == 503


class TestEnds:
    async def test_a_client_that_leaves_mid_stream_finishes_once(self, start, profile, upstream, director):
        director.observe_what = Observe.CHUNKS
        upstream.release.clear()
        proxy = await start(profile)
        async with proxy.post("/sse", data=b"{}") as response:
            await response.content.readuntil(b"data: 2\n\n")
        finished = await asyncio.wait_for(director.finished.get(), 5)
        assert finished.outcome.termination is Termination.CLIENT
        assert finished.outcome.response_bytes == 27
        await idle(proxy, director)

    async def test_a_client_that_leaves_mid_pick_finishes_once(self, start, profile, upstream, director):
        cancelled = asyncio.Event()

        async def pick(*_):
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        director.picks = pick
        proxy = await start(profile)
        request = asyncio.create_task(proxy.post("/v1/completions", data=b"{}").__aenter__())
        await director.picking.wait()
        request.cancel()
        await asyncio.wait_for(cancelled.wait(), 5)
        finished = await director.finished.get()
        assert (finished.route, finished.outcome.termination) == (None, Termination.CLIENT)
        await idle(proxy, director)
        assert not upstream.requests

    async def test_a_fault_in_the_pick_is_a_500_and_the_next_request_works(self, start, profile, director, caplog):
        async def fail(*_):
            raise KeyError("fault")

        director.picks = fail
        proxy = await start(profile)
        async with proxy.post("/v1/completions", data=b"{}") as response:
            assert response.status == 500
            assert "internal error" in (await response.json())["error"]["message"]
        director.picks = None
        async with proxy.post("/v1/completions", data=b"{}") as response:
            assert response.status == 200

    async def test_a_burst_leaves_no_stream_open(self, start, profile, director):
        proxy = await start(profile)

        async def one():
            async with proxy.post("/v1/completions", data=b"x" * 70_000) as response:
                assert response.status == 200
                await response.read()

        await asyncio.gather(*(one() for _ in range(40)))
        for _ in range(40):
            assert (await director.finished.get()).outcome.termination is Termination.NATURAL
        await idle(proxy, director)


async def idle(proxy, director):
    """Until no stream is open; then nothing may be left to finish."""
    await proxy.until_idle()
    assert director.finished.empty()


class TestUpgrades:
    async def test_a_websocket_opens_and_carries_messages(self, start, profile, director):
        proxy = await start(profile)
        async with proxy.http.ws_connect(f"{proxy.url}/ws") as socket:
            await socket.send_str("hello")
            assert await socket.receive_str(timeout=5) == "hello"
        assert director.requests[0][1] == b""
        await asyncio.wait_for(director.finished.get(), 5)


async def test_picker_gone_is_a_500_not_a_hang(start, profile):
    proxy = await start(profile)
    await proxy.server.stop()
    async with proxy.post("/v1/completions", data=b"{}") as response:
        assert response.status >= 500


async def test_answers_that_do_not_pass_through_the_picker_outlive_it(start, upstream):
    upstream.release.clear()
    proxy = await start(Profile.BUFFERED)
    async with proxy.post("/sse", data=b"{}") as response:
        await response.content.readuntil(b"data: 2\n\n")
        await proxy.server.drain(0.05)
        upstream.release.set()
        assert await response.content.read() == b"data: [DONE]\n\n"
