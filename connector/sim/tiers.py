"""One tier below HBM: chunks of blocks in order of use, with pins, eviction and the tier's own events.

A chunk is named by the hash of its last block. It is pending while it is being written, pinned while something reads
it, and evictable otherwise, least recently used first. Recency changes only when a chunk is admitted and when a
request that used it ends, then tail first, so that the tail of the oldest request goes first.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import msgspec

from connector.events import BlockRemoved, BlockStored, Event, Hash, TierCleared
from connector.sim.hashing import BlockHash


class Lookup(Enum):
    MISS = auto()
    PENDING = auto()
    HIT = auto()


@dataclass(slots=True)
class Chunk:
    """`announcement` is the event that says this chunk is stored; its hashes are the chunk's blocks."""

    announcement: BlockStored
    ready: bool = False
    pins: int = 0

    @property
    def evictable(self) -> bool:
        return self.ready and not self.pins


class Tier:
    """Chunks of one medium.

    Args:
        medium: the name that events carry.
        capacity: how many chunks fit; None for no limit (nothing is ever removed).
        locality: the events' `locality`, if the medium has one.
    """

    def __init__(self, medium: str, capacity: int | None, locality: str | None = None) -> None:
        self.capacity = capacity
        self.events: list[Event] = []
        self._medium = medium
        self._locality = locality
        self._chunks: OrderedDict[BlockHash, Chunk] = OrderedDict()

    def __len__(self) -> int:
        return len(self._chunks)

    def lookup(self, key: BlockHash) -> Lookup:
        chunk = self._chunks.get(key)
        if chunk is None:
            return Lookup.MISS
        return Lookup.HIT if chunk.ready else Lookup.PENDING

    def make_room(self, count: int, protected: Collection[BlockHash]) -> bool:
        """Evict until `count` more chunks fit, sparing `protected`; all of it or nothing."""
        if self.capacity is None:
            return True
        excess = len(self._chunks) + count - self.capacity
        victims = self._oldest(excess, protected)
        if victims is None:
            return False
        if victims:
            hashes = [block for key in victims for block in self._chunks.pop(key).announcement.block_hashes]
            self.events.append(BlockRemoved(hashes, self._medium, group_idx=0, locality=self._locality))
        return True

    def admit(self, key: BlockHash, announcement: BlockStored) -> None:
        """Add a chunk as pending, most recently used; room must have been made."""
        self._chunks[key] = Chunk(msgspec.structs.replace(announcement, medium=self._medium, locality=self._locality))

    def announcement(self, key: BlockHash) -> BlockStored:
        return self._chunks[key].announcement

    def complete(self, keys: Iterable[BlockHash]) -> None:
        """Pending chunks are written: readable from now on, and said so."""
        for key in keys:
            chunk = self._chunks[key]
            chunk.ready = True
            self.events.append(chunk.announcement)

    def drop(self, keys: Iterable[BlockHash]) -> None:
        """Forget pending chunks that will not be written after all."""
        for key in keys:
            del self._chunks[key]

    def pin(self, keys: Iterable[BlockHash]) -> None:
        for key in keys:
            self._chunks[key].pins += 1

    def unpin(self, keys: Iterable[BlockHash]) -> None:
        for key in keys:
            self._chunks[key].pins -= 1

    def refresh(self, keys: Sequence[BlockHash]) -> None:
        """A request that used these chunks, in prompt order, has ended: its head becomes the most recent."""
        for key in reversed(keys):
            if key in self._chunks:
                self._chunks.move_to_end(key)

    def clear(self, *, silently: bool = False) -> None:
        """Drop all chunks; `silently`, as vLLM itself does it, nobody is told."""
        self._chunks.clear()
        if not silently:
            self.events.append(TierCleared(self._medium))

    def take_events(self) -> list[Event]:
        events, self.events = self.events, []
        return events

    def residency(self) -> Counter[Hash]:
        """How many readable chunks hold each hash."""
        ready = (chunk.announcement.block_hashes for chunk in self._chunks.values() if chunk.ready)
        return Counter(block for hashes in ready for block in hashes)

    def _oldest(self, count: int, protected: Collection[BlockHash]) -> list[BlockHash] | None:
        victims: list[BlockHash] = []
        if count <= 0:
            return victims
        for key, chunk in self._chunks.items():
            if chunk.evictable and key not in protected:
                victims.append(key)
                if len(victims) == count:
                    return victims
        return None
