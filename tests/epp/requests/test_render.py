"""Tokens from render endpoints: the engine's ids, or a reason within the time allowed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer

from epp.requests import render
from epp.requests.model import ChatPrompt, InferenceRequest, Prompt
from epp.requests.render import RenderTokens

CHAT = ChatPrompt([{"role": "user", "content": "hi"}])


class Engine:
    """Answers render calls as told and remembers them."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, bytes]] = []
        self.warm = asyncio.Event()
        self.answer: Callable[[], Any] = lambda: [{"token_ids": [1, 2]}]
        self.status = 200

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if b"warm-up" in body:
            self.warm.set()
            return web.json_response({"token_ids": [0]})
        self.calls.append((request.path, body))
        answer = self.answer()
        if asyncio.iscoroutine(answer):
            answer = await answer
        text = answer if isinstance(answer, str) else json.dumps(answer)
        return web.Response(text=text, status=self.status, content_type="application/json")


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def now() -> list[float]:
    return [100.0]


@pytest_asyncio.fixture
async def tokens(engine: Engine, now: list[float]) -> AsyncIterator[RenderTokens]:
    application = web.Application()
    application.router.add_post("/{path:.*}", engine.handle)
    async with TestServer(application) as server:
        service = RenderTokens(str(server.make_url("/")), "base", 0.2, clock=lambda: now[0])
        await service.start()
        yield service
        await service.stop()


def asked(prompt: Prompt = "p", body: bytes = b'{"model":"lora", "x":1.0, "prompt":"p"}') -> InferenceRequest:
    return InferenceRequest("r1", "/", {}, body, model="lora", prompts=(prompt,))


async def test_completions_are_rendered_under_the_base_models_name_and_otherwise_as_sent(
    tokens: RenderTokens, engine: Engine
) -> None:
    request = asked()
    await tokens.produce(request)
    assert request.tokens == [b"\1\0\0\0\2\0\0\0"]
    assert engine.calls == [("/v1/completions/render", b'{"model":"base","x":1.0,"prompt":"p"}')]


async def test_a_body_that_names_the_base_model_goes_on_byte_for_byte(tokens: RenderTokens, engine: Engine) -> None:
    body = b'{ "model" : "base" }'
    await tokens.produce(asked(body=body))
    assert engine.calls[0][1] == body


async def test_chats_have_an_endpoint_of_their_own(tokens: RenderTokens, engine: Engine) -> None:
    engine.answer = lambda: {"token_ids": [3], "features": None}
    request = asked(CHAT)
    await tokens.produce(request)
    assert request.tokens == [b"\3\0\0\0"]
    assert engine.calls[0][0] == "/v1/chat/completions/render"


async def test_the_endpoint_is_warmed_up_at_start(tokens: RenderTokens, engine: Engine) -> None:
    await asyncio.wait_for(engine.warm.wait(), 5)


@pytest.mark.parametrize(
    "answer",
    ["<html>", "[]", [{"token_ids": ["x"]}], [{"token_ids": [-1]}], [{"token_ids": [1]}] * 2, "[" * 100_000],
    ids=lambda answer: str(answer)[:30],
)  # fmt: skip
async def test_an_answer_that_cannot_be_used_leaves_the_request_unscored(
    tokens: RenderTokens, engine: Engine, answer: Any
) -> None:
    engine.answer = lambda: answer
    request = asked()
    await tokens.produce(request)
    assert request.unscored in ("render: unreadable answer", "render: wrong number of prompts")
    assert request.tokens == ()


async def test_a_refused_render_leaves_the_request_unscored(tokens: RenderTokens, engine: Engine) -> None:
    engine.status = 403
    request = asked()
    await tokens.produce(request)
    assert request.unscored == "render: status 403"


async def test_a_slow_endpoint_is_not_waited_for(tokens: RenderTokens, engine: Engine) -> None:
    engine.answer = lambda: asyncio.sleep(2, [])
    request = asked()
    await tokens.produce(request)
    assert request.unscored == "render: timeout"


async def test_an_endpoint_that_is_away_leaves_the_request_unscored(unused_tcp_port: int) -> None:
    service = RenderTokens(f"http://127.0.0.1:{unused_tcp_port}", "base", 1)
    request = asked()
    await service.produce(request)
    assert request.unscored == "render: not started"
    await service.start()
    await service.produce(request)
    assert request.unscored == "render: ClientConnectorError"
    await service.stop()


async def test_an_answer_over_the_limit_is_not_read(
    tokens: RenderTokens, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(render, "MAX_ANSWER_BYTES", 5)
    request = asked()
    await tokens.produce(request)
    assert request.unscored == "render: answer too large"


async def test_after_several_failures_the_endpoint_is_left_alone_for_a_while(
    tokens: RenderTokens, engine: Engine, now: list[float]
) -> None:
    engine.status = 503
    for _ in range(render.FAILURES):
        await tokens.produce(asked())
    request = asked()
    await tokens.produce(request)
    assert request.unscored == "render: paused after failures"
    assert len(engine.calls) == render.FAILURES
    now[0] += render.PAUSE
    engine.status = 200
    request = asked()
    await tokens.produce(request)
    assert request.tokens


async def test_no_more_requests_wait_than_allowed(
    tokens: RenderTokens, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(render, "QUEUE", 1)
    free = asyncio.Event()

    async def hold() -> list[dict[str, list[int]]]:
        await free.wait()
        return [{"token_ids": [1]}]

    engine.answer = hold
    first = asyncio.ensure_future(tokens.produce(asked()))
    await asyncio.sleep(0)
    second = asked()
    await tokens.produce(second)
    assert second.unscored == "render: busy"
    assert tokens.occupancy == {"queue": 1}
    free.set()
    await first
    assert tokens.queued == 0
