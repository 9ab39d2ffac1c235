"""What a publisher last said of itself besides its events: load, tiers, heartbeats. Nothing of it is in the index."""

from __future__ import annotations

from indexer.wire import Groups, Load, Notes, Tiers

MISSED_HEARTBEATS = 3
LATENESS = 1.0
"""Seconds more that the last of them may take."""


class Told:
    """Of one life of the publisher."""

    __slots__ = ("groups", "heartbeat", "load", "load_at", "tiers")

    def __init__(self) -> None:
        self.load: Load | None = None
        self.load_at = 0.0
        """When it was heard, by our clock."""
        self.tiers = Tiers()
        self.groups: Groups | None = None
        self.heartbeat = 0.0
        """Seconds; 0 = nothing was promised."""

    def hear(self, notes: Notes, now: float) -> None:
        if notes.load is not None:
            self.load, self.load_at = notes.load, now
        if notes.tiers is not None:
            new, old = notes.tiers, self.tiers
            self.tiers = Tiers(new.gpu or old.gpu, new.cpu or old.cpu, new.storage or old.storage)
        if notes.groups is not None:
            self.groups = notes.groups
        if notes.heartbeat:
            self.heartbeat = notes.heartbeat

    def notes(self) -> Notes:
        """What a residency is to know of it."""
        return Notes(tiers=self.tiers, groups=self.groups)

    def is_overdue(self, seconds: float) -> bool:
        """Is a silence of so many seconds longer than what was promised?"""
        return bool(self.heartbeat) and seconds > MISSED_HEARTBEATS * self.heartbeat + LATENESS
