"""Scraping real HTTP servers on loopback, friendly and hostile ones."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from aiohttp import web

from epp import tls
from epp.fleet.endpoint import Endpoint, EndpointSpec, EngineLoad
from epp.fleet.fleet import Fleet
from epp.fleet.scrape import Scraper, ScrapeSettings, ScrapeState, _phase

GOOD = b"vllm:num_requests_waiting 3\nvllm:num_requests_running 2\nvllm:kv_cache_usage_perc 0.5\n"
FAST = ScrapeSettings(interval=0.02, max_bytes=10_000, longest_pause=0.1)

Page = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Engine:
    """A server whose `page` may be exchanged; it tells how often it was asked and by how many at once."""

    page: Page
    port: int = 0
    asked: int = 0
    under_way: int = 0
    most_under_way: int = 0
    connections: set[object] = field(default_factory=set)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked += 1
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        assert request.transport is not None
        self.connections.add(request.transport.get_extra_info("peername"))
        try:
            return await self.page(request)
        finally:
            self.under_way -= 1


def serves(body: bytes, status: int = 200, content_type: str = "text/plain") -> Page:
    async def page(request: web.Request) -> web.StreamResponse:
        return web.Response(body=body, status=status, content_type=content_type)

    return page


@asynccontextmanager
async def running(*engines: Engine, path: str = "/metrics") -> AsyncIterator[None]:
    runners = []
    for engine in engines:
        app = web.Application()
        app.router.add_get(path, engine.answer)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.01)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", engine.port).start()
        engine.port = runner.addresses[0][1]
        runners.append(runner)
    try:
        yield
    finally:
        for runner in runners:
            await runner.cleanup()


def _unused_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Counters(Counter[str]):
    def poll_failed(self, source_type: str) -> None:
        self[source_type] += 1

    def extract_failed(self, source_type: str, extractor_type: str) -> None:
        self[extractor_type] += 1


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 (what is awaited happens in the scraper, which announces nothing)
            await asyncio.sleep(0.005)


@dataclass
class Scraping:
    fleet: Fleet
    scraper: Scraper
    counters: Counters

    def endpoint(self, index: int = 0) -> Endpoint:
        return self.fleet.endpoints[index]

    def state(self, index: int = 0) -> ScrapeState:
        state = self.scraper.state(self.endpoint(index))
        assert state is not None
        return state

    async def until(self, condition: Callable[[], bool]) -> None:
        await eventually(condition)


@asynccontextmanager
async def scraping(
    *engines: Engine, settings: ScrapeSettings = FAST, clock: Callable[[], float] = time.monotonic
) -> AsyncIterator[Scraping]:
    fleet, counters = Fleet(), Counters()
    scraper = Scraper(fleet, counters, settings, clock)
    async with running(*engines, path=settings.path):
        await scraper.start()
        fleet.apply(EndpointSpec(f"127.0.0.1:{engine.port}", f"pod-{i}") for i, engine in enumerate(engines))
        try:
            yield Scraping(fleet, scraper, counters)
        finally:
            await scraper.stop()


async def test_load_appears_on_the_endpoint_with_the_time_it_was_read() -> None:
    async with scraping(Engine(serves(GOOD)), clock=lambda: 42.0) as s:
        await s.until(lambda: s.endpoint().load.updated_at > 0)
        load = s.endpoint().load
        assert load.updated_at == 42.0
        assert (load.waiting, load.running, load.kv_usage) == (3, 2, 0.5)
        assert s.state().failures == 0
        assert s.state().page_bytes == len(GOOD)


async def test_each_reading_is_a_new_object_so_that_a_decision_keeps_what_it_saw() -> None:
    async with scraping(Engine(serves(GOOD))) as s:
        await s.until(lambda: s.endpoint().load.updated_at > 0)
        before = s.endpoint().load
        await s.until(lambda: s.endpoint().load is not before)
        assert before.waiting == 3


async def test_scrapes_repeat_over_one_connection_and_never_overlap() -> None:
    async def slow(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(0.05)
        return web.Response(body=GOOD)

    engine = Engine(slow)
    async with scraping(engine) as s:
        await s.until(lambda: engine.asked >= 4)
    assert engine.most_under_way == 1
    assert len(engine.connections) == 1


async def test_an_engine_slower_than_the_interval_is_left_alone_in_between() -> None:
    began: list[float] = []
    ended: list[float] = []

    async def slow(request: web.Request) -> web.StreamResponse:
        began.append(time.monotonic())
        await asyncio.sleep(0.15)
        ended.append(time.monotonic())
        return web.Response(body=GOOD)

    async with scraping(Engine(slow), settings=ScrapeSettings(interval=0.1)) as s:
        await s.until(lambda: len(began) >= 4)
    assert all(again - end >= 0.05 for again, end in zip(began[1:], ended, strict=False))


async def hangs(request: web.Request) -> web.StreamResponse:
    await asyncio.sleep(3600)
    raise AssertionError


async def never_ends(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    for _ in range(1000):
        await response.write(b"# HELP once more\n")
        await asyncio.sleep(0.01)
    return response


async def breaks_off(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Length": "5000"})
    await response.prepare(request)
    await response.write(GOOD)
    assert request.transport is not None
    request.transport.abort()
    return response


async def redirects(request: web.Request) -> web.StreamResponse:
    raise web.HTTPFound("/metrics?elsewhere")


BAD_PAGES = {
    "error 500": (serves(GOOD, status=500), "status 500"),
    "html": (serves(b"<html>hello</html>", content_type="text/html"), "no figures"),
    "empty": (serves(b""), "no figures"),
    "not a number": (serves(GOOD.replace(b"3", b"NaN")), "no figures"),
    "infinite": (serves(GOOD.replace(b"2", b"+Inf")), "no figures"),
    "huge": (serves(GOOD + b"# filler\n" * 10_000), "more than 10000 bytes"),
    "broken off": (breaks_off, ""),
    "a redirect": (redirects, "status 302"),
}


@pytest.mark.parametrize("kind", BAD_PAGES)
async def test_a_bad_page_is_a_failure_that_keeps_the_last_figures(kind: str) -> None:
    page, error = BAD_PAGES[kind]
    engine = Engine(serves(GOOD))
    async with scraping(engine) as s:
        await s.until(lambda: s.endpoint().load.updated_at > 0)
        engine.page = page
        await s.until(lambda: s.state().failures_in_a_row >= 2)
        assert error in s.state().last_error
        assert s.state().last_error
        assert s.endpoint().load.waiting == 3
        assert s.counters["metrics-data-source"] == s.state().failures
        engine.page = serves(GOOD.replace(b"3", b"4"))
        await s.until(lambda: s.endpoint().load.waiting == 4)
        assert (s.state().failures_in_a_row, s.state().last_error) == (0, "")


@pytest.mark.parametrize("page", [hangs, never_ends])
async def test_a_page_that_does_not_end_is_given_up_in_time_and_harms_no_other_endpoint(page: Page) -> None:
    stuck, healthy = Engine(page), Engine(serves(GOOD))
    async with scraping(stuck, healthy) as s:
        await s.until(lambda: s.state(0).failures > 0)
        assert healthy.asked > 10
        assert s.endpoint(0).load.updated_at == 0
        assert s.endpoint(1).load.waiting == 3


def test_an_endpoint_that_keeps_failing_is_asked_less_and_less_often() -> None:
    settings = ScrapeSettings(interval=0.01, longest_pause=0.16)
    scraper = Scraper(Fleet(), Counters(), settings)
    pauses = [scraper._pause(ScrapeState(failures_in_a_row=n)) for n in range(7)]
    assert pauses == pytest.approx([0.01, 0.02, 0.04, 0.08, 0.16, 0.16, 0.16])


async def test_an_endpoint_that_streams_its_load_is_asked_seldom_and_keeps_what_it_streamed() -> None:
    engine = Engine(serves(GOOD))
    async with scraping(engine, settings=ScrapeSettings(interval=0.02, longest_pause=0.5)) as s:
        await s.until(lambda: engine.asked > 0)
        streamed = EngineLoad(waiting=77, updated_at=time.monotonic(), streamed_until=time.monotonic() + 3600)
        s.endpoint().load = streamed
        asked = engine.asked
        began = time.monotonic()
        await s.until(lambda: engine.asked >= asked + 3)
        assert time.monotonic() - began > 0.5, "two long pauses, but for the scrape that was under way"
        assert s.endpoint().load.waiting == 77
        s.endpoint().load = replace(streamed, streamed_until=0.0)
        await s.until(lambda: s.endpoint().load.waiting == 3)


async def test_when_the_stream_of_a_dead_endpoint_ends_it_is_soon_found_out() -> None:
    engine, settings = Engine(serves(GOOD)), ScrapeSettings(interval=0.02, longest_pause=3600.0)
    async with scraping(settings=settings) as s:
        async with running(engine):
            s.fleet.apply([EndpointSpec(f"127.0.0.1:{engine.port}")])
            await s.until(lambda: s.endpoint().load.updated_at > 0)
            s.endpoint().load = EngineLoad(streamed_until=time.monotonic() + 3600)
        assert s.endpoint().reachable
        s.endpoint().load = EngineLoad()
        await s.until(lambda: not s.endpoint().reachable)


async def test_an_endpoint_that_refuses_connections_is_not_picked_until_it_answers_in_whatever_way() -> None:
    async with scraping(Engine(serves(GOOD))) as s:
        dead = EndpointSpec(f"127.0.0.1:{_unused_port()}")
        s.fleet.apply([s.endpoint().spec, dead])
        endpoint = s.fleet.get(dead.address)
        assert endpoint is not None
        await s.until(lambda: not endpoint.reachable)
        assert s.fleet.subset(None) == (s.endpoint(),)
        risen = Engine(serves(b"not ready", status=503), port=int(dead.address.rpartition(":")[2]))
        async with running(risen):
            await s.until(lambda: endpoint.reachable)
        assert len(s.fleet.subset(None)) == 2


async def test_a_metrics_port_of_its_own_says_nothing_of_the_port_that_serves_requests() -> None:
    async with scraping(Engine(serves(GOOD))) as s:
        spec = EndpointSpec("127.0.0.1:9", metrics_address=f"127.0.0.1:{_unused_port()}")
        s.fleet.apply([s.endpoint().spec, spec])
        endpoint = s.fleet.get(spec.address)
        assert endpoint is not None
        await s.until(lambda: (state := s.scraper.state(endpoint)) is not None and state.failures_in_a_row > 3)
        assert endpoint.reachable


async def test_an_endpoint_nobody_listens_at_is_a_failure_like_any_other() -> None:
    address = f"127.0.0.1:{_unused_port()}"
    scraper = Scraper(fleet := Fleet(), Counters(), FAST)
    fleet.apply([EndpointSpec(address)])
    await scraper.start()
    state = scraper.state(fleet.endpoints[0])
    assert state is not None
    await eventually(lambda: state.failures >= 2)
    assert "connect" in state.last_error.lower()
    await scraper.stop()


async def test_no_failure_reaches_the_log_more_than_once_in_a_row(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "epp.fleet.scrape"):
        async with scraping(Engine(serves(b"", status=503))) as s:
            await s.until(lambda: s.state().failures >= 3)
    assert [record.getMessage() for record in caplog.records] == ["a scrape failed"]


async def test_a_plain_engine_without_optional_metrics_causes_no_error_at_all(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "epp.fleet.scrape"):
        async with scraping(Engine(serves(GOOD))) as s:
            await s.until(lambda: s.state().scrapes > 5)
            assert s.counters == {}
    assert not caplog.records


async def test_an_absent_kv_usage_is_counted_each_time_shown_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "epp.fleet.scrape"):
        async with scraping(Engine(serves(GOOD.replace(b"kv_cache", b"renamed")))) as s:
            await s.until(lambda: s.counters["core-metrics-extractor"] >= 3)
            assert s.state().missing == ("kv_usage",)
    assert len(caplog.records) == 1


async def test_metrics_may_live_at_another_address_port_or_path() -> None:
    engine = Engine(serves(GOOD))
    async with running(engine, path="/prometheus"):
        settings = ScrapeSettings(interval=0.02, path="/prometheus")
        scraper = Scraper(fleet := Fleet(), Counters(), settings)
        fleet.apply([EndpointSpec("127.0.0.9:1", metrics_address=f"127.0.0.1:{engine.port}")])
        await scraper.start()
        await eventually(lambda: fleet.endpoints[0].load.updated_at > 0)
        await scraper.stop()


@pytest.mark.parametrize(
    ("settings", "spec", "url"),
    [
        (ScrapeSettings(), EndpointSpec("10.0.0.1:8000"), "http://10.0.0.1:8000/metrics"),
        (ScrapeSettings(port=9100), EndpointSpec("[fd00::1]:8000"), "http://[fd00::1]:9100/metrics"),
        (
            ScrapeSettings(scheme="https"),
            EndpointSpec("10.0.0.1:80", metrics_address="10.0.0.2:9"),
            "https://10.0.0.2:9/metrics",
        ),
    ],
)
def test_the_url_follows_settings_and_spec(settings: ScrapeSettings, spec: EndpointSpec, url: str) -> None:
    assert settings.url(Endpoint(spec, 0)) == url


async def test_scraping_begins_and_ends_with_the_endpoint() -> None:
    engine = Engine(serves(GOOD))
    async with scraping(engine) as s:
        await s.until(lambda: engine.asked > 0)
        endpoint = s.endpoint()
        s.fleet.apply([])
        assert s.scraper.state(endpoint) is None
        await asyncio.sleep(0)  # the cancelled scrape ends
        asked = engine.asked
        await asyncio.sleep(3 * FAST.interval)
        assert engine.asked <= asked + 1


async def test_stopping_ends_scrapes_under_way() -> None:
    stuck = Engine(hangs)
    async with scraping(stuck) as s:
        await s.until(lambda: stuck.asked == 1)
        async with asyncio.timeout(1):
            await s.scraper.stop()


async def test_only_so_many_scrapes_run_at_once() -> None:
    engines = [Engine(hangs) for _ in range(6)]
    async with scraping(*engines, settings=ScrapeSettings(interval=0.01, concurrency=2)) as s:
        await s.until(lambda: sum(engine.under_way for engine in engines) == 2)
        await asyncio.sleep(0.1)
        assert sum(engine.asked for engine in engines) == 2


def test_phases_spread_a_fleet_over_the_interval() -> None:
    phases = sorted(_phase(slot) for slot in range(100))
    gaps = [after - before for before, after in zip(phases, [*phases[1:], 1.0], strict=True)]
    assert max(gaps) < 0.03


class TestTls:
    """Metrics behind a certificate that the engine made for itself, which it may exchange at any time."""

    @asynccontextmanager
    async def serving(self, tmp_path: Path, port: int = 0) -> AsyncIterator[int]:
        key, certificate = tls.self_signed()
        (tmp_path / "key").write_bytes(key)
        (tmp_path / "certificate").write_bytes(certificate)
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(tmp_path / "certificate", tmp_path / "key")
        app = web.Application()
        app.router.add_get("/metrics", serves(GOOD))
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.01)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port, ssl_context=context).start()
        try:
            yield runner.addresses[0][1]
        finally:
            await runner.cleanup()

    async def test_by_default_any_certificate_will_do_also_its_successor(self, tmp_path: Path) -> None:
        async with AsyncExitStack() as stack:
            first = await stack.enter_async_context(AsyncExitStack())
            port = await first.enter_async_context(self.serving(tmp_path))
            scraper = Scraper(fleet := Fleet(), Counters(), replace(FAST, scheme="https", port=port))
            await scraper.start()
            stack.push_async_callback(scraper.stop)
            fleet.apply([EndpointSpec("127.0.0.1:9")])
            (endpoint,) = fleet.endpoints
            await eventually(lambda: endpoint.load.updated_at > 0)
            await first.aclose()
            await stack.enter_async_context(self.serving(tmp_path, port))
            since = time.monotonic()
            await eventually(lambda: endpoint.load.updated_at > since)

    async def test_where_certificates_are_verified_such_a_one_is_a_failure(self, tmp_path: Path) -> None:
        async with self.serving(tmp_path) as port:
            settings = replace(FAST, scheme="https", insecure_skip_verify=False)
            scraper = Scraper(fleet := Fleet(), Counters(), settings)
            await scraper.start()
            fleet.apply([EndpointSpec(f"127.0.0.1:{port}")])
            state = scraper.state(fleet.endpoints[0])
            assert state is not None
            await eventually(lambda: state.failures > 3)
            assert "certificate" in state.last_error.lower()
            assert fleet.endpoints[0].reachable, "somebody is there"
            await scraper.stop()
