"""A lane: a publisher's blocks in one tier and one KV-cache group, as a bit of the index's masks."""

from __future__ import annotations

from collections.abc import Iterator, Set
from itertools import islice, repeat


class Lane:
    __slots__ = ("_given", "_taken", "bit", "counts_copies", "dropped_copies", "forgotten", "held", "masks", "surplus")

    def __init__(self, masks: dict[int, int], bit: int, *, counts_copies: bool = True) -> None:
        self.masks = masks
        """The index's."""
        self.bit = bit
        self.counts_copies = counts_copies
        """False: a set, which one removal empties of a block however often it was added."""
        self.held = 0
        """Blocks held, each counted once."""
        self.surplus: dict[int, int] = {}
        """Key → copies beyond the first. Engines announce every physical copy, and the removal of each."""
        self.dropped_copies = 0
        """Removals of copies beyond the first."""
        self.forgotten = 0
        """Blocks that it held, and may still hold, when the index forgot them."""
        self._given = (0, bit)
        self._taken = (bit, 0)

    # Neighbouring blocks mostly have the same holders. Giving them the same mask object saves most of the memory for
    # masks, arithmetic here, and comparisons when a prompt is matched; hence the memory of the last change either way.

    def add(self, key: int, *, count_copies: bool = True) -> None:
        mask = self.masks.get(key, 0)
        if not mask & self.bit:
            self.masks[key] = self._with(mask)
            self.held += 1
        elif count_copies and self.counts_copies:
            self.surplus[key] = self.surplus.get(key, 0) + 1

    def add_chain(self, keys: list[int], *, count_copies: bool = True) -> list[int]:
        """The same for distinct keys. Returns the masks before; [] if nobody held any of them."""
        if len(keys) == 1:
            before = self.masks.get(keys[0], 0)
            self.add(keys[0], count_copies=count_copies)
            return [before] if before else []
        size = len(self.masks)
        masks = list(map(self.masks.setdefault, keys, repeat(self.bit)))
        new = len(self.masks) - size
        self.held += new
        if new == len(keys):
            return []
        if new:
            newest = set(islice(reversed(self.masks), new))
            masks = [0 if key in newest else mask for key, mask in zip(keys, masks, strict=True)]
        self._add_held(keys, masks, count_copies)
        return masks

    def _add_held(self, keys: list[int], masks: list[int], count_copies: bool) -> None:
        """Add the keys whose mask is not 0."""
        mask = masks[0]
        if mask and not mask & self.bit and masks.count(mask) == len(masks):
            self.masks.update(zip(keys, repeat(self._with(mask))))
            self.held += len(keys)
            return
        for key, mask in zip(keys, masks, strict=True):
            if mask:
                self.add(key, count_copies=count_copies)

    def remove(self, key: int) -> bool:
        """One copy less. True if with it the block's last holder of all is gone."""
        if self.surplus and key in self.surplus:
            self._drop_copy(key)
            return False
        mask = self.masks.get(key, 0)
        if not mask & self.bit:
            return False
        self.held -= 1
        if mask == self.bit:
            del self.masks[key]
            return True
        self.masks[key] = self._without(mask)
        return False

    def forget(self, keys: Set[int], held: int) -> None:
        """The index forgets these keys, of which `held` were here."""
        self.held -= held
        self.forgotten += held
        for key in self.surplus.keys() & keys:
            del self.surplus[key]

    def _with(self, mask: int) -> int:
        if mask is not self._given[0]:
            self._given = (mask, mask | self.bit)
        return self._given[1]

    def _without(self, mask: int) -> int:
        if mask is not self._taken[0]:
            self._taken = (mask, mask ^ self.bit)
        return self._taken[1]

    def _drop_copy(self, key: int) -> None:
        self.dropped_copies += 1
        if self.surplus[key] == 1:
            del self.surplus[key]
        else:
            self.surplus[key] -= 1


def each_bit(mask: int) -> Iterator[int]:
    while mask:
        yield mask & -mask
        mask &= mask - 1
