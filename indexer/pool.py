"""A store that several publishers load from: what any of them put there, all of them find.

One lane (and KV-cache group) for all of them, as a set: the same block announced by several is held once, and a
removal by any of them removes it. It outlives restarts and departures as long as one of them is left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from indexer.lane import Lane
from indexer.parking import Parking

if TYPE_CHECKING:
    from indexer.index import PrefixIndex
    from indexer.residency import Residency


class Pool:
    """Made by `PrefixIndex.join`."""

    def __init__(self, index: PrefixIndex, tier: str, name: str, model: str) -> None:
        self.tier = tier
        self.name = name
        self.model = model
        self.members: set[Residency] = set()
        self.lanes: dict[int, Lane] = {}
        """By KV-cache group."""
        self.parking = Parking()
        """Whoever announced a block of which only the hash is known."""
        self._index = index

    @property
    def held(self) -> int:
        """Blocks; of several groups, the group's with fewest."""
        return min((lane.held for lane in self.lanes.values()), default=0)

    @property
    def block_size(self) -> int:
        """Tokens a block, as its publishers say; 0 = none of them has yet."""
        return next((member.own_block_size for member in self.members if member.own_block_size), 0)

    def lane(self, group: int) -> Lane | None:
        """Opened where there is none; None if there cannot be one."""
        lane = self.lanes.get(group) or self._index.open_lane(self.tier, counts_copies=False)
        if lane is not None:
            self.lanes[group] = lane
        return lane

    def clear(self) -> None:
        for lane in self.lanes.values():
            self._index.close_lane(lane)
        self.lanes.clear()
        self.parking.clear()
        for member in self.members:
            member.lanes_changed()
