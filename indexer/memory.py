"""What the index takes of memory, part by part, and how many blocks its budget allows."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING

from indexer.budget import ENTRY, INT, Usage, int_bytes, sized, table_bytes
from indexer.hashes import GRACE
from indexer.order import Order
from indexer.parking import Parking

if TYPE_CHECKING:
    from indexer.index import PrefixIndex

PUBLISHER = 1 << 13
"""Bytes a publisher, without what it holds."""
NEWEST = 1 << 10
"""Blocks that show how far neighbours share a mask."""
FEW = 1 << 12
"""Blocks that are too few to show what a block takes."""
SHORT = 2
"""From this part of the blocks that fit on it matters which of them are useful."""
ROUND = 8
"""At least this part of all blocks is forgotten at a time, because each time all hashes are looked through."""
PARKED = 8
"""The part of the budget that parked events may take."""
NAMES = 8
"""Hashes of its own that a publisher may have for a block."""
SLACK = 16
"""The part of the blocks that fit which is kept free: one block too many may double a table."""


class Memory:
    def __init__(self, index: PrefixIndex, order: Order) -> None:
        self._index = index
        self._order = order

    def parts(self) -> Mapping[str, int]:
        """Bytes, not less than the objects take."""
        index, masks, tables = self._index, self._index.masks, self._index.hash_tables()
        return {
            "masks": sized(masks, INT) + int(len(masks) * self._mask_bytes()),
            "hashes": sum(sized(table.keys, INT) + sized(table.released, INT) for table in tables),
            "copies": sum(sized(lane.surplus, INT) for lane in index.lanes.values() if lane.surplus),
            "parking": sum(parking.bytes for parking in self._parkings()),
            "asked": self._order.held * (ENTRY + INT) + self._moved * INT,
            "publishers": len(index.publishers) * PUBLISHER + index.names.bytes,
            # a table is rebuilt beside itself
            "rebuild": max(sys.getsizeof(masks), *(sys.getsizeof(table.keys) for table in tables), 0),
        }

    def weigh(self, budget: int) -> int:
        """How many blocks there should be, if that is fewer than there are. Sets the index's `ceiling`."""
        index, parts = self._index, self.parts()
        if parts["parking"] > budget // PARKED:
            self._shrink_parkings(budget // PARKED)
        if sum(parts.values()) > budget:
            self._clear_inventors()
            self._compact()
        blocks, fits = len(index.masks), self._usage(parts, budget).fits(budget)
        index.ceiling = fits
        self._order.matters = blocks > fits // SHORT
        wanted = fits - fits // SLACK
        return min(wanted, blocks - blocks // ROUND) if blocks > wanted else blocks

    def _usage(self, parts: Mapping[str, int], budget: int) -> Usage:
        """As it would be after all tables were rebuilt."""
        blocks = max(FEW, len(self._index.masks))
        largest, *others = sorted((len(table.keys) for table in self._index.hash_tables()), reverse=True) or [0]
        return Usage(
            mask=(parts["masks"] - sized(self._index.masks, INT)) / max(1, len(self._index.masks)),
            hashes=max(largest / blocks, 1.0) + 1 / ROUND,  # those of forgotten blocks stay a little longer
            other=((ENTRY + INT) * sum(others) + parts["copies"] + self._moved * INT) / blocks,
            fixed=parts["publishers"] + min(parts["parking"], budget // PARKED),
        )

    def _clear_inventors(self) -> None:
        """Publishers that give the same blocks ever new names: it is not for others to make room for those."""
        for publisher in self._index.publishers:
            names = len(publisher.own_hashes.keys)
            if names > GRACE and names > NAMES * sum(map(publisher.held, publisher.tiers())):
                publisher.skipped["too_many_names"] += 1
                publisher.clear()

    def _compact(self) -> None:
        """Tables that are larger than what is in them needs, because there was more."""
        for table in (self._index.masks, *(table.keys for table in self._index.hash_tables())):
            if sys.getsizeof(table) > table_bytes(len(table)):
                entries = dict(table)
                table.clear()
                table.update(entries)

    @property
    def _moved(self) -> int:
        """Keys of which two integers are kept, at most."""
        return min(len(self._index.masks), self._order.copies)

    def _mask_bytes(self) -> float:
        """A block."""
        newest = list(islice(reversed(self._index.masks.values()), NEWEST))
        distinct = {id(mask): mask for mask in newest}
        return sum(int_bytes(mask.bit_length()) for mask in distinct.values()) / max(1, len(newest))

    def _parkings(self) -> Iterator[Parking]:
        for publisher in self._index.publishers:
            yield publisher.parking
        for pool in self._index.pools.values():
            yield pool.parking

    def _shrink_parkings(self, limit: int) -> None:
        """Those that take more than their share."""
        parkings = [parking for parking in self._parkings() if parking]
        for parking in parkings:
            parking.shrink(limit // len(parkings))
