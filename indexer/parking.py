"""Stored events that cannot be indexed yet, because a hash they depend on is not known.

Two kinds wait here. A *claim*: a lane holds a block of which only the hash is known. A *recipe*: an event whose tokens
would give its blocks' keys if its parent's key were known. Both are bounded, in blocks and in bytes; the oldest make
room.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, deque
from collections.abc import Collection

from indexer.lane import Lane
from indexer.wire import BlockStored

MAX_BLOCKS = 1 << 14
"""Of each kind, a publisher."""
MAX_BYTES = 8 << 20
"""Of recipes, a publisher. One that is larger than that does not wait at all."""
CLAIM = 272
"""Bytes a claim, with its share of the table."""
RECIPE = 600
"""Bytes an event without its hashes, tokens and extras, with its share of the table."""


class Parking:
    def __init__(self) -> None:
        self._claims: dict[Lane, OrderedDict[int, int]] = {}
        """Lane → hash → copies."""
        self._claimed = 0
        self._recipes: OrderedDict[int, deque[BlockStored]] = OrderedDict()
        """By the hash they wait for."""
        self._recipe_blocks = 0
        self._recipe_bytes = 0
        self.dropped = 0
        """Blocks that made room."""

    def __bool__(self) -> bool:
        return bool(self._claimed or self._recipes)

    def __len__(self) -> int:
        """Blocks held, as far as hashes tell, but not in the index."""
        return len(set().union(*self._claims.values()))

    @property
    def bytes(self) -> int:
        return self._recipe_bytes + self._claimed * CLAIM

    # --- claims

    def claim(self, block_hash: int, lane: Lane) -> None:
        """One copy of the block is in `lane`."""
        claims = self._claims.setdefault(lane, OrderedDict())
        copies = claims.get(block_hash, 0)
        if lane.counts_copies or not copies:
            claims[block_hash] = copies + 1
        self._claimed += not copies
        if self._claimed > MAX_BLOCKS:
            self._drop_oldest_claim()

    def unclaim(self, block_hash: int, lane: Lane) -> bool:
        """One copy less. False if none is waiting."""
        claims = self._claims.get(lane)
        if claims is None or block_hash not in claims:
            return False
        if claims[block_hash] > 1:
            claims[block_hash] -= 1
        else:
            self._take(lane, block_hash)
        return True

    def has_claims(self, lane: Lane) -> bool:
        return bool(self._claims.get(lane))

    def unclaim_all(self, block_hash: int, bits: int) -> None:
        """None of the lanes with these bits has it any more."""
        for lane in [lane for lane in self._claims if lane.bit & bits]:
            self._take(lane, block_hash)

    def _take(self, lane: Lane, block_hash: int) -> int:
        """All copies."""
        copies = self._claims[lane].pop(block_hash, 0)
        self._claimed -= bool(copies)
        if not self._claims[lane]:
            del self._claims[lane]
        return copies

    def _drop_oldest_claim(self) -> None:
        """Of the lane with most of them."""
        fullest = max(self._claims.values(), key=len)
        fullest.popitem(last=False)
        self._claimed -= 1
        self.dropped += 1

    # --- recipes

    def wait_for(self, block_hash: int, event: BlockStored) -> None:
        """Until the hash's key is known, the event's tokens are of no use."""
        self._recipes.setdefault(block_hash, deque()).append(event)
        self._count(event, 1)
        while self._recipe_blocks > MAX_BLOCKS or self._recipe_bytes > MAX_BYTES:
            self._drop_oldest_recipe()

    def _count(self, event: BlockStored, sign: int) -> None:
        self._recipe_blocks += sign * len(event.hashes)
        self._recipe_bytes += sign * _bytes(event)

    def _drop_oldest_recipe(self) -> None:
        parent = next(iter(self._recipes))
        event = self._recipes[parent].popleft()
        if not self._recipes[parent]:
            del self._recipes[parent]
        self._count(event, -1)
        self.dropped += len(event.hashes)

    # --- both

    def learned(self, block_hash: int) -> tuple[list[Lane], list[BlockStored]]:
        """The hash's key is known now: who holds the block (once for each copy), and the events that waited for it.
        They no longer wait."""
        events = list(self._recipes.pop(block_hash, ()))
        for event in events:
            self._count(event, -1)
        return [lane for lane in list(self._claims) for _ in range(self._take(lane, block_hash))], events

    def forget(self, lanes: Collection[Lane]) -> None:
        """These lanes hold nothing any more."""
        for lane in lanes:
            self._claimed -= len(self._claims.pop(lane, ()))

    def shrink(self, limit: int) -> None:
        """To `limit` bytes, because others need room."""
        while self._recipes and self.bytes > limit:
            self._drop_oldest_recipe()
        while self._claimed and self.bytes > limit:
            self._drop_oldest_claim()

    def clear(self) -> None:
        self._claims.clear()
        self._recipes.clear()
        self._claimed = self._recipe_blocks = self._recipe_bytes = 0


def _bytes(event: BlockStored) -> int:
    extras = sum(map(sys.getsizeof, event.extras.values())) + 100 * len(event.extras) if event.extras else 0
    return RECIPE + 56 * len(event.hashes) + len(event.tokens) + extras
