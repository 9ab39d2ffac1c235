"""The KV events of vLLM 0.27 and later, and their wire form: a msgpack array holding one map per event.

Fields with a default are left out when they hold it, exactly as vLLM does. `AllBlocksCleared.tiers` is ours: vLLM's
own event says nothing about what was cleared, and a consumer that does not know the field ignores it.
"""

from __future__ import annotations

import msgspec

GPU = "GPU"
CPU = "CPU"
STORAGE = "STORAGE"


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True):
    """Blocks that a tier now holds; `token_ids` covers all of `block_hashes`, or is empty in placeholder events."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: list[list[str] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    locality: str | None = None
    session_id: str | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True):
    """Copies that a tier no longer holds; other copies of the same hash may remain there."""

    block_hashes: list[int]
    medium: str
    group_idx: int | None = None
    locality: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, omit_defaults=True):
    """The prefix cache was reset; `tiers` names what was emptied (None: as silent as vLLM itself)."""

    tiers: list[str] | None = None


Event = BlockStored | BlockRemoved | AllBlocksCleared


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[Event]
    data_parallel_rank: int


_encoder = msgspec.msgpack.Encoder()


def encode_batch(events: list[Event], *, at: float) -> bytes:
    """One step's events as the payload of one message; `at` is the Unix time in seconds."""
    return _encoder.encode(_Batch(at, events, 0))
