"""One walk over a prompt's keys that finds how far every candidate's blocks reach, tier after tier.

Stages run on until a block lacks their bits: an HBM stage any block, a lower one the last block of a chunk, which is
the block that engines look up. A stage that ends hands over to its member's next (steps.py). No candidate is looked at
on its own, and neighbouring blocks mostly share their mask (lane.py sees to that), so only the ends of runs cost Python
instructions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from typing import Any

from indexer.plan import Group
from indexer.steps import STAY

NOBODYS = -1
"""A key that no block has."""


def walk(
    group: Group, masks: Mapping[int, int], keys: list[int], gpu_blocks: int, columns: Mapping[str, list[int]]
) -> Collection[int]:
    """Writes into the members' columns how many blocks come from HBM, of which at most `gpu_blocks` may, and from their
    first stages below: whole chunks, and no less than a chunk's worth of blocks.

    Returns members that went on to a later stage, whose columns below HBM are not right then.
    """
    chunk, take, gpu = group.chunk, group.steps.take, columns["gpu"]
    mixed: set[int] = set()
    state = group.steps.first
    steps = state.steps
    left = keys[:gpu_blocks]
    left.append(NOBODYS)  # there all HBM runs end
    rest: Any = iter(left)
    count_left = rest.__length_hint__
    for mask, _ in groupby(map(masks.get, rest)):
        step = steps.get(mask) or take(state, mask)
        if step is STAY:
            continue
        # The iterator knows how many keys are left, and `groupby` has taken the first one of this mask.
        at = gpu_blocks - count_left()
        if chunk > 1 or at == gpu_blocks:
            mask = (mask or 0) | _lower_mask(group, masks, keys, at)
            step = steps.get(mask) or take(state, mask)
            if step is STAY:
                continue
        state, runs, lower, later = step
        for member in runs:
            gpu[member] = at
        if lower:
            _serve(lower, at, chunk, columns)
        if later:
            mixed.update(later)
        steps = state.steps
        if not state.running:
            return mixed
    _, _, lower, later = steps.get(None) or take(state, None)
    _serve(lower, len(keys), chunk, columns)
    mixed.update(later)
    return mixed


def _serve(lower: Sequence[tuple[str, int, int]], at: int, chunk: int, columns: Mapping[str, list[int]]) -> None:
    """Stages that end at block number `at`."""
    gpu, end = columns["gpu"], at - at % chunk
    for column, member, thinned in lower:
        gain = end - gpu[member]
        if gain >= chunk:
            columns[column][member] = gain - thinned


def _lower_mask(group: Group, masks: Mapping[int, int], keys: list[int], at: int) -> int:
    """The stages below HBM that have the chunk of block number `at`: those that have its last block."""
    last = at - at % group.chunk + group.chunk - 1
    return masks.get(keys[last], 0) & ~group.gpu if last < len(keys) else 0
