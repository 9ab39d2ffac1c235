"""What the index costs: ingest per block, match per request, memory per unique block. CPU time of one process.

    python -m tests.bench.bench_index [--quick]

Scenarios, stated because figures depend on them:

- *ingest*: payloads as vLLM sends them (maps, integer hashes, block size 16, token ids up to 150 000), from payload
  bytes to visible in an index of 64 000 blocks and more. `decode_apply`: one event of 32 new blocks each; `known`: the
  same from a second publisher; `cpu_tier`: the same as 32 self-describing events of one block; `removed`: their
  evictions, 32 events of one block. The ZMQ socket is not in it (the feed's bench has it).
- *match*: a prompt of `B` blocks, `E` endpoints with an HBM and a CPU tier. Of eight endpoints two hold nothing, three
  a system prompt (an eighth of the blocks) in both tiers, one a run of random length in HBM, one such a run that goes
  on in CPU RAM, and one such a run in CPU RAM alone. `…_scattered`: every endpoint has runs of random lengths of its
  own. Keys are computed before, the prompt and the set of candidates have been seen before, and the index holds 64 000
  blocks more. `…_conversations`: 2000 prompts in turn, which share a system prompt of 16 blocks; each is held by one to
  three endpoints, in both tiers, for a random length. What is remembered of prompts does not suffice for them.
- *memory*: blocks of 32-block prompts, each held by 64 publishers in one tier, everything counted: masks, hash → key,
  residencies (resident set and tracemalloc). `…_cpu`: the same blocks in the CPU tier too.
"""

from __future__ import annotations

import argparse
import gc
import random
import struct
import time
import tracemalloc
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from indexer import PrefixIndex, Prompt, Residency, decode_batch, match

BLOCK_SIZE = 16
EVENT_BLOCKS = 32
TOP_TOKEN = 150_000


