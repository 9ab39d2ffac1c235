"""Asking real HTTP servers on loopback for their models."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
from aiohttp import web

from epp.fleet.endpoint import EndpointSpec
from epp.fleet.fleet import Fleet
from epp.fleet.model_names import Kind, ModelNames
from epp.fleet.models import ModelSettings, ModelWatcher
from tests.waiting import until

LIST = b'{"data":[{"id":"8b"},{"id":"poet","parent":"8b","root":"/p"}]}'
EAGER = ModelSettings(interval=0.02, shortest=0.01, timeout=0.2, max_bytes=10_000)
RARE = ModelSettings(interval=3600, shortest=0.01)

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


def answers(body: bytes, status: int = 200, **headers: str) -> Answer:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(body=body, status=status, headers=headers)

    return answer


@dataclass
class Watching:
    fleet: Fleet
    names: ModelNames
    answer: Answer
    port: int = 0
    asked: int = 0
    _runner: web.AppRunner | None = None

    @property
    def spec(self) -> EndpointSpec:
        return EndpointSpec(f"127.0.0.1:{self.port}", "pod")

    async def start(self) -> None:
        """Serve, on the same port every time."""
        app = web.Application()
        app.router.add_get("/v1/models", self.serve)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.01)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def serve(self, request: web.Request) -> web.StreamResponse:
        self.asked += 1
        return await self.answer(request)

    async def asked_again(self, times: int = 2) -> None:
        wanted = self.asked + times
        await until(lambda: self.asked >= wanted)


@asynccontextmanager
async def watching(answer: Answer, settings: ModelSettings = EAGER) -> AsyncIterator[Watching]:
    fleet, names = Fleet(), ModelNames()
    watching = Watching(fleet, names, answer)
    await watching.start()
    watcher = ModelWatcher(fleet, names, settings)
    await watcher.start()
    fleet.apply([watching.spec])
    try:
        yield watching
    finally:
        await watcher.stop()
        await watching.stop()


async def test_a_list_is_known_soon_after_its_endpoint() -> None:
    async with watching(answers(LIST), RARE) as w:
        assert w.names.kind("poet") is Kind.UNLISTED  # it was asked for, and nothing is expected meanwhile
        await until(lambda: w.names.kind("poet") is Kind.ADAPTER)
        assert w.names.kind("8b") is Kind.BASE


async def test_it_is_asked_for_again_and_again() -> None:
    async with watching(answers(LIST)) as w:
        await until(lambda: w.names.kind("poet") is Kind.ADAPTER)
        w.answer = answers(b'{"data":[{"id":"8b"}]}')
        await until(lambda: w.names.kind("poet") is Kind.UNLISTED)


async def test_a_name_that_no_list_has_brings_a_question_forward_however_often_it_is_named() -> None:
    async with watching(answers(b'{"data":[{"id":"8b"}]}'), RARE) as w:
        await until(lambda: len(w.names))
        assert w.asked == 1
        w.answer = answers(LIST)
        for _ in range(1000):
            w.names.kind("poet")
        await until(lambda: w.names.kind("poet") is Kind.ADAPTER)
        assert w.asked <= 3  # the last one for those that asked while the second was under way


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(answers(b"not found", 404), id="no such page"),
        pytest.param(answers(b'{"error":"key?"}', 401), id="an API key is wanted"),
        pytest.param(answers(b"", 500), id="an error"),
        pytest.param(answers(b"<html></html>"), id="HTML"),
        pytest.param(answers(b'{"data":[]}'), id="no models"),
        pytest.param(answers(LIST + b" " * 10_000), id="a huge page"),
        pytest.param(answers(b"", 302, Location="/v1/models"), id="a redirect"),
        pytest.param(answers(gzip.compress(LIST), **{"Content-Encoding": "gzip"}), id="compressed though not asked to"),
    ],
)
async def test_an_engine_without_a_list_is_nothing_special(answer: Answer) -> None:
    async with watching(answer) as w:
        await until(lambda: w.names.kind("poet") is Kind.UNKNOWN)
        w.answer = answers(LIST)
        await until(lambda: w.names.kind("poet") is Kind.ADAPTER)
        w.answer = answer
        await w.asked_again()
        assert w.names.kind("poet") is Kind.ADAPTER  # as it said before


async def test_one_that_never_answers_is_given_up_in_time() -> None:
    async def silence(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(3600)
        raise AssertionError

    async with watching(silence) as w:
        assert w.names.kind("poet") is Kind.UNLISTED
        await until(lambda: w.names.kind("poet") is Kind.UNKNOWN)
        await w.asked_again()


async def test_one_that_is_not_there_yet_is_asked_until_it_is() -> None:
    async with watching(answers(LIST), RARE) as w:
        await w.stop()
        w.fleet.apply([])
        w.fleet.apply([w.spec])
        await until(lambda: w.names.kind("poet") is Kind.UNKNOWN)
        await w.start()
        await until(lambda: w.names.kind("poet") is Kind.ADAPTER)


async def test_with_its_endpoint_a_list_and_its_task_are_gone() -> None:
    def tasks() -> list[asyncio.Task[None]]:
        return [task for task in asyncio.all_tasks() if task.get_name().startswith("models of")]

    async with watching(answers(LIST)) as w:
        for _ in range(20):
            w.fleet.apply([w.spec])
            await until(lambda: w.names.kind("poet") is Kind.ADAPTER)
            assert len(tasks()) == 1
            w.fleet.apply([])
            assert w.names.kind("poet") is Kind.UNKNOWN
            await until(lambda: not tasks())
