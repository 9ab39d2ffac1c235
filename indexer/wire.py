"""An engine's event payload → typed events.

One decoder for every engine: events may be maps (today's vLLM), positional arrays (vLLM up to 0.23, SGLang) or either
of them wrapped in a msgpack bin; hashes may be integers of any width or digests. A batch of maps, the common case, is
decoded in one typed pass; anything else goes event by event, so that one bad event is named and skipped alone.

Left out: what the events mean for residency (residency.py), and the message around the payload (feed.py).
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from math import isfinite
from typing import Annotated, Any

import msgspec

from indexer.keys import encode_extras

MAX_PAYLOAD = 16 << 20
"""Bytes. A step's batch is at most a few hundred kB; decoding takes at most 40 times as much in memory, because what a
byte may stand for is limited below."""

MAX_EVENTS = 1 << 17
"""A batch. An engine with blocks of one token removes them one an event."""

MAX_EXTRA_KEYS = 1 << 20
"""Bytes an event."""

MAX_NAME = 512
MAX_BLOCK_SIZE = 1 << 16
_UINT64 = (1 << 64) - 1

_TIERS = {
    None: "gpu",
    "": "gpu",
    "GPU": "gpu",
    "CPU": "cpu",
    "STORAGE": "storage",
    "cpu_pinned": "cpu",
    "cpu_tier1": "cpu",
    "cpu_tier2": "storage",
    "disk": "storage",
    "local_disk": "storage",
    "nvme": "storage",
    "external": "storage",
    "fs": "storage",
    "obj": "storage",
    "object_store": "storage",
    "shared_storage": "storage",
}


class BadPayload(ValueError):
    """The payload as a whole cannot be read: too large, not msgpack, or not a batch."""


class BlockStored(msgspec.Struct, frozen=True, gc=False):
    """Blocks now held in a tier. Without tokens it is a placeholder: only the hashes say what is held."""

    hashes: Sequence[int]
    """The engine's own block hashes, opaque uint64, in prompt order."""
    parent: int | None = None
    """Hash of the block before the first; None = the prompt starts here."""
    tokens: bytes = b""
    """Little-endian uint32 of all the blocks together."""
    block_size: int = 0
    tier: str = "gpu"
    lora_name: str = ""
    extras: Mapping[int, bytes] | None = None
    """Block number in this event → what besides tokens is in its hash (`keys.encode_extras`). None = the engine does
    not say, and then a salted block looks like an unsalted one."""
    group: int | None = None
    kind: str = ""
    """`kv_cache_spec_kind`; "" = not said."""
    window: int = 0
    """Of sliding-window attention, in tokens; 0 = not said."""
    repeats: bool = False
    """May announce blocks again that it has announced before, without a second copy existing (vLLM's
    `kv_cache_report_mode: full` re-sends the hit prefix from its first block, with the session's id)."""
    lead: int = 0
    """Blocks between the parent and the first that is named: the tokens are of them too, but nothing holds them."""


class BlockRemoved(msgspec.Struct, frozen=True, gc=False):
    hashes: Sequence[int]
    tier: str = "gpu"
    group: int | None = None


class BlocksCleared(msgspec.Struct, frozen=True, gc=False):
    tiers: tuple[str, ...] | None = None
    """Which tiers were emptied; None = the engine does not say."""


Event = BlockStored | BlockRemoved | BlocksCleared


class Skipped(msgspec.Struct, frozen=True):
    """An event that was left out, or the notes."""

    reason: str
    """`unknown_type`, `bad_field`, `malformed` or `bad_notes`: fit for a metric label."""
    detail: str


# --- what our connector says besides events; this is also its form on the wire

_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]


class Load(msgspec.Struct, frozen=True, gc=False):
    waiting: _Count
    """Requests."""
    running: _Count
    kv_usage: Annotated[float, msgspec.Meta(ge=0, le=1)]
    """HBM blocks of running requests."""


