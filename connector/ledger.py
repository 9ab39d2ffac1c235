"""What the stream has announced as held, so that events can be completed and the whole be told again.

Events pass through `apply`. Those of HBM say all about their blocks and pass as they are. Those of the tiers below say
less, and get what earlier events said about the same hashes: tokens, parent, adapter, extra keys. Copies are counted as
a consumer counts them, per medium and KV-cache group, so `freeze` shows what a consumer of all events holds.

Where a medium's chunk is told, its announcements are chunks: named by their last hash, and never twice in the tier. A
chunk announced by its last hash alone is widened to all its blocks where they are known; and whatever a removal names,
what is removed is what was announced.

Events are read by field names, so they may be vLLM's structs or ours. What cannot be understood passes unchanged.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, islice, pairwise, repeat
from typing import Any

import msgspec

from connector.events import GPU, AllBlocksCleared, BlockRemoved, BlockStored, Hash

RUN_BLOCKS = 16
"""Neighbours that share what is known of them, as long as one of them is held."""
REMEMBERED = 1 << 15
"""Blocks of a group that stay known though their tier lost them: HBM may evict a block before a tier below has it."""
REMOVED_AT_ONCE = 4096
"""Hashes in one event when a tier is cleared."""
PART_BLOCKS = 1000
PART_BYTES = 1 << 20
"""Of a part of a snapshot, at most; bytes roughly."""

WHOLE_KINDS = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})
"""Of groups that keep all blocks of a prompt. What is known of a block of another kind may rest on blocks before it
that nobody holds, so that it is told with theirs."""

_ODD = (AttributeError, TypeError, ValueError, OverflowError)


class Scope(msgspec.Struct, frozen=True, gc=False):
    """What all blocks of a kind have in common."""

    lora_id: int | None
    lora_name: str | None
    kind: str | None
    window: int | None


class Run(msgspec.Struct, frozen=True, gc=False):
    """Neighbouring blocks as an event described them."""

    hashes: Sequence[Hash]
    parent: Hash | None
    tokens: bytes
    """Native uint32; empty = not known, and then nothing else is."""
    block_size: int
    extras: Sequence[Any] | None
    """A block's extra keys each; empty = none has any; None = not known."""
    lookahead: Sequence[list[int]] | None
    scope: Scope
    lead: int = 0
    """Blocks that `tokens` begins with, before the first of `hashes`: they have no extra keys."""

    @property
    def is_complete(self) -> bool:
        return self.extras is not None

    def before(self, index: int) -> Hash | None:
        """The hash of the block before that one; None also if it is not known."""
        if index:
            return self.hashes[index - 1]
        return None if self.lead else self.parent

    def origin(self, index: int) -> tuple[Hash | None, int]:
        """From where to tell what a block is: a hash, and how many blocks are between that and the block."""
        if (self.lead or self.scope.kind not in WHOLE_KINDS) and not any((self.extras or ())[:index]):
            return self.parent, self.lead + index
        return self.before(index), 0

    def token_ids(self, first: int, end: int) -> list[int]:
        size = self.block_size * 4
        return array("I", self.tokens[(self.lead + first) * size : (self.lead + end) * size]).tolist()

    def extra_keys(self, first: int, end: int) -> list[Any] | None:
        if self.extras is None:
            return None
        return list(self.extras[first:end]) if self.extras else [None] * (end - first)


Holding = list[tuple[Hash, Run]]


