"""The hit rule of engines whose KV-cache groups are not all alike, or whose hits end early: vLLM's own, as of 0.33.

HBM: a place in the prompt is looked for where a hit can end for all groups. Each in turn accepts the last such place,
not behind the one that the groups before it accepted, until all accept the same. Below: the same for chunks, from the
chunk in which HBM's hit ended; where some layers need only what is before the end, the last token is computed anew.

A group's blocks are looked at as intervals of held ones, as neighbouring blocks mostly share their mask (lane.py).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from indexer.groups import CHUNK_KIND, PREFIX_KINDS, STATE_KIND, WINDOW_KINDS, Rule
from indexer.wire import Lookup

Intervals = Sequence[tuple[int, int]]
"""Numbers of blocks, from and before; in order, with gaps between them."""


class Runs:
    """A prompt's blocks with who holds them."""

    def __init__(self, masks: Mapping[int, int], keys: Sequence[int]) -> None:
        self._masks = [mask or 0 for mask in map(masks.get, keys)]
        self._runs: dict[int, list[tuple[int, int]]] = {}

    def __len__(self) -> int:
        """In units."""
        return len(self._masks)

    def where(self, stride: int, holds: Callable[[int], bool]) -> Intervals:
        """The blocks of `stride` units whose mask is as wanted. They have the mask of their last unit."""
        found: list[tuple[int, int]] = []
        start = 0
        for end, mask in self._runs.get(stride) or self._split(stride):
            if holds(mask):
                if found and found[-1][1] == start:
                    found[-1] = found[-1][0], end
                else:
                    found.append((start, end))
            start = end
        return found

    def with_any(self, stride: int, bits: int) -> Intervals:
        return self.where(stride, lambda mask: mask & bits != 0)

    def _split(self, stride: int) -> list[tuple[int, int]]:
        """Runs of blocks with the same mask: the number of the block behind each, and the mask."""
        runs: list[tuple[int, int]] = []
        end = 0
        for mask, run in groupby(self._masks[stride - 1 :: stride]):
            end += len(list(run))
            runs.append((end, mask))
        self._runs[stride] = runs
        return runs


# --- HBM


class Found(NamedTuple):
    """What is held of the groups of a lookup."""

    blocks: Intervals
    units: Intervals
    """Where hits can end inside blocks: those units at which one can."""


def hbm_hit(rule: Rule, bits: Sequence[int], runs: Runs, tokens: int) -> int:
    """Tokens that HBM serves of a prompt of so many. `bits`: for each lookup those that a block must have."""
    found = [_found(rule, lookup, lane_bits, runs) for lookup, lane_bits in zip(rule.lookups, bits, strict=True)]
    if rule.alone:
        return _end(rule, rule.lookups[0], found[0], tokens - 1, drop=rule.lookups[0].eagle)
    return _agreed(rule, found, tokens - 1, len(runs) * rule.unit)


