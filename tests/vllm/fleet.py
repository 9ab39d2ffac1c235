"""Real engines, each behind paths that can be cut, the real picker, and a real Envoy; and what is measured there."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from epp.toolbox.bootstrap import Profile
from epp.toolbox.demo import fleet as demo
from epp.toolbox.demo.chaos.links import Link
from epp.toolbox.demo.picker_config import write_picker_config
from epp.toolbox.processes import Children, free_ports, tail

from ..envoy.chain import Chain, Reply
from . import tiny_model
from .engines import HOST, Engine, Kind
from .rest import until_at_rest
from .traffic import Ask, Traffic

REPLICAS = 2
POLL_S = 0.004
RECENT = 5
"""Decisions among which one that has just been made is looked for."""


@dataclass(frozen=True, slots=True)
class Probe:
    """One request: what the picker predicted for the engine it chose, and what that engine delivered, in tokens."""

    ask: Ask
    engine: str
    """`ip:port`."""
    state: str
    """Of the picker's feed of that engine, just before; "" = not asked for."""
    predicted: dict[str, int] | None
    """By tier, and in `total`; None = the picker predicted nothing."""
    delivered: int
    text: str
    answered_at: float
    """Monotonic seconds."""
    decision: dict[str, Any] = field(repr=False)

    @property
    def total(self) -> int:
        return self.predicted["total"] if self.predicted else 0

    @property
    def exact(self) -> bool:
        return self.predicted is not None and self.total == self.delivered

    @property
    def too_high(self) -> bool:
        return self.total > self.delivered

    @property
    def too_high_while_live(self) -> bool:
        return self.too_high and self.state == "live"

    def hits(self, tier: str) -> bool:
        return bool(self.predicted and self.predicted[tier])

    def __str__(self) -> str:
        return (
            f"{self.ask.kind} at {self.engine} ({self.state}): predicted {self.predicted}, delivered {self.delivered}"
        )


class Fleet:
    """Two engines of a kind behind one picker. The engine that a request goes to is the picker's choice unless `only`
    names another."""

    def __init__(self, kind: Kind, engines: list[Engine], chain: Chain, http: aiohttp.ClientSession) -> None:
        self.kind = kind
        self.engines = engines
        self.chain = chain
        self.http = http
        self.events = {engine.name: Link(port, engine.events_port) for engine, port in _with_ports(engines)}
        self.replays = {engine.name: Link(port, engine.replay_port) for engine, port in _with_ports(engines)}
        self.heard: list[tuple[Ask, str]] = []
        """Every sequential request and its answer's text, for comparison with an engine that does not offload."""

    @property
    def links(self) -> Iterable[Link]:
        return (*self.events.values(), *self.replays.values())

    # -- requests ---------------------------------------------------------------------------------------------------

    async def probe(self, ask: Ask, *, only: Engine | None = None, state: bool = False) -> Probe:
        """Until it is answered and all is quiet. `state`: say what the picker's feed of `only` was like just before."""
        before = (await self.feed(only))["state"] if state and only else ""
        reply = await self.send(ask, only=only)
        assert reply.status == 200, reply.body
        answered_at = time.monotonic()
        decision = await self.chain.decision(reply, among=RECENT, poll_s=POLL_S)
        await self.quiet()
        text = reply.text
        self.heard.append((ask, text))
        return Probe(
            ask, decision["chosen"], before, decision["predicted"], reply.cached_tokens, text, answered_at, decision
        )

    async def send(self, ask: Ask, *, only: Engine | None = None) -> Reply:
        return await self.chain.send("POST", ask.path, json=ask.body, only=only.address if only else "")

    async def run(self, traffic: Traffic, count: int, *, only: Engine | None = None) -> list[Probe]:
        """One after another."""
        probes = []
        for ask in traffic.take(count):
            probes.append(probe := await self.probe(ask, only=only, state=only is not None))
            traffic.answered(ask, probe.text)
        return probes

    async def burst(self, traffic: Traffic, count: int, *, at_once: int = 8) -> None:
        """So many at a time, through the picker."""
        asks = traffic.take(count)

        async def client() -> None:
            for ask in asks:
                reply = await self.send(ask)
                assert reply.status == 200, (reply.status, reply.body)

        async with asyncio.TaskGroup() as clients:
            for _ in range(at_once):
                clients.create_task(client())
        await self.chain.until_idle()
        await self.quiet()

    # -- what the picker knows --------------------------------------------------------------------------------------

    async def feed(self, engine: Engine) -> dict[str, Any]:
        feeds = (await self.chain.page("/debug/feeds"))["feeds"]
        return next(feed for feed in feeds if feed["endpoint"] == engine.address)

    async def quiet(self) -> None:
        """Until the picker has heard all there is to hear: an engine ends its copies to CPU RAM, and tells of them, a
        step or so after the answer."""
        groups = [engine.pid for engine in self.engines if engine.pid]
        await until_at_rest([*groups, self.chain.picker.pid])

    def tails(self) -> str:
        """The end of every log, for a person who asks what went wrong."""
        logs = {engine.name: engine.tail() for engine in self.engines} | {"picker": tail(self.chain.picker.log)}
        return "\n".join(f"--- {name} ---\n{text}" for name, text in logs.items())

    # -- faults -----------------------------------------------------------------------------------------------------

    async def restart_engine(self, engine: Engine) -> None:
        await engine.kill()
        await engine.start(self.http)

    async def restart_picker(self) -> None:
        self.chain.picker.signal_group(signal.SIGKILL)
        await self.chain.picker.stop()
        await self.chain.start_picker()


def _with_ports(engines: list[Engine]) -> Iterable[tuple[Engine, int]]:
    return zip(engines, free_ports(len(engines)), strict=True)


@asynccontextmanager
async def running(kind: Kind, python: Path, directory: Path, http: aiohttp.ClientSession) -> AsyncIterator[Fleet]:
    model = directory / "model"
    tiny_model.write_tiny_qwen3(model)
    async with Children(directory) as children:
        engines = [Engine(children, python, kind, f"engine-{number}", directory) for number in range(REPLICAS)]
        chain = Chain(
            children, http, directory, f"--config-file={directory / 'config.yaml'}", "--observe-streams=1"
        )  # fmt: skip
        fleet = Fleet(kind, engines, chain, http)
        endpoints = [
            demo.Engine(
                engine.name, engine.address,
                f"tcp://{HOST}:{fleet.events[engine.name].port}", f"tcp://{HOST}:{fleet.replays[engine.name].port}",
            )
            for engine in engines
        ]  # fmt: skip
        demo.write_endpoints(directory / "endpoints.json", endpoints)
        write_picker_config(directory / "config.yaml", directory / "endpoints.json", model)
        try:
            await asyncio.gather(*(link.mend() for link in fleet.links))
            await asyncio.gather(*(engine.start(http) for engine in engines))
            await chain.start_picker(feeds=REPLICAS)
            await chain.start_envoy(Profile.BUFFERED)
            yield fleet
        finally:
            await asyncio.gather(*(link.cut() for link in fleet.links))


def tally(probes: Iterable[Probe]) -> dict[str, int]:
    """Figures of a run of requests."""
    counted = Counter(requests=0, exact=0, too_high=0, too_high_while_live=0)
    for probe in probes:
        counted["requests"] += 1
        counted["exact"] += probe.exact
        counted["too_high"] += probe.too_high
        counted["too_high_while_live"] += probe.too_high_while_live
        for tier in ("gpu", "cpu", "storage"):
            counted[f"hits_{tier}"] += probe.hits(tier)
    return dict(counted)
