"""Stored events that cannot be indexed yet, because a hash they depend on is not known.

Two kinds wait here. A *claim*: a lane holds a block of which only the hash is known. A *recipe*: an event whose tokens
would give its blocks' keys if its parent's key were known. Both are bounded; the oldest make room.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from indexer.lane import Lane
from indexer.wire import BlockStored

MAX_BLOCKS = 1 << 14
"""Of each kind, a publisher."""
_NONE: Counter[Lane] = Counter()


class Parking:
    def __init__(self) -> None:
        self._claims: dict[int, Counter[Lane]] = {}
        """Hash → lane → copies."""
        self._recipes: dict[int, list[BlockStored]] = {}
        self._recipe_blocks = 0
        self.dropped = 0
        """Blocks that made room."""

    def __bool__(self) -> bool:
        return bool(self._claims or self._recipes)

    def __len__(self) -> int:
        """Blocks held, as far as hashes tell, but not in the index."""
        return len(self._claims)

    def claim(self, block_hash: int, lane: Lane) -> None:
        """One copy of the block is in `lane`."""
        lanes = self._claims.setdefault(block_hash, Counter())
        if lane.counts_copies or not lanes[lane]:
            lanes[lane] += 1
        if len(self._claims) > MAX_BLOCKS:
            self._claims.pop(next(iter(self._claims)))
            self.dropped += 1

    def unclaim(self, block_hash: int, lane: Lane) -> bool:
        """One copy less. False if none is waiting."""
        lanes = self._claims.get(block_hash)
        if lanes is None or not lanes[lane]:
            return False
        lanes[lane] -= 1
        if not lanes.total():
            del self._claims[block_hash]
        return True

    def wait_for(self, block_hash: int, event: BlockStored) -> None:
        """Until the hash's key is known, the event's tokens are of no use."""
        self._recipes.setdefault(block_hash, []).append(event)
        self._recipe_blocks += len(event.hashes)
        while self._recipe_blocks > MAX_BLOCKS:
            self._drop_oldest_recipe()

    def _drop_oldest_recipe(self) -> None:
        parent = next(iter(self._recipes))
        event = self._recipes[parent].pop(0)
        if not self._recipes[parent]:
            del self._recipes[parent]
        self._recipe_blocks -= len(event.hashes)
        self.dropped += len(event.hashes)

    def learned(self, block_hash: int) -> tuple[Iterable[Lane], Sequence[BlockStored]]:
        """The hash's key is known now: who holds the block (once for each copy), and the events that waited for it.
        They no longer wait."""
        events = self._recipes.pop(block_hash, ())
        self._recipe_blocks -= sum(len(event.hashes) for event in events)
        return self._claims.pop(block_hash, _NONE).elements(), events

    def forget(self, lanes: Collection[Lane]) -> None:
        """These lanes hold nothing any more."""
        for block_hash, claims in list(self._claims.items()):
            for lane in lanes:
                del claims[lane]  # which a Counter allows for what it does not have
            if not claims.total():
                del self._claims[block_hash]

    def clear(self) -> None:
        self._claims.clear()
        self._recipes.clear()
        self._recipe_blocks = 0
