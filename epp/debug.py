"""HTTP on the metrics port: `/metrics`, and read-only JSON views for people and scripts.

Nothing here shows prompts, bodies or tokens. Work is done in small pieces or off the loop's thread, because the same
thread routes requests.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

from aiohttp import web
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.exposition import choose_encoder

from epp.decisions import Decisions
from epp.fleet.endpoint import Endpoint
from epp.fleet.fleet import Fleet
from epp.fleet.scrape import ScrapeState

logger = logging.getLogger(__name__)

_DEFAULT_DECISIONS = "20"
_SHUTDOWN_SECONDS = 5.0
_LONGEST_STATE = 1 << 20


class Named(Protocol):
    """A plugin instance. With a method `state()` that gives JSON values, it shows them."""

    name: str
    type: str


@dataclass(slots=True, frozen=True)
class Views:
    """What can be looked at. All callables are called on the loop's thread, per request."""

    registry: CollectorRegistry
    fleet: Fleet
    decisions: Decisions
    clock: Callable[[], float]
    """The clock of `EngineLoad.updated_at`."""
    scrape_state: Callable[[Endpoint], ScrapeState | None] = lambda endpoint: None
    feeds: Callable[[], Any] = list
    """JSON values: the event feeds and their state."""
    plugins: Callable[[], Iterable[Named]] = lambda: ()


class DebugServer:
    """A service on `host:port` (0 = any free port: see `port` once started)."""

    def __init__(self, host: str, port: int, views: Views) -> None:
        self._host = host
        self._wanted_port = port
        self._pages = _Pages(views)
        self._runner: web.AppRunner | None = None

    @property
    def port(self) -> int:
        assert self._runner is not None
        return int(self._runner.addresses[0][1])

    async def start(self) -> None:
        app = web.Application(middlewares=[_errors_as_json])
        app.add_routes(self._pages.routes())
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=_SHUTDOWN_SECONDS)
        await self._runner.setup()
        await web.TCPSite(self._runner, self._host, self._wanted_port).start()

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None


class _Collected:
    """Metrics already collected, for an encoder that runs on another thread."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


class _Pages:
    def __init__(self, views: Views) -> None:
        self._views = views
        self._rendering = asyncio.Lock()

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/metrics", self.metrics),
            web.get("/healthz", self.health),
            web.get("/debug/decisions", self.decisions),
            web.get("/debug/endpoints", self.endpoints),
            web.get("/debug/feeds", self.feeds),
            web.get("/debug/plugins/state", self.plugins),
        ]

    async def metrics(self, request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        async with self._rendering:  # a page at a time: impatient scrapers must not pile up
            metrics: list[Metric] = []
            for metric in self._views.registry.collect():
                metrics.append(metric)
                await asyncio.sleep(0)
            page = await asyncio.to_thread(encode, _Collected(metrics))
        return web.Response(body=page, headers={"Content-Type": content_type})

    async def health(self, request: web.Request) -> web.Response:
        fleet = self._views.fleet
        return _json({"status": "ok", "synced": fleet.synced, "endpoints": len(fleet.endpoints)})

    async def decisions(self, request: web.Request) -> web.Response:
        decisions, query = self._views.decisions, request.query
        limit = _limit(query.get("limit", _DEFAULT_DECISIONS))
        found: list[bytes] = []
        for decision in decisions.newest(model=query.get("model", ""), endpoint=query.get("endpoint", "")):
            if len(found) == limit:
                break
            found.append(_encode(decision.to_json()))
            await asyncio.sleep(0)
        return _json_text(b'{"decisions": [' + b", ".join(found) + b"]}")

    async def endpoints(self, request: web.Request) -> web.Response:
        fleet = self._views.fleet
        return _json({"synced": fleet.synced, "endpoints": [self._endpoint(e) for e in fleet.endpoints]})

    def _endpoint(self, endpoint: Endpoint) -> dict[str, Any]:
        load, state = endpoint.load, self._views.scrape_state(endpoint)
        shown = asdict(load)
        now, updated_at, streamed_until = self._views.clock(), shown.pop("updated_at"), shown.pop("streamed_until")
        return {
            **asdict(endpoint.spec),
            "slot": endpoint.slot,
            "reachable": endpoint.reachable,
            "load": {**shown, "age": now - updated_at if updated_at else None, "streamed": now < streamed_until},
            "inflight_requests": endpoint.inflight_requests,
            "inflight_tokens": endpoint.inflight_tokens,
            "scrape": None if state is None else asdict(state),
        }

    async def feeds(self, request: web.Request) -> web.Response:
        return _json({"feeds": self._views.feeds()})

    async def plugins(self, request: web.Request) -> web.Response:
        states = {plugin.name: _plugin_state(plugin) for plugin in self._views.plugins()}
        return _json({"timestamp": datetime.now(UTC).isoformat(), "plugins": states})


def _plugin_state(plugin: Named) -> dict[str, Any]:
    about = {"name": plugin.name, "type": plugin.type}
    dump = getattr(plugin, "state", None)
    if dump is None:
        return {**about, "message": "this plugin has no state to show"}
    try:
        state = dump()
        size = len(_encode(state))
    except Exception as error:
        logger.exception("a plugin could not show its state", extra={"plugin": plugin.name})
        return {**about, "message": f"the state could not be read: {type(error).__name__}"}
    return {**about, "state": state} if size <= _LONGEST_STATE else {**about, "message": f"{size} bytes, too large"}


def _limit(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text)):
        raise web.HTTPBadRequest(text="limit: expected a positive whole number")
    return int(text)


@web.middleware
async def _errors_as_json(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as error:
        return _error(error.status, error.text or error.reason)
    except Exception:
        logger.exception("a debug page failed", extra={"path": request.path})
        return _error(500, "this page failed; the log says why")


def _error(status: int, message: str) -> web.Response:
    return _json({"error": {"code": status, "message": message}}, status)


def _json(value: Mapping[str, Any], status: int = 200) -> web.Response:
    return _json_text(_encode(value), status)


def _json_text(text: bytes, status: int = 200) -> web.Response:
    return web.Response(body=text, content_type="application/json", charset="utf-8", status=status)


def _encode(value: Any) -> bytes:
    """Lone surrogates in names stay escapes; values JSON does not know become text."""
    return json.dumps(value, default=str).encode()
