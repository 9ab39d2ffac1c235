"""The prefix index: block key → bitmask of who holds the block, and in which tier.

Holders are lanes (lane.py), one a publisher and tier, each a bit. Forgetting a whole lane is O(1): its bit is retired,
no reader asks for it any more, and its publisher's next lane gets another one. `sweep` takes retired bits out of the
masks slice by slice and only then gives them out again, so nothing comes back to life.

There are no tables per endpoint or tier: a block costs one entry here and one of hash → key, whoever holds it.

All of it together has a budget of bytes (budget.py). Where it does not suffice, the least useful blocks are forgotten
(order.py), by all who hold them. What is held then is less than the truth, and never more: a removal of a block that is
not known any more changes nothing.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from typing import Any

from indexer.hashes import HashKeys
from indexer.lane import Lane, each_bit
from indexer.memory import Memory
from indexer.names import Names
from indexer.order import Order
from indexer.pool import Pool
from indexer.residency import Residency

MAX_RETIRED = 4096
"""Retired bits that wait for a sweep; one more and they are swept at once, so masks stay short whoever forgets to."""
SLICE = 1024
"""Entries looked at between two chances to stop."""
HASH_SLACK = 1 << 15
FORGET = 128
"""Keys forgotten between two chances to stop."""


class PrefixIndex:
    def __init__(self) -> None:
        self.masks: dict[int, int] = {}
        """Block key → mask of the lanes that hold it; never 0. Always the same object."""
        self.names = Names()
        self.roots = self.names.roots
        """Every model and adapter name that is known → root of its chains."""
        self.plans: dict[tuple[Residency, ...], Any] = {}
        """For match.py: what it derives from lanes, block sizes and models; emptied whenever those change."""
        self.changes = 0
        """How often they did."""
        self.budget = 0
        """Bytes for all of the index, residencies and parked events included; 0 = without bound."""
        self.forgotten = 0
        """Blocks given up so far to keep to the budget."""
        self.ceiling = sys.maxsize
        """Blocks beyond which `make_room` must not wait for the next sweep."""
        self.lanes: dict[int, Lane] = {}
        """By their bits."""
        self.gpu_bits = 0
        self.publishers: set[Residency] = set()
        self.pools: dict[tuple[str, str, str], Pool] = {}
        """By tier, name and model."""
        self._hashes: dict[str, HashKeys] = {}
        self._free_bits: list[int] = []
        self._next_bit = 0
        self._retired = 0
        self._pass: Iterator[None] | None = None
        self._hashes_after_pass = 0
        self.order = Order(self.masks)
        self._memory = Memory(self, self.order)

    def publisher(self, name: str, model: str = "") -> Residency:
        """What a publisher holds, from now on; `close()` it when its endpoint goes. `model`: its topic's, if any."""
        residency = Residency(self, name, model)
        self.publishers.add(residency)
        return residency

    def knows_model(self, name: str) -> bool:
        """Is this name known, as a topic's model or as an adapter?"""
        return name in self.roots

    def __len__(self) -> int:
        """Unique blocks (with those that wait for `sweep`)."""
        return len(self.masks)

    def blocks(self, tier: str) -> int:
        """Blocks held in a tier, by all publishers together; what they share counts once."""
        own = sum(publisher.held(tier) for publisher in self.publishers if not publisher.shares(tier))
        return own + sum(pool.held for pool in self.pools.values() if pool.tier == tier)

    @property
    def known_hashes(self) -> int:
        return sum(len(table.keys) for table in self.hash_tables())

    # --- for Residency

    def root_for(self, model: str, base: int, alias: int) -> int:
        """Root of the chains for a request's model ("" = the base model): the name's own if it is known, as a model or
        an adapter of any engine; else one of those that a publisher has for its base model and for unknown names."""
        return self.roots.get(model, alias if model else base)

    def changed(self) -> None:
        """Lanes, block sizes or models are no longer what they were."""
        self.plans.clear()
        self.changes += 1

    def renew(self, name: str) -> None:
        """The adapter of this name is another one than before: what is held of it counts no more."""
        if all(publisher.model != name for publisher in self.publishers):
            self.names.renew(name)

    def hash_tables(self) -> list[HashKeys]:
        """Those that have anything in them: hardly a publisher has hashes of its own."""
        own = (publisher.own_hashes for publisher in self.publishers)
        return [table for table in (*self._hashes.values(), *own) if table.keys or table.released]

    def hashes(self, model: str) -> HashKeys:
        """The table that publishers of one model share."""
        return self._hashes.setdefault(model, HashKeys(self.masks))

    def join(self, tier: str, name: str, residency: Residency) -> Pool:
        place = tier, name, residency.model
        pool = self.pools.get(place)
        if pool is None:
            pool = self.pools[place] = Pool(self, *place)
        pool.members.add(residency)
        self.changed()
        return pool

    def leave(self, pool: Pool, residency: Residency) -> None:
        """With its last publisher a pool is gone."""
        pool.members.discard(residency)
        self.changed()
        if not pool.members:
            pool.clear()
            del self.pools[pool.tier, pool.name, pool.model]

    def open_lane(self, tier: str, *, counts_copies: bool = True) -> Lane:
        self.changed()
        lane = Lane(self.masks, 1 << self._take_bit(), counts_copies=counts_copies)
        self.lanes[lane.bit] = lane
        if tier == "gpu":
            self.gpu_bits |= lane.bit
        return lane

    @property
    def width(self) -> int:
        """Bits that lanes have or had, at most."""
        return self._next_bit

    def _take_bit(self) -> int:
        if self._free_bits:
            return heappop(self._free_bits)
        self._next_bit += 1
        return self._next_bit - 1

    def close_lane(self, lane: Lane) -> None:
        self.changed()
        self.lanes.pop(lane.bit, None)
        self.gpu_bits &= ~lane.bit
        if lane.held:
            self._retired |= lane.bit
        else:
            heappush(self._free_bits, lane.bit.bit_length() - 1)
        if self._retired.bit_count() > MAX_RETIRED:
            while self.sweep():
                pass

    def forget(self, residency: Residency) -> None:
        self.changed()
        self.publishers.discard(residency)
        self.release_hashes(residency.model)

    def release_hashes(self, model: str) -> None:
        """Drop a model's table once no publisher needs it."""
        if not any(publisher.model == model for publisher in self.publishers):
            self._hashes.pop(model, None)

    # --- clean-up

    def sweep(self, limit: int = 4 * SLICE) -> bool:
        """About `limit` entries' worth of cleaning up after clears and departures, and of keeping to the budget; True
        while there is more to do.

        For a periodic task: readers see a clear at once without it. Each pass begins with a list of a table's keys,
        about 10 ms for a million.
        """
        more = self.order.settle(limit)
        if self._pass is None:
            self._pass = self._next_pass()
            if self._pass is None:
                return more
        for _ in range(max(1, limit // SLICE)):
            if next(self._pass, self) is self:
                self._pass = None
                return more or bool(self._retired)
        return True

    def _next_pass(self) -> Iterator[None] | None:
        if self.budget:
            wanted = self._memory.weigh(self.budget)
            if wanted < len(self.masks):
                return self._forget_down_to(wanted)
        if self._retired or self.known_hashes > 2 * self._hashes_after_pass + HASH_SLACK:
            return self._clean()
        return None

    def _clean(self) -> Iterator[None]:
        """One pass over everything, for the bits that are retired as it begins."""
        retired, self._retired = self._retired, 0
        if retired:
            for keys in _slices(self.masks):
                _strip(self.masks, keys, retired)
                yield
        for table in self.hash_tables():
            for hashes in _slices(table.keys):
                table.forget_unused(hashes)
                yield
        self._hashes_after_pass = self.known_hashes
        while retired:
            highest = retired.bit_length() - 1
            heappush(self._free_bits, highest)
            retired ^= 1 << highest

    # --- the budget

    def asked(self, keys: Sequence[int]) -> None:
        """A request has asked for these keys, in their order, and they will not change: such blocks are forgotten last.
        Costs next to nothing."""
        self.order.asked(keys)

    def memory(self) -> Mapping[str, int]:
        """Bytes by part, not less than their objects take. What the allocator wastes comes on top, up to a tenth."""
        return self._memory.parts()

    def make_room(self) -> None:
        """To be called when there are more blocks than `ceiling`: events come in faster than they are swept."""
        self.forget_blocks(self.order.least_useful(4 * FORGET, self.gpu_bits))

    def _forget_down_to(self, count: int) -> Iterator[None]:
        while len(self.masks) > count:
            self.forget_blocks(self.order.least_useful(FORGET, self.gpu_bits))
            yield
        yield from self._clean()

    def forget_blocks(self, keys: Sequence[int]) -> None:
        """Take them out of every lane. Their hashes follow later; until then they lead to nothing."""
        held, distinct = Counter[int](), set(keys)
        for mask, count in Counter(map(self.masks.pop, keys)).items():
            for bit in each_bit(mask):
                held[bit] += count
        for bit, count in held.items():
            lane = self.lanes.get(bit)
            if lane is not None:
                if not lane.forgotten:
                    self.changed()
                lane.forget(distinct, count)
        self.forgotten += len(keys)


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
