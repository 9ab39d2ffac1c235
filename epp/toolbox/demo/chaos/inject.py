"""Faults, done for real: each begins, lasts, and is over."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from epp.toolbox.demo.chaos.engines import Mortal
from epp.toolbox.demo.chaos.faults import Fault, Kind
from epp.toolbox.demo.chaos.stage import Stage
from epp.toolbox.demo.chaos.watch import Watch
from epp.toolbox.processes import PartFailed

PATIENCE_S = 30.0


@dataclass(slots=True)
class Episode:
    """One fault as it happened. Monotonic seconds."""

    fault: Fault
    began: float
    healing: float = 0.0
    """What the picker hears from then on, it hears from the fleet as it is afterwards."""
    ended: float = 0.0
    """The process is back up, or the link is whole."""


async def inject(stage: Stage, watch: Watch, fault: Fault) -> Episode:
    """Returns once the fault is over."""
    episode = Episode(fault, time.monotonic())
    try:
        async with asyncio.timeout(PATIENCE_S):
            await _INJECT[fault.kind](stage, watch, episode)
    except TimeoutError:
        raise PartFailed("demo", f"a fault was not over after {PATIENCE_S:g} s: {fault.kind.value}") from None
    episode.ended = time.monotonic()
    return episode


def _engine(stage: Stage, episode: Episode) -> Mortal:
    return stage.engines[episode.fault.engine]


async def _lasts(episode: Episode) -> None:
    await asyncio.sleep(episode.fault.seconds)
    episode.healing = time.monotonic()


async def _engine_killed(stage: Stage, watch: Watch, episode: Episode) -> None:
    """While it has requests to answer."""
    engine = _engine(stage, episode)
    await stage.until_busy(engine)
    episode.began = time.monotonic()
    await engine.kill()
    await _lasts(episode)
    await engine.start()


async def _engine_stopped(stage: Stage, watch: Watch, episode: Episode) -> None:
    engine = _engine(stage, episode)
    engine.freeze()
    await _lasts(episode)
    engine.thaw()


async def _engine_replaced(stage: Stage, watch: Watch, episode: Episode) -> None:
    """As an operator scales down: out of the list first, then out of work, then stopped."""
    engine = _engine(stage, episode)
    stage.list_engines(without=engine)
    await watch.until(lambda look: engine.address not in look.feeds)
    await stage.until_idle(engine)
    await engine.stop()
    await _lasts(episode)
    await engine.start()
    stage.list_engines()


async def _link_cut(stage: Stage, watch: Watch, episode: Episode) -> None:
    link = _engine(stage, episode).events
    await link.cut()
    await _lasts(episode)
    await link.mend()


async def _link_stalled(stage: Stage, watch: Watch, episode: Episode) -> None:
    link = _engine(stage, episode).events
    link.stall()
    await _lasts(episode)
    link.resume()


async def _messages_lost(stage: Stage, watch: Watch, episode: Episode) -> None:
    await _engine(stage, episode).events.lose(episode.fault.messages)
    await _lasts(episode)


async def _replay_cut(stage: Stage, watch: Watch, episode: Episode) -> None:
    engine = _engine(stage, episode)
    await engine.replay.cut()
    await engine.events.lose(episode.fault.messages)
    await _lasts(episode)
    await engine.replay.mend()


async def _cache_reset(stage: Stage, watch: Watch, episode: Episode) -> None:
    episode.began = episode.healing = await stage.reset_cache(_engine(stage, episode))


async def _picker_killed(stage: Stage, watch: Watch, episode: Episode) -> None:
    await watch.collect()
    await stage.kill_picker()
    await _lasts(episode)
    await stage.start_picker()


_INJECT: dict[Kind, Callable[[Stage, Watch, Episode], Awaitable[None]]] = {
    Kind.ENGINE_KILLED: _engine_killed,
    Kind.ENGINE_STOPPED: _engine_stopped,
    Kind.ENGINE_REPLACED: _engine_replaced,
    Kind.LINK_CUT: _link_cut,
    Kind.LINK_STALLED: _link_stalled,
    Kind.MESSAGES_LOST: _messages_lost,
    Kind.REPLAY_CUT: _replay_cut,
    Kind.CACHE_RESET: _cache_reset,
    Kind.PICKER_KILLED: _picker_killed,
}
