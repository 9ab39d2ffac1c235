"""One walk over a prompt's keys that finds how far every candidate's blocks reach, tier after tier.

A mask of the stages still running loses bits where a block lacks them: an HBM stage at any block, a lower one at the
last block of a chunk, which is the block that engines look up. A stage that ends hands over to its member's next. No
candidate is looked at on its own, and neighbouring blocks mostly share their mask (lane.py sees to that), so only the
ends of runs cost Python instructions.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from operator import length_hint

from indexer.plan import Group, Stage

NOBODYS = -1
"""A key that no block has."""


def walk(
    group: Group, masks: Mapping[int, int], keys: list[int], gpu_blocks: int, gpu_runs: list[int]
) -> dict[Stage, int]:
    """Sets `gpu_runs[member]` to the number of blocks that come from HBM, of which at most `gpu_blocks` may.

    Returns, for each stage below that was asked and may serve something, the number of the first block that it does
    not serve, to be rounded down to a whole chunk.
    """
    lower: dict[Stage, int] = {}
    running, chunk, known = group.first, group.chunk, group.ended
    left = keys[:gpu_blocks]
    left.append(NOBODYS)  # there all HBM runs end
    rest = iter(left)
    for found, _ in groupby(map(masks.get, rest)):
        mask = found or 0
        missing = running & ~mask
        if not missing:
            continue
        # The iterator knows how many keys are left, and `groupby` has taken the first one of this mask.
        at = gpu_blocks - length_hint(rest)
        if chunk > 1 or at == gpu_blocks:
            mask |= _lower_mask(group, masks, keys, at)
            missing &= ~mask
            if not missing:
                continue
        bits, members, stages, after = known.get(missing) or group.end(missing)
        running ^= bits
        for member in members:
            gpu_runs[member] = at
        if at:
            for stage in stages:
                lower[stage] = at
        if after:
            running |= after & mask if group.flat else _begin(group, after, mask)
        if not running:
            return lower
    lower.update(dict.fromkeys(group.end(running).lower, len(keys)))
    return lower


def _begin(group: Group, bits: int, mask: int) -> int:
    """Of the stages with these bits those that have the block, and of the others those that follow, if they have it."""
    begun = 0
    while absent := bits & ~mask:
        skipped = group.ended.get(absent) or group.end(absent)
        begun |= bits & ~skipped.bits
        bits = skipped.after
    return begun | bits


def _lower_mask(group: Group, masks: Mapping[int, int], keys: list[int], at: int) -> int:
    """The stages below HBM that have the chunk of block number `at`: those that have its last block."""
    last = at - at % group.chunk + group.chunk - 1
    return masks.get(keys[last], 0) & ~group.gpu if last < len(keys) else 0
