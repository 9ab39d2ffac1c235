"""The fleet of the chaos demo: engines that can die, the picker, and an Envoy that outlives both."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from epp.toolbox.demo.chaos.engines import Mortal, cut_links, start_mortals
from epp.toolbox.demo.envoys import resilient_bootstrap
from epp.toolbox.demo.fleet import (
    HOST,
    READY_S,
    PickerPorts,
    launch_picker,
    start_envoy,
    start_picker,
    until_quiet,
    write_endpoints,
)
from epp.toolbox.demo.picker_config import write_picker_config
from epp.toolbox.demo.sizes import Sizes
from epp.toolbox.processes import Child, Children, PartFailed, free_ports

SIZES = {"working_set_tokens": 0, "hbm_blocks": 480, "cpu_chunks": 400}
"""Of an engine: HBM for about eight prompts, so there are evictions, and three times that in CPU RAM."""
DECISIONS = 1000
PICKED = 3
"""Endpoints named for a request: as many as Envoy tries."""
POLL_S = 0.05
_OPEN = re.compile(r"^vllm:num_requests_(?:running|waiting)(?:\{.*\})? (\S+)$", re.MULTILINE)
_STAT = re.compile(r"^(\S+): (\d+)$", re.MULTILINE)


class Stage:
    """What faults are done to, and what they leave running."""

    def __init__(
        self,
        children: Children,
        http: aiohttp.ClientSession,
        engines: Sequence[Mortal],
        endpoints: Path,
        start_picker: Callable[[], Awaitable[Child]],
        picker: Child,
        ports: tuple[int, int, PickerPorts],
    ) -> None:
        listen_port, self._admin_port, self._picker_ports = ports
        self.base_url = f"http://{HOST}:{listen_port}"
        self.metrics_url = f"http://{HOST}:{self._picker_ports.metrics}"
        self.http = http
        self.engines = engines
        self._children = children
        self._endpoints = endpoints
        self._start_picker = start_picker
        self._picker = picker

    def check(self) -> None:
        """Raises `PartFailed` for a process that has ended and was not meant to."""
        self._children.check()

    def logs(self) -> str:
        return self._children.tails()

    def list_engines(self, without: Mortal | None = None) -> None:
        """Tell the picker which engines there are."""
        write_endpoints(self._endpoints, [engine.as_seen for engine in self.engines if engine is not without])

    async def kill_picker(self) -> None:
        self._children.release(self._picker)
        await self._picker.kill()

    async def start_picker(self) -> None:
        """On the ports that it had; returns once it serves."""
        self._picker = await self._start_picker()

    async def reset_cache(self, engine: Mortal) -> float:
        """Of its HBM; refused while blocks are in use, so asked again until it is done. Returns when that was asked
        which was done."""
        asked_at = 0.0

        async def reset() -> bool:
            nonlocal asked_at
            asked_at = time.monotonic()
            async with self.http.post(f"http://{engine.address}/reset_prefix_cache") as response:
                return bool((await response.json())["success"])

        await _until(reset, engine.name, "its cache was in use")
        return asked_at

    async def until_busy(self, engine: Mortal) -> None:
        """Returns once it has requests to answer."""

        async def busy() -> bool:
            return await self._open_requests(engine) > 0

        await _until(busy, engine.name, "it had nothing to do")

    async def until_idle(self, engine: Mortal) -> None:
        """Returns once it has none left."""

        async def idle() -> bool:
            return await self._open_requests(engine) == 0

        await _until(idle, engine.name, "it was busy")

    async def _open_requests(self, engine: Mortal) -> float:
        async with self.http.get(f"http://{engine.address}/metrics") as response:
            return sum(map(float, _OPEN.findall(await response.text())))

    async def until_quiet(self) -> None:
        """Returns once the picker has read all that the engines have to say; they must be idle."""
        await until_quiet(self.http, self._picker_ports.metrics)

    async def until_asked(self) -> None:
        """Returns once Envoy asks the picker again, which it finds out by health checks."""

        async def healthy() -> bool:
            return await self.envoy_stat("cluster.picker.membership_healthy") == 1

        await _until(healthy, "envoy", "it took the picker for down")

    async def envoy_stat(self, name: str) -> int:
        async with self.http.get(f"http://{HOST}:{self._admin_port}/stats?filter=^{re.escape(name)}$") as response:
            return int(dict(_STAT.findall(await response.text())).get(name, 0))


async def _until(probe: Callable[[], Awaitable[bool]], part: str, complaint: str) -> None:
    try:
        async with asyncio.timeout(READY_S):
            while True:
                if await probe():
                    return
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise PartFailed(part, f"{complaint} for {READY_S:g} s") from None


@asynccontextmanager
async def raised(
    directory: Path, http: aiohttp.ClientSession, engines: int, model_directory: Path
) -> AsyncIterator[Stage]:
    async with Children(directory) as children:
        mortals = await start_mortals(children, Sizes(engines=engines, **SIZES), model_directory)
        try:
            endpoints, config = directory / "fleet" / "endpoints.yaml", directory / "config.yaml"
            endpoints.parent.mkdir()
            write_endpoints(endpoints, [mortal.as_seen for mortal in mortals])
            write_picker_config(config, endpoints, model_directory, PICKED)
            listen_port, admin_port, *rest = free_ports(5)
            ports = PickerPorts(*rest)
            picker = await start_picker(children, http, config, ports, DECISIONS)
            bootstrap = directory / "envoy.json"
            addresses = [mortal.address for mortal in mortals]
            bootstrap.write_text(json.dumps(resilient_bootstrap(listen_port, admin_port, ports.grpc, addresses)))
            await start_envoy(children, http, bootstrap, admin_port)

            def again() -> Awaitable[Child]:
                return launch_picker(children, config, ports, DECISIONS)

            yield Stage(children, http, mortals, endpoints, again, picker, (listen_port, admin_port, ports))
        finally:
            await cut_links(mortals)