def measure(*, quick: bool = False) -> dict[str, float]:
    scale = 4 if quick else 1
    return {
        **measure_ingest(rounds=20 // scale),
        **measure_match(repeat=200 // scale),
        **measure_memory(blocks=(1 << 17) // (8 * scale)),
    }


# --- ingest


def measure_ingest(rounds: int) -> dict[str, float]:
    """Best round each: other work on the machine only ever adds."""
    rng = random.Random(1)
    index = PrefixIndex()
    first, second = index.publisher("a"), index.publisher("b")
    for _ in range(2000):  # the tables of a fleet do not fit into the processor's caches
        first.apply(decode_batch(_payload(_event(rng))))
    costs: dict[str, list[float]] = {}
    for _ in range(rounds):
        events = [_event(rng) for _ in range(100)]
        stored = [_payload(event) for event in events]
        for name, residency, payloads in (
            ("decode_apply", first, stored),
            ("known", second, stored),
            ("cpu_tier", first, [_payload(*_chunks(event)) for event in events]),
            ("removed", first, [_payload(*_removals(event)) for event in events]),
        ):
            costs.setdefault(name, []).append(_ingest(residency, payloads) / (len(events) * EVENT_BLOCKS))
    assert first.held("cpu") == second.held("gpu") == rounds * 100 * EVENT_BLOCKS
    assert first.held("gpu") == 2000 * EVENT_BLOCKS
    return {f"ingest_{name}_ns_per_block": min(figures) for name, figures in costs.items()}


def _ingest(residency: Residency, payloads: list[bytes]) -> float:
    """CPU nanoseconds."""
    begin = time.process_time_ns()
    for payload in payloads:
        residency.apply(decode_batch(payload))
    return float(time.process_time_ns() - begin)


def _event(rng: random.Random, blocks: int = EVENT_BLOCKS) -> dict[str, object]:
    return {
        "type": "BlockStored",
        "block_hashes": [rng.getrandbits(64) for _ in range(blocks)],
        "parent_block_hash": None,
        "token_ids": [rng.randrange(TOP_TOKEN) for _ in range(blocks * BLOCK_SIZE)],
        "block_size": BLOCK_SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None] * blocks,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }


def _removals(event: dict[str, object]) -> Iterable[dict[str, object]]:
    hashes = event["block_hashes"]
    assert isinstance(hashes, list)
    for block_hash in reversed(hashes):
        yield {"type": "BlockRemoved", "block_hashes": [block_hash], "medium": "GPU", "group_idx": 0}


def _chunks(event: dict[str, object]) -> Iterable[dict[str, object]]:
    """The event's blocks as self-describing CPU-tier events of one block."""
    hashes, token_ids = event["block_hashes"], event["token_ids"]
    assert isinstance(hashes, list)
    assert isinstance(token_ids, list)
    for i, block_hash in enumerate(hashes):
        yield {
            **event,
            "block_hashes": [block_hash],
            "parent_block_hash": hashes[i - 1] if i else None,
            "token_ids": token_ids[i * BLOCK_SIZE : (i + 1) * BLOCK_SIZE],
            "medium": "CPU",
            "extra_keys": None,
        }


def one_event(rng: random.Random, blocks: int) -> bytes:
    """A message's payload: new blocks of a new prompt, in HBM."""
    return _payload(_event(rng, blocks))


def _payload(*events: dict[str, object]) -> bytes:
    return msgspec.msgpack.encode([time.time(), list(events), 0])


# --- match


def measure_match(repeat: int) -> dict[str, float]:
    figures = {
        f"match_us_{blocks}_blocks_{endpoints}_endpoints": _match(blocks, endpoints, repeat, _typical)
        for blocks in (512, 2048)
        for endpoints in (8, 64, 512)
    }
    figures["match_us_512_blocks_64_endpoints_scattered"] = _match(512, 64, repeat, _scattered)
    figures["match_us_100_blocks_64_endpoints_conversations"] = _match_conversations(100, 64)
    return figures


def _typical(number: int, blocks: int, rng: random.Random) -> tuple[int, int]:
    """Blocks that an endpoint has in HBM and in CPU RAM."""
    run, more, system = rng.randrange(blocks), rng.randrange(blocks), blocks // 8
    cases = [(0, 0)] * 2 + [(system, system)] * 3 + [(run, 0), (run, min(blocks, run + more)), (0, run)]
    return cases[number % 8]


def _scattered(number: int, blocks: int, rng: random.Random) -> tuple[int, int]:
    return rng.randrange(blocks), rng.randrange(blocks)


def _match(
    blocks: int, endpoints: int, repeat: int, held: Callable[[int, int, random.Random], tuple[int, int]]
) -> float:
    """CPU microseconds a match."""
    rng = random.Random(blocks * endpoints)
    index = PrefixIndex()
    residencies = [index.publisher(str(i)) for i in range(endpoints)]
    _fill_with_other_prompts(residencies, rng)
    event = _event(rng, blocks)
    for number, residency in enumerate(residencies):
        for medium, count in zip(("GPU", "CPU"), held(number, blocks, rng), strict=True):
            residency.apply(decode_batch(_payload(_cut(event, count, medium))))
    token_ids = event["token_ids"]
    assert isinstance(token_ids, list)
    prompt = Prompt(struct.pack(f"<{len(token_ids)}I", *token_ids))
    assert any(match(index, prompt, residencies).cpu)
    return _best_of(lambda: match(index, prompt, residencies), repeat) / 1000


def _match_conversations(blocks: int, endpoints: int, conversations: int = 2000, system: int = 16) -> float:
    """CPU microseconds a match."""
    rng = random.Random(blocks * endpoints)
    index = PrefixIndex()
    residencies = [index.publisher(str(i)) for i in range(endpoints)]
    first: dict[str, Any] = _event(rng, system)
    prompts = []
    for _ in range(conversations):
        rest: dict[str, Any] = _event(rng, blocks - system)
        event = {**rest, **{name: [*first[name], *rest[name]] for name in ("block_hashes", "token_ids", "extra_keys")}}
        for residency in rng.sample(residencies, rng.choice((1, 1, 1, 2, 3))):
            for medium in ("GPU", "CPU"):
                residency.apply(decode_batch(_payload(_cut(event, rng.randrange(system, blocks), medium))))
        prompts.append(Prompt(struct.pack(f"<{blocks * BLOCK_SIZE}I", *event["token_ids"])))
    return _best_of(lambda: [match(index, prompt, residencies) for prompt in prompts], 1) / 1000 / conversations


def _fill_with_other_prompts(residencies: list[Residency], rng: random.Random) -> None:
    """So that the tables are larger than the processor's caches, as they are in a fleet."""
    for number in range(2000):
        residencies[number % len(residencies)].apply(decode_batch(_payload(_event(rng))))
    for residency in residencies:
        residency.apply(decode_batch(_payload(_cut(_event(rng), EVENT_BLOCKS, "CPU"))))


def _cut(event: dict[str, object], blocks: int, medium: str) -> dict[str, object]:
    hashes, token_ids = event["block_hashes"], event["token_ids"]
    assert isinstance(hashes, list)
    assert isinstance(token_ids, list)
    return {
        **event,
        "block_hashes": hashes[:blocks],
        "token_ids": token_ids[: blocks * BLOCK_SIZE],
        "extra_keys": [None] * blocks,
        "medium": medium,
    }


def _best_of(call: Callable[[], object], repeat: int) -> float:
    """CPU nanoseconds a call: the best of five rounds, as other work on the machine only ever adds."""
    call()
    rounds = []
    for _ in range(5):
        begin = time.process_time_ns()
        for _ in range(repeat):
            call()
        rounds.append((time.process_time_ns() - begin) / repeat)
    return min(rounds)


# --- memory


def measure_memory(blocks: int, holders: int = 64) -> dict[str, float]:
    rng = random.Random(3)
    payloads = [_payload(_event(rng)) for _ in range(blocks // EVENT_BLOCKS)]
    index = PrefixIndex()
    residencies = [index.publisher(str(i)) for i in range(holders)]
    gc.collect()
    tracemalloc.start()
    for payload in payloads:
        _hold_everywhere(residencies, payload)
    one_tier = tracemalloc.get_traced_memory()[0]
    for payload in payloads:
        _hold_everywhere(residencies, payload.replace(b"\xa3GPU", b"\xa3CPU"))
    two_tiers = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    unique = len(index)
    assert unique == len(payloads) * EVENT_BLOCKS == residencies[-1].held("cpu")
    return {
        f"bytes_per_unique_block_{holders}_holders": one_tier / unique,
        f"bytes_per_unique_block_{holders}_holders_gpu_and_cpu": two_tiers / unique,
    }


def _hold_everywhere(residencies: list[Residency], payload: bytes) -> None:
    batch = decode_batch(payload)
    for residency in residencies:
        residency.apply(batch)


def main() -> None:
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a quarter of the work, less steady figures")
    table = Table("figure", "value")
    table.columns[1].justify = "right"
    for name, value in measure(quick=parser.parse_args().quick).items():
        table.add_row(name, f"{value:,.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