class Tier(msgspec.Struct, frozen=True, gc=False):
    """All in blocks, not chunks."""

    capacity: _Count | None = None
    """None = unlimited, or not known."""
    held: _Count | None = None
    """Unique blocks; None = not known."""
    chunk: Annotated[int, msgspec.Meta(ge=1, le=MAX_BLOCK_SIZE)] = 1
    """Blocks an offloaded chunk."""
    pool: Annotated[str, msgspec.Meta(max_length=MAX_NAME)] | None = None
    """The store that holds them, shared by all publishers that name the same; None = the publisher's own."""


class Tiers(msgspec.Struct, frozen=True, rename="upper"):
    """None = nothing said."""

    gpu: Tier | None = None
    cpu: Tier | None = None
    storage: Tier | None = None

    def items(self) -> list[tuple[str, Tier]]:
        """Those of which something is said, by our names for tiers."""
        named = (("gpu", self.gpu), ("cpu", self.cpu), ("storage", self.storage))
        return [(name, tier) for name, tier in named if tier is not None]


class Lookup(msgspec.Struct, frozen=True):
    """KV-cache groups that are alike, and that the engine looks up together."""

    groups: Annotated[list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]], msgspec.Meta(max_length=64)]
    """Their numbers."""
    kind: Annotated[str, msgspec.Meta(max_length=64)]
    """`kv_cache_spec_kind`, or `scratch`: never reused, and not needed for a hit."""
    block: Annotated[int, msgspec.Meta(ge=1, lt=1 << 24)]
    """Tokens a block."""
    window: Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)] = 0
    """Tokens of a sliding window, or of a chunk of local attention."""
    eagle: bool = False
    """Is the last block of a hit dropped, as EAGLE's kind of speculation computes it anew?"""
    draft: Annotated[list[int], msgspec.Meta(max_length=64)] = []
    """Those of the groups that have a draft model's layers; a load ends a chunk before what is found of them."""


class Groups(msgspec.Struct, frozen=True):
    """All of the engine's KV-cache groups."""

    lookups: Annotated[list[Lookup], msgspec.Meta(max_length=64)]
    """None: they are of a kind that nothing can be said of."""
    alignment: Annotated[int, msgspec.Meta(ge=1, lt=1 << 24)] = 1
    """Hits in HBM end at multiples of so many tokens."""


class SnapshotPart(msgspec.Struct, frozen=True, gc=False):
    part: Annotated[int, msgspec.Meta(ge=1)]
    parts: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]


class Notes(msgspec.Struct, frozen=True):
    instance: Annotated[str, msgspec.Meta(max_length=64)] = ""
    """Random, one an engine process; "" = not said."""
    load: Load | None = None
    tiers: Tiers | None = None
    heartbeat: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 0.0
    """The publisher sends at least every so many seconds, even if empty batches; 0 = not said, or no promise."""
    snapshot: SnapshotPart | None = None
    """Which part of an answer to a snapshot request this batch is."""
    groups: Groups | None = None


class Batch(msgspec.Struct, frozen=True):
    timestamp: float
    """Seconds since the epoch, by the engine's clock; 0 if what it said is no time."""
    events: list[Event]
    notes: Notes | None = None
    skipped: Sequence[Skipped] = ()

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    @property
    def instance(self) -> str:
        """Id of the engine process that sent it; "" = not said."""
        return "" if self.notes is None else self.notes.instance

    @property
    def part(self) -> SnapshotPart | None:
        """Which part of a snapshot it is; None = an ordinary batch."""
        return None if self.notes is None else self.notes.snapshot


# --- what is on the wire; field names and order are the engines'

_Hash = int | bytes
_Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
_Group = Annotated[int, msgspec.Meta(ge=0)]
_Pair = Annotated[tuple[int, ...], msgspec.Meta(min_length=1)]

_ExtraKeys = list[tuple[Any, ...] | None]
_Packed = msgspec.Raw
"""What may be anything is not unpacked with the rest: an empty list or map is one byte here and 64 in memory."""
_ABSENT = _Packed()
_NULL = b"\xc0"
_NO_EXTRA_KEYS = (b"", _NULL)
_NONE_EACH = {msgspec.msgpack.encode([None] * blocks): blocks for blocks in range(1, 65)}
"""Extra keys of so many blocks that have none, which is what most events say."""


class _Metadata(msgspec.Struct, gc=False):
    """What SGLang's arrays have in the place of `lora_name`, for salted blocks only."""

    cache_salt: _Name | None = None


