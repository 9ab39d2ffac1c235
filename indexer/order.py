"""Which blocks are of least use: the order of the index's table, the least useful first.

What is stored goes to the table's end by itself. What was asked for is moved there too, the tail of a prompt before its
head: a head without its tail is still a prefix. It is not moved by those who look something up, which stays free of
writing, but later, from a queue, and once only in a while.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice
from statistics import median_low

MAX_ASKED = 1 << 17
"""Keys in the queue; beyond it the oldest requests drop out."""
MAX_MOVED = 1 << 16
"""Keys that were moved not long ago, and are not moved again."""
WINDOW = 1 << 14
"""Keys taken from the table's beginning at once."""
PART = 8
"""When this part of the table was looked at for what to forget, what was moved before may be moved again."""


class Order:
    def __init__(self, masks: dict[int, int]) -> None:
        self.masks = masks
        """The index's."""
        self.matters = False
        """Is memory getting short? Until then nothing is moved."""
        self.copies = 0
        """Keys that were moved so far: the table has the asker's integer since, the table of hashes the first one."""
        self._asked: deque[Sequence[int]] = deque()
        self._waiting = 0
        self._moved: set[int] = set()
        self._looked_at = 0
        self._window: dict[int, None] = {}
        """The next to be looked at."""

    def asked(self, keys: Sequence[int]) -> None:
        """A request has asked for these keys, which must not change any more."""
        if self.matters and keys:
            self._asked.append(keys)
            self._waiting += len(keys)
            while self._waiting > MAX_ASKED:
                self._waiting -= len(self._asked.popleft())

    @property
    def held(self) -> int:
        """Keys kept for all this."""
        return self._waiting + len(self._moved)

    def settle(self, limit: int) -> bool:
        """Move about `limit` keys of those that were asked for; True while there are more."""
        while self._asked and limit > 0:
            keys = self._asked.popleft()
            self._waiting -= len(keys)
            limit -= len(keys)
            self._to_end([key for key in dict.fromkeys(keys) if key in self.masks and key not in self._moved])
        return bool(self._asked)

    def _to_end(self, keys: list[int]) -> None:
        keys.reverse()
        self._move(keys)
        self.copies += len(keys)
        if len(self._moved) > MAX_MOVED:
            self._moved.clear()
        self._moved.update(keys)
        for key in self._window.keys() & keys:
            del self._window[key]

    def _move(self, keys: list[int]) -> None:
        self.masks.update(zip(keys, list(map(self.masks.pop, keys)), strict=True))

    def _look_further(self, count: int) -> None:
        self._window = dict.fromkeys(islice(self.masks, count))
        self._looked_at += count
        if self._looked_at > len(self.masks) // PART:
            self._looked_at = 0
            self._moved.clear()

    def least_useful(self, count: int, gpu: int) -> list[int]:
        """Some keys to forget, none only if there are none: of the `count` oldest the half that is in fewest places. In
        HBM, whose bits are `gpu`, counts double. The others stay for once."""
        masks, found = self.masks, dict[int, int]()
        while masks and not found:
            if not self._window:
                self._look_further(max(count, min(WINDOW, len(masks) // PART)))
            for key in list(islice(self._window, count)):
                del self._window[key]
                if mask := masks.get(key):
                    found[key] = mask.bit_count() + (mask & gpu).bit_count()
        if not found:
            return []
        line = median_low(found.values())
        self._move([key for key, worth in found.items() if worth > line])
        return [key for key, worth in found.items() if worth <= line]
