"""The engines' own hit rule, for a whole fleet at once: how many blocks of a prompt each publisher has in each tier.

As vLLM does it: the run of HBM blocks from the first, short of the last token (one must be computed); then whole
chunks, from the chunk in which that run ends, as long as the chunk's *last* block is in the CPU tier, else in storage.
Such a load may reach the last token, and must gain at least a chunk's worth of blocks.

Engines whose layers do not all attend to everything before them have rules of their own (hybrid.py).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import groupby, islice
from operator import itemgetter, mul

import msgspec

from indexer.hybrid import Runs, hbm_hit, load_hit
from indexer.index import PrefixIndex
from indexer.keys import chain, encode_extras
from indexer.plan import Group, Ruled, plan
from indexer.residency import Residency
from indexer.steps import column
from indexer.walk import walk

TIERS = ("gpu", "cpu", "storage", "other")
"""`other`: media that the indexer has no name for."""


class Prompt:
    """A prompt's tokens (little-endian uint32) with all else that goes into its keys. Keys are computed once for each
    block size and root."""

    __slots__ = ("_keys", "extras", "model", "tokens")

    def __init__(self, tokens: bytes, model: str = "", salt: str = "") -> None:
        self.tokens = tokens
        self.model = model
        self.extras = {0: encode_extras([salt])} if salt else None
        self._keys: dict[tuple[int, int], list[int]] = {}

    def __len__(self) -> int:
        """In tokens."""
        return len(self.tokens) // 4

    def keys(self, block_size: int, root: int) -> list[int]:
        """Of the whole blocks; for publisher `r`: `prompt.keys(r.block_size, r.root_for(prompt.model))`."""
        keys = self._keys.get((block_size, root))
        if keys is None:
            keys = chain(self.tokens, block_size, root, self.extras)
            self._keys[block_size, root] = keys
        return keys


class Match(msgspec.Struct):
    """Blocks served from each tier: columns aligned with `residencies`."""

    residencies: Sequence[Residency]
    gpu: list[int]
    cpu: list[int]
    storage: list[int]
    other: list[int]
    """Tiers of media that the indexer has no name for."""
    recomputed: dict[int, str] = msgspec.field(default_factory=dict)
    """Whose last block comes from which tier but for its last token, which the engine computes anew."""

    def column(self, tier: str) -> list[int]:
        found: list[int] = getattr(self, column(tier))
        return found

    def tokens(self, sizes: Sequence[int]) -> list[list[int]]:
        """For each of `TIERS` its column in tokens; empty = nothing at all. `sizes`: the residencies' block sizes,
        which callers ask for once."""
        columns = self.gpu, self.cpu, self.storage, self.other
        tokens = [list(map(mul, column, sizes)) if any(column) else [] for column in columns]
        for i, last in self.recomputed.items():
            tokens[TIERS.index(last)][i] -= 1
        return tokens

    def blocks(self, i: int) -> int:
        return self.gpu[i] + self.cpu[i] + self.storage[i] + self.other[i]

    def cached_tokens(self, i: int) -> int:
        """What the engine would report as `cached_tokens`."""
        return self.blocks(i) * self.residencies[i].block_size - (i in self.recomputed)


def match(
    index: PrefixIndex, prompt: Prompt, residencies: Sequence[Residency], groups: Sequence[Group] | None = None
) -> Match:
    """Residencies whose block size is not known yet have nothing. `groups`: their `plan`, for who keeps it as long as
    `PrefixIndex.changes` stays the same."""
    zeros = [0] * len(residencies)
    result = Match(residencies, zeros, zeros[:], zeros[:], zeros[:])
    for group in plan(index, residencies) if groups is None else groups:
        keys = prompt.keys(group.block_size, index.root_for(prompt.model, group.root, group.alias_root))
        index.asked(keys)
        if keys and (group.steps.first.running or group.sharers):
            _add_plain(group, index.masks, keys, (len(prompt) - 1) // group.block_size, result)
        if keys and group.ruled:
            runs = Runs(index.masks, keys)
            for member, ruled in group.ruled.items():
                _add_ruled(member, ruled, runs, len(prompt), result)
    return result


def _add_ruled(member: int, ruled: Ruled, runs: Runs, tokens: int, result: Match) -> None:
    unit = ruled.rule.unit
    hit = hbm_hit(ruled.rule, ruled.gpu, runs, tokens)
    result.gpu[member] = hit // unit
    if not ruled.below:
        return
    chunks = [
        runs.with_any(part.chunk // unit, cpu | storage)
        for part, (cpu, storage) in zip(ruled.loads.parts, ruled.below, strict=True)
    ]
    end = load_hit(ruled.loads, chunks, tokens, hit)
    if end == hit:
        return
    blocks = -(-end // unit)
    chunk, (cpu, storage) = ruled.loads.parts[0].chunk // unit, ruled.below[0]
    stored = runs.where(chunk, lambda mask: mask & storage != 0 and not mask & cpu)
    overlaps = [min(behind * chunk, blocks) - max(start * chunk, hit // unit) for start, behind in stored]
    result.storage[member] = sum(overlap for overlap in overlaps if overlap > 0)
    result.cpu[member] = blocks - hit // unit - result.storage[member]
    if end % unit:
        in_storage = any(start * chunk < blocks <= behind * chunk for start, behind in stored)
        result.recomputed[member] = "storage" if in_storage else "cpu"


def _add_plain(group: Group, masks: Mapping[int, int], keys: list[int], gpu_blocks: int, result: Match) -> None:
    """HBM runs, and what the tiers below serve after them: whole chunks, and no less than a chunk's worth of blocks."""
    columns = {"gpu": result.gpu, "cpu": result.cpu, "storage": result.storage, "other": result.other}
    mixed = {*group.sharers, *walk(group, masks, keys, gpu_blocks, columns)}
    if mixed:
        runs = _runs(group, masks, keys)
        for member in mixed:
            _add_mixed(group, member, runs, result)


def _runs(group: Group, masks: Mapping[int, int], keys: list[int]) -> Sequence[tuple[int, int]]:
    """Runs of chunks that the same stages below HBM have: the number of the block behind each, and what lacks it."""
    runs: list[tuple[int, int]] = []
    end, size = 0, group.chunk
    for mask, run in groupby(map(masks.get, keys[size - 1 :: size])):
        end += size * len(list(run))
        missing = group.lacking(mask or 0)
        if runs and runs[-1][1] == missing:
            runs.pop()
        runs.append((end, missing))
    return runs


def _add_mixed(group: Group, member: int, runs: Sequence[tuple[int, int]], result: Match) -> None:
    """For a member that may find chunks in several tiers: each comes from the first that has it."""
    at = gpu = result.gpu[member]
    tiers = group.below[member]
    gains = dict.fromkeys(tiers, 0)
    for end, missing in islice(runs, bisect_right(runs, gpu, key=itemgetter(0)), None):
        for stage in tiers:
            if not stage.bits & missing:
                break
        else:
            break
        gains[stage] += end - at
        at = end
    if at - gpu >= group.chunk:
        for stage in tiers:
            result.column(stage.tier)[member] = 0
        less = group.thinned.get(member, 0)
        for stage, gain in reversed(gains.items()):
            result.column(stage.tier)[member] += max(0, gain - less)
            less = max(0, less - gain)
