"""A store that several publishers load from: what any of them put there, all of them find.

Each has lanes of its own for what it says is there (a set; one a KV-cache group), and a block is there if anybody says
so whose word counts. So what somebody said ends with him, and does not count while his picture may be outdated. A
removal is true for all, whoever tells it: what is gone is gone.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import TYPE_CHECKING

from indexer.lane import Lane, each_bit
from indexer.parking import Parking

if TYPE_CHECKING:
    from indexer.index import PrefixIndex
    from indexer.residency import Residency


class Standing(Enum):
    """What a publisher's word counts for, to the others of a store."""

    DRAFT = "draft"
    """Nothing: it is a copy that is being made, of what the publisher said long ago."""
    DOUBTED = "doubted"
    """What it removes is gone; what it announced may be, too, by now."""
    CURRENT = "current"


class Pool:
    """Made by `PrefixIndex.join`."""

    def __init__(self, index: PrefixIndex, tier: str, name: str, model: str) -> None:
        self.tier = tier
        self.name = name
        self.model = model
        self.members: set[Residency] = set()
        self.bits: dict[int, int] = {}
        """KV-cache group → those of all members' lanes."""
        self._uncounted = 0
        """Those of members whose word does not count."""
        self.parking = Parking()
        """Of all members: anybody may say what a block is of which another one has told the hash only."""
        self._index = index

    @property
    def counted(self) -> dict[int, int]:
        """KV-cache group → bits, of which a block must have one."""
        return {group: bits & ~self._uncounted for group, bits in self.bits.items()}

    @property
    def held(self) -> int:
        """Blocks that the member says are there that knows of most: there are at least as many."""
        current = (member for member in self.members if member.standing is Standing.CURRENT)
        return max((member.claimed(self.tier) for member in current), default=0)

    @property
    def block_size(self) -> int:
        """Tokens a block, as its publishers say; 0 = none of them has yet."""
        return next((member.own_block_size for member in self.members if member.own_block_size), 0)

    # --- the members' lanes

    def opened(self, group: int, lane: Lane, standing: Standing) -> None:
        self.bits[group] = self.bits.get(group, 0) | lane.bit
        self.judge([lane], standing)

    def closed(self, group: int, lane: Lane) -> None:
        self.bits[group] &= ~lane.bit
        if not self.bits[group]:
            del self.bits[group]
        self._uncounted &= ~lane.bit
        self.parking.forget([lane])

    def judge(self, lanes: Iterable[Lane], standing: Standing) -> None:
        """This is what the word of the lanes' publisher counts for."""
        for lane in lanes:
            if standing is Standing.CURRENT:
                self._uncounted &= ~lane.bit
            else:
                self._uncounted |= lane.bit

    # --- what is true for all of them

    def remove(self, bits: int, key: int) -> bool:
        """Out of the lanes with these bits. True if the block's last holder of all is gone."""
        lanes, bits = self._index.lanes, bits & self._index.masks.get(key, 0)
        if bits in lanes:
            return lanes[bits].remove(key)
        gone = False
        for bit in each_bit(bits):
            gone = lanes[bit].remove(key)
        return gone

    def clear(self) -> None:
        for member in self.members:
            member.clear([self.tier])
        self.parking.clear()
