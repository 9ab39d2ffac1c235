"""Which KV-cache groups an engine has, and what the rule by which it reuses their blocks needs to know of them.

Our connector tells it in its notes. Of other engines it is gathered from events, which say neither how long a chunk of
local attention is, nor whether EAGLE's drop applies; there all groups must have blocks of one size.

Kinds are vLLM's `kv_cache_spec_kind`s. Blocks of *full attention* are reusable as far as all before them are held. Of a
*sliding window*, and of a *chunk* of local attention, the blocks that reach back from the place where a hit ends must
be held; of a recurrent *state* (Mamba) the one that ends there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import gcd

from indexer.wire import BlockStored, Lookup
from indexer.wire import Groups as ToldGroups

PREFIX_KINDS = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
WINDOW_KINDS = frozenset({"sliding_window", "sliding_window_mla"})
CHUNK_KIND = "chunked_local_attention"
STATE_KIND = "mamba"
SCRATCH_KIND = "scratch"
"""Ours: a group whose blocks are never reused, and not needed for a hit."""

MAX_GROUPS = 32


@dataclass(slots=True, frozen=True)
class Rule:
    """All in tokens."""

    lookups: Sequence[Lookup] = ()
    """In the order in which they are made. Empty: there is nothing but full attention, the same for all groups."""
    unit: int = 0
    """All else is a multiple of it: what a key stands for. 0 = one block, whatever its size."""
    alignment: int = 0
    """Hits in HBM end at its multiples."""
    alone: bool = False
    """Is there one group only?"""
    told: bool = False

    @property
    def is_plain(self) -> bool:
        return not self.lookups

    @property
    def is_fine(self) -> bool:
        """Can hits end inside blocks?"""
        return any(lookup.block > self.alignment for lookup in self.lookups)


PLAIN = Rule()


class Groups:
    """Of one life of an engine."""

    def __init__(self) -> None:
        self.told: Rule | None = None
        """As the notes tell; None: they do not, or of something that is not known here."""
        self._is_told = False
        self._kinds: dict[int, str] = {}
        """As the notes tell."""
        self._heard: dict[int, tuple[str, int]] = {}
        """As events tell: kind and window; of a kind whose rule is not known "" and 0."""
        self._mixed = False
        """Have events told of blocks of several sizes?"""

    def tell(self, groups: ToldGroups) -> bool:
        """The engine tells of them itself. True if that is news."""
        told, kinds = _rule(groups), {group: lookup.kind for lookup in groups.lookups for group in lookup.groups}
        news = not self._is_told or told != self.told or kinds != self._kinds
        self.told, self._kinds, self._is_told = told, kinds, True
        return news

    def hear(self, event: BlockStored) -> bool:
        """An event tells what its group is. True if that is news."""
        group, window = event.group, event.window if event.kind in WINDOW_KINDS else 0
        if group is None or not event.kind or (group not in self._heard and len(self._heard) >= MAX_GROUPS):
            return False
        known = window > 0 or event.kind in PREFIX_KINDS or event.kind == STATE_KIND
        heard = (event.kind, window) if known else ("", 0)
        news = self._heard.get(group) != heard
        self._heard[group] = heard
        return news

    def hear_other_size(self, event: BlockStored) -> bool:
        """Blocks of a group turn out to be of another size than those of others. True if that is news."""
        news = not self._mixed and event.group is not None and event.tier == "gpu"
        self._mixed = self._mixed or news
        return news

    def problem(self, event: BlockStored) -> str:
        """Why the event's blocks are not indexed; "" if they are."""
        kind = self._kind(event)
        if kind is None:
            return "unknown_group"
        if kind in PREFIX_KINDS or (self.told is not None and not self.told.is_plain):
            return "" if kind else "not_a_prefix_cache"
        return "" if kind and event.tier == "gpu" and event.group is not None else "not_a_prefix_cache"

    def _kind(self, event: BlockStored) -> str | None:
        """ "" = one whose rule is not known; None = nobody has told."""
        if self._is_told:
            kind = self._kinds.get(event.group or 0)
            return "" if kind is not None and (self.told is None or kind == SCRATCH_KIND) else kind
        if event.group is None:
            return event.kind or "full_attention"
        return self._heard.get(event.group, (None, 0))[0]

    def prefix_groups(self) -> list[int]:
        """Of full attention, as far as is known."""
        kinds = self._kinds if self._is_told else {group: kind for group, (kind, _) in self._heard.items()}
        return [group for group, kind in kinds.items() if kind in PREFIX_KINDS]

    def rule(self, block_size: int, others: Iterable[Groups], lanes: Iterable[int]) -> Rule | None:
        """None: no hit is to be expected. `others`: of engines that share a store with this one, and so run the same
        model; `lanes`: groups of which such a store holds something."""
        if self._is_told:
            return self.told
        heard = self._heard
        for other in others:
            heard = other._heard | heard
        known = {*heard, *lanes}
        if self._mixed or ("", 0) in heard.values() or any(group not in known for group in range(len(known))):
            return None  # groups are numbered from 0, so one that nobody has told of yet shows as a gap
        if all(kind in PREFIX_KINDS for kind, _ in heard.values()):
            return PLAIN
        alike: dict[tuple[str, int], list[int]] = {}
        for group, (kind, window) in sorted(heard.items()):
            alike.setdefault(("full_attention" if kind in PREFIX_KINDS else kind, window), []).append(group)
        lookups = [Lookup(ids, kind, block_size, window) for (kind, window), ids in alike.items()]
        return Rule(_in_order(lookups), block_size, block_size, alone=len(heard) == 1) if block_size else None


def _rule(groups: ToldGroups) -> Rule | None:
    """None if it is not what any known engine does."""
    lookups = [lookup for lookup in groups.lookups if lookup.kind != SCRATCH_KIND]
    alignment = groups.alignment
    unit = gcd(alignment, *(lookup.block for lookup in lookups))
    if not lookups or any(not _is_sound(lookup, alignment, unit) for lookup in lookups):
        return None
    count = sum(len(lookup.groups) for lookup in groups.lookups)
    plain = all(lookup.kind in PREFIX_KINDS and lookup.block == alignment and not lookup.eagle for lookup in lookups)
    if plain:
        return Rule(unit=unit, alignment=alignment, told=True)
    return Rule(_in_order(lookups), unit, alignment, alone=count == 1, told=True)


def _is_sound(lookup: Lookup, alignment: int, unit: int) -> bool:
    block, window = lookup.block, lookup.window
    if not lookup.groups or max(lookup.groups) >= MAX_GROUPS:
        return False
    if lookup.kind in WINDOW_KINDS:
        return window > 0 and alignment % block == 0
    if lookup.kind == CHUNK_KIND:
        return alignment == block and window > 0 and window % block == 0 and not lookup.eagle
    if lookup.kind in PREFIX_KINDS or lookup.kind == STATE_KIND:
        return alignment % block == 0 or alignment == unit
    return False


def _in_order(lookups: Iterable[Lookup]) -> tuple[Lookup, ...]:
    """Full attention first."""
    return tuple(sorted(lookups, key=lambda lookup: lookup.kind not in PREFIX_KINDS))