class _StoredFields(msgspec.Struct, tag_field="type", tag="BlockStored", gc=False):
    """In the order in which arrays have them. All but the hashes may be missing."""

    block_hashes: list[_Hash]
    parent_block_hash: _Hash | None = None
    token_ids: tuple[int | _Pair, ...] | None = None
    """Pairs where SGLang speculates EAGLE's way: each token with the one that follows it."""
    block_size: Annotated[int, msgspec.Meta(ge=0, le=MAX_BLOCK_SIZE)] | None = None
    lora_id: int | None = None
    medium: _Name | None = None
    lora_name: _Name | _Metadata | None = None
    extra_keys: _Packed = _ABSENT
    """`_ExtraKeys` or null."""
    group_idx: _Group | None = None
    kv_cache_spec_kind: _Name | None = None
    kv_cache_spec_sliding_window: int | None = None

    def _event(self, salt: str | None, in_session: bool, lead: int = 0) -> BlockStored:
        lora_name, parent = self.lora_name or "", self.parent_block_hash
        if isinstance(lora_name, _Metadata):
            salt, lora_name = lora_name.cache_salt, ""
        if self.lora_id and not lora_name:
            raise ValueError(f"lora_id {self.lora_id} without lora_name: whose blocks these are is not known")
        if parent is not None:
            parent = uint64_hash(parent) or None  # some publishers send 0 for "no parent"
        extras: Mapping[int, bytes] | None = None
        packed = bytes(self.extra_keys)
        if packed in _NO_EXTRA_KEYS:
            if salt:
                extras = {0: encode_extras([salt])} if parent is None else _NO_EXTRAS
        elif _NONE_EACH.get(packed) == len(self.block_hashes):
            extras = _NO_EXTRAS
        else:
            extras = self._extras(packed, lora_name)
        window = self.kv_cache_spec_sliding_window
        return BlockStored(
            _hashes(self.block_hashes),
            parent,
            _uint32s(self.token_ids) if self.token_ids else b"",
            self.block_size or 0,
            _TIERS.get(self.medium) or canonical_tier(self.medium),
            lora_name,
            extras,
            self.group_idx,
            self.kv_cache_spec_kind or "",
            window if window and window > 0 else 0,
            in_session and parent is None,
            lead,
        )

    def _extras(self, packed: bytes, lora_name: str) -> Mapping[int, bytes]:
        if len(packed) > MAX_EXTRA_KEYS:
            raise ValueError(f"extra_keys of {len(packed)} bytes are over the limit of {MAX_EXTRA_KEYS}")
        extra_keys = _decode_extra_keys(packed)
        if len(extra_keys) != len(self.block_hashes):
            raise ValueError(f"extra_keys has {len(extra_keys)} entries for {len(self.block_hashes)} blocks")
        return _extras(extra_keys, lora_name) if any(extra_keys) else _NO_EXTRAS


class _Stored(_StoredFields, tag_field="type", tag="BlockStored", gc=False):
    session_id: _Packed = _ABSENT
    cache_salt: _Name | None = None
    """SGLang's, on every block of a salted prompt. Its hashes know the salt too."""
    lead_blocks: Annotated[int, msgspec.Meta(ge=0, le=MAX_BLOCK_SIZE)] = 0
    """Our connector's own: blocks that `token_ids` covers before the first of `block_hashes`."""

    def event(self) -> BlockStored:
        in_session = self.session_id is not _ABSENT and bytes(self.session_id) != _NULL
        return self._event(self.cache_salt, in_session, self.lead_blocks)


class _Removed(msgspec.Struct, tag_field="type", tag="BlockRemoved", gc=False):
    block_hashes: list[_Hash]
    medium: _Name | None = None
    group_idx: _Group | None = None

    def event(self) -> BlockRemoved:
        return BlockRemoved(_hashes(self.block_hashes), canonical_tier(self.medium), self.group_idx)


