"""Builds the parts from the options, runs them, drains them.

Order matters at both ends. Start: configuration (so that a bad one exits before anything listens), discovery, services,
then the listeners, then readiness. Stop: not ready, requests in flight finish, listeners close, services stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvloop

from epp import logs
from epp.config.environment import Environment
from epp.config.errors import ConfigError
from epp.config.loader import Configuration, load
from epp.debug import DebugServer, Views
from epp.decisions import Decisions
from epp.director import RequestDirector, Settings
from epp.fleet.discovery.static import StaticDiscovery
from epp.fleet.fleet import Fleet
from epp.fleet.models import ModelSettings, ModelWatcher
from epp.fleet.scrape import Scraper, ScrapeSettings
from epp.options import Options
from epp.producers.inflight import InFlight
from epp.scheduling.scheduler import Scheduler
from epp.server import ExtProcServer, ServerOptions
from epp.telemetry import Telemetry

logger = logging.getLogger(__name__)

SHORTEST_SCRAPE_INTERVAL = 0.05
"""Seconds; llm-d's."""


_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StartError(Exception):
    """The picker cannot start as it is configured; the text says why."""


class App:
    """One picker. `start` raises `ConfigError` or `StartError`; after it, `stop` once."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.fleet = Fleet()
        self.telemetry = Telemetry()
        self.environment = Environment(
            fleet=self.fleet, telemetry=self.telemetry, index_budget=options.index_memory_budget
        )
        self.configuration = load(_config_text(options), self.environment)
        self.configuration.log()
        self.decisions = Decisions(options.decisions)
        self.in_flight = InFlight.of(self.environment)
        self.telemetry.watch(self.fleet, options.pool_name, staleness=options.metrics_staleness_threshold)
        self._scraper = _scraper(self)
        self._models = _models(self)
        self._discovery = _discovery(self)
        self._server = ExtProcServer(_director(self), _server_options(options))
        self._debug = DebugServer(options.bind, options.metrics_port, self._views())
        self._started: list[Any] = []

    @property
    def ports(self) -> dict[str, int]:
        return {"grpc": self._server.port, "grpc_health": self._server.health_port, "metrics": self._debug.port}

    async def start(self) -> None:
        try:
            for service in self._services():
                self._started.append(service)
                await service.start()
            await self._server.start()
        except BaseException as error:
            await self._server.stop()
            await self._stop_services()
            if isinstance(error, (OSError, ValueError)):
                raise StartError(f"cannot start: {error}") from error
            raise
        self._server.health.set_ready(True)
        logger.info("ready", extra={**self.ports, "endpoints": len(self.fleet.endpoints)})

    def _services(self) -> Iterator[Any]:
        yield self._discovery
        if self._scraper:
            yield self._scraper
        if self._models:
            yield self._models
        yield from self.environment.services
        yield self._debug

    async def stop(self, drain_timeout: float = 0.0) -> None:
        """Not ready at once; requests get `drain_timeout` seconds to finish and to go elsewhere."""
        await self._server.drain(drain_timeout)
        await self._stop_services()
        logger.info("stopped", extra={"in_flight": len(self.in_flight)})

    async def _stop_services(self) -> None:
        for service in reversed(self._started):
            try:
                await service.stop()
            except Exception:
                logger.exception("a part did not stop cleanly", extra={"part": type(service).__name__})
        self._started.clear()

    def _views(self) -> Views:
        scraper = self._scraper
        feeds = self.environment.shared.get("kv-events")
        return Views(
            registry=self.telemetry.registry,
            fleet=self.fleet,
            decisions=self.decisions,
            clock=self.environment.clock,
            scrape_state=scraper.state if scraper else lambda endpoint: None,
            feeds=feeds.snapshot if feeds else list,
            plugins=self.configuration.plugins.values,
        )


def _config_text(options: Options) -> str:
    if not options.config_file:
        return options.config_text
    try:
        return Path(options.config_file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StartError(f"--config-file: {error}") from error


def _discovery(app: App) -> Any:
    configured, static = app.configuration.discovery, app.options.endpoints
    if configured and static:
        raise StartError("--endpoints and dataLayer.discovery exclude each other")
    if not configured and not static:
        raise StartError(
            "no source of endpoints: set dataLayer.discovery to a file-discovery plugin, or --endpoints=ip:port,…"
            " (InferencePools and label selectors are not available in this version)"
        )
    try:
        return configured or StaticDiscovery(static, app.fleet)
    except ValueError as error:
        raise StartError(str(error)) from error


def _scraper(app: App) -> Scraper | None:
    layer = app.configuration.data_layer
    if not layer.scrape:
        return None
    settings = ScrapeSettings(
        interval=_scrape_interval(layer.metrics.interval_seconds or app.options.refresh_metrics_interval),
        scheme=layer.metrics.scheme,
        path=layer.metrics.path,
        port=layer.metrics.port,
        insecure_skip_verify=layer.metrics.insecure_skip_verify,
    )
    return Scraper(app.fleet, app.telemetry, settings, app.environment.clock)


def _models(app: App) -> ModelWatcher | None:
    """Only predictions from events need to know what a model's name means."""
    events, source = app.environment.shared.get("kv-events"), app.configuration.data_layer.models
    if events is None:
        return None
    settings = ModelSettings(source.scheme, source.path, source.insecure_skip_verify)
    return ModelWatcher(app.fleet, events.models, settings, app.environment.clock)


