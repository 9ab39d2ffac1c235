"""The engines' own hit rule, for a whole fleet at once: how many blocks of a prompt each publisher has in each tier.

As vLLM does it: the run of HBM blocks from the first, short of the last token (one must be computed); then whole
chunks, from the chunk in which that run ends, as long as the chunk's *last* block is in the CPU tier, else in storage.
Such a load may reach the last token, and must gain at least a chunk's worth of blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
            if ends:
                _add_lower(group, ends, index.masks, keys, result)
    return result


def _add_lower(
    group: Group, ends: Mapping[Stage, int], masks: Mapping[int, int], keys: list[int], result: Match
) -> None:
    """What the tiers below HBM serve: whole chunks, and no less than a chunk's worth of blocks."""
    size = group.chunk
    for stage, at in ends.items():
        if stage is not group.lower[stage.member]:
            _add_mixed(group, stage.member, masks, keys[size - 1 :: size], result)
            continue
        gain = at - at % size - result.gpu[stage.member]
        if gain >= size:
            result.column(stage.tier)[stage.member] = gain


def _add_mixed(group: Group, member: int, masks: Mapping[int, int], chunks: list[int], result: Match) -> None:
    """For a member that finds chunks in several tiers: each comes from the first that has it.

    `chunks`: the key of each chunk's last block.
    """
    size, gpu = group.chunk, result.gpu[member]
    tiers = list(group.tiers_below(member))
    gains = dict.fromkeys(tiers, 0)
    for number in range(gpu // size, len(chunks)):
        mask = masks.get(chunks[number], 0)
        server = next((stage for stage in tiers if not stage.bits & ~mask), None)
        if server is None:
            break
        gains[server] += (number + 1) * size - max(gpu, number * size)
    if sum(gains.values()) >= size:
        for stage in tiers:
            result.column(stage.tier)[member] = 0
        for stage, gain in gains.items():
            result.column(stage.tier)[member] += gain
