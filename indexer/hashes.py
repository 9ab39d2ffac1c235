"""Engine hash → block key, as learned from stored events.

Engines of one model agree on their hashes as a rule, so one table serves them all (`HashKeys` per model in the index).
An engine that hashes differently (a random seed, a bug) gets a table of its own on top and never changes the others'.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping

GRACE = 1 << 14
"""How many hashes stay known after their block left every tier: a CPU-tier event may follow the HBM copy's removal."""


class HashKeys:
    """A hash is known for as long as its key is held by a lane of these `bits` (a function; None = by any lane)."""

    def __init__(self, masks: Mapping[int, int], bits: Callable[[], int] | None = None) -> None:
        self.keys: dict[int, int] = {}
        self.released: deque[int] = deque()
        """Hashes whose blocks left their last tier not long ago."""
        self._masks = masks
        self._bits = bits

    def release(self, hashes: Iterable[int]) -> None:
        """These hashes' blocks left their last tier: forget the hashes, though not at once."""
        self.released.extend(hashes)
        excess = len(self.released) - GRACE
        if excess > 0:
            self.forget_unused([self.released.popleft() for _ in range(excess)])

    def forget_unused(self, hashes: Iterable[int]) -> None:
        keys, masks, bits = self.keys, self._masks, -1 if self._bits is None else self._bits()
        for block_hash in hashes:
            key = keys.get(block_hash)
            if key is not None and not masks.get(key, 0) & bits:
                del keys[block_hash]
