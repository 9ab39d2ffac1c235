"""What one publisher's engine holds: applies its events to the index.

An event is indexed as far as its blocks' keys can be known: computed from its tokens where the event says all that goes
into a key, looked up by hash where it does not (placeholders, CPU-tier events without extra keys), and kept aside where
neither works yet (parking.py). Which groups' blocks are followed, and what they are for, is said in groups.py.

Where an engine's groups have blocks of several sizes, keys are of the largest *unit* that divides them all, and a block
is known by the key of its last unit, just as vLLM hashes it.

Nothing an engine sends raises here; what cannot be used is counted in `skipped`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial, reduce
from itertools import repeat
from math import gcd
from operator import or_
from typing import TYPE_CHECKING

from indexer.groups import Groups, Rule
from indexer.hashes import HashKeys
from indexer.keys import block_key
from indexer.lane import Lane
from indexer.names import NOBODYS, Used
from indexer.parking import Parking
from indexer.pool import Pool, Standing
from indexer.stored import described_size, keys_after, says_all, usable
from indexer.vllm_hash import is_unsalted_first_block
from indexer.wire import BlockRemoved, BlocksCleared, BlockStored, Event, Notes

if TYPE_CHECKING:
    from indexer.index import PrefixIndex

MAX_SCOPES = 64
"""Kinds of events whose lane is remembered."""
NAMED_TIERS = frozenset({"gpu", "cpu", "storage"})
MAX_OTHER_TIERS = 8
"""Of media without a name here."""
MAX_HELD = 1 << 22
"""Blocks a lane. Some stores never say what they evict: then everything they said before is forgotten."""


class Residency:
    """Made by `PrefixIndex.publisher`."""

    def __init__(self, index: PrefixIndex, name: str, model: str) -> None:
        self.name = name
        self.stored_blocks = 0
        self.removed_blocks = 0
        self.removed_copies = 0
        """Of the removed blocks, those of which another copy remains in the tier."""
        self.skipped_removals = 0
        """Events about tiers or groups of which nothing is indexed."""
        self.skipped: Counter[str] = Counter()
        """Events not indexed, by reason: a small fixed set."""
        self._index = index
        self._names = Used(index.names)
        self._lanes: dict[tuple[str, int], Lane] = {}
        """By tier and KV-cache group; in a store that it shares, what it says of it itself."""
        self._pools: dict[str, Pool] = {}
        """By tier, where it shares one."""
        self._standing = Standing.CURRENT
        self._groups = Groups()
        self._unit = 0
        """Tokens that a key stands for, where some group's blocks are larger; 0 = a block's."""
        self._admitted: dict[tuple[str, int | None, str, int, str, int], Lane] = {}
        """What decides whether an event is indexed → its lane, for those that are."""
        self.parking = Parking()
        self.own_block_size = 0
        """As its own events say; 0 = they have not."""
        self._sized_by_hbm = False
        self._told_chunk = 0
        self._learned_chunk = 0
        self._closed = False
        self.own_hashes = HashKeys(index.masks, self._all_bits)
        """Where this engine's hashes are not the ones that others of its model use."""
        self._bind(model)

    def _bind(self, model: str) -> None:
        self._model = model
        self._shared = self._index.hashes(model)
        self._root = self._names.base(model)
        self._index.changed()

    # --- what is known of the engine

    @property
    def model(self) -> str:
        """The base model's name as the topic says it; "" if it does not. Assigning another name forgets everything."""
        return self._model

    @model.setter
    def model(self, model: str) -> None:
        if model != self._model and not self._closed:
            self.clear()
            former, stores = self._model, {tier: pool.name for tier, pool in self._pools.items()}
            for tier in stores:
                self.share(tier, None)
            self._bind(model)
            for tier, name in stores.items():
                self.share(tier, name)
            self._index.release_hashes(former)

    @property
    def block_size(self) -> int:
        """Tokens a block (a unit, where blocks are of several sizes); learned from notes and events, else from those of
        who shares a store with it; 0 = unknown."""
        return self.own_block_size or max((pool.block_size for pool in self._pools.values()), default=0)

    @property
    def blocks_per_chunk(self) -> int:
        """KV blocks an offloaded chunk: as told by assignment, else as learned from events, else 1."""
        return self._told_chunk or self._learned_chunk or 1

    @blocks_per_chunk.setter
    def blocks_per_chunk(self, blocks: int) -> None:
        if blocks != self._told_chunk:
            self._told_chunk = blocks
            self._index.changed()

    def told(self, notes: Notes) -> None:
        """What the publisher says of its groups and tiers, before the events of the same batch."""
        if notes.groups is not None and self._groups.tell(notes.groups):
            self._groups_told()
        tiers = notes.tiers
        if tiers is None:
            return
        if tiers.cpu is not None:
            self.blocks_per_chunk = tiers.cpu.chunk
            self.share("cpu", tiers.cpu.pool)
        if tiers.storage is not None:
            self.share("storage", tiers.storage.pool)

    def share(self, tier: str, pool: str | None) -> None:
        """From now on the tier, which is below HBM, is a store of all publishers that name the same pool; None = its
        own again."""
        joined, pool = self._pools.get(tier), pool or None
        if self._closed or pool == (joined and joined.name):
            return
        self.clear([tier])
        if joined is not None:
            del self._pools[tier]
            self._index.leave(joined, self)
        if pool is not None:
            self._pools[tier] = self._index.join(tier, pool, self)

    def shares(self, tier: str) -> bool:
        return tier in self._pools

    @property
    def standing(self) -> Standing:
        """What its word counts for, to the others of the stores that it shares."""
        return self._standing

    @standing.setter
    def standing(self, standing: Standing) -> None:
        if standing is self._standing:
            return
        self._standing = standing
        for tier, pool in self._pools.items():
            pool.judge(self._lanes_in(tier).values(), standing)
            self._index.changed()

    @property
    def root(self) -> int:
        """Root of the base model's chains."""
        return self._root

    @property
    def alias_root(self) -> int:
        """Root of the chains for a name that is not known: the base model's, of which it must be an alias, unless it
        may be an adapter's that was forgotten."""
        return self._index.roots[NOBODYS] if self._names.is_forgetful else self._root

    def root_for(self, model: str) -> int:
        """As `PrefixIndex.root_for`, for this publisher."""
        return self._index.root_for(model, self._root, self.alias_root)

    # --- what it holds

    def needs(self, tier: str, groups: Iterable[int] | None = None) -> Sequence[int]:
        """Of the index's masks: a block that has any bit of each of these is in the tier, in these groups (None = those
        that decide). Empty: nothing is."""
        pool = self._pools.get(tier)
        bits = {group: lane.bit for group, lane in self._lanes_in(tier).items()} if pool is None else pool.counted
        needs = [bits.get(group, 0) for group in (self._deciding(bits) if groups is None else groups)]
        return needs if all(needs) else []

    def bits(self, tier: str, groups: Iterable[int] | None = None) -> int:
        """The same together. In a tier of its own a block must have all of them."""
        return sum(self.needs(tier, groups))

    def holds(self, tier: str, key: int) -> bool:
        needs, mask = self.needs(tier), self._index.masks.get(key, 0)
        return bool(needs) and all(mask & need for need in needs)

    @property
    def rule(self) -> Rule | None:
        """By which the engine reuses blocks; None: no hit is to be expected."""
        pools = self._pools.values()
        others = (member._groups for pool in pools for member in pool.members if member is not self)
        return self._groups.rule(self.block_size, others, (group for pool in pools for group in pool.bits))

    def held(self, tier: str) -> int:
        """Blocks in a tier; of several groups, the group's with fewest."""
        pool = self._pools.get(tier)
        return self.claimed(tier) if pool is None else pool.held

    def claimed(self, tier: str) -> int:
        """The same, of what it says itself."""
        lanes = self._lanes_in(tier)
        return min((lanes[group].held if group in lanes else 0 for group in self._deciding(lanes)), default=0)

    @property
    def is_thinned(self) -> bool:
        """Has the index forgotten blocks that are, or were, in its HBM?"""
        return any(lane.forgotten for lane in self._lanes_in("gpu").values())

    def _deciding(self, known: Iterable[int]) -> Iterable[int]:
        """The KV-cache groups of full attention, if there are such, else all. A block is in a tier if it is in all of
        these."""
        return self._groups.prefix_groups() or known

    def _lanes_in(self, tier: str) -> dict[int, Lane]:
        """By KV-cache group."""
        return {group: lane for (lane_tier, group), lane in self._lanes.items() if lane_tier == tier}

    def tiers(self) -> set[str]:
        """In which anything is or was held."""
        return {tier for tier, _ in self._lanes} | {tier for tier, pool in self._pools.items() if pool.bits}

    @property
    def parked(self) -> int:
        """Blocks that the engine holds but that are not indexed yet, for want of an event that says what they are."""
        return len(self.parking)

    @property
    def dropped(self) -> int:
        """Parked blocks that were given up for newer ones."""
        return self.parking.dropped

    def counted(self) -> Counter[str]:
        """All its counters but `skipped`, by their names. Only ever up."""
        names = ("stored_blocks", "removed_blocks", "removed_copies", "skipped_removals", "dropped")
        return Counter({name: getattr(self, name) for name in names})

    # --- events

    def apply(self, events: Iterable[Event]) -> None:
        """In order. A `Batch` is an iterable of its events."""
        if self._closed:
            return
        for event in events:
            if type(event) is BlockStored:
                self._store(event)
            elif type(event) is BlockRemoved:
                self._remove(event)
            elif type(event) is BlocksCleared:
                self.clear(event.tiers)
                self._empty(event.tiers or ())

    def clear(self, tiers: Iterable[str] | None = None) -> None:
        """Forget what it holds in these tiers; None = everything. Of shared stores, what it said itself."""
        wanted = None if tiers is None else set(tiers)
        gone = {name: lane for name, lane in self._lanes.items() if wanted is None or name[0] in wanted}
        for (tier, group), lane in gone.items():
            del self._lanes[tier, group]
            self._index.close_lane(lane)
            if tier in self._pools:
                self._pools[tier].closed(group, lane)
        self.lanes_changed()
        if wanted is None:
            self.parking.clear()
            self.own_hashes = HashKeys(self._index.masks, self._all_bits)
            self._learned_chunk = 0
        elif self.parking and gone:
            self.parking.forget(gone.values())

    def _empty(self, tiers: Iterable[str]) -> None:
        """The stores that it shares, as far as its word counts there."""
        if self._standing is not Standing.DRAFT:
            for tier in self._pools.keys() & set(tiers):
                self._pools[tier].clear()

    def restart(self) -> None:
        """Another life of the engine begins: forget everything, and what kind of engine it was too."""
        self._groups, self._unit = Groups(), 0
        self.clear()

    def forget(self) -> None:
        """Messages were lost, which may have told of removals: nothing is certain any more, of shared stores either."""
        self.clear()
        self._empty(self._pools)

    def close(self) -> None:
        """The endpoint is gone: forget everything. Events that still arrive are ignored."""
        if not self._closed:
            self.clear()
            self._closed = True
            for pool in self._pools.values():
                self._index.leave(pool, self)
            self._pools.clear()
            self._names.close()
            self._index.forget(self)

    def _store(self, event: BlockStored) -> None:
        if len(event.tokens) != 4 * event.block_size * len(event.hashes) or event.lead:
            event = usable(event)
            if event.tokens and not event.block_size:
                self.skipped["tokens_do_not_fill_blocks"] += 1
                return
        lane = self._admit(event)
        if lane is None:
            return
        self.stored_blocks += len(event.hashes)
        before = self._key_before(event) if event.tokens and says_all(event) else None
        if before is None:
            self._store_by_hash(event, lane)
        else:
            keys = keys_after(event, before, self._unit)
            masks = lane.add_chain(keys, count_copies=not event.repeats)
            self._learn(event.hashes, keys, masks)
        if self.parking or (self._pools and any(pool.parking for pool in self._pools.values())):
            self._settle(event.hashes)
        if lane.held > MAX_HELD:
            self.skipped["too_many_blocks"] += 1
            self.clear([event.tier])
        if len(self._index.masks) > self._index.ceiling:
            self._index.make_room()

    def _store_by_hash(self, event: BlockStored, lane: Lane) -> None:
        """For events that do not say all: trust what is known of a hash, derive the rest, keep the remainder aside."""
        keys = self._keys(event.hashes)
        if None in keys:
            if event.tokens:
                keys = self._derive(event, keys)
            self._park(event, lane, keys)
        for key in keys:
            if key is not None:
                lane.add(key, count_copies=not event.repeats)

    def _derive(self, event: BlockStored, keys: Sequence[int | None]) -> list[int | None]:
        """Fill the gaps in `keys` that follow a known block (or a known parent) from the event's tokens."""
        derived: list[int | None] = []
        before = self._parent_key(event)
        if self._unit or event.lead:
            return list(keys) if before is None else self._derive_all(event, keys, before)
        extras = event.extras or {}
        step = 4 * event.block_size
        for i, key in enumerate(keys):
            if key is None and before is not None:
                key = block_key(event.tokens[i * step : (i + 1) * step], before, extras.get(i, b""))
                mask = self._index.masks.get(key)
                self._learn([event.hashes[i]], [key], [mask] if mask else [])
            derived.append(key)
            before = key
        return derived

    def _derive_all(self, event: BlockStored, keys: Sequence[int | None], before: int) -> list[int | None]:
        fresh = {
            block_hash: key
            for block_hash, known, key in zip(event.hashes, keys, keys_after(event, before, self._unit), strict=True)
            if known is None
        }
        masks = [self._index.masks.get(key, 0) for key in fresh.values()]
        self._learn(list(fresh), list(fresh.values()), masks if any(masks) else [])
        return self._keys(event.hashes)

    def _parent_key(self, event: BlockStored) -> int | None:
        """Key of the block before the event's first; None if unknown. Before a prompt's first block it is the root,
        provided that the event lets us tell a salted block from an unsalted one."""
        if event.parent is None and not says_all(event):
            first = event.tokens[: 4 * event.block_size]
            if event.lora_name or not is_unsalted_first_block(event.hashes[0], first):
                return None
        return self._key_before(event)

    def _key_before(self, event: BlockStored) -> int | None:
        """The same of an event that says all."""
        if event.parent is not None:
            return self._key(event.parent)
        return self._adapter_root(event.lora_name) if event.lora_name else self._root

    def _adapter_root(self, name: str) -> int | None:
        """None if there are too many names."""
        forgetful, root = self._names.is_forgetful, self._names.adapter(name)
        if forgetful != self._names.is_forgetful:
            self._index.changed()
        return root

    def _park(self, event: BlockStored, lane: Lane, keys: Sequence[int | None]) -> None:
        parking = self._parking_of(event.tier)
        for block_hash, key in zip(event.hashes, keys, strict=True):
            if key is None:
                parking.claim(block_hash, lane)
        if event.tokens and None in keys:
            parking.wait_for(event.hashes[0] if event.parent is None else event.parent, event)

    def _settle(self, hashes: Iterable[int]) -> None:
        """Index what waited for these hashes, and what waited for that."""
        queue = list(hashes)
        parkings = [self.parking, *(pool.parking for pool in self._pools.values())]
        while queue:
            block_hash = queue.pop()
            key = self._key(block_hash)
            if key is None:
                continue
            for lanes, events in [parking.learned(block_hash) for parking in parkings]:
                for lane in lanes:  # once for each copy
                    lane.add(key)
                for event in events:
                    self._derive(event, self._keys(event.hashes))
                    queue.extend(event.hashes)
                    self._release(event.hashes)  # in case nobody holds them by now

    def _parking_of(self, tier: str) -> Parking:
        pool = self._pools.get(tier)
        return self.parking if pool is None else pool.parking

    def _remove(self, event: BlockRemoved) -> None:
        tier, group = event.tier, event.group or 0
        if tier in self._pools and self._standing is not Standing.DRAFT:
            self._remove_for_all(event.hashes, self._pools[tier], group)
            return
        lane = self._lanes.get((tier, group))
        if lane is None:
            self.skipped_removals += 1
            return
        self.removed_blocks += len(event.hashes)
        hashes, copies = event.hashes, lane.dropped_copies
        parking = self._parking_of(tier)
        if parking:
            hashes = [block_hash for block_hash in hashes if not parking.unclaim(block_hash, lane)]
        self._remove_by(lane.remove, hashes)
        self.removed_copies += lane.dropped_copies - copies

    def _remove_for_all(self, hashes: Sequence[int], pool: Pool, group: int) -> None:
        bits = pool.bits.get(group, 0)
        if not bits:
            self.skipped_removals += 1
            return
        self.removed_blocks += len(hashes)
        if pool.parking:
            for block_hash in hashes:
                pool.parking.unclaim_all(block_hash, bits)
        self._remove_by(partial(pool.remove, bits), hashes)

    def _remove_by(self, remove: Callable[[int], bool], hashes: Sequence[int]) -> None:
        """`remove` says of a key whether its last holder of all is gone."""
        own = self.own_hashes.keys
        self._release(
            [
                block_hash
                for block_hash, key in zip(hashes, self._keys(hashes), strict=True)
                if key is not None and (remove(key) or block_hash in own)
            ]
        )

    # --- which events count

    def _admit(self, event: BlockStored) -> Lane | None:
        """The lane that the event's blocks belong in; None, counted, if they are not to be indexed."""
        size = event.block_size if event.tokens else described_size(event)
        scope = (event.tier, event.group, event.kind, event.window, event.lora_name, size)
        lane = self._admitted.get(scope)
        if lane is None:
            lane = self._examine(event)
            if lane is not None and len(self._admitted) < MAX_SCOPES:
                self._admitted[scope] = lane
        if lane is not None and event.tokens and event.extras is None and event.tier != "gpu":
            self._learn_chunk(len(event.hashes))
        return lane

    def _examine(self, event: BlockStored) -> Lane | None:
        """`_admit` for events unlike those before."""
        problem = self._problem(event)
        lane = None
        if not problem:
            if described_size(event):
                self._learn_block_size(event)
            lane = self._lane(event.tier, event.group or 0)
        if lane is None:
            self.skipped[problem or "too_many_tiers"] += 1
        return lane

    def _problem(self, event: BlockStored) -> str:
        """Why events like this one are not indexed; "" if they are."""
        if self._groups.hear(event):
            self.lanes_changed()
            self._index.changed()
        problem = self._groups.problem(event)
        if problem:
            return problem
        if event.lora_name and self._adapter_root(event.lora_name) is None:
            return "too_many_models"
        return "" if self._fits(event) else "other_block_size"

    def _fits(self, event: BlockStored) -> bool:
        size, told = described_size(event), self._groups.told
        if size in (0, self.own_block_size) or (told and size % self.own_block_size == 0):
            return True
        if not told and self._may_resize(event.tier):
            return True
        if self._groups.hear_other_size(event):
            self._index.changed()
        return False

    def _may_resize(self, tier: str) -> bool:
        """The block size is HBM's to say; some stores below it announce blocks of their own size."""
        if tier == "gpu":
            return not any(lane.held for lane in self._lanes_in("gpu").values())
        return not self._sized_by_hbm and not any(lane.held for lane in self._lanes.values())

    def _lane(self, tier: str, group: int) -> Lane | None:
        lane, pool = self._lanes.get((tier, group)), self._pools.get(tier)
        if lane is None and (tier in NAMED_TIERS or self._has_room_for(tier)):
            lane = self._lanes[tier, group] = self._index.open_lane(tier, counts_copies=pool is None)
            if pool is not None:
                pool.opened(group, lane, self._standing)
        return lane

    def _has_room_for(self, tier: str) -> bool:
        """Media that hold nothing any more give way to others."""
        others = {name for name, _ in self._lanes} - NAMED_TIERS
        if tier in others or len(others) < MAX_OTHER_TIERS:
            return True
        full = {name for (name, _), lane in self._lanes.items() if lane.held or self.parking.has_claims(lane)}
        self.clear(others - full)
        return not others <= full

    def lanes_changed(self) -> None:
        """Which events belong where has to be found out anew."""
        self._admitted.clear()

    def _learn_block_size(self, event: BlockStored) -> None:
        if not self._groups.told:
            self._resize(event.block_size)
            self._sized_by_hbm = self._sized_by_hbm or event.tier == "gpu"

    def _resize(self, size: int) -> None:
        if size != self.own_block_size:
            self.clear({tier for (tier, _), lane in self._lanes.items() if lane.held})  # in blocks of another size
            self.own_block_size = size
            self._index.changed()

    def _groups_told(self) -> None:
        rule = self._groups.told
        if rule is not None:
            self._resize(rule.unit)
            self._sized_by_hbm = True
        self._unit = rule.unit if rule and any(lookup.block != rule.unit for lookup in rule.lookups) else 0
        self.lanes_changed()
        self._index.changed()

    def _learn_chunk(self, blocks: int) -> None:
        if blocks == self._learned_chunk:
            return
        # Offloading announces one chunk an event. Publishers of other CPU tiers announce any number of blocks, of which
        # 1 is the common divisor soon enough.
        chunk = gcd(self._learned_chunk, blocks)
        if chunk != self._learned_chunk:
            self._learned_chunk = chunk
            self._index.changed()

    # --- hash → key

    def _key(self, block_hash: int) -> int | None:
        own = self.own_hashes.keys
        key = own.get(block_hash) if own else None
        return self._shared.keys.get(block_hash) if key is None else key

    def _keys(self, hashes: Sequence[int]) -> list[int | None]:
        return list(map(self._key if self.own_hashes.keys else self._shared.keys.get, hashes))

    def _learn(self, hashes: Sequence[int], keys: list[int], masks: list[int]) -> None:
        """These hashes are these keys, which `masks` held so far ([] = nobody any).

        What another engine uses the same hash for stays; and where others know a block by another hash, ours is kept
        for ourselves: the shared table is for engines that agree.
        """
        shared, own = self._shared.keys, self.own_hashes.keys
        # Blocks that nobody holds are learned in passing.
        known = list(map(shared.get, hashes) if masks else map(shared.setdefault, hashes, keys))
        if known == keys and not own:
            return
        for block_hash, key, mask, before in zip(hashes, keys, masks or repeat(0), known, strict=False):
            if before == key:
                own.pop(block_hash, None)
            elif before is None and not mask:
                shared[block_hash] = key
            else:
                own[block_hash] = key

    def _release(self, hashes: Sequence[int]) -> None:
        self._shared.release(hashes)
        if self.own_hashes.keys:
            self.own_hashes.release(hashes)

    def _all_bits(self) -> int:
        """Of the lanes that it holds anything in, with those of the stores that it shares."""
        shared = (bits for pool in self._pools.values() for bits in pool.bits.values())
        return reduce(or_, shared, sum(lane.bit for lane in self._lanes.values()))
