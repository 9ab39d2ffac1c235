"""What we say beside vLLM's events does no harm: consumers that know nothing of it read the same events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import given, settings

from connector.events import CPU, GPU, STORAGE, AllBlocksCleared, BlockStored, Load, Notes, Tier
from connector.events import encode_batch as encode
from connector.journal import About, Journal

from .walk import CHUNK, StockCleared, StockStored, Walk, steps

# --- vLLM's own structs, as a consumer in Python declares them


class BlockRemovedOfVllm(msgspec.Struct, omit_defaults=True, tag="BlockRemoved"):
    block_hashes: list[int | bytes]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class BatchOfVllm(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[StockStored | BlockRemovedOfVllm | StockCleared]
    data_parallel_rank: int | None = None


read_as_vllm = msgspec.msgpack.Decoder(BatchOfVllm).decode


# --- llm-d's rules: one bad event, and the whole batch is dropped


class Dropped(Exception):
    pass


def read_as_llm_d(payload: bytes) -> tuple[float, list[dict[str, Any]], int | None]:
    batch = msgpack.unpackb(payload, strict_map_key=False)
    if not isinstance(batch, list) or len(batch) < 2:
        raise Dropped
    timestamp, events, *more = batch
    if not isinstance(timestamp, float) or (more and not isinstance(more[0], int | None)):
        raise Dropped
    return timestamp, [read_event(event) for event in events], more[0] if more else None


FIELDS: dict[str, dict[str, tuple[type, ...]]] = {
    "BlockStored": {
        "block_hashes": (list,),
        "parent_block_hash": (int, bytes, type(None)),
        "token_ids": (list,),
        "block_size": (int,),
        "lora_id": (int, type(None)),
        "medium": (str, type(None)),
        "lora_name": (str, type(None)),
        "extra_keys": (list, type(None)),
        "group_idx": (int, type(None)),
        "kv_cache_spec_kind": (str, type(None)),
        "kv_cache_spec_sliding_window": (int, type(None)),
    },
    "BlockRemoved": {"block_hashes": (list,), "medium": (str, type(None)), "group_idx": (int, type(None))},
    "AllBlocksCleared": {},
}


def read_event(event: Any) -> dict[str, Any]:
    if not isinstance(event, dict) or event.get("type") not in FIELDS:
        raise Dropped(event)
    read = {name: event.get(name) for name in FIELDS[event["type"]]}
    for name, kinds in FIELDS[event["type"]].items():
        if type(read[name]) not in kinds:
            raise Dropped(name, read[name])
    if (read.get("group_idx") or 0) < 0:
        raise Dropped
    if not all(type(block_hash) in (int, bytes) and block_hash != b"" for block_hash in read.get("block_hashes", ())):
        raise Dropped
    if not all(type(keys) in (list, type(None)) for keys in read.get("extra_keys") or ()):
        raise Dropped
    return {"type": event["type"], **read}


# --- all that we ever send


def messages(walk_steps: Sequence[tuple[int, int, int]], *, stock: bool) -> Iterator[bytes]:
    tiers = {GPU: Tier(100), CPU: Tier(40, chunk=CHUNK), STORAGE: Tier(chunk=CHUNK, pool="shared")}
    journal = Journal(About(tiers=tiers, load=Load(1, 2, 0.5)), rank=3)
    walk = Walk(stock=stock)
    for number, step in enumerate(walk_steps):
        message = journal.batch(walk.step(*step), number * 0.3)
        if message is not None:
            yield message[1]
    yield journal.heartbeat(100.0)[1]
    for _, payload in journal.snapshot(101.0):
        yield payload


@settings(max_examples=100, deadline=None)
@given(steps)
def test_every_message_reads_the_same_to_those_who_know_only_vllm(walk_steps: list[tuple[int, int, int]]) -> None:
    for stock in (True, False):
        for payload in messages(walk_steps, stock=stock):
            timestamp, events, rank, notes = msgpack.unpackb(payload)
            for event in events:
                event.pop("tiers", None)
            assert len(notes["instance"]) == 32
            seen = read_as_vllm(payload)
            assert (seen.ts, seen.data_parallel_rank) == (timestamp, rank) == (timestamp, 3)
            assert msgpack.unpackb(msgspec.msgpack.encode(seen))[1] == events
            assert read_as_llm_d(payload) == (timestamp, [read_event(event) for event in events], rank)


def test_the_test_of_harmlessness_would_notice_harm() -> None:
    unknown = msgpack.packb([1.0, [{"type": "Heartbeat"}], 0])
    with pytest.raises(Dropped):
        read_as_llm_d(unknown)
    with pytest.raises(msgspec.ValidationError):
        read_as_vllm(unknown)


# --- the forms themselves


def test_without_notes_a_payload_is_what_vllm_sends() -> None:
    event = BlockStored([1], None, [5, 6], 2, None, "GPU", None, extra_keys=[None], group_idx=0)
    batch = BatchOfVllm(2.0, [StockStored([1], None, [5, 6], 2, None, "GPU", None, [None], 0)], 0)
    assert encode([event], 2.0) == msgspec.msgpack.encode(batch)


def test_notes_leave_out_what_is_not_said() -> None:
    def told(notes: Notes) -> Any:
        return msgpack.unpackb(encode([], 0.0, 0, notes))[3]

    assert told(Notes("i")) == {"instance": "i"}
    full = Notes("i", Load(1, 2, 0.25), {"CPU": Tier(10, 0, 2, "p"), "GPU": Tier(held=0)}, 1.0)
    assert told(full) == {
        "instance": "i",
        "load": {"waiting": 1, "running": 2, "kv_usage": 0.25},
        "tiers": {"CPU": {"capacity": 10, "held": 0, "chunk": 2, "pool": "p"}, "GPU": {"held": 0}},
        "heartbeat": 1.0,
    }


def test_an_event_says_which_tiers_were_cleared_only_where_that_is_known() -> None:
    assert msgpack.unpackb(encode([AllBlocksCleared(["GPU"]), AllBlocksCleared()], 0.0))[1] == [
        {"type": "AllBlocksCleared", "tiers": ["GPU"]},
        {"type": "AllBlocksCleared"},
    ]