def _found(rule: Rule, lookup: Lookup, bits: int, runs: Runs) -> Found:
    def holds(mask: int) -> bool:
        return mask & bits == bits

    if not bits:
        return Found((), ())
    fine = lookup.block > rule.alignment
    return Found(runs.where(lookup.block // rule.unit, holds), runs.where(1, holds) if fine else ())


def _agreed(rule: Rule, found: Sequence[Found], limit: int, known: int) -> int:
    """The last place, at most `limit`, that all lookups accept. EAGLE's drop is made once for each candidate: then a
    lookup may look a block further than the candidate."""
    prefixes: dict[int, int] = {}
    dropped: set[int] = set()
    settled_at_once = len(rule.lookups) == 2 and rule.lookups[0].kind in PREFIX_KINDS
    while True:
        candidate = limit
        for i, lookup in enumerate(rule.lookups):
            if i in prefixes:
                candidate = min(candidate, prefixes[i])
                continue
            drop = lookup.eagle and i not in dropped
            reach = candidate
            if drop and lookup.kind != STATE_KIND:
                reach = min(candidate + min(lookup.block, rule.alignment), known)
            end = _end(rule, lookup, found[i], reach, drop=drop)
            if drop:
                dropped.add(i)
            elif end < candidate:
                dropped.clear()
            candidate = end
            if lookup.kind in PREFIX_KINDS:
                prefixes[i] = end
        if candidate >= limit:
            return limit
        limit = candidate
        if settled_at_once:
            return limit


def _end(rule: Rule, lookup: Lookup, found: Found, limit: int, *, drop: bool) -> int:
    """The last place, at most `limit`, where a hit can end for these groups; in tokens, as all here is."""
    if lookup.kind in PREFIX_KINDS:
        return _end_of_prefix(rule, lookup, found, limit, drop=drop)
    if lookup.kind in WINDOW_KINDS:
        return _end_of_window(rule, lookup, found.blocks, limit, drop=drop)
    if lookup.kind == CHUNK_KIND:
        return _end_in_chunk(lookup, found.blocks, limit)
    return _end_at_state(rule, lookup, found, limit)


def _end_of_prefix(rule: Rule, lookup: Lookup, found: Found, limit: int, *, drop: bool) -> int:
    block, unit = lookup.block, rule.unit
    run = found.blocks[0][1] if found.blocks and found.blocks[0][0] == 0 else 0
    end = block * min(run, limit // block)
    if found.units:
        last = min(end + block - unit, limit) // unit
        inside = _last_before(found.units, last)
        if inside * unit > end:
            end = inside * unit
    if drop and end:
        end -= min(block, rule.alignment)
    return end - end % rule.alignment


def _end_of_window(rule: Rule, lookup: Lookup, held: Intervals, limit: int, *, drop: bool) -> int:
    block, step = lookup.block, rule.alignment // lookup.block
    need = max(1, -(-(lookup.window - 1) // block) + drop)
    for start, behind in _backwards(held, limit // block):
        end = min(behind, limit // block)
        end -= (end - drop) % step
        if end - start >= need and end > start:
            return (end - drop) * block
        if start == 0 and end > 0:  # nothing is before the first block
            end -= end % step
            if drop and end:
                end = (end - 1) - (end - 1) % step
            return end * block
    return 0


def _end_in_chunk(lookup: Lookup, held: Intervals, limit: int) -> int:
    block = lookup.block
    first = limit // lookup.window * lookup.window // block
    for start, behind in held:
        if start <= first < behind:
            return min(behind, limit // block) * block
    return first * block


def _end_at_state(rule: Rule, lookup: Lookup, found: Found, limit: int) -> int:
    if found.units:
        return rule.unit * _last_before(found.units, limit // rule.unit)
    block = lookup.block
    return block * _last_before(found.blocks, limit // block, max(1, rule.alignment // block))


def _last_before(held: Intervals, limit: int, step: int = 1) -> int:
    """The number of the last held block + 1, at most `limit`, that is a multiple of `step`; 0 = there is none."""
    for start, behind in _backwards(held, limit):
        end = min(behind, limit)
        end -= end % step
        if end > start:
            return end
    return 0


def _backwards(held: Intervals, limit: int) -> Iterator[tuple[int, int]]:
    """Those that begin before `limit`, the last first: where groups agree late, they are asked for many times."""
    for at in range(bisect_left(held, (limit,)) - 1, -1, -1):
        yield held[at]


# --- the tiers below


@dataclass(slots=True, frozen=True)
class Part:
    """Chunks of one KV-cache group."""

    group: int
    chunk: int
    """Tokens."""
    window: int = 0
    """Tokens before the end of a hit that a sliding window needs; 0 = another kind."""
    chunks: int = 0
    """That must be held before the end of a hit; 0 = all."""
    draft: bool = False

    def needed(self, end: int) -> int:
        """Chunks that must be held before a hit's end in the last of them."""
        return max(self.chunks, -(-(self.window - 1 + -end % self.chunk) // self.chunk)) if self.window else self.chunks


@dataclass(slots=True, frozen=True)
class Loads:
    """By which a hit is continued from the tiers below HBM."""

    parts: Sequence[Part]
    """In the order in which they are looked up: full attention first, then those that need most chunks."""
    step: int
    """Tokens at whose multiples it may end, because of recurrent states; 1 = anywhere."""

    @property
    def recomputes(self) -> bool:
        """Is the last token computed anew?"""
        return any(part.chunks for part in self.parts)


def loads(rule: Rule, blocks_per_chunk: int) -> Loads:
    parts = [
        _part(lookup, group, lookup.block * blocks_per_chunk) for lookup in rule.lookups for group in lookup.groups
    ]
    parts.sort(key=lambda part: part.group)
    parts.sort(key=lambda part: (part.chunks > 0, -part.chunks))
    states = [lookup.block * blocks_per_chunk for lookup in rule.lookups if lookup.kind == STATE_KIND]
    return Loads(parts, max(states, default=1))


def _part(lookup: Lookup, group: int, chunk: int) -> Part:
    draft = group in lookup.draft
    if lookup.kind in WINDOW_KINDS:
        return Part(group, chunk, lookup.window, -(-lookup.window // chunk), draft)
    if lookup.kind == CHUNK_KIND:
        return Part(group, chunk, 0, -(-lookup.window // chunk), draft)
    return Part(group, chunk, 0, 1 if lookup.kind == STATE_KIND else 0, draft)


def load_hit(rule: Loads, held: Sequence[Intervals], tokens: int, computed: int) -> int:
    """Where a hit ends that begins with `computed` tokens from HBM. `held`: for each part its chunks."""
    limit = tokens
    if rule.recomputes:
        limit -= 1
        limit -= limit % rule.step
    gained = 0
    popped: set[int] = set()
    todo = list(range(len(rule.parts)))
    while todo:
        again: list[int] = []
        windows_seen = False
        for i in todo:
            part = rule.parts[i]
            chunk, known, first = part.chunk, tokens // part.chunk, computed // part.chunk
            limit = min(limit, known * chunk)
            if limit - computed < chunk:
                return computed
            pops = part.draft and i not in popped
            behind = min(-(-(limit + pops * chunk) // chunk), known)
            if part.chunks:
                needed = part.needed(min(limit, (behind - pops) * chunk))
                found = _end_of_chunks(held[i], first, behind, part.chunks + pops, needed + pops)
            else:
                found = _end_of_run(held[i], first, behind)
            if found == first:
                return computed
            if pops:
                popped.add(i)
            limit = min(limit, (found - pops) * chunk)
            gain = limit - computed
            if gain < chunk:
                return computed
            if gain < gained:
                if not part.draft:
                    popped.clear()
                if windows_seen:
                    again = [j for j, other in enumerate(rule.parts) if other.chunks]
            windows_seen = windows_seen or part.chunks > 0
            gained = gain
        todo = again
    return computed + gained


def _end_of_run(held: Intervals, first: int, behind: int) -> int:
    """Of the chunks held from the first on."""
    for start, end in held:
        if start <= first < end:
            return min(end, behind)
    return first


def _end_of_chunks(held: Intervals, first: int, behind: int, needed: int, needed_last: int) -> int:
    """Of the last chunks in a row, between `first` and `behind`, that are as many as needed, or begin with the first.
    `needed_last`: of those that end at `behind`."""
    for start, end in _backwards(held, behind):
        start, end = max(start, first), min(end, behind)
        if end <= start:
            continue
        if end - start >= (needed_last if end == behind else needed) or start == first:
            return end
    return first
