"""The pages of the metrics port, asked over real HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse

from epp.debug import DebugServer, Views
from epp.decisions import Decisions
from epp.fleet.endpoint import EndpointSpec, EngineLoad
from epp.fleet.fleet import Fleet
from epp.fleet.scrape import ScrapeState
from epp.requests.model import InferenceRequest
from epp.scheduling.plugin import ProfileResult, Scheduling, SchedulingResult
from epp.telemetry import Telemetry


@dataclass
class Plugin:
    name: str
    type: str = "a-type"


class Stateful(Plugin):
    def state(self) -> Any:
        return {"entries": 3}


class Broken(Plugin):
    def state(self) -> Any:
        raise RuntimeError("secret detail")


class Vast(Plugin):
    def state(self) -> Any:
        return "x" * (2 << 20)


@dataclass
class Site:
    """A picker's parts behind a running server."""

    telemetry: Telemetry = field(default_factory=Telemetry)
    fleet: Fleet = field(default_factory=Fleet)
    decisions: Decisions = field(default_factory=Decisions)
    url: str = ""
    session: aiohttp.ClientSession | None = None

    def views(self) -> Views:
        return Views(
            registry=self.telemetry.registry,
            fleet=self.fleet,
            decisions=self.decisions,
            clock=lambda: 100.0,
            scrape_state=lambda endpoint: (
                ScrapeState(scrapes=4, last_error="status 500") if endpoint.slot == 0 else None
            ),
            feeds=lambda: [{"endpoint": "10.0.0.0:8000", "state": "live"}],
            plugins=lambda: [Plugin("plain"), Stateful("stateful"), Broken("broken"), Vast("vast")],
        )

    def decide(self, model: str = "m", chosen: int = 0) -> None:
        run = Scheduling(InferenceRequest("id", "/", {}, b"", model=model), self.fleet.endpoints, 0.0)
        endpoints = self.fleet.endpoints
        profile = ProfileResult(endpoints, [0.0] * len(endpoints), {}, [endpoints[chosen]])
        self.decisions.record(run, SchedulingResult({"default": profile}, "default"), arrived=0.0)

    async def get(self, path: str, **headers: str) -> tuple[int, str, str]:
        assert self.session is not None
        async with self.session.get(self.url + path, headers=headers) as response:
            return response.status, response.headers["Content-Type"], await response.text()

    async def json(self, path: str) -> Any:
        status, content_type, text = await self.get(path)
        assert (status, content_type) == (200, "application/json; charset=utf-8")
        return json.loads(text)


@asynccontextmanager
async def serving() -> AsyncIterator[Site]:
    site = Site()
    site.fleet.apply([EndpointSpec("10.0.0.0:8000", "pod-0"), EndpointSpec("10.0.0.1:8000", "pod-1")])
    server = DebugServer("127.0.0.1", 0, site.views())
    await server.start()
    site.url = f"http://127.0.0.1:{server.port}"
    try:
        async with aiohttp.ClientSession() as site.session:
            yield site
    finally:
        await server.stop()


async def test_metrics_are_prometheus_text_unless_openmetrics_is_asked_for() -> None:
    async with serving() as site:
        site.telemetry.requests("m", "t", "f", 0).started(10)
        status, content_type, text = await site.get("/metrics")
        assert (status, content_type.partition(";")[0]) == (200, "text/plain")
        assert "llm_d_epp_request_total{" in text
        assert any(family.name == "llm_d_epp_request" for family in parse(text))

        accept = "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"
        status, content_type, text = await site.get("/metrics", Accept=accept)
        assert (status, content_type.partition(";")[0]) == (200, "application/openmetrics-text")
        assert text.endswith("# EOF\n")
        assert any(family.name == "llm_d_epp_request" for family in parse_openmetrics(text))  # type: ignore[no-untyped-call]


async def test_several_scrapers_at_once_are_all_served() -> None:
    async with serving() as site:
        answers = await asyncio.gather(*(site.get("/metrics") for _ in range(5)))
        assert [status for status, _, _ in answers] == [200] * 5


