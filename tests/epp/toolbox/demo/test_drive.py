"""The clients against a scripted engine: what they send, what they note down, and how they fail."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from epp.toolbox.demo.drive import Call, Client, run_moves, run_plan
from epp.toolbox.demo.moves import Action, Move
from epp.toolbox.demo.traffic import History, Plan, Session, Style, Turn

USAGE = {"prompt_tokens": 100, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 64}}


class Engine:
    """Answers every request with "hello"; tests replace `answer`."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.ids: list[str] = []
        self.events = [{"choices": [{"delta": {"role": "assistant"}}]}, {"choices": [{"delta": {"content": "hel"}}]},
                       {"choices": [{"delta": {"content": "lo"}}]}, {"choices": [], "usage": USAGE}]  # fmt: skip
        self.ending = b"data: [DONE]\n\n"
        self.status = 200
        self.usage: dict[str, Any] = USAGE

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.ids.append(request.headers["x-request-id"])
        if self.status != 200:
            return web.Response(status=self.status, text="no endpoint")
        if body.get("stream"):
            return await self._stream(request)
        choice = {"message": {"content": "hello"}} if "messages" in body else {"text": "hello"}
        return web.json_response({"choices": [choice], "usage": self.usage})

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for event in self.events:
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await response.write(self.ending)
        return response


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
async def client(engine: Engine) -> AsyncIterator[Client]:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", engine.answer)
    app.router.add_post("/v1/completions", engine.answer)
    async with TestServer(app) as server, aiohttp.ClientSession() as http:
        yield Client(http, f"http://127.0.0.1:{server.port}", "demo", lambda call: None)


CHAT = History(Style.CHAT, "system", ["question"])


@pytest.mark.parametrize("style", list(Style))
@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_is_noted_down_with_the_engines_own_figures(
    client: Client, engine: Engine, style: Style, stream: bool
) -> None:
    if style is not Style.CHAT:
        engine.events = [{"choices": [{"text": "hel"}]}, {"choices": [{"text": "lo"}], "usage": USAGE}]
    call = await client.ask("id-1", History(style, "system", ["question"]), 5, stream=stream)
    assert (call.status, call.error, call.text) == (200, "", "hello")
    assert (call.prompt_tokens, call.cached_tokens) == (100, 64)
    assert call.sent_at < call.first_at <= call.done_at
    assert engine.ids == ["id-1"]
    assert client.calls == [call]


async def test_the_first_token_of_a_stream_is_not_its_role_event(client: Client, engine: Engine) -> None:
    engine.events = [{"choices": [{"delta": {"role": "assistant", "content": ""}}]}, {"choices": [], "usage": USAGE}]
    call = await client.ask("id", CHAT, 5, stream=True)
    assert call.first_at == call.done_at


async def test_an_error_status_is_a_failure_with_the_engines_words(client: Client, engine: Engine) -> None:
    engine.status = 503
    call = await client.ask("id", CHAT, 5, stream=True)
    assert call.failed
    assert call.error == "HTTP 503: no endpoint"


async def test_a_stream_that_breaks_off_is_a_failure(client: Client, engine: Engine) -> None:
    engine.ending = b""
    assert "[DONE]" in (await client.ask("id", CHAT, 5, stream=True)).error


async def test_an_error_event_is_a_failure(client: Client, engine: Engine) -> None:
    engine.events = [{"error": {"message": "out of memory"}}]
    assert "out of memory" in (await client.ask("id", CHAT, 5, stream=True)).error


async def test_an_answer_without_cached_tokens_is_a_failure(client: Client, engine: Engine) -> None:
    engine.usage = {"prompt_tokens": 100}
    assert "cached_tokens" in (await client.ask("id", CHAT, 5, stream=False)).error


async def test_nobody_listening_is_a_failure() -> None:
    done: list[Call] = []
    async with aiohttp.ClientSession() as http:
        call = await Client(http, "http://127.0.0.1:1", "demo", done.append).ask("id", CHAT, 5, stream=False)
    assert call.failed
    assert done == [call]


def session(*texts: str) -> Session:
    return Session("s", Style.CHAT, 0.0, "system", tuple(Turn(text, 0.0, 5, False) for text in texts))


async def test_a_conversation_carries_the_engines_answers_on(client: Client, engine: Engine) -> None:
    histories = await run_plan(client, Plan((session("one", "two"),)), "rr")
    assert [message["content"] for message in engine.bodies[1]["messages"]] == ["system", "one", "hello", "two"]
    assert engine.ids == ["rr-s-0", "rr-s-1"]
    assert histories == {"s": History(Style.CHAT, "system", ["one", "hello", "two", "hello"])}


async def test_a_conversation_ends_with_its_first_failure(client: Client, engine: Engine) -> None:
    engine.status = 500
    await run_plan(client, Plan((session("one", "two"),)), "rr")
    assert len(client.calls) == 1


def move(action: Action, history: str, text: str = "ignored", source: str = "", salt: str = "") -> Move:
    return Move(action, history, source, Style.TEXT, "opening", text, 5, False, salt)


async def test_moves_open_repeat_extend_salt_and_return_one_after_another(client: Client, engine: Engine) -> None:
    moves = [
        move(Action.OPEN, "a", "one"),
        move(Action.REPEAT, "a"),
        move(Action.EXTEND, "a", "two"),
        move(Action.FLOOD, "b", "other"),
        move(Action.SALT, "c", source="a", salt="tenant"),
        move(Action.EXTEND, "c", "three", salt="tenant"),
        move(Action.RETURN, "d", "again", source="ask-1"),
        move(Action.REPEAT, "a"),
    ]
    earlier = {"ask-1": History(Style.TEXT, "document", ["question", " answer"])}
    sent_before: list[int] = []

    async def settle() -> None:
        await asyncio.sleep(0)
        sent_before.append(len(engine.bodies))

    await run_moves(client, moves, earlier, "exact", settle)
    first, third = "opening\n\none", "opening\n\nonehello\n\ntwo"
    assert [body["prompt"] for body in engine.bodies] == [
        first, first, third, "opening\n\nother", third, third + "hello\n\nthree",
        "document\n\nquestion answer\n\nagain", third,
    ]  # fmt: skip
    assert [body.get("cache_salt") for body in engine.bodies] == [None] * 4 + ["tenant"] * 2 + [None] * 2
    assert sent_before == list(range(8))
    assert engine.ids == [f"exact-{i}" for i in range(8)]
    assert earlier["ask-1"].said == ["question", " answer"]
