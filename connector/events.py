"""The KV events of vLLM 0.27 and later, what we say beside them, and the wire form of both.

A payload is a msgpack array `[time, [event, ...], data-parallel rank, notes]`, each event a map. Fields with a default
are left out when they hold it, exactly as vLLM does. Ours are `AllBlocksCleared.tiers`, `BlockStored.lead_blocks` and
the notes; consumers that do not know them skip them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

GPU = "GPU"
CPU = "CPU"
STORAGE = "STORAGE"

Hash = int | bytes
"""A block's hash as events carry it, opaque."""


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Blocks that a tier now holds; `token_ids` covers all of `block_hashes`, or is empty in placeholder events."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: list[Any] | None = None
    """What besides tokens is in the hashes: for each block nothing or a sequence."""
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[list[int]] | None = None
    lead_blocks: int = 0
    """Blocks between the parent and the first of `block_hashes`: not held, but `token_ids` begins with theirs."""


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Copies that a tier no longer holds; other copies of the same hash may remain there."""

    block_hashes: list[Hash]
    medium: str
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """The prefix cache was reset; `tiers` names what was emptied (None: as silent as vLLM itself)."""

    tiers: list[str] | None = None


class TierCleared(msgspec.Struct, gc=False):
    """A tier below HBM was emptied. Never on the wire: the ledger has all removed that was announced there."""

    medium: str


Event = BlockStored | BlockRemoved | AllBlocksCleared | TierCleared


class Load(msgspec.Struct, frozen=True):
    """Requests that wait and run, and the share of HBM blocks that they hold, 0 to 1."""

    waiting: int
    running: int
    kv_usage: float


class Tier(msgspec.Struct, frozen=True, omit_defaults=True):
    """One tier, in blocks. `pool` names a store that all publishers share who give the same name."""

    capacity: int | None = None
    """None: unlimited or unknown."""
    held: int | None = None
    """Blocks held now, each counted once; None: not known."""
    chunk: int = 1
    """Blocks that are offloaded, loaded and evicted together."""
    pool: str | None = None


SCRATCH = "scratch"


class Lookup(msgspec.Struct, frozen=True, omit_defaults=True):
    """KV-cache groups that are alike, and that the engine looks up together."""

    groups: list[int]
    kind: str
    """vLLM's `kv_cache_spec_kind`, or `SCRATCH`: never reused, and not needed for a hit."""
    block: int
    """Tokens a block."""
    window: int = 0
    """Tokens of a sliding window, or of a chunk of local attention."""
    eagle: bool = False
    """Is the last block of a hit dropped?"""
    draft: list[int] = []
    """Those of the groups that have a draft model's layers."""


class Groups(msgspec.Struct, frozen=True):
    """All KV-cache groups of the engine."""

    lookups: list[Lookup] = []
    """None: by what rule the engine reuses blocks cannot be told."""
    alignment: int = 1
    """Hits in HBM end at multiples of so many tokens."""


class SnapshotPart(msgspec.Struct, frozen=True):
    part: int
    """From 1."""
    parts: int


class Notes(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a message says besides events."""

    instance: str = ""
    """Another one: another life of the engine."""
    load: Load | None = None
    tiers: dict[str, Tier] | None = None
    heartbeat: float = 0.0
    """Seconds: while idle a message comes at least this often. 0: no promise."""
    snapshot: SnapshotPart | None = None
    groups: Groups | None = None


_encode = msgspec.msgpack.Encoder().encode


def encode_batch(events: Sequence[object], at: float, rank: int = 0, notes: Notes | None = None) -> bytes:
    """The payload of one message; `at` is the Unix time in seconds. The events may be vLLM's own structs.

    Raises:
        TypeError: an event holds what msgpack cannot say.
    """
    return _encode([at, events, rank] if notes is None else [at, events, rank, notes])


def is_encodable(event: object) -> bool:
    try:
        _encode(event)
    except (TypeError, ValueError, OverflowError):
        return False
    return True