class Group:
    """The blocks of one KV-cache group: in which tiers they are, and what is known of them."""

    __slots__ = ("kind", "lanes", "remembered", "vague", "window")

    def __init__(self) -> None:
        self.lanes: list[Lane] = []
        self.kind: str | None = None
        self.window: int | None = None
        self.remembered: OrderedDict[Hash, Run] = OrderedDict()
        self.vague: set[Hash] = set()
        """Held, and not known completely."""

    def find(self, block_hash: Hash) -> Run | None:
        """The run that says most about a block; None if none says what it is."""
        best = None
        for run in chain((lane.held.get(block_hash) for lane in self.lanes), (self.remembered.get(block_hash),)):
            if run is not None and run.tokens:
                if run.is_complete:
                    return run
                best = run
        return best

    def lineage(self, block_hash: Hash, length: int) -> Holding:
        """The block and those before it, the earliest first; fewer than `length` where no more are known."""
        found: Holding = []
        wanted: Hash | None = block_hash
        while wanted is not None and len(found) < length:
            run = self.find(wanted)
            if run is None:
                break
            found.append((wanted, run))
            wanted = run.before(run.hashes.index(wanted))
        return found[::-1]

    def remember(self, block_hash: Hash, run: Run) -> None:
        self.remembered[block_hash] = run
        if len(self.remembered) > REMEMBERED:
            self.remembered.popitem(last=False)

    def learn(self, runs: Iterable[Run]) -> None:
        """These may say more about held blocks than was known when they came."""
        if not self.vague:
            return
        for run in runs:
            if run.is_complete:
                for block_hash in self.vague.intersection(run.hashes):
                    self.vague.remove(block_hash)
                    for lane in self.lanes:
                        if block_hash in lane.held:
                            lane.held[block_hash] = run

    def check_vague(self, hashes: Iterable[Hash]) -> None:
        """These may no longer be held."""
        if self.vague:
            for block_hash in self.vague.intersection(hashes):
                if not any(block_hash in lane.held for lane in self.lanes):
                    self.vague.remove(block_hash)


class Lane:
    """One medium's blocks of one group."""

    __slots__ = ("announced", "chunk", "group", "group_idx", "held", "locality", "medium", "surplus")

    def __init__(
        self, group: Group, medium: str, group_idx: int | None, locality: str | None, chunk: int | None
    ) -> None:
        self.group = group
        self.medium = medium
        self.group_idx = group_idx
        self.locality = locality
        self.chunk = chunk
        """Blocks a chunk; None: announcements are of blocks."""
        self.held: dict[Hash, Run] = {}
        self.surplus: dict[Hash, int] = {}
        """Copies beyond the first."""
        self.announced: dict[Hash, int] = {}
        """Last hash of a chunk → how many of its blocks were announced."""

    def add(self, runs: Iterable[Run], *, count_copies: bool) -> None:
        for run in runs:
            if self.held.keys().isdisjoint(run.hashes):
                self.held.update(zip(run.hashes, repeat(run)))
            else:
                self.hold(zip(run.hashes, repeat(run)), count_copies=count_copies)

    def hold(self, blocks: Iterable[tuple[Hash, Run]], *, count_copies: bool = True) -> None:
        for block_hash, run in blocks:
            if block_hash not in self.held:
                self.held[block_hash] = run
            elif count_copies:
                self.surplus[block_hash] = self.surplus.get(block_hash, 0) + 1

    def drop(self, hashes: Sequence[Hash]) -> None:
        """One copy less of each."""
        for block_hash in hashes:
            if block_hash in self.surplus:
                self.surplus[block_hash] -= 1
                if not self.surplus[block_hash]:
                    del self.surplus[block_hash]
            else:
                run = self.held.pop(block_hash, None)
                if run is not None and run.tokens:
                    self.group.remember(block_hash, run)
        self.group.check_vague(hashes)

    def clear(self) -> None:
        recent = list(islice(reversed(self.held.items()), REMEMBERED))
        for block_hash, run in reversed(recent):
            if run.tokens:
                self.group.remember(block_hash, run)
        self.held.clear()
        self.surplus.clear()
        self.announced.clear()
        self.group.check_vague(self.group.vague.copy())

    def removal(self, hashes: Sequence[Hash]) -> BlockRemoved:
        return BlockRemoved(list(hashes), self.medium, self.group_idx, self.locality)

    def stored(self, run: Run, first: int, end: int) -> BlockStored:
        """An event that announces these blocks of a run, self-describing as far as they are known."""
        parent, lead = run.origin(first) if run.tokens else (None, 0)
        return BlockStored(
            block_hashes=list(run.hashes[first:end]),
            parent_block_hash=parent,
            token_ids=run.token_ids(first - lead, end),
            block_size=run.block_size,
            lora_id=run.scope.lora_id,
            medium=self.medium,
            lora_name=run.scope.lora_name,
            extra_keys=run.extra_keys(first, end),
            group_idx=self.group_idx,
            kv_cache_spec_kind=run.scope.kind,
            kv_cache_spec_sliding_window=run.scope.window,
            locality=self.locality,
            lookahead_token_ids=list(run.lookahead[first:end]) if run.lookahead is not None else None,
            lead_blocks=lead,
        )


