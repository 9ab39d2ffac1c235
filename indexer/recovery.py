"""What a stream keeps while it recovers lost batches: the copy they go into, the live batches that wait for them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from indexer.frames import Message
from indexer.residency import Residency
from indexer.sequence import SequenceTracker
from indexer.wire import SnapshotPart

ATTEMPTS = 3
"""Questions in a row in vain: then the recovery has failed. Before the last one a rebuild turns from snapshots, if they
do not come whole, to the publisher's memory."""
HELD_BATCHES = 4096
HELD_BYTES = 32 * 2**20
HELD_BYTES_IN_ALL = 256 * 2**20
"""By all streams of a process."""
MESSAGE_BYTES = 256
"""Of memory that a held message takes besides its payload."""


class Copy:
    """A picture of what the publisher holds, and the numbers it rests on."""

    __slots__ = ("last_payload", "numbers", "residency")

    def __init__(self, residency: Residency) -> None:
        self.residency = residency
        self.numbers = SequenceTracker()
        self.last_payload = b""
        """Of the last number; b"" = not known, as after a snapshot."""

    def forget(self, before: int) -> None:
        """Everything learned from batches with lower numbers."""
        self.residency.forget()
        self.numbers.skip_to(before)


class Allowance:
    """Bytes that the held batches of several streams may take together."""

    __slots__ = ("limit", "taken")

    def __init__(self, limit: int = HELD_BYTES_IN_ALL) -> None:
        self.limit = limit
        self.taken = 0

    @property
    def is_exceeded(self) -> bool:
        return self.taken > self.limit


@dataclass(slots=True)
class Recovery:
    """Replayed batches go into `copy`; live ones wait in `held` until the replay has come up to them."""

    copy: Copy
    allowance: Allowance
    held: deque[Message] = field(default_factory=deque)
    held_bytes: int = 0
    begun: bool = False
    """`copy` has something to go on from: the first replayed batch, or a whole snapshot."""
    moving: bool = False
    """Something of use has come since the last look."""
    stalls: int = 0
    """Questions in a row that brought nothing to go on from."""

    def hold(self, message: Message) -> bool:
        """False if there is no room."""
        self.held.append(message)
        self._count(_size(message))
        full = len(self.held) > HELD_BATCHES or self.held_bytes > HELD_BYTES or self.allowance.is_exceeded
        return not full

    def release(self) -> Message:
        """The first held one, which waits no longer."""
        message = self.held.popleft()
        self._count(-_size(message))
        return message

    def end(self) -> None:
        """What is still held is nobody's any more."""
        self._count(-self.held_bytes)

    def _count(self, size: int) -> None:
        self.held_bytes += size
        self.allowance.taken += size

    @property
    def newest(self) -> int:
        """Highest number that is known to exist."""
        return max(self.copy.numbers.last, self.held[-1].seq if self.held else -1)

    def moved(self) -> bool:
        """A look: has anything come since the last one?"""
        moved, self.moving = self.moving, False
        return moved

    def advanced(self) -> None:
        """Whatever happens now, it goes on from here."""
        self.moving, self.stalls = True, 0

    def stalled(self) -> bool:
        """Another question is needed: True when there were too many in vain."""
        self.stalls += 1
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
    """Of a new copy: from a snapshot where the publisher gives one, else from the first batch that it remembers."""

    snapshot: Parts | None = None
    """What has come of the snapshot that was asked for; None once it is whole, or if none is wanted."""

    @property
    def used(self) -> bool:
        """Something is in `copy`."""
        return self.begun or (self.snapshot is not None and self.snapshot.taken > 0)

    def begin(self, last: int) -> None:
        """A whole snapshot is in `copy`: everything up to batch `last`."""
        self.snapshot = None
        self.copy.numbers.accept_all(last)
        self.begun = True
        self.advanced()

    def start_over(self, copy: Copy, *, snapshot: bool) -> None:
        self.copy = copy
        self.snapshot = Parts() if snapshot and self.stalls < ATTEMPTS - 1 else None


@dataclass(slots=True)
class Parts:
    """Those of a snapshot that have come. They come in order, and all of one picture have one number."""

    seq: int = -1
    """Number of the last batch that the snapshot reflects."""
    taken: int = 0
    wanted: int = 0

    def take(self, seq: int, part: SnapshotPart) -> bool:
        """False if it is not the next one of this snapshot."""
        if not self.taken:
            self.seq, self.wanted = seq, part.parts
        self.taken += 1
        return (seq, part.part, part.parts) == (self.seq, self.taken, self.wanted)

    @property
    def whole(self) -> bool:
        return self.taken == self.wanted


def _size(message: Message) -> int:
    return len(message.payload) + MESSAGE_BYTES
