"""Simulated engines, each a process of its own on ports that it keeps, with links between it and the picker."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from pathlib import Path

from epp.toolbox.demo.chaos.faults import HEARTBEAT_S
from epp.toolbox.demo.chaos.links import Link
from epp.toolbox.demo.fleet import HOST, READY_S, Engine, announced, engine_command
from epp.toolbox.demo.sizes import Sizes
from epp.toolbox.processes import Child, Children, free_ports

_PORTS_EACH = 5


class Mortal:
    """An engine that can be killed, stopped and started again; `events` and `replay` are the links to it."""

    def __init__(self, name: str, children: Children, command: Sequence[str], ports: Sequence[int]) -> None:
        http, events, replay, events_link, replay_link = ports
        self.name = name
        self.address = f"{HOST}:{http}"
        self.events = Link(events_link, events)
        self.replay = Link(replay_link, replay)
        self._children = children
        self._command = [
            *command, "--engines=1", f"--name={name}", f"--port={http}", f"--events-port={events}",
            f"--replay-port={replay}", f"--heartbeat-s={HEARTBEAT_S:g}",
        ]  # fmt: skip
        self._child: Child | None = None
        self._lives = 0

    @property
    def as_seen(self) -> Engine:
        """With the addresses that the picker knows."""
        return Engine(self.name, self.address, self.events.address, self.replay.address)

    async def start(self) -> None:
        """Returns once it serves."""
        self._lives += 1
        child = await self._children.start(f"{self.name}-life-{self._lives}", self._command)
        self._child = child
        await child.until(lambda: announced(child, 1), READY_S)

    async def kill(self) -> None:
        await self._released().kill()

    async def stop(self) -> None:
        """As an operator stops it."""
        await self._released().stop()

    def freeze(self) -> None:
        self._running.signal_group(signal.SIGSTOP)

    def thaw(self) -> None:
        self._running.signal_group(signal.SIGCONT)

    @property
    def _running(self) -> Child:
        assert self._child is not None
        return self._child

    def _released(self) -> Child:
        child, self._child = self._running, None
        self._children.release(child)
        return child


async def start_mortals(children: Children, sizes: Sizes, model_directory: Path) -> list[Mortal]:
    """All at once, links included; the caller cuts these at the end."""
    ports = free_ports(_PORTS_EACH * sizes.engines)
    command = engine_command(sizes, model_directory)
    engines = [
        Mortal(f"sim-{i}", children, command, ports[_PORTS_EACH * i : _PORTS_EACH * (i + 1)])
        for i in range(sizes.engines)
    ]
    await asyncio.gather(*(engine.start() for engine in engines))
    for engine in engines:
        await engine.events.mend()
        await engine.replay.mend()
    return engines


async def cut_links(engines: Sequence[Mortal]) -> None:
    for engine in engines:
        await engine.events.cut()
        await engine.replay.cut()
