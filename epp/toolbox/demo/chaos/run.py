"""The chaos demo from start to end: a fleet under traffic, fault after fault, and after each a look at what is known.

Faults come one at a time, so that each has figures of its own. When its feed is live again, the traffic is asked to be
silent, and a few requests one after another show whether `live` was true.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import aiohttp
from tokenizers import Tokenizer

from epp.toolbox.demo import model
from epp.toolbox.demo.chaos.faults import Fault, Kind, schedule
from epp.toolbox.demo.chaos.figures import Group, Report, Seen
from epp.toolbox.demo.chaos.inject import Episode, inject
from epp.toolbox.demo.chaos.judge import Probe, Struck, findings
from epp.toolbox.demo.chaos.probes import probe
from epp.toolbox.demo.chaos.stage import Stage, raised
from epp.toolbox.demo.chaos.talk import Traffic
from epp.toolbox.demo.chaos.watch import Watch, unlike_live
from epp.toolbox.demo.drive import Call, Client
from epp.toolbox.demo.screen import Screen
from epp.toolbox.demo.sizes import BLOCK_SIZE, BLOCKS_PER_CHUNK

TRAFFIC_BETWEEN_S = 1.5
"""Between two faults, and before the first, undisturbed."""
LIVE_WITHIN_S = 20.0
WATCH_S = 0.2


async def chaos(arguments: argparse.Namespace, screen: Screen) -> Report:
    """Raises `PartFailed` for a part that failed without being asked to."""
    with tempfile.TemporaryDirectory(prefix="tierpick-chaos-") as directory:
        root = Path(directory)
        tokenizer = model.write_model(root / "model")
        screen.say(f"Starting {arguments.engines} simulated engines, a process each, the picker and Envoy …")
        connector = aiohttp.TCPConnector(limit=0)
        async with (
            aiohttp.ClientSession(connector=connector) as http,
            raised(root / "run", http, arguments.engines, root / "model") as stage,
        ):
            report = await _Run(stage, arguments.seed, screen, tokenizer).report(
                schedule(arguments.seed, arguments.faults, arguments.engines)
            )
            if not report.passed:
                screen.quote(stage.logs())
            return report


class _Run:
    def __init__(self, stage: Stage, seed: int, screen: Screen, tokenizer: Tokenizer) -> None:
        self._stage = stage
        self._seed = seed
        self._screen = screen
        self._tokenizer = tokenizer
        self._client = Client(stage.http, stage.base_url, model.NAME, _ignored)
        self._watch = Watch(stage.http, stage.metrics_url)
        self._traffic = Traffic(self._client, seed)
        self._rng = random.Random(seed ^ 0x9120BE)
        self._struck: list[Struck] = []

    async def report(self, faults: Sequence[Fault]) -> Report:
        began = time.monotonic()
        seen = await self._under_traffic(faults)
        seconds = time.monotonic() - began
        await self._watch.collect()
        last = self._watch.looks[-1]
        return Report(
            seed=self._seed,
            engines=len(self._stage.engines),
            seconds=seconds,
            faults=Group(tuple(seen)),
            findings=tuple(
                findings(
                    self._client.calls, self._watch.picks, self._struck, self._tokens, BLOCK_SIZE * BLOCKS_PER_CHUNK
                )
            ),
            retries=await self._stage.envoy_stat("cluster.engines.upstream_rq_retry"),
            not_live=tuple(e.address for e in self._stage.engines if not last.is_live([e.address])),
        )

    def _tokens(self, call: Call) -> Sequence[int]:
        return list(self._tokenizer.encode(call.prompt, add_special_tokens=False).ids)

    async def _under_traffic(self, faults: Sequence[Fault]) -> list[Seen]:
        """Ends all tasks with the last fault, or with the first that fails."""
        background = [asyncio.create_task(work()) for work in (self._watch.run, self._traffic.run, self._check)]
        foreground = asyncio.create_task(self._one_after_another(faults))
        try:
            await asyncio.wait([foreground, *background], return_when=asyncio.FIRST_COMPLETED)
            for task in (*background, foreground):
                if task.done():
                    task.result()
            return foreground.result()
        finally:
            await _ended(foreground, *background)

    async def _check(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            self._stage.check()

    async def _one_after_another(self, faults: Sequence[Fault]) -> list[Seen]:
        seen = []
        for number, fault in enumerate(faults, 1):
            await asyncio.sleep(TRAFFIC_BETWEEN_S)
            seen.append(await self._one(f"{number}/{len(faults)}", fault))
        return seen

    async def _one(self, number: str, fault: Fault) -> Seen:
        engine = self._stage.engines[fault.engine]
        is_of_all = fault.kind is Kind.PICKER_KILLED
        self._screen.say(f"{number} {fault.kind.value}{'' if is_of_all else f' ({engine.name})'} …")
        episode = await inject(self._stage, self._watch, fault)
        concerned = [e.address for e in self._stage.engines] if is_of_all else [engine.address]
        live_at = await self._watch.until_live(concerned, episode.healing, LIVE_WITHIN_S)
        if not is_of_all:
            self._struck.append(Struck(fault.kind, engine.name, episode.began, episode.ended))
        noticed_at = unlike_live(self._watch.looks, engine.address, episode.began)
        seen = Seen(
            kind=fault.kind,
            engine=engine.name,
            noticed_s=None
            if noticed_at is None or noticed_at > (live_at or noticed_at)
            else noticed_at - episode.began,
            live_s=None if live_at is None else max(0.0, live_at - episode.ended),
            probes=() if live_at is None else tuple(await self._probes(number, fault)),
        )
        self._screen.say(f"    {_in_words(episode, seen)}")
        return seen

    async def _probes(self, number: str, fault: Fault) -> list[Probe]:
        async with self._traffic.gate.closed():
            await self._stage.until_asked()
            engine = self._stage.engines[fault.engine]
            name = f"probe-{number.partition('/')[0]}"
            return await probe(self._stage, self._watch, self._traffic, self._client, engine, name, self._rng)


def _in_words(episode: Episode, seen: Seen) -> str:
    noticed = "" if seen.noticed_s is None else f"noticed after {seen.noticed_s:.2f} s, "
    over = f"over after {episode.ended - episode.began:.2f} s, "
    if seen.live_s is None:
        return f"{noticed}{over}[red]not live within {LIVE_WITHIN_S:g} s"
    verdicts = [probe.verdict.value for probe in seen.probes]
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in dict.fromkeys(verdicts))
    return f"{noticed}{over}live {seen.live_s:.2f} s later; {counts}"


def _ignored(call: Call) -> None:
    """The client keeps its calls."""


async def _ended(*tasks: asyncio.Task[object]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