async def test_decisions_come_newest_first_and_can_be_narrowed() -> None:
    async with serving() as site:
        for number in range(30):
            site.decide(f"model-{number}", number % 2)
        shown = (await site.json("/debug/decisions"))["decisions"]
        assert [decision["model"] for decision in shown[:2]] == ["model-29", "model-28"]
        assert len(shown) == 20
        assert len((await site.json("/debug/decisions?limit=1000000"))["decisions"]) == 30
        assert len((await site.json("/debug/decisions?limit=3"))["decisions"]) == 3
        (one,) = (await site.json("/debug/decisions?model=model-7"))["decisions"]
        assert one["chosen"] == "10.0.0.1:8000"
        chosen = (await site.json("/debug/decisions?endpoint=10.0.0.0:8000"))["decisions"]
        assert {decision["chosen"] for decision in chosen} == {"10.0.0.0:8000"}


async def test_without_decisions_the_list_is_empty() -> None:
    async with serving() as site:
        assert await site.json("/debug/decisions") == {"decisions": []}


@pytest.mark.parametrize("limit", ["0", "-1", "many", "1.5", "", "9" * 50, "٣"])
async def test_a_senseless_limit_is_a_400_that_names_it(limit: str) -> None:
    async with serving() as site:
        status, _, text = await site.get(f"/debug/decisions?limit={limit}")
        assert status == 400
        assert json.loads(text)["error"]["message"].startswith("limit:")


async def test_endpoints_show_load_with_its_age_and_the_state_of_scraping() -> None:
    async with serving() as site:
        first = site.fleet.endpoints[0]
        first.load = EngineLoad(waiting=3, kv_usage=0.5, updated_at=98.0)
        first.inflight_requests = 2
        shown = await site.json("/debug/endpoints")
        one, two = shown["endpoints"]
        assert shown["synced"] is True
        assert (one["address"], one["name"], one["inflight_requests"]) == ("10.0.0.0:8000", "pod-0", 2)
        assert (one["load"]["waiting"], one["load"]["age"]) == (3, 2.0)
        assert one["scrape"]["last_error"] == "status 500"
        assert (two["load"]["age"], two["scrape"]) == (None, None)


async def test_feeds_are_shown_as_their_owner_tells_them() -> None:
    async with serving() as site:
        assert await site.json("/debug/feeds") == {"feeds": [{"endpoint": "10.0.0.0:8000", "state": "live"}]}


async def test_plugins_show_their_state_and_one_that_cannot_spoils_nothing() -> None:
    async with serving() as site:
        shown = await site.json("/debug/plugins/state")
        plugins = shown["plugins"]
        assert "timestamp" in shown
        assert plugins["stateful"] == {"name": "stateful", "type": "a-type", "state": {"entries": 3}}
        assert "message" in plugins["plain"]
        assert plugins["broken"]["message"] == "the state could not be read: RuntimeError"
        assert "too large" in plugins["vast"]["message"]


async def test_health() -> None:
    async with serving() as site:
        assert await site.json("/healthz") == {"status": "ok", "synced": True, "endpoints": 2}


async def test_an_unknown_page_and_a_wrong_method_are_json_errors() -> None:
    async with serving() as site:
        status, content_type, text = await site.get("/debug/nothing")
        assert (status, content_type) == (404, "application/json; charset=utf-8")
        assert json.loads(text)["error"]["code"] == 404
        assert site.session is not None
        async with site.session.post(site.url + "/metrics") as response:
            assert response.status == 405


async def test_a_page_that_fails_says_so_without_details() -> None:
    class NoDecisions(Decisions):
        def newest(self, *, model: str = "", endpoint: str = "") -> Any:
            raise RuntimeError("secret detail")

    site = Site(decisions=NoDecisions())
    server = DebugServer("127.0.0.1", 0, site.views())
    await server.start()
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{server.port}/debug/decisions") as response,
    ):
        text = await response.text()
        assert response.status == 500
    await server.stop()
    assert "secret detail" not in text


async def test_a_port_that_is_taken_fails_the_start() -> None:
    site = Site()
    first = DebugServer("127.0.0.1", 0, site.views())
    await first.start()
    second = DebugServer("127.0.0.1", first.port, site.views())
    with pytest.raises(OSError, match="address already in use"):
        await second.start()
    await second.stop()
    await first.stop()