class _Cleared(msgspec.Struct, tag_field="type", tag="AllBlocksCleared", gc=False):
    tiers: _Packed = _ABSENT
    """Our connector's own field; engines without it may put anything here, and then they did not say."""

    def event(self) -> BlocksCleared:
        try:
            return BlocksCleared(tuple(map(canonical_tier, _decode_media(self.tiers))))
        except msgspec.DecodeError:
            return BlocksCleared()


class _StoredArray(_StoredFields, array_like=True, tag_field="type", tag="BlockStored", gc=False):
    def event(self) -> BlockStored:
        return self._event(None, False)


class _RemovedArray(_Removed, array_like=True, tag_field="type", tag="BlockRemoved", gc=False):
    pass


class _ClearedArray(_Cleared, array_like=True, tag_field="type", tag="AllBlocksCleared", gc=False):
    pass


_FEW = msgspec.Meta(max_length=MAX_EVENTS)
_PackedEvents = Annotated[list[_Packed], _FEW]
_MapEvent = _Stored | _Removed | _Cleared
_ArrayEvent = _StoredArray | _RemovedArray | _ClearedArray


class _MapBatch(msgspec.Struct, array_like=True, gc=False):
    """The rank is not read: whose batch it is, the connection says."""

    ts: float
    events: Annotated[list[_MapEvent], _FEW]
    data_parallel_rank: _Packed = _ABSENT
    notes: Notes | None = None


class _RawBatch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: _PackedEvents
    data_parallel_rank: _Packed = _ABSENT
    notes: _Packed = _ABSENT


class _Identity(msgspec.Struct, gc=False):
    """Of notes that are of no other use."""

    instance: Annotated[str, msgspec.Meta(max_length=64)] = ""


class _NamedBatch(msgspec.Struct, gc=False):
    """A batch as a map, with the names of both spellings in use."""

    ts: float | None = None
    TS: float | None = None
    events: _PackedEvents | None = None
    Events: _PackedEvents | None = None


_decode_maps = msgspec.msgpack.Decoder(_MapBatch).decode
_decode_raw = msgspec.msgpack.Decoder(_RawBatch).decode
_decode_named = msgspec.msgpack.Decoder(_NamedBatch).decode
_decode_map_event = msgspec.msgpack.Decoder(_MapEvent).decode
_decode_array_event = msgspec.msgpack.Decoder(_ArrayEvent).decode
_decode_media = msgspec.msgpack.Decoder(Annotated[list[str], msgspec.Meta(max_length=64)]).decode
_decode_extra_keys = msgspec.msgpack.Decoder(_ExtraKeys).decode
_decode_bytes = msgspec.msgpack.Decoder(bytes).decode
_decode_notes = msgspec.msgpack.Decoder(Notes | None).decode
_decode_identity = msgspec.msgpack.Decoder(_Identity).decode

_NO_EXTRAS: Mapping[int, bytes] = {}
_BYTE_ORDER = "@" if sys.byteorder == "little" else "<"  # the native order, where it is the right one, packs faster

_UNREADABLE = (msgspec.DecodeError, ValueError, OverflowError, RecursionError, struct.error)


def decode_batch(payload: bytes) -> Batch:
    """Raises BadPayload if there is no batch to read; a bad event inside a batch is in `skipped` instead."""
    if len(payload) > MAX_PAYLOAD:
        raise BadPayload(f"payload of {len(payload)} bytes is over the limit of {MAX_PAYLOAD}")
    try:
        batch = _decode_maps(payload)
        events = batch.events if len(batch.events) == 1 else _merge_removals(batch.events)
        return Batch(_time(batch.ts), [event.event() for event in events], batch.notes)
    except _UNREADABLE:
        return _decode_one_by_one(payload)


def _time(timestamp: float) -> float:
    return timestamp if isfinite(timestamp) else 0.0


def _merge_removals(events: Iterable[_MapEvent]) -> list[_MapEvent]:
    """Engines send evictions as one event per block; neighbours that differ in nothing else become one event."""
    merged: list[_MapEvent] = []
    last: _MapEvent | None = None
    for event in events:
        if (
            type(event) is _Removed
            and type(last) is _Removed
            and event.medium == last.medium
            and event.group_idx == last.group_idx
        ):
            last.block_hashes += event.block_hashes
        else:
            last = event
            merged.append(event)
    return merged


