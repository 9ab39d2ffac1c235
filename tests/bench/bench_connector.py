"""What the engine's side costs: recording what is announced, and telling it again. CPU time of one process.

    python -m tests.bench.bench_connector [--quick]

Events are the connector's own structs: block size 16, token ids up to 150 000, integer hashes.

- `ledger_ns_per_block_…`: what the ledger adds to a batch. `gpu`: one HBM event of 32 new blocks; `decode`: of one
  block; `cpu`: 32 self-describing events of one block that lack extra keys; `placeholder`: 16 events of a chunk of two
  blocks, told by its last hash; `evicted`: 32 HBM removals of one block.
- `journal_us_per_message_…`: the same and encoding with notes, as the publisher's thread does it; `without_us`: the
  encoding alone, as vLLM does it.
- `snapshot_…`, of half a million blocks in HBM: taking the picture, during which the engine stands still; then CPU a
  block for all its parts, and of one part.
- `ledger_bytes_per_block_…`: memory, the hashes included (tracemalloc).
"""

from __future__ import annotations

import argparse
import gc
import random
import time
import tracemalloc
from collections.abc import Callable, Iterable, Sequence

import msgspec

from connector.events import BlockRemoved, BlockStored, Event, Load, Tier, encode_batch
from connector.journal import About, Journal
from connector.ledger import Ledger
from tests.bench.bench_index import BLOCK_SIZE, TOP_TOKEN

EVENT_BLOCKS = 32


def measure(*, quick: bool = False) -> dict[str, float]:
    return {
        **measure_ledger(rounds=5 if quick else 20),
        **measure_journal(rounds=5 if quick else 20),
        **measure_snapshot(blocks=1 << 16 if quick else 500_000),
        **measure_memory(blocks=1 << 14 if quick else 1 << 17),
    }


def stored(rng: random.Random, blocks: int = EVENT_BLOCKS) -> BlockStored:
    return BlockStored(
        block_hashes=[rng.getrandbits(64) for _ in range(blocks)],
        parent_block_hash=None,
        token_ids=[rng.randrange(TOP_TOKEN) for _ in range(blocks * BLOCK_SIZE)],
        block_size=BLOCK_SIZE,
        lora_id=None,
        medium="GPU",
        lora_name=None,
        extra_keys=[None] * blocks,
        group_idx=0,
        kv_cache_spec_kind="full_attention",
    )


def self_describing(event: BlockStored) -> list[BlockStored]:
    hashes, size = event.block_hashes, event.block_size
    return [
        msgspec.structs.replace(
            event,
            block_hashes=[block_hash],
            parent_block_hash=hashes[i - 1] if i else None,
            token_ids=event.token_ids[i * size : (i + 1) * size],
            medium="CPU",
            extra_keys=None,
        )
        for i, block_hash in enumerate(hashes)
    ]


def placeholders(event: BlockStored, chunk: int) -> list[BlockStored]:
    return [
        BlockStored([block_hash], None, [], 0, None, "STORAGE", None, group_idx=0)
        for block_hash in event.block_hashes[chunk - 1 :: chunk]
    ]


def removals(event: BlockStored) -> list[BlockRemoved]:
    return [BlockRemoved([block_hash], "GPU", 0) for block_hash in reversed(event.block_hashes)]


# --- the ledger


def measure_ledger(rounds: int) -> dict[str, float]:
    """Best round each: other work on the machine only ever adds."""
    rng = random.Random(1)
    ledger = Ledger({"CPU": 1, "STORAGE": 2})
    for _ in range(2000):
        ledger.apply([stored(rng)])
    costs: dict[str, list[float]] = {}
    for _ in range(rounds):
        events = [stored(rng) for _ in range(100)]
        batches: dict[str, Iterable[Sequence[Event]]] = {
            "gpu": [[event] for event in events],
            "decode": [[stored(rng, 1)] for _ in range(100 * EVENT_BLOCKS)],
            "cpu": [self_describing(event) for event in events],
            "placeholder": [placeholders(event, 2) for event in events],
            "evicted": [removals(event) for event in events],
        }
        for name, applied in batches.items():
            costs.setdefault(name, []).append(spent(ledger.apply, applied) / (100 * EVENT_BLOCKS))
    assert ledger.held("CPU") == ledger.held("STORAGE") == rounds * 100 * EVENT_BLOCKS
    assert ledger.held("GPU") == (2000 + rounds * 100) * EVENT_BLOCKS
    return {f"ledger_ns_per_block_{name}": min(figures) for name, figures in costs.items()}


def spent(act: Callable[[Sequence[Event]], object], batches: Iterable[Sequence[Event]]) -> float:
    """CPU nanoseconds."""
    begin = time.process_time_ns()
    for events in batches:
        act(events)
    return float(time.process_time_ns() - begin)


# --- the journal


def measure_journal(rounds: int) -> dict[str, float]:
    rng = random.Random(2)
    journal = Journal(
        About(tiers={"GPU": Tier(capacity=100_000), "CPU": Tier(capacity=1_000_000)}, load=Load(3, 9, 0.5))
    )
    costs: dict[str, list[float]] = {}
    at = 1e9

    def say(events: Sequence[Event]) -> None:
        nonlocal at
        at += 0.01
        journal.batch(events, at)

    for _ in range(rounds):
        events = [[stored(rng)] for _ in range(200)]
        costs.setdefault("without", []).append(spent(lambda batch: encode_batch(batch, 1e9), events) / 200_000)
        costs.setdefault("", []).append(spent(say, events) / 200_000)
    return {"journal_us_per_message": min(costs[""]), "journal_us_per_message_without_us": min(costs["without"])}


# --- the snapshot


def measure_snapshot(blocks: int) -> dict[str, float]:
    rng = random.Random(3)
    journal = Journal(About(tiers={"GPU": Tier(capacity=blocks)}), buffer_steps=10)
    for _ in range(blocks // EVENT_BLOCKS):
        journal.batch([stored(rng)], 1e9)
    begin = time.thread_time_ns()
    parts = journal.snapshot(1e9)
    frozen = time.thread_time_ns() - begin
    costs: list[float] = []
    sizes: list[int] = []
    while True:
        begin = time.thread_time_ns()
        part = next(parts, None)
        if part is None:
            break
        costs.append((time.thread_time_ns() - begin) / 1e6)
        sizes.append(len(part[1]))
    return {
        "snapshot_ms_freeze": frozen / 1e6,
        "snapshot_us_per_block": sum(costs) * 1000 / blocks,
        "snapshot_ms_per_part": sorted(costs)[len(costs) // 2],
        "snapshot_ms_longest_part": max(costs),
        "snapshot_bytes_per_block": sum(sizes) / blocks,
    }


# --- memory


def measure_memory(blocks: int) -> dict[str, float]:
    rng = random.Random(4)
    ledger = Ledger({"CPU": 1})
    gc.collect()
    tracemalloc.start()
    events = []
    for _ in range(blocks // EVENT_BLOCKS):
        event = stored(rng)
        ledger.apply([event])
        events.append(msgspec.structs.replace(event, token_ids=[], block_size=0, extra_keys=None, medium="CPU"))
        del event
    one_tier = tracemalloc.get_traced_memory()[0]
    while events:
        ledger.apply([events.pop()])
    two_tiers = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert ledger.held("GPU") == ledger.held("CPU") == blocks
    return {"ledger_bytes_per_block_gpu": one_tier / blocks, "ledger_bytes_per_block_gpu_and_cpu": two_tiers / blocks}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    for key, value in measure(quick=parser.parse_args().quick).items():
        print(f"{key:45} {value:10.1f}")


if __name__ == "__main__":
    main()
