"""Engine hash → block key, as learned from stored events.

Engines of one model agree on their hashes as a rule, so one table serves them all (`HashKeys` per model in the index).
An engine that hashes differently (a random seed, a bug) gets a table of its own on top and never changes the others'.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

GRACE = 1 << 14
"""How many hashes stay known after their block left every tier: a CPU-tier event may follow the HBM copy's removal."""


class HashKeys:
    """`in_use(key)` says whether a key may still be asked for by its hash."""

    def __init__(self, in_use: Callable[[int], bool]) -> None:
        self.keys: dict[int, int] = {}
        self._in_use = in_use
        self._released: deque[int] = deque()

    def release(self, hashes: Iterable[int]) -> None:
        """These hashes' blocks left their last tier: forget the hashes, though not at once."""
        self._released.extend(hashes)
        while len(self._released) > GRACE:
            self.forget_unused(self._released.popleft())

    def forget_unused(self, block_hash: int) -> None:
        key = self.keys.get(block_hash)
        if key is not None and not self._in_use(key):
            del self.keys[block_hash]