class Ledger:
    """Of one engine; pure.

    Args:
        chunks: blocks a chunk, of the media below HBM where it is known.
    """

    def __init__(self, chunks: Mapping[str, int] | None = None) -> None:
        self.odd = 0
        """Events that were not understood."""
        self._chunks = {medium: chunk for medium, chunk in (chunks or {}).items() if medium != GPU}
        self._groups: dict[int | None, Group] = {}
        self._lanes: dict[tuple[str, int | None], Lane] = {}
        self._handlers: dict[type, Callable[[Any, list[object]], None]] = {}
        self._heaviest_block = 1

    def apply(self, events: Iterable[object]) -> list[object]:
        """Record one batch; returns what is to be published of it."""
        told: list[object] = []
        for event in events:
            handle = self._handlers.get(type(event)) or self._handler(type(event))
            handle(event, told)
        return told

    def held(self, medium: str) -> int:
        """Blocks in a medium, each counted once a group."""
        return sum(len(lane.held) for lane in self._lanes.values() if lane.medium == medium)

    def media(self) -> list[str]:
        """In which anything is or was held, HBM first."""
        return list(dict.fromkeys(lane.medium for lane in self._sorted_lanes()))

    def freeze(self) -> Picture:
        """What is held, as of now; costs a dictionary copy a lane."""
        lanes = [(lane, lane.held.copy(), lane.surplus.copy()) for lane in self._sorted_lanes()]
        return Picture(lanes, part_blocks=max(1, min(PART_BLOCKS, PART_BYTES // self._heaviest_block)))

    def _sorted_lanes(self) -> list[Lane]:
        return sorted(self._lanes.values(), key=lambda lane: lane.medium != GPU)

    # --- one handler a kind of event

    def _handler(self, kind: type) -> Callable[[Any, list[object]], None]:
        handlers = {
            "BlockStored": self._store,
            "BlockRemoved": self._remove,
            "AllBlocksCleared": self._clear,
            "TierCleared": self._clear_tier,
        }
        self._handlers[kind] = handler = handlers.get(kind.__name__, self._pass_on)
        return handler

    def _pass_on(self, event: Any, told: list[object]) -> None:
        self.odd += 1
        told.append(event)

    def _store(self, event: Any, told: list[object]) -> None:
        try:
            medium = event.medium or GPU
            runs = self._read(event, medium)
            lane = self._lane(event, medium)
        except _ODD:
            self._pass_on(event, told)
            return
        if runs[0].scope.kind:
            lane.group.kind, lane.group.window = runs[0].scope.kind, runs[0].scope.window
        if medium == GPU:
            # vLLM's `kv_cache_report_mode: full` repeats what was announced before, from the first block on
            repeats = event.parent_block_hash is None and getattr(event, "session_id", None) is not None
            lane.add(runs, count_copies=not repeats)
            lane.group.learn(runs)
            told.append(event)
        elif runs[0].tokens:
            self._store_below(event, runs, lane, told)
        else:
            for run in runs:
                for block_hash in run.hashes:
                    self._store_by_hash(event, block_hash, run.scope, lane, told)

    def _store_below(self, event: Any, runs: Sequence[Run], lane: Lane, told: list[object]) -> None:
        """A self-describing event of a lower tier: what it leaves out, HBM's events may have said."""
        known = [lane.group.find(block_hash) for block_hash in event.block_hashes]
        if all(run is not None and run.is_complete for run in known):
            holding: Holding = list(zip(event.block_hashes, known, strict=True))  # type: ignore[arg-type]
            if event.extra_keys is None:
                event = msgspec.structs.replace(event, **_identity(holding))
            self._announce(event, holding, lane, told)
        else:
            self._announce(event, [(block_hash, run) for run in runs for block_hash in run.hashes], lane, told)
            lane.group.learn(runs)

    def _store_by_hash(self, event: Any, block_hash: Hash, scope: Scope, lane: Lane, told: list[object]) -> None:
        """A placeholder: the block, and its chunk with it, are described where they are known."""
        whole = lane.chunk or 1
        holding = lane.group.lineage(block_hash, whole)
        if len(holding) < whole:
            holding = holding[-1:]
        if holding:
            event = _described(event, holding)
        else:
            kind, window = lane.group.kind, lane.group.window
            scope = _scope(scope.lora_id, scope.lora_name, kind, window)
            holding = [(block_hash, Run((block_hash,), None, b"", 0, None, None, scope))]
            event = msgspec.structs.replace(
                event, block_hashes=[block_hash], kv_cache_spec_kind=kind, kv_cache_spec_sliding_window=window
            )
        self._announce(event, holding, lane, told)

    def _announce(self, event: Any, holding: Holding, lane: Lane, told: list[object]) -> None:
        if lane.chunk:
            name, run = holding[-1]
            known = lane.held.get(name)
            if known is not None and name in lane.announced:
                if lane.announced[name] >= len(holding) and (known.tokens or not run.tokens):
                    return
                self._remove_chunk(name, lane, told)
            lane.announced[name] = len(holding)
        lane.hold(holding)
        lane.group.vague.update(block_hash for block_hash, run in holding if not run.is_complete)
        told.append(event)

    def _remove_chunk(self, name: Hash, lane: Lane, told: list[object]) -> None:
        hashes = self._chunk_hashes(name, lane)
        lane.drop(hashes)
        told.append(lane.removal(hashes))

    def _remove(self, event: Any, told: list[object]) -> None:
        try:
            hashes = event.block_hashes
            _check_hashes(hashes)
            lane = self._lanes.get((event.medium or GPU, event.group_idx))
        except _ODD:
            self._pass_on(event, told)
            return
        if lane is not None and lane.chunk:
            hashes = self._announced_of(hashes, lane)
            if not hashes:
                return
            if hashes != event.block_hashes:
                event = msgspec.structs.replace(event, block_hashes=hashes)
        if lane is not None:
            lane.drop(hashes)
        told.append(event)

    def _announced_of(self, hashes: Sequence[Hash], lane: Lane) -> list[Hash]:
        """What was announced of the chunks that a removal names: by all their blocks in order, or by the last only."""
        told: list[Hash] = []
        rest = list(hashes)
        while rest:
            name = rest.pop()
            if name in lane.announced:
                longest = max(lane.chunk or 1, lane.announced[name])
                for block_hash, _ in reversed(lane.group.lineage(name, longest)[:-1]):
                    if not rest or rest[-1] != block_hash:
                        break
                    rest.pop()
                told += reversed(self._chunk_hashes(name, lane))
            elif name in lane.held:
                told.append(name)
        return told[::-1]

    def _chunk_hashes(self, name: Hash, lane: Lane) -> list[Hash]:
        """The blocks announced under this name, which is not the name of a chunk any more."""
        blocks = lane.announced.pop(name)
        return [name] if blocks == 1 else [block_hash for block_hash, _ in lane.group.lineage(name, blocks)]

    def _clear(self, event: Any, told: list[object]) -> None:
        """A reset that does not say of what is one of HBM; other tiers are cleared by `TierCleared`."""
        tiers = getattr(event, "tiers", None)
        if not isinstance(tiers, list):
            tiers = [GPU]
            event = AllBlocksCleared(tiers)
        for lane in self._lanes.values():
            if lane.medium in tiers:
                lane.clear()
        told.append(event)

    def _clear_tier(self, event: Any, told: list[object]) -> None:
        for lane in self._lanes.values():
            if lane.medium == event.medium:
                hashes = chain(lane.held, _elements(lane.surplus))
                while some := list(islice(hashes, REMOVED_AT_ONCE)):
                    told.append(lane.removal(some))
                lane.clear()

    # --- reading

    def _lane(self, event: Any, medium: str) -> Lane:
        group_idx = event.group_idx
        lane = self._lanes.get((medium, group_idx))
        if lane is None:
            group = self._groups.setdefault(group_idx, Group())
            lane = Lane(group, medium, group_idx, getattr(event, "locality", None), self._chunks.get(medium))
            group.lanes.insert(0 if medium == GPU else len(group.lanes), lane)
            self._lanes[medium, group_idx] = lane
        return lane

    def _read(self, event: Any, medium: str) -> list[Run]:
        """The event's blocks. Raises one of _ODD if they are not what a consumer would understand."""
        hashes, token_ids = event.block_hashes, event.token_ids
        _check_hashes(hashes)
        scope = _scope(
            event.lora_id,
            event.lora_name,
            getattr(event, "kv_cache_spec_kind", None),
            getattr(event, "kv_cache_spec_sliding_window", None),
        )
        if not token_ids:
            return [Run(hashes, None, b"", 0, None, None, scope)]
        size, lead = event.block_size, getattr(event, "lead_blocks", 0)
        if len(token_ids) != (lead + len(hashes)) * size:
            if scope.kind not in WHOLE_KINDS and len(token_ids) > len(hashes) * size:
                # Blocks that are not kept have tokens there, but no hash; which ones is not said
                return [Run(hashes, None, b"", size, None, None, scope)]
            raise ValueError("tokens do not fill the blocks")
        tokens = array("I", token_ids).tobytes()
        extras = self._read_extras(event, medium)
        lookahead = getattr(event, "lookahead_token_ids", None)
        self._heaviest_block = max(self._heaviest_block, 5 * size + 64)
        if lead + len(hashes) <= RUN_BLOCKS:
            return [Run(hashes, event.parent_block_hash, tokens, size, extras, lookahead, scope, lead)]
        starts = [0, *range(RUN_BLOCKS - lead % RUN_BLOCKS, len(hashes), RUN_BLOCKS)]
        return [
            Run(
                hashes[first:end],
                hashes[first - 1] if first else event.parent_block_hash,
                tokens[(first and lead + first) * size * 4 : (lead + end) * size * 4],
                size,
                extras and extras[first:end],
                lookahead and lookahead[first:end],
                scope,
                0 if first else lead,
            )
            for first, end in pairwise([*starts, len(hashes)])
        ]

    def _read_extras(self, event: Any, medium: str) -> Sequence[Any] | None:
        extras: Sequence[Any] | None = getattr(event, "extra_keys", None)
        if extras is None:
            return () if medium == GPU else None  # an engine that says nothing about HBM has no such keys
        if len(extras) != len(event.block_hashes):
            raise ValueError("not one entry a block")
        if not any(extras):
            return ()
        weight = max(len(msgspec.msgpack.encode(entry)) for entry in extras)
        self._heaviest_block = max(self._heaviest_block, weight + 5 * event.block_size + 64)
        return extras


class Picture:
    """What was held at one moment, told lazily as events."""

    def __init__(self, lanes: list[tuple[Lane, dict[Hash, Run], dict[Hash, int]]], part_blocks: int) -> None:
        self._lanes = lanes
        self._part_blocks = part_blocks
        copies = sum(len(held) + sum(surplus.values()) for _, held, surplus in lanes)
        self.part_count = max(1, -(-copies // part_blocks))

    def parts(self) -> Iterator[list[BlockStored]]:
        """HBM first; in a tier parents before children, and further copies in events of their own behind all first
        ones. Can be had once."""
        part: list[BlockStored] = []
        room = self._part_blocks
        for lane, run, first, end in self._pieces():
            while first < end:
                some = min(room, end - first)
                part.append(lane.stored(run, first, first + some))
                first += some
                room -= some
                if not room:
                    yield part
                    part, room = [], self._part_blocks
        if part or not any(held for _, held, _ in self._lanes):
            yield part

    def _pieces(self) -> Iterator[tuple[Lane, Run, int, int]]:
        for lane, held, surplus in self._lanes:
            for run, first, end in _in_order(held):
                yield lane, run, first, end
            for block_hash in _elements(surplus):
                run = held[block_hash]
                index = run.hashes.index(block_hash)
                yield lane, run, index, index + 1


def _in_order(held: Mapping[Hash, Run]) -> Iterator[tuple[Run, int, int]]:
    """Every block once, in pieces of runs, parents first."""
    done: set[Hash] = set()
    for start in held:
        pieces: list[tuple[Run, int, int]] = []
        block_hash: Hash | None = start
        while block_hash is not None and block_hash not in done and block_hash in held:
            run = held[block_hash]
            first, end = _extent(held, run, run.hashes.index(block_hash))
            done.update(run.hashes[first:end])
            pieces.append((run, first, end))
            block_hash = run.before(first)
        yield from reversed(pieces)


def _extent(held: Mapping[Hash, Run], run: Run, index: int) -> tuple[int, int]:
    """From where to where a run is still held, around a block of it."""
    first, end = index, index + 1
    while first and held.get(run.hashes[first - 1]) is run:
        first -= 1
    while end < len(run.hashes) and held.get(run.hashes[end]) is run:
        end += 1
    return first, end


def _elements(counts: Mapping[Hash, int]) -> Iterator[Hash]:
    return chain.from_iterable(repeat(block_hash, count) for block_hash, count in counts.items())


def _check_hashes(hashes: Sequence[object]) -> None:
    if not set(map(type, hashes)) <= {int, bytes}:
        raise TypeError("not hashes")


@lru_cache(1024)
def _scope(lora_id: int | None, lora_name: str | None, kind: str | None, window: int | None) -> Scope:
    return Scope(lora_id, lora_name, kind, window)


def _described(event: Any, holding: Holding) -> Any:
    """A placeholder event, told in full."""
    block_hash, run = holding[0]
    index = run.hashes.index(block_hash)
    parent, lead = run.origin(index)
    told = msgspec.structs.replace(
        event,
        block_hashes=[block_hash for block_hash, _ in holding],
        parent_block_hash=parent,
        token_ids=[
            *run.token_ids(index - lead, index),
            *(token for name, run in holding for token in _tokens(name, run)),
        ],
        block_size=run.block_size,
        kv_cache_spec_kind=event.kv_cache_spec_kind or run.scope.kind,
        kv_cache_spec_sliding_window=event.kv_cache_spec_sliding_window or run.scope.window,
        **_identity(holding),
    )
    return _with_lead(told, lead) if lead else told


def _with_lead(event: Any, lead: int) -> BlockStored:
    """vLLM's struct has no field for it."""
    fields = {name: getattr(event, name) for name in BlockStored.__struct_fields__ if hasattr(event, name)}
    return BlockStored(**fields | {"lead_blocks": lead})


def _identity(holding: Holding) -> dict[str, Any]:
    """Adapter and extra keys of an event of these blocks, as far as they are known."""
    scope = holding[0][1].scope
    known = all(run.is_complete for _, run in holding)
    keys = [_extra_key(name, run) for name, run in holding] if known else None
    return {"lora_id": scope.lora_id, "lora_name": scope.lora_name, "extra_keys": keys}


def _tokens(block_hash: Hash, run: Run) -> list[int]:
    index = run.hashes.index(block_hash)
    return run.token_ids(index, index + 1)


def _extra_key(block_hash: Hash, run: Run) -> Any:
    return run.extras[run.hashes.index(block_hash)] if run.extras else None
