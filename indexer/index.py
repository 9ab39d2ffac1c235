"""The prefix index: block key → bitmask of who holds the block, and in which tier.

Holders are lanes (lane.py), one a publisher and tier, each a bit. Forgetting a whole lane is O(1): its bit is retired,
no reader asks for it any more, and its publisher's next lane gets another one. `sweep` takes retired bits out of the
masks slice by slice and only then gives them out again, so nothing comes back to life.

There are no tables per endpoint or tier: a block costs one entry here and one of hash → key, whoever holds it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from heapq import heappop, heappush
from typing import Any

from indexer.hashes import HashKeys
from indexer.keys import root_key
from indexer.lane import Lane
from indexer.pool import Pool
from indexer.residency import Residency

MAX_MODELS = 4096
"""Names of models and adapters that are told apart."""
NAMED_TIERS = frozenset({"gpu", "cpu", "storage"})
MAX_OTHER_TIERS = 8
MAX_RETIRED = 64
"""Retired bits that wait for a sweep; one more and they are swept at once, so masks stay short whoever forgets to."""
SLICE = 1024
"""Entries looked at between two chances to stop."""
HASH_SLACK = 1 << 15


class PrefixIndex:
    def __init__(self) -> None:
        self.masks: dict[int, int] = {}
        """Block key → mask of the lanes that hold it; never 0. Always the same object."""
        self.roots: dict[str, int] = {}
        """Every model and adapter name seen → root of its chains."""
        self.plans: dict[tuple[Residency, ...], Any] = {}
        """For match.py: what it derives from lanes, block sizes and models; emptied whenever those change."""
        self._publishers: set[Residency] = set()
        self._pools: dict[tuple[str, str, str], Pool] = {}
        """By tier, name and model."""
        self._other_tiers: set[str] = set()
        self._hashes: dict[str, HashKeys] = {}
        self._free_bits: list[int] = []
        self._next_bit = 0
        self._retired = 0
        self._pass: Iterator[None] | None = None
        self._hashes_after_pass = 0

    def publisher(self, name: str, model: str = "") -> Residency:
        """What a publisher holds, from now on; `close()` it when its endpoint goes. `model`: its topic's, if any."""
        residency = Residency(self, name, model)
        self._publishers.add(residency)
        return residency

    def knows_model(self, name: str) -> bool:
        """Has this name been seen, as a topic's model or as an adapter?"""
        return name in self.roots

    def __len__(self) -> int:
        """Unique blocks (with those that wait for `sweep`)."""
        return len(self.masks)

    def blocks(self, tier: str) -> int:
        """Blocks held in a tier, by all publishers together; what they share counts once."""
        own = sum(publisher.held(tier) for publisher in self._publishers if not publisher.shares(tier))
        return own + sum(pool.held for pool in self._pools.values() if pool.tier == tier)

    @property
    def known_hashes(self) -> int:
        return sum(len(table.keys) for table in self._hash_tables())

    # --- for Residency

    def changed(self) -> None:
        """Lanes, block sizes or models are no longer what they were."""
        self.plans.clear()

    def root(self, name: str) -> int | None:
        """Root of a model's or adapter's chains; None if there are too many names to tell them apart."""
        root = self.roots.get(name)
        if root is None and len(self.roots) < MAX_MODELS:
            root = self.roots[name] = root_key(name)
        return root

    def _hash_tables(self) -> list[HashKeys]:
        return [*self._hashes.values(), *(publisher.own_hashes for publisher in self._publishers)]

    def hashes(self, model: str) -> HashKeys:
        """The table that publishers of one model share."""
        return self._hashes.setdefault(model, HashKeys(self.masks.__contains__))

    def join(self, tier: str, name: str, residency: Residency) -> Pool:
        place = tier, name, residency.model
        pool = self._pools.get(place)
        if pool is None:
            pool = self._pools[place] = Pool(self, *place)
        pool.members.add(residency)
        self.changed()
        return pool

    def leave(self, pool: Pool, residency: Residency) -> None:
        """With its last publisher a pool is gone."""
        pool.members.discard(residency)
        self.changed()
        if not pool.members:
            pool.clear()
            del self._pools[pool.tier, pool.name, pool.model]

    def open_lane(self, tier: str, *, counts_copies: bool = True) -> Lane | None:
        """None if there are too many tiers of media without a name here."""
        if tier not in NAMED_TIERS and tier not in self._other_tiers:
            if len(self._other_tiers) >= MAX_OTHER_TIERS:
                return None
            self._other_tiers.add(tier)
        self.changed()
        return Lane(self.masks, 1 << self._take_bit(), counts_copies=counts_copies)

    def _take_bit(self) -> int:
        if self._free_bits:
            return heappop(self._free_bits)
        self._next_bit += 1
        return self._next_bit - 1

    def close_lane(self, lane: Lane) -> None:
        self.changed()
        if lane.held:
            self._retired |= lane.bit
        else:
            heappush(self._free_bits, lane.bit.bit_length() - 1)
        if self._retired.bit_count() > MAX_RETIRED:
            while self.sweep():
                pass

    def forget(self, residency: Residency) -> None:
        self.changed()
        self._publishers.discard(residency)
        self.release_hashes(residency.model)

    def release_hashes(self, model: str) -> None:
        """Drop a model's table once no publisher needs it."""
        if not any(publisher.model == model for publisher in self._publishers):
            self._hashes.pop(model, None)

    # --- clean-up

    def sweep(self, limit: int = 4 * SLICE) -> bool:
        """About `limit` entries' worth of cleaning up after clears and departures; True while there is more to do.

        For a periodic task: readers see a clear at once without it. Each pass begins with a list of a table's keys,
        about 10 ms for a million.
        """
        if self._pass is None:
            if not self._retired and self.known_hashes <= 2 * self._hashes_after_pass + HASH_SLACK:
                return False
            self._pass = self._clean()
        for _ in range(max(1, limit // SLICE)):
            if next(self._pass, self) is self:
                self._pass = None
                return bool(self._retired)
        return True

    def _clean(self) -> Iterator[None]:
        """One pass over everything, for the bits that are retired as it begins."""
        retired, self._retired = self._retired, 0
        if retired:
            for keys in _slices(self.masks):
                _strip(self.masks, keys, retired)
                yield
        for table in self._hash_tables():
            for hashes in _slices(table.keys):
                for block_hash in hashes:
                    table.forget_unused(block_hash)
                yield
        self._hashes_after_pass = self.known_hashes
        while retired:
            highest = retired.bit_length() - 1
            heappush(self._free_bits, highest)
            retired ^= 1 << highest


def _slices(table: Collection[int]) -> Iterator[list[int]]:
    everything = list(table)
    for start in range(0, len(everything), SLICE):
        yield everything[start : start + SLICE]


def _strip(masks: dict[int, int], keys: list[int], retired: int) -> None:
    """Take the retired bits out of these keys' masks, sharing the resulting objects as `Lane.add` does."""
    before = after = 0
    for key in keys:
        mask = masks.get(key, 0)
        if mask is not before:
            before, after = mask, mask & ~retired
        if after:
            masks[key] = after
        else:
            masks.pop(key, None)
