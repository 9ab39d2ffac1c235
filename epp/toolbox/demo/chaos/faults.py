"""What is done to the fleet, to whom and when: a seeded schedule. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import islice

HEARTBEAT_S = 0.5
"""What the demo's engines promise."""
SILENCE_S = 3 * HEARTBEAT_S + 1.0
"""The silence that a picker must call one: three heartbeats, the last of them up to a second late."""
SLACK_S = 0.5
"""For a busy machine, on top of what a picker is given to notice."""

_MOST_LOST = 3


class Kind(Enum):
    ENGINE_KILLED = "engine killed, restarted"
    ENGINE_STOPPED = "engine stopped, continued"
    ENGINE_REPLACED = "engine replaced at its address"
    LINK_CUT = "event connection refused"
    LINK_STALLED = "event connection silent"
    MESSAGES_LOST = "event messages lost"
    REPLAY_CUT = "messages lost, replay refused"
    CACHE_RESET = "prefix cache reset"
    PICKER_KILLED = "picker killed, restarted"

    @property
    def strikes_the_cache(self) -> bool:
        """Does it change what an engine holds, so that a request under way may find less than was there?"""
        return self in (Kind.ENGINE_KILLED, Kind.ENGINE_REPLACED, Kind.CACHE_RESET)

    @property
    def noticeable_after(self) -> float:
        """Seconds from the beginning after which no picker that listens may still say `live`, unless it is over."""
        return _NOTICEABLE_AFTER[self]


_NOTICEABLE_AFTER = {
    Kind.ENGINE_KILLED: SLACK_S,
    Kind.ENGINE_STOPPED: SILENCE_S + SLACK_S,
    Kind.ENGINE_REPLACED: SLACK_S,
    Kind.LINK_CUT: SLACK_S,
    Kind.LINK_STALLED: SILENCE_S + SLACK_S,
    Kind.MESSAGES_LOST: (_MOST_LOST + 1) * HEARTBEAT_S + SLACK_S,
    Kind.REPLAY_CUT: (_MOST_LOST + 1) * HEARTBEAT_S + SLACK_S,
    Kind.CACHE_RESET: SLACK_S,
    Kind.PICKER_KILLED: 0.0,
}

_LASTS = {
    Kind.ENGINE_KILLED: (0.3, 1.2),
    Kind.ENGINE_STOPPED: (SILENCE_S + 0.5, SILENCE_S + 1.0),
    Kind.ENGINE_REPLACED: (0.3, 0.8),
    Kind.LINK_CUT: (0.3, 1.5),
    Kind.LINK_STALLED: (SILENCE_S + 0.5, SILENCE_S + 1.0),
    Kind.MESSAGES_LOST: (0.0, 0.0),
    Kind.REPLAY_CUT: (1.0, 2.5),
    Kind.CACHE_RESET: (0.0, 0.0),
    Kind.PICKER_KILLED: (0.2, 0.8),
}
"""Seconds, besides what starting a process takes."""


@dataclass(frozen=True, slots=True)
class Fault:
    kind: Kind
    engine: int
    """The engine concerned. Where none is, the one that is looked at afterwards."""
    seconds: float
    messages: int
    """To lose, of those kinds that lose any."""


def schedule(seed: int, count: int, engines: int) -> list[Fault]:
    """`count` faults: all kinds in some order, again and again; the same for the same arguments."""
    return list(islice(_faults(random.Random(seed ^ 0xC4A05), engines), count))


def _faults(rng: random.Random, engines: int) -> Iterator[Fault]:
    while True:
        for kind in rng.sample(list(Kind), len(Kind)):
            yield Fault(kind, rng.randrange(engines), rng.uniform(*_LASTS[kind]), rng.randint(1, _MOST_LOST))
