"""What a stream keeps while it recovers lost batches: the copy they go into, the live batches that wait for them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from indexer.frames import Message
from indexer.residency import Residency
from indexer.sequence import SequenceTracker

ATTEMPTS = 3
"""Looks in a row that find nothing new: then the recovery has failed."""
HELD_BATCHES = 4096
HELD_BYTES = 32 * 2**20


class Copy:
    """A picture of what the publisher holds, and the numbers it rests on."""

    __slots__ = ("last_payload", "numbers", "residency")

    def __init__(self, residency: Residency) -> None:
        self.residency = residency
        self.numbers = SequenceTracker()
        self.last_payload = b""

    def forget(self, before: int) -> None:
        """Everything learned from batches with lower numbers."""
        self.residency.clear()
        self.numbers.skip_to(before)


@dataclass(slots=True)
class Recovery:
    """Replayed batches go into `copy`; live ones wait in `held` until the replay has come up to them."""

    copy: Copy
    held: deque[Message] = field(default_factory=deque)
    held_bytes: int = 0
    begun: bool = False
    """The first replayed batch has come."""
    progress: int = 0
    """Batches since the last look."""
    stalls: int = 0
    """Looks in a row without progress."""

    def hold(self, message: Message) -> bool:
        """False if there is no room."""
        self.held.append(message)
        self.held_bytes += len(message.payload)
        return len(self.held) <= HELD_BATCHES and self.held_bytes <= HELD_BYTES

    def stalled(self) -> bool:
        """A look at the progress: True when there was none too often."""
        self.stalls = 0 if self.progress else self.stalls + 1
        self.progress = 0
        return self.stalls >= ATTEMPTS


@dataclass(slots=True)
class Repair(Recovery):
    """Of the visible copy, from its last batch on."""

    alarms: int = 0

    @property
    def first(self) -> int:
        """The last batch we have; 0 if we have none."""
        return max(self.copy.numbers.last, 0)


@dataclass(slots=True)
class Rebuild(Recovery):
    """Of a new copy, from the publisher's first batch on."""
