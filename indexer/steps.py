"""How a group's stages end and begin from block to block of a prompt (pure).

A state is the stages that run, a step what a block with some mask does to them. Both are remembered: prompts share
prefixes, and neighbouring blocks their holders, so the same few masks meet the same few states again and again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from msgspec import Struct

from indexer.lane import each_bit

MAX_STEPS = 2048
MAX_SETS = 1024
"""Steps, and sets of stages that end together, that are remembered for one group."""
_COLUMNS = frozenset({"gpu", "cpu", "storage"})


@dataclass(slots=True, frozen=True, eq=False)
class Stage:
    """One tier of one candidate. An engine asks its tiers in turn, each from where the one before it ended."""

    member: int
    """Position among the candidates."""
    tier: str
    bits: int
    """A block counts if it has all of them (several: one a KV-cache group). Of a store that others share, a bit that
    stands for it (`Group.stores`)."""
    next: Stage | None


class Ended(NamedTuple):
    """Stages that end at the same block."""

    bits: int
    """All of theirs."""
    after: int
    """Bits of the stages that follow."""
    runs: Sequence[int]
    """Members of the HBM stages."""
    lower: Sequence[tuple[str, int, int]]
    """Of their members' first stages below HBM: the column, the member, and its `Group.thinned`."""
    later: Sequence[int]
    """Members of the others."""


class State(Struct, eq=False):
    running: int
    """Bits of the stages that run."""
    steps: dict[int | None, Step] = {}
    """By the block's mask; None = nobody has it. What is not in there yet, `Steps.take` finds."""


Step = tuple[State, Sequence[int], Sequence[tuple[str, int, int]], Sequence[int]]
"""The state after it, and `runs`, `lower` and `later` of what ended."""

STAY: Step = (State(0), (), (), ())
"""Nothing ends."""


def column(tier: str) -> str:
    """Of a match: the tier's own, or that of all media that the indexer has no name for."""
    return tier if tier in _COLUMNS else "other"


class Steps:
    def __init__(self) -> None:
        self.first = State(0)
        """Where every member's first stage runs."""
        self._stages: dict[int, Stage] = {}
        """By each of its bits."""
        self._lower: dict[int, tuple[Stage, int]] = {}
        """Member → its first stage below HBM, and `Group.thinned`."""
        self._flat = True
        """Is every stage below HBM its member's last, and of one bit?"""
        self._states: dict[int, State] = {}
        self._ended: dict[int, Ended] = {}
        self._taken = 0

    def enter(self, stage: Stage | None, thinned: int) -> None:
        """A member's first, with those that follow it."""
        self.first.running |= stage.bits if stage else 0
        while stage:
            self._stages.update(dict.fromkeys(each_bit(stage.bits), stage))
            if stage.tier != "gpu":
                self._lower.setdefault(stage.member, (stage, thinned))
                self._flat = self._flat and stage.next is None and stage.bits.bit_count() == 1
            stage = stage.next

    def take(self, state: State, mask: int | None) -> Step:
        """The step from there, which is remembered."""
        if self._taken >= MAX_STEPS:
            self._forget()
        self._taken += 1
        step = state.steps[mask] = self._step(state.running, mask or 0)
        return step

    def _step(self, running: int, mask: int) -> Step:
        missing = running & ~mask
        if not missing:
            return STAY
        ended = self._ended.get(missing) or self._end(missing)
        running ^= ended.bits
        if ended.after:
            running |= ended.after & mask if self._flat else self._begin(ended.after, mask)
        state = self._states.get(running)
        if state is None:
            state = self._states[running] = State(running)
        return state, ended.runs, ended.lower, ended.later

    def _begin(self, bits: int, mask: int) -> int:
        """Of the stages with these bits those that have the block, and of the others those that follow, if they have
        it."""
        begun = 0
        while absent := bits & ~mask:
            skipped = self._ended.get(absent) or self._end(absent)
            begun |= bits & ~skipped.bits
            bits = skipped.after
        return begun | bits

    def _end(self, bits: int) -> Ended:
        """The stages with any of these. Remembered too, as masks may differ in what does not matter: look into `_ended`
        first."""
        if len(self._ended) >= MAX_SETS:
            self._ended.clear()
        ended = self._ended[bits] = self._of(dict.fromkeys(self._stages[bit] for bit in each_bit(bits)))
        return ended

    def _of(self, stages: Iterable[Stage]) -> Ended:
        bits = after = 0
        runs, lower, later = [], [], []
        for stage in stages:
            bits |= stage.bits
            after |= stage.next.bits if stage.next else 0
            if stage.tier == "gpu":
                runs.append(stage.member)
                continue
            first, thinned = self._lower[stage.member]
            if stage is first:
                lower.append((column(stage.tier), stage.member, thinned))
            else:
                later.append(stage.member)
        return Ended(bits, after, runs, lower, later)

    def _forget(self) -> None:
        self.first.steps.clear()
        self._states.clear()
        self._taken = 0
