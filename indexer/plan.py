"""What matching needs to know about a set of candidates, worked out once and kept until their lanes change.

Candidates with equal block sizes, roots and chunks form a group, whose prompts are matched in one walk over the keys.
Each engine whose KV-cache groups are not all alike goes by a rule of its own (hybrid.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import Any

from indexer.groups import Rule
from indexer.hybrid import Loads, loads
from indexer.index import PrefixIndex
from indexer.residency import Residency
from indexer.steps import Stage, Steps

MAX_PLANS = 64
MAX_CANDIDATES = 8192
"""Of all plans together, as each remembers what becomes of its candidates' stages; a single plan may have more."""
_ORDER = {"gpu": 0, "cpu": 1, "storage": 2}


@dataclass(slots=True, frozen=True)
class Ruled:
    """A candidate that reuses blocks by a rule of its own."""

    rule: Rule
    gpu: Sequence[int]
    """For each lookup of the rule the bits that a block must have."""
    loads: Loads
    below: Sequence[tuple[int, int]]
    """For each part of the loads the bits of CPU RAM and of storage, of which a chunk must have one; none = nothing is
    expected there."""

    @classmethod
    def of(cls, residency: Residency, rule: Rule) -> Ruled:
        plan = loads(rule, residency.blocks_per_chunk)
        gpu = [residency.bits("gpu", lookup.groups) for lookup in rule.lookups]
        below = [tuple(residency.bits(tier, [part.group]) for tier in ("cpu", "storage")) for part in plan.parts]
        # Others' connectors may have rules of their own, and hits that end inside blocks are not looked for in chunks.
        known = rule.told and not rule.is_fine and not residency.is_thinned and all(map(any, below))
        return cls(rule, gpu, plan, [(cpu, storage) for cpu, storage in below] if known else [])


@dataclass(slots=True)
class Group:
    block_size: int
    root: int
    """Of the base model's chains."""
    alias_root: int
    """Of the chains for names that are not known."""
    chunk: int
    beyond: int
    """The first bit that no lane has."""
    steps: Steps = field(default_factory=Steps)
    """How the members' stages end."""
    gpu: int = 0
    """Bits of the HBM stages."""
    low: int = 0
    """Bits of the stages below HBM."""
    below: dict[int, Sequence[Stage]] = field(default_factory=dict)
    """Member → all its stages below HBM, in order."""
    ruled: dict[int, Ruled] = field(default_factory=dict)
    """Members that are no part of the walk."""
    thinned: dict[int, int] = field(default_factory=dict)
    """Member → blocks by which a load from below may turn out shorter. The index has forgotten some of its HBM blocks:
    where its run seems to end the real one may go on, and end too near to the load's end for a whole chunk."""
    stores: dict[tuple[int, ...], int] = field(default_factory=dict)
    """Of each store that several publishers share: of which bits a block must have one each, and a bit beyond those of
    lanes for blocks that do."""
    sharers: list[int] = field(default_factory=list)
    """Members with such a store. Its bit cannot tell the walk whose stage has ended, so those stages are no part of
    it."""

    def enter(self, member: int, residency: Residency, rule: Rule) -> None:
        if not rule.is_plain:
            self.ruled[member] = Ruled.of(residency, rule)
            return
        stage: Stage | None = None
        below: list[Stage] = []
        for tier in sorted(residency.tiers(), key=_rank, reverse=True):
            needs = residency.needs(tier)
            if not needs:
                continue
            if residency.shares(tier):
                below.append(Stage(member, tier, self._store(needs), None))
                continue
            stage = Stage(member, tier, sum(needs), stage)
            if tier == "gpu":
                self.gpu |= stage.bits
            else:
                below.append(stage)
        if self.chunk > 1 and residency.is_thinned:
            self.thinned[member] = self.chunk - 1
        self.steps.enter(stage, self.thinned.get(member, 0))
        self.below[member] = below[::-1]
        self.low |= _union(stage.bits for stage in below)
        if any(map(residency.shares, (stage.tier for stage in below))):
            self.sharers.append(member)

    def _store(self, needs: Sequence[int]) -> int:
        return self.stores.setdefault(tuple(needs), self.beyond << len(self.stores))

    def lacking(self, mask: int) -> int:
        """Bits of the stages below HBM that a block with this mask lacks."""
        lacking = self.low & ~mask
        for needs, bit in self.stores.items():
            for need in needs:
                if not mask & need:
                    break
            else:
                lacking ^= bit
        return lacking


def is_full(sets: Collection[Sequence[Any]], further: int) -> bool:
    """Whether there is no room for plans of one more set of candidates, a `further` number of them."""
    return len(sets) >= MAX_PLANS or sum(map(len, sets)) + further > MAX_CANDIDATES


def plan(index: PrefixIndex, residencies: Sequence[Residency]) -> Sequence[Group]:
    candidates = tuple(residencies)
    groups: Sequence[Group] | None = index.plans.get(candidates)
    if groups is None:
        if is_full(index.plans, len(candidates)):
            index.plans.clear()
        groups = index.plans[candidates] = _groups(candidates, 1 << index.width)
    return groups


def _groups(candidates: Sequence[Residency], beyond: int) -> Sequence[Group]:
    groups: dict[tuple[int, int, int, int], Group] = {}
    for i, residency in enumerate(candidates):
        rule = residency.rule
        if residency.block_size and rule is not None:
            shape = (residency.block_size, residency.root, residency.alias_root, residency.blocks_per_chunk)
            groups.setdefault(shape, Group(*shape, beyond)).enter(i, residency, rule)
    return list(groups.values())


def _union(masks: Iterable[int]) -> int:
    return reduce(or_, masks, 0)


def _rank(tier: str) -> tuple[int, str]:
    """HBM, CPU RAM, storage, media nobody knows."""
    return _ORDER.get(tier, len(_ORDER)), tier
