"""Sequence numbers of one publisher's batches: what a number means, given those before it.

A publisher numbers its batches from 0, one by one, and starts again at 0 when its process does. So a number that goes
back is a new life of the publisher, and one that skips is a loss. Numbers only: what is to be done about a loss, and
what publishers that name their instance make certain, is stream.py's affair.
"""

from __future__ import annotations

from enum import Enum

import msgspec


class Verdict(Enum):
    APPLY = "apply"
    """The next one."""
    DUPLICATE = "duplicate"
    """Already accounted for."""
    RESTART = "restart"
    """The publisher has started anew: nothing learned before is true any more."""


class Gap(msgspec.Struct, frozen=True):
    """Batches `first`..`last` are missing."""

    first: int
    last: int

    @property
    def batches(self) -> int:
        return self.last - self.first + 1


class SequenceTracker:
    """`classify` says what a number means, `accept` records that it has been accounted for.

    The numbers `since`..`last`, without a hole, are those on which a picture of the publisher rests; from 0 on it is
    complete.
    """

    __slots__ = ("_heard", "last", "since")

    def __init__(self) -> None:
        self.last = -1
        """Highest number accounted for; -1 = none."""
        self.since: int | None = None
        """First number accounted for; None = none yet."""
        self._heard = -1

    def __repr__(self) -> str:
        return f"<SequenceTracker {self.since}..{self.last}>"

    @property
    def complete(self) -> bool:
        return self.since == 0

    def receive(self, seq: int) -> Verdict | Gap:
        """A live message. The very first is accepted whatever its number."""
        if seq == self.last + 1 or self.since is None:
            self._heard = seq
            return Verdict.APPLY
        if self.goes_back(seq):
            return Verdict.RESTART
        self._heard = seq
        return self.replayed(seq)

    def goes_back(self, seq: int) -> bool:
        """Is it lower than what was heard, and not the next one?"""
        return seq < self._heard and seq != self.last + 1 and self.since is not None

    def replayed(self, seq: int) -> Verdict | Gap:
        """A message from the publisher's memory: never a restart, and not held against live ones."""
        if seq == self.last + 1 or self.since is None:
            return Verdict.APPLY
        return Verdict.DUPLICATE if seq <= self.last else Gap(self.last + 1, seq - 1)

    def accept(self, seq: int) -> None:
        """`seq` is accounted for. If it does not follow `last`, the numbers before it no longer count."""
        if self.since is None or seq != self.last + 1:
            self.since = seq
        self.last = seq

    def accept_all(self, last: int) -> None:
        """Everything from 0 to `last` is accounted for, by other means than the batches."""
        self.since, self.last = 0, last

    def skip_to(self, seq: int) -> None:
        """Nothing before `seq` counts any more; it is the next to be accounted for. 0 = nothing was missed."""
        self.last, self.since = seq - 1, seq

    def doubt(self) -> None:
        """The connection broke: only the very next number proves that it is still the same life."""
        self._heard = self.last + 1

    def succeed(self, other: SequenceTracker) -> None:
        """These numbers take over from `other`. If they end below what it heard live, it was of an earlier life."""
        self._heard = other._heard if other._heard <= self.last else -1
