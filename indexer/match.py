"""The engines' own hit rule, for a whole fleet at once: how many blocks of a prompt each publisher has in each tier.

As vLLM does it: the run of HBM blocks from the first, short of the last token (one must be computed); then whole
chunks, from the chunk in which that run ends, as long as the chunk's *last* block is in the CPU tier, else in storage.
Such a load may reach the last token, and must gain at least a chunk's worth of blocks.

Where some layers attend to a sliding window, the HBM run is cut to end where the window before it is held; what lower
tiers would serve is not counted then.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from operator import itemgetter

from indexer.index import PrefixIndex
from indexer.keys import chain, encode_extras
from indexer.plan import Group, Stage, plan
from indexer.residency import Residency
from indexer.walk import walk

_COLUMNS = frozenset({"gpu", "cpu", "storage"})


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


@dataclass(slots=True)
class Match:
    """Blocks served from each tier: columns aligned with `residencies`."""

    residencies: Sequence[Residency]
    gpu: list[int]
    cpu: list[int]
    storage: list[int]
    other: list[int]
    """Tiers of media that the indexer has no name for."""

    def column(self, tier: str) -> list[int]:
        return getattr(self, tier) if tier in _COLUMNS else self.other

    def blocks(self, i: int) -> int:
        return self.gpu[i] + self.cpu[i] + self.storage[i] + self.other[i]

    def cached_tokens(self, i: int) -> int:
        """What the engine would report as `cached_tokens`."""
        return self.blocks(i) * self.residencies[i].block_size


def match(index: PrefixIndex, prompt: Prompt, residencies: Sequence[Residency]) -> Match:
    """Residencies whose block size is not known yet have nothing."""
    zeros = [0] * len(residencies)
    result = Match(residencies, zeros, zeros[:], zeros[:], zeros[:])
    for group in plan(index, residencies):
        keys = prompt.keys(group.block_size, index.roots.get(prompt.model, group.root))
        if keys:
            ends = walk(group, index.masks, keys, (len(prompt) - 1) // group.block_size, result.gpu)
            for member, windows in group.windows.items():
                result.gpu[member] = _end_in_windows(index.masks, keys, result.gpu[member], windows)
            if ends or group.sharers:
                _add_lower(group, ends, index.masks, keys, result)
    return result


def _end_in_windows(masks: Mapping[int, int], keys: Sequence[int], end: int, windows: Sequence[tuple[int, int]]) -> int:
    """The last place, at most `end`, where an HBM run may end: all windows that end there are held."""
    tried = -1
    while end != tried:
        tried = end
        for bit, blocks in windows:
            end = _end_in_window(masks, keys, end, bit, blocks)
    return end


def _end_in_window(masks: Mapping[int, int], keys: Sequence[int], end: int, bit: int, blocks: int) -> int:
    run = 0
    for at in range(end - 1, -1, -1):
        run = run + 1 if masks.get(keys[at], 0) & bit else 0
        if run == blocks:
            return at + blocks
    return run


def _add_lower(
    group: Group, ends: Mapping[Stage, int], masks: Mapping[int, int], keys: list[int], result: Match
) -> None:
    """What the tiers below HBM serve: whole chunks, and no less than a chunk's worth of blocks."""
    size = group.chunk
    mixed = dict.fromkeys(group.sharers)
    for stage, at in ends.items():
        if stage is not group.lower[stage.member]:
            mixed[stage.member] = None
            continue
        gain = at - at % size - result.gpu[stage.member]
        if gain >= size:
            result.column(stage.tier)[stage.member] = gain
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
        missing = group.low & ~(mask or 0)
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
        for stage, gain in gains.items():
            result.column(stage.tier)[member] += gain
