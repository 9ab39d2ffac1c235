"""What the index's parts take of memory, and how many blocks fit into a budget.

A CPython dict never gives memory back while entries come and go in it: it is rebuilt when it is full, for three times
the entries that it has by then, the new table beside the old one. So what counts is not a table's size of the moment
but its size after the next rebuild, which follows from its entries alone: it neither swings nor depends on the past.
"""

from __future__ import annotations

import sys
from collections.abc import Sized
from typing import NamedTuple

INT = 48
"""Bytes of a 64-bit integer, as the allocator rounds it."""
ENTRY = 120
"""Bytes an entry takes of its table, at most."""


def table_bytes(entries: int) -> int:
    """Of a dict, after its next rebuild: a power of two of places, each 4 bytes, two thirds of them with 24 more."""
    return 112 + (20 << (3 * max(entries, 5)).bit_length())


def int_bytes(bits: int) -> int:
    """Of an integer of so many bits."""
    return -(-(sys.getsizeof(1) + 4 * (bits // 30)) // 16) * 16


def sized(table: Sized, each: int) -> int:
    """Bytes of a table as it is now, with `each` for the objects of an entry."""
    return sys.getsizeof(table) + len(table) * each


class Usage(NamedTuple):
    """What a number of blocks takes, other things being as they are."""

    mask: float = float(INT)
    """Bytes of integers for masks, a block."""
    hashes: float = 1.0
    """Entries in the largest table of hashes, a block."""
    other: float = 0.0
    """Bytes that grow with the number of blocks besides, a block."""
    fixed: int = 0
    """Bytes that do not."""

    def bytes(self, blocks: int) -> int:
        keys, hashes = table_bytes(blocks), table_bytes(int(blocks * self.hashes))
        each = INT + self.mask + self.hashes * INT + self.other
        return self.fixed + keys + hashes + max(keys, hashes) + int(blocks * each)

    def fits(self, budget: int) -> int:
        """How many blocks do."""
        low, high = 0, budget // INT
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.bytes(middle) <= budget else (low, middle - 1)
        return low


def capacity(budget: int, lanes: int = 64) -> int:
    """Blocks that fit into `budget` bytes: an estimate for the start, with masks of so many lanes."""
    return Usage(mask=int_bytes(lanes) / 4).fits(budget)