def _scrape_interval(wanted: float) -> float:
    if wanted < SHORTEST_SCRAPE_INTERVAL:
        logger.warning("engines are scraped every %g s, not every %g s", SHORTEST_SCRAPE_INTERVAL, wanted)
    return max(wanted, SHORTEST_SCRAPE_INTERVAL)


def _director(app: App) -> RequestDirector:
    configuration, options = app.configuration, app.options
    scheduler = Scheduler(
        producers=configuration.producers,
        profiles=configuration.profiles,
        handler=configuration.handler,
        plugins=list(configuration.plugins.values()),
        telemetry=app.telemetry,
        rng=app.environment.rng,
    )
    return RequestDirector(
        fleet=app.fleet,
        scheduler=scheduler,
        in_flight=app.in_flight,
        telemetry=app.telemetry,
        decisions=app.decisions,
        weights=_weights(configuration),
        settings=Settings(
            disable_subset_filter=options.disable_endpoint_subset_filter,
            emit_scores=options.emit_endpoint_scores,
            max_body_bytes=options.max_body_bytes,
            observe_streams=options.observe_streams,
        ),
        clock=app.environment.clock,
        rng=app.environment.rng,
    )


def _weights(configuration: Configuration) -> dict[str, dict[str, float]]:
    return {p.name: {scorer.name: weight for scorer, weight in p.scorers} for p in configuration.profiles}


def _server_options(options: Options) -> ServerOptions:
    return ServerOptions(
        bind=options.bind,
        port=options.grpc_port,
        health_port=options.grpc_health_port,
        secure_serving=options.secure_serving,
        cert_path=options.cert_path,
        enable_cert_reload=options.enable_cert_reload,
        max_body_bytes=options.max_body_bytes,
    )


async def _serve(app: App) -> None:
    with _stop_signals() as signals:
        await app.start()
        _quiet_collector()
        number = await signals.get()
    await app.stop(0.0 if number == signal.SIGINT else app.options.drain_timeout)


def _quiet_collector() -> None:
    """What is there after the start stays: no need to look at it again and again, nor at every 700th new object."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def _raise_file_limit() -> None:
    """Each endpoint takes a handful of descriptors: event and replay sockets, their monitors, a scrape connection."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@contextlib.contextmanager
def _stop_signals() -> Iterator[asyncio.Queue[int]]:
    """Those that come: SIGTERM asks for a drain, SIGINT (a person at the keyboard) for none.

    After the block, a second one ends the process the default way.
    """
    loop, signals = asyncio.get_running_loop(), asyncio.Queue[int]()
    for number in _STOP_SIGNALS:
        loop.add_signal_handler(number, signals.put_nowait, number)
    try:
        yield signals
    finally:
        for number in _STOP_SIGNALS:
            loop.remove_signal_handler(number)


def run(options: Options) -> int:
    """Serve until SIGTERM or SIGINT. Exit status: 0, or 1 with the reason on standard error."""
    logs.configure(logs.level(options.verbosity), options.log_encoder)
    _raise_file_limit()
    for flag in options.without_effect:
        logger.info("without effect: %s", flag)
    try:
        uvloop.run(_build_and_serve(options))
    except (ConfigError, StartError) as error:
        print(f"epp: {error}", file=sys.stderr)
        return 1
    return 0


async def _build_and_serve(options: Options) -> None:
    await _serve(App(options))