def _decode_one_by_one(payload: bytes) -> Batch:
    try:
        timestamp, raw_events, raw_notes = _open_batch(payload)
    except _UNREADABLE as error:
        raise BadPayload(f"not an event batch: {error}") from error
    events: list[Event] = []
    skipped: list[Skipped] = []
    for raw in raw_events:
        try:
            events.append(_decode_event(bytes(raw)).event())
        except _UNREADABLE as error:
            skipped.append(Skipped(_reason(error), str(error)[:200]))
    notes = _read_notes(bytes(raw_notes), skipped) if raw_notes else None
    return Batch(_time(timestamp), events, notes, skipped)


def _read_notes(raw: bytes, skipped: list[Skipped]) -> Notes | None:
    """Of malformed ones the instance alone: without it the batch would look like another engine's."""
    try:
        return _decode_notes(raw)
    except _UNREADABLE as error:
        skipped.append(Skipped("bad_notes", str(error)[:200]))
    try:
        return Notes(_decode_identity(raw).instance)
    except _UNREADABLE:
        return None


def _open_batch(payload: bytes) -> tuple[float, list[_Packed], _Packed]:
    if _is_map(payload):
        named = _decode_named(payload)
        events = named.events if named.events is not None else named.Events
        if events is None:
            raise ValueError("no `events`")
        return named.ts or named.TS or 0.0, events, _ABSENT
    batch = _decode_raw(payload)
    return batch.ts, batch.events, batch.notes


def _decode_event(raw: bytes) -> _MapEvent | _ArrayEvent:
    if raw[:1] in (b"\xc4", b"\xc5", b"\xc6"):
        raw = _decode_bytes(raw)
    return _decode_map_event(raw) if _is_map(raw) else _decode_array_event(raw)


def _is_map(data: bytes) -> bool:
    return bool(data) and (data[0] & 0xF0 == 0x80 or data[0] in (0xDE, 0xDF))


def _reason(error: Exception) -> str:
    if isinstance(error, msgspec.ValidationError):
        return "unknown_type" if str(error).startswith("Invalid value") else "bad_field"
    return "malformed" if isinstance(error, msgspec.DecodeError | RecursionError) else "bad_field"


def uint64_hash(value: int | bytes) -> int:
    """An engine's block hash as uint64: integers keep their bits, digests their last eight bytes, big-endian."""
    if isinstance(value, int):
        return value & _UINT64
    if not value:
        raise ValueError("empty block hash")
    return int.from_bytes(value[-8:], "big")


def _hashes(values: list[Any]) -> list[int]:
    try:
        if not values or min(values) >= 0:
            return values
    except TypeError:  # there are digests among them
        pass
    return [uint64_hash(value) for value in values]


def _uint32s(token_ids: tuple[int | tuple[int, ...], ...]) -> bytes:
    if isinstance(token_ids[0], tuple):
        token_ids = tuple(pair[0] if isinstance(pair, tuple) else pair for pair in token_ids)
    return _packer(len(token_ids))(*token_ids)


@lru_cache(maxsize=256)
def _packer(count: int) -> Callable[..., bytes]:
    return struct.Struct(f"{_BYTE_ORDER}{count}I").pack


def _extras(extra_keys: _ExtraKeys, lora_name: str) -> dict[int, bytes]:
    encoded: dict[int, bytes] = {}
    for block, items in enumerate(extra_keys):
        # The adapter is in the chain's root already; the engine lists it first.
        rest = items[1:] if items and lora_name and items[0] == lora_name else items
        if rest:
            encoded[block] = encode_extras(rest)
    return encoded


def canonical_tier(medium: str | None) -> str:
    """`gpu`, `cpu`, `storage`; a medium nobody knows is a tier of its own, lower-cased."""
    tier = _TIERS.get(medium)
    if tier is None:
        name = (medium or "").lower()
        tier = _TIERS.get(name, name)
    return tier


def parse_topic(topic: str) -> tuple[str, str]:
    """`kv@pod@model` → (pod, model), where the model may contain `@`; anything else → (the whole topic, "")."""
    parts = topic.split("@", 2)
    return (parts[1], parts[2]) if len(parts) == 3 else (topic, "")
