"""What breaks may cost hits, but no prediction exceeds what is delivered while the picker says `live` of an engine."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from dataclasses import dataclass

import pytest

from .engines import BUFFERED_BATCHES
from .fleet import Probe
from .kinds import CHUNKS_4, STOCK, fleets
from .traffic import Traffic, completion

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.envoy,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(400),
]

CUT_S = 5.0
PATIENCE_S = 40.0
HOPELESS_S = 8.0
"""Patience with an engine that cannot be asked what it holds."""
EXACT_IN_A_ROW = 24
"""Twice round the warm prompts."""


@pytest.fixture(scope="session")
def warm():
    """Prompts that together are more than HBM holds and less than CPU RAM: in turns, each is reloaded from there."""
    rng = random.Random(8)
    return [completion(rng.choices(range(3, 1000), k=150), kind="warm") for _ in range(10)]


@dataclass(frozen=True)
class Recovery:
    probes: list[Probe]
    state: str
    """Of the feed in the end, and why it is not live."""
    live_s: float | None
    """From the end of the fault to the feed's state `live`; None = not within the patience."""
    exact_s: float | None
    """To the first request from which on all were predicted exactly, while live."""


async def recovery(fleet, engine, asks, *, since, patience_s=None):
    """Asks round and round until the predictions have been exact, and the feed live, for a while; or patience ends."""
    patience_s = patience_s or (PATIENCE_S if fleet.kind.ours else HOPELESS_S)
    probes, live_s, exact_s, in_a_row, now = [], None, None, 0, 0.0
    rounds = itertools.cycle(asks)
    while in_a_row < EXACT_IN_A_ROW and now < patience_s:
        probes.append(probe := await fleet.probe(next(rounds), only=engine, state=True))
        now = probe.answered_at - since
        if probe.state == "live" and live_s is None:
            live_s = now
        in_a_row = in_a_row + 1 if probe.exact and probe.state == "live" else 0
        if in_a_row == 1:
            exact_s = now
    feed = await fleet.feed(engine)
    state = f"{feed['state']} {feed['reason']}".strip()
    return Recovery(probes, state, live_s, exact_s if in_a_row else None)


def record(report, fleet, name, found, *more, **figures):
    """And what must hold on every fleet: never too much while live."""
    rounded = {name: None if s is None else round(s, 2) for name, s in
               (("live_after_s", found.live_s), ("exact_after_s", found.exact_s))}  # fmt: skip
    proof = report.never_too_high_while_live(
        fleet, name, [*more, *found.probes], state=found.state, **rounded, **figures
    )
    if fleet.kind.ours:
        assert proof.holds, proof
        assert None not in (found.live_s, found.exact_s), proof


async def warmed(fleet, engine, asks):
    for ask in asks * 2:
        await fleet.probe(ask, only=engine)


@fleets(CHUNKS_4, STOCK)
async def test_picker_killed_and_restarted_in_front_of_warm_engines(fleet, report, warm):
    [engine, _] = fleet.engines
    await warmed(fleet, engine, warm)
    await fleet.restart_picker()
    found = await recovery(fleet, engine, warm, since=time.monotonic())
    record(report, fleet, "picker killed and restarted", found)
    assert any(probe.delivered for probe in found.probes)


@fleets(CHUNKS_4, STOCK)
async def test_event_socket_cut_for_5_seconds(fleet, report, warm):
    [engine, _] = fleet.engines
    await warmed(fleet, engine, warm)
    started = time.monotonic()
    await fleet.events[engine.name].cut()
    meanwhile = await busy_until(fleet, engine, started + CUT_S)
    await fleet.events[engine.name].mend()
    found = await recovery(fleet, engine, warm, since=time.monotonic())
    record(report, fleet, f"events cut for {CUT_S:g} s", found, *meanwhile, requests_meanwhile=len(meanwhile))


async def busy_until(fleet, engine, end):
    probes, traffic = [], Traffic(9)
    while time.monotonic() < end:
        probes += await fleet.run(traffic, 1, only=engine)
    return probes


@fleets(CHUNKS_4, STOCK)
async def test_events_lost_while_the_replay_socket_is_dead(fleet, report, warm):
    """What was lost cannot be asked for, until the replay socket is back."""
    [engine, _] = fleet.engines
    await warmed(fleet, engine, warm)
    await fleet.replays[engine.name].cut()
    await fleet.events[engine.name].cut()
    meanwhile = await fleet.run(Traffic(10), 20, only=engine)
    await fleet.events[engine.name].mend()
    dead = await recovery(fleet, engine, warm, since=time.monotonic(), patience_s=3)
    await fleet.replays[engine.name].mend()
    found = await recovery(fleet, engine, warm, since=time.monotonic())
    states = sorted({probe.state for probe in dead.probes})
    record(report, fleet, "replay socket dead", found, *meanwhile, *dead.probes, states_while_dead=states)
    if fleet.kind.ours:
        assert "live" not in states


@fleets(CHUNKS_4, STOCK)
async def test_more_events_lost_than_the_engine_remembers(fleet, report, warm):
    [engine, _] = fleet.engines
    await warmed(fleet, engine, warm)
    before = (await fleet.feed(engine))["last_seq"]
    await fleet.events[engine.name].cut()
    await storm(fleet, engine)
    await fleet.events[engine.name].mend()
    found = await recovery(fleet, engine, warm, since=time.monotonic())
    lost = (await fleet.feed(engine))["last_seq"] - before - len(found.probes)
    record(report, fleet, f"more lost than the {BUFFERED_BATCHES} batches remembered", found, batches_lost=lost)
    assert lost > BUFFERED_BATCHES


async def storm(fleet, engine):
    """More steps with events than the engine remembers; past the picker, which would only be slower."""
    rng = random.Random(11)
    asks = iter([completion(rng.choices(range(3, 1000), k=40)) for _ in range(2 * BUFFERED_BATCHES)])

    async def client():
        for ask in asks:
            async with fleet.http.post(engine.url + ask.path, json=ask.body) as response:
                assert response.status == 200

    await asyncio.gather(*(client() for _ in range(2)))


@fleets(CHUNKS_4, STOCK)
async def test_engine_killed_and_restarted_in_place(fleet, report, warm):
    """The picker predicts nothing of what the former process held, and learns what the new one holds."""
    [engine, _] = fleet.engines
    await warmed(fleet, engine, warm)
    await fleet.restart_engine(engine)
    found = await recovery(fleet, engine, warm, since=time.monotonic())
    record(report, fleet, "engine killed and restarted in place", found)
    assert found.probes[0].delivered == 0
    assert found.probes[-1].delivered > 0
