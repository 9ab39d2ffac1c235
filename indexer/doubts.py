"""How far the picture of a publisher can be trusted: what speaks against it, and the state and trust that follow. Pure.

Doubts are of two kinds. A picture is *incomplete* if it was begun late, or anew after a loss: what it shows is proven,
but there may be more. As engines forget too, that becomes less with time. It is *outdated* if something may have passed
us by since: the longer, the less of it is true.
"""

from __future__ import annotations

from enum import Enum
from math import inf

from indexer.sequence import SequenceTracker
from indexer.told import Told

INCOMPLETE = 0.5
"""Trust in a picture just begun."""
COMPLETION = 60.0
"""Seconds in which the doubt whether there is more becomes half."""
OUTDATED = 0.5
"""Trust in a picture that may just have become outdated."""
DECAY = 10.0
"""Seconds in which trust in it becomes half."""
DELAYS_WINDOW = 300.0
"""Seconds from which the fastest message is taken, at least; twice as much at most, so that clocks may drift."""
LATEST = float(1 << 40)
"""Timestamps from here on are none."""
LATE = 1.0
"""Seconds of delay from which on a message is one of a backlog, and others, not read yet, may have changed much."""


class State(Enum):
    SYNCING = "syncing"
    """Connecting, or learning from the publisher's memory."""
    LIVE = "live"
    """All that the publisher ever said is accounted for."""
    UNSURE = "unsure"
    """Only what it said since some batch: it may hold more than we know of."""
    LOST = "lost"
    """No connection: what we know may be outdated."""


class Doubts:
    """About the visible picture of one publisher, and its connection."""

    __slots__ = (
        "_begun_at",
        "_begun_with",
        "connected_at",
        "has_been_connected",
        "heard_at",
        "is_connected",
        "is_doubtful",
        "is_silent",
        "outdated_at",
        "why_incomplete",
        "why_lost",
    )

    def __init__(self) -> None:
        self.is_connected = False
        self.has_been_connected = False
        self.connected_at = 0.0
        self.heard_at = 0.0
        """When the last live message came; 0 = never."""
        self.why_lost = ""
        self.why_incomplete = ""
        self.is_doubtful = False
        """Reconnected, and not yet known to be talking to the same life of the publisher."""
        self.is_silent = False
        """Heartbeats were promised and do not come."""
        self.outdated_at: float | None = None
        """Since when something may have passed us by; None = nothing may have."""
        self._begun_with: int | None = 0
        self._begun_at = 0.0

    # -- what happens

    def connected(self, now: float, *, knows_something: bool) -> None:
        self.is_connected = self.has_been_connected = True
        self.connected_at = now
        self.is_silent = False
        self.is_doubtful = knows_something
        if not knows_something:
            self.outdated_at = None

    def disconnected(self, why: str, now: float) -> None:
        self.is_connected, self.why_lost = False, why
        self._outdated(now)

    def heard(self, now: float) -> bool:
        """A live message, which was judged by its number. Whether it takes a doubt away."""
        self.heard_at = now
        if not self.is_doubtful and not self.is_silent and self.outdated_at is None:
            return False
        self.is_doubtful = self.is_silent = False
        self.outdated_at = None
        return True

    def recovered(self) -> None:
        """The publisher's memory has brought the picture up to date."""
        self.is_doubtful = False
        if not self.is_silent:
            self.outdated_at = None

    def notice_silence(self, told: Told, now: float) -> bool:
        """True if it has just become too long."""
        if not self.is_connected or self.is_silent or not told.is_overdue(now - max(self.heard_at, self.connected_at)):
            return False
        self.is_silent = True
        self._outdated(now)
        return True

    def _outdated(self, now: float) -> None:
        if self.outdated_at is None:
            self.outdated_at = now

    # -- what follows

    def judge(self, numbers: SequenceTracker, told: Told, *, learning: bool, late: bool) -> tuple[State, str]:
        """The state, and why it is that."""
        if not self.is_connected:
            return (State.LOST, self.why_lost) if self.why_lost else (State.SYNCING, "connecting")
        if learning:
            return State.SYNCING, "learning from the publisher's memory"
        if self.is_silent:
            return State.UNSURE, "silent"
        if self.is_doubtful:
            return State.UNSURE, "reconnected; nothing heard since"
        if late:
            return State.UNSURE, "events come late"
        if numbers.complete:
            if told.heartbeat and self.heard_at < self.connected_at:
                return State.SYNCING, "waiting for the first heartbeat"
            return State.LIVE, ""
        if numbers.since is None:
            return State.UNSURE, "nothing heard yet"
        return State.UNSURE, self.why_incomplete or f"joined at batch {numbers.since}"

    def is_current(self, told: Told, *, late: bool) -> bool:
        """Is what the picture shows still true, as far as anybody can know?"""
        waiting = bool(told.heartbeat) and self.heard_at < self.connected_at
        return self.is_connected and not (self.is_silent or self.is_doubtful or waiting or late)

    def trust(self, numbers: SequenceTracker, now: float, *, late: bool) -> float:
        """0 to 1: what a block that the picture shows is worth, of what it would be worth if the picture were live."""
        if not self.is_connected:
            return 0.0 if self.why_lost else 1.0
        if numbers.since != self._begun_with:
            self._begun_with, self._begun_at = numbers.since, now
        if self.outdated_at is not None:
            return OUTDATED * _halved(now - self.outdated_at, DECAY)
        if late:
            return OUTDATED
        if numbers.complete or numbers.since is None:
            return 1.0
        return 1 - (1 - INCOMPLETE) * _halved(now - self._begun_at, COMPLETION)


class Delay:
    """How long messages take, compared with the fastest of late: whose clocks these are, and how they are set, is not
    known."""

    __slots__ = ("_before", "_heard_at", "_least", "_until", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0
        """Of the last message that had a timestamp."""
        self._heard_at = -inf
        self._least = self._before = inf
        self._until = -inf

    def hear(self, timestamp: float, now: float) -> None:
        if not 0 < timestamp < LATEST:
            return
        took, self._heard_at = now - timestamp, now
        if now >= self._until:
            self._before = self._least if now < self._until + DELAYS_WINDOW else inf
            self._least, self._until = took, now + DELAYS_WINDOW
        elif took < self._least:
            self._least = took
        self.seconds = took - min(self._least, self._before)

    def is_late(self, now: float) -> bool:
        """Are messages of a backlog coming in? When none comes for a while, the last one was the end of it."""
        return self.seconds > LATE and now - self._heard_at < LATE


def _halved(seconds: float, half_life: float) -> float:
    return float(2.0 ** (-seconds / half_life))
