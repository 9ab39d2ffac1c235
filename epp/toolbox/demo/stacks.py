"""The two things that traffic is sent to: Envoy over engines in turn, and Envoy with the picker. Fresh engines each."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from epp.toolbox.demo import model
from epp.toolbox.demo.counters import EngineCounters
from epp.toolbox.demo.decisions import parse_predictions
from epp.toolbox.demo.drive import Call, Client
from epp.toolbox.demo.envoys import picker_bootstrap, round_robin_bootstrap
from epp.toolbox.demo.fleet import (
    HOST,
    Engine,
    PickerPorts,
    fetch_json,
    read_counters,
    start_engines,
    start_envoy,
    start_picker,
    until_quiet,
    write_endpoints,
)
from epp.toolbox.demo.picker_config import write_picker_config
from epp.toolbox.demo.sizes import Sizes
from epp.toolbox.demo.verdicts import Prediction
from epp.toolbox.processes import Children, free_ports


class Stack:
    """Running processes behind one HTTP address."""

    def __init__(self, children: Children, http: aiohttp.ClientSession, port: int, engines: list[Engine]) -> None:
        self.base_url = f"http://{HOST}:{port}"
        self._children = children
        self._http = http
        self._engines = engines

    def client(self, on_done: Callable[[Call], None]) -> Client:
        return Client(self._http, self.base_url, model.NAME, on_done)

    async def counters(self) -> dict[str, EngineCounters]:
        return await read_counters(self._http, self._engines)

    def logs(self) -> str:
        return self._children.tails()

    def check(self) -> None:
        """Raises `PartFailed` if one of the processes has ended."""
        self._children.check()


class PickerStack(Stack):
    def __init__(
        self,
        children: Children,
        http: aiohttp.ClientSession,
        port: int,
        engines: list[Engine],
        metrics_port: int,
        decisions: int,
    ) -> None:
        super().__init__(children, http, port, engines)
        self.metrics_url = f"http://{HOST}:{metrics_port}"
        self._metrics_port = metrics_port
        self._decisions = decisions

    async def until_quiet(self) -> None:
        """Return once the picker has read all that the engines have to say; they must be idle."""
        await until_quiet(self._http, self._metrics_port)

    async def predictions(self) -> dict[str, Prediction]:
        """What the picker predicted, by request id, as far back as its ring of decisions goes."""
        page = await fetch_json(self._http, f"{self.metrics_url}/debug/decisions?limit={self._decisions}")
        return parse_predictions(page)


@asynccontextmanager
async def round_robin_stack(
    directory: Path, http: aiohttp.ClientSession, sizes: Sizes, model_directory: Path
) -> AsyncIterator[Stack]:
    async with Children(directory) as children:
        engines = await start_engines(children, sizes, model_directory)
        port, admin_port = free_ports(2)
        bootstrap = directory / "envoy.json"
        bootstrap.write_text(json.dumps(round_robin_bootstrap(port, admin_port, [engine.http for engine in engines])))
        await start_envoy(children, http, bootstrap, admin_port)
        yield Stack(children, http, port, engines)


@asynccontextmanager
async def picker_stack(
    directory: Path, http: aiohttp.ClientSession, sizes: Sizes, model_directory: Path, decisions: int
) -> AsyncIterator[PickerStack]:
    """The picker keeps its last `decisions` decisions."""
    async with Children(directory) as children:
        engines = await start_engines(children, sizes, model_directory)
        endpoints, config = directory / "endpoints.yaml", directory / "config.yaml"
        write_endpoints(endpoints, engines)
        write_picker_config(config, endpoints, model_directory)
        port, admin_port, *picker_ports = free_ports(5)
        await start_picker(children, http, config, PickerPorts(*picker_ports), decisions)
        bootstrap = directory / "envoy.json"
        bootstrap.write_text(json.dumps(picker_bootstrap(port, admin_port, picker_ports[0])))
        await start_envoy(children, http, bootstrap, admin_port)
        yield PickerStack(children, http, port, engines, picker_ports[2], decisions)
