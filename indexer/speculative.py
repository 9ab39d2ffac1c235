"""Blocks that an endpoint will probably hold soon, because a prompt was just sent there.

Events come only when the engine has computed the blocks; until then a burst of equal prompts would see an empty cache
everywhere and scatter. So a pick is noted here, for as long as its request runs and not longer than a time to live.
Nothing here is proof: the figures that count hits never include it.

Holders are any hashable names of endpoints. Keys are those of keys.py: a key stands for everything before it too, which
is why a run can be found by bisection, and why of long prompts a sample of the keys is enough to note: what is likely
need not be known to the block.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from itertools import repeat
from typing import Any

import msgspec

MAX_KEYS = 1 << 20
"""Noted keys, all requests together; what would exceed it is not noted."""

DENSE = 64
STRIDE = 16
"""Every key is noted up to block `DENSE`, from there on every 16th."""


class _Note(msgspec.Struct, frozen=True):
    holder: Hashable
    keys: Sequence[int]
    expires: float


class Speculation:
    """`now` is in seconds of any clock that does not go back."""

    def __init__(self, time_to_live: float = 2.0, max_keys: int = MAX_KEYS) -> None:
        self.time_to_live = time_to_live
        self._max_keys = max_keys
        self._notes: OrderedDict[Hashable, list[_Note]] = OrderedDict()
        """Request → what was noted for it; the oldest first."""
        self._counts: dict[Hashable, dict[int, int]] = {}
        """Holder → key → how many requests wait for it."""
        self.keys = 0
        self.dropped = 0
        """Notes not taken for want of room."""

    def __len__(self) -> int:
        """Requests noted."""
        return len(self._notes)

    @property
    def occupancy(self) -> float:
        """0..1"""
        return self.keys / self._max_keys

    def add(self, request: Hashable, holder: Hashable, keys: Sequence[int], now: float, start: int = 0) -> None:
        """`request`, a prompt with these keys, was sent to `holder`, which will hold those from number `start` on. May
        be called several times for one request: several prompts, several holders."""
        keys = _sample(keys, start)
        if not keys:
            return
        if self.keys + len(keys) > self._max_keys:
            self.dropped += 1
            return
        self._notes.setdefault(request, []).append(_Note(holder, keys, now + self.time_to_live))
        counts = self._counts.setdefault(holder, {})
        counts.update(zip(keys, [count + 1 for count in map(counts.get, keys, repeat(0))], strict=True))
        self.keys += len(keys)

    def drop(self, request: Hashable) -> None:
        """The request has ended, or its blocks have come. Unknown requests are nothing new."""
        for note in self._notes.pop(request, ()):
            self._take_out(note)

    def forget(self, holder: Hashable) -> None:
        """The endpoint is gone, or has lost everything."""
        if self._counts.pop(holder, None) is None:
            return
        for request, notes in list(self._notes.items()):
            rest = [note for note in notes if note.holder != holder]
            self.keys -= sum(len(note.keys) for note in notes if note.holder == holder)
            if rest:
                self._notes[request] = rest
            else:
                del self._notes[request]

    def expire(self, now: float) -> None:
        """To be called now and then: takes out what is past its time."""
        while self._notes:
            request, notes = next(iter(self._notes.items()))
            if notes[0].expires > now:
                return
            self.drop(request)

    def runs(self, keys: Sequence[int], columns: Mapping[Any, int], starts: Sequence[int]) -> dict[int, int]:
        """For each column, of one holder, how many of `keys` that will probably hold from number `starts[column]` on
        without a hole: at least. Columns of which that is 0 are left out."""
        found = {}
        sample = _sample(keys, 0)
        for holder, counts in self._counts.items():
            column = columns.get(holder)
            if column is not None:
                start = starts[column]
                first = _number_from(start)
                if first < len(sample) and sample[first] in counts:
                    end = bisect_left(sample, True, first, key=lambda key: key not in counts)
                    found[column] = _block(end - 1) + 1 - start
        return found

    def _take_out(self, note: _Note) -> None:
        counts = self._counts.get(note.holder)
        self.keys -= len(note.keys)
        if counts is None:
            return
        left = list(map(counts.pop, note.keys, repeat(1)))
        if max(left) > 1:
            counts.update((key, count - 1) for key, count in zip(note.keys, left, strict=True) if count > 1)
        if not counts:
            del self._counts[note.holder]


def _sample(keys: Sequence[int], start: int) -> Sequence[int]:
    """Of those from number `start` on."""
    if len(keys) <= DENSE:
        return keys[start:] if start else keys
    return [*keys[start:DENSE], *keys[_block(max(DENSE, _number_from(start))) :: STRIDE]]


def _block(number: int) -> int:
    """Which block the sample's `number`th key is of."""
    return number if number < DENSE else DENSE + (number - DENSE) * STRIDE


def _number_from(block: int) -> int:
    """The sample's first key of this block or a later one."""
    return block if block <= DENSE else DENSE + -(-(block - DENSE) // STRIDE)
