"""Does the index's memory stay flat? Millions of blocks through a fleet, the resident set looked at all the time.

    python -m tests.bench.churn [--blocks 10000000] [--budget 192Mi]

16 publishers with room for 50 000 blocks each take prompts of 32 blocks, some of which several of them hold, and evict
the oldest. Now and then one restarts, clears a tier, offloads to CPU RAM what it evicts, or sends blocks whose parents
never come; two of them have hashes of their own. Requests ask for what was stored lately. Housekeeping runs as it does
in the picker. Every tenth of the way is a line: the resident set (its growth since the start) as a mean and at its
highest, beside what `PrefixIndex.memory` says. Each run is a process of its own: with a budget, and without.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import random
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table

from epp.cli import quantity
from indexer import PrefixIndex
from indexer.keys import chain
from indexer.residency import Residency
from indexer.wire import BlockRemoved, BlocksCleared, BlockStored

PUBLISHERS = 16
STRANGERS = 2
"""Publishers with hashes of their own."""
CAPACITY = 50_000
PROMPT = 32
BLOCK_SIZE = 16
TENTHS = 10
SWEEP_EVERY = 64
"""Events: about what comes in a tenth of a second."""
SLICES = 32
"""Sweeps that housekeeping does in that time, while there is something to do."""
WARM = 3
"""Tenths after which nothing should grow any more."""
MIB = 1 << 20


class Line(NamedTuple):
    blocks: int
    indexed: int
    parked: int
    forgotten: int
    said: int
    """Bytes, as the index says; the highest."""
    mean: float
    """Bytes of the resident set, beyond those before the first block."""
    peak: int


class Engine:
    """One publisher, and what its engine holds: numbers of prompts, from which all else follows."""

    def __init__(self, number: int, index: PrefixIndex) -> None:
        self.number = number
        self._index = index
        self._restart()

    def _restart(self) -> None:
        self.residency = self._index.publisher(f"engine-{self.number}", "model")
        self._gpu: deque[int] = deque()
        self._cpu: deque[int] = deque()

    def event(self, prompt: int) -> BlockStored:
        tokens = random.Random(prompt).randbytes(4 * BLOCK_SIZE * PROMPT)
        return BlockStored(self._hashes(prompt), None, tokens, BLOCK_SIZE, extras={})

    def _hashes(self, prompt: int) -> list[int]:
        strange = self.number + 1 if self.number < STRANGERS else 0
        return chain(bytes(4 * PROMPT), 1, (prompt << 8) + strange)

    def store(self, prompt: int) -> None:
        self._gpu.append(prompt)
        self.residency.apply([self.event(prompt)])
        if len(self._gpu) * PROMPT > CAPACITY:
            self._evict(self._gpu.popleft())

    def _evict(self, prompt: int) -> None:
        hashes = self._hashes(prompt)
        if prompt % 4 == 0:
            self._cpu.append(prompt)
            self.residency.apply([BlockStored(hashes, tier="cpu")])
        self.residency.apply([BlockRemoved(hashes[::-1])])
        if len(self._cpu) * PROMPT > CAPACITY // 4:
            self.residency.apply([BlockRemoved(self._hashes(self._cpu.popleft()), "cpu")])

    def mishap(self, kind: int, prompt: int) -> None:
        if kind == 0:
            self.residency.close()
            self._restart()
        elif kind == 1:
            self.residency.apply([BlocksCleared(("gpu",))])
            self._gpu.clear()
        else:
            orphan = self.event(-prompt)
            self.residency.apply([msgspec.structs.replace(orphan, parent=prompt)])


def churn(blocks: int, budget: int) -> Iterator[Line]:
    rng = random.Random(1)
    index = PrefixIndex()
    index.budget = budget
    engines = [Engine(number, index) for number in range(PUBLISHERS)]
    gc.collect()
    start = _resident()
    stored, resident, said = 0, list[int](), 0
    for tenth in range(1, TENTHS + 1):
        while stored < blocks * tenth // TENTHS:
            stored += _some(index, engines, rng, stored // PROMPT)
            resident.append(_resident() - start)
            said = max(said, sum(index.memory().values()))
        parked = sum(len(engine.residency.parking) for engine in engines)
        yield Line(stored, len(index), parked, index.forgotten, said, mean(resident), max(resident))
        resident.clear()
        said = 0


def _some(index: PrefixIndex, engines: list[Engine], rng: random.Random, number: int) -> int:
    for prompt in range(number, number + SWEEP_EVERY):
        takers = rng.sample(engines, rng.choice((1, 1, 1, 2, 4)))
        for engine in takers:
            engine.store(prompt)
        if rng.random() < 1 / 8:
            rng.choice(engines).mishap(2, prompt)
        if rng.random() < 1 / 4000:
            rng.choice(engines).mishap(rng.randrange(2), prompt)
        _ask(index, takers[0].residency, max(0, prompt - rng.randrange(2000)))
    for _ in range(SLICES):
        if not index.sweep():
            break
    return SWEEP_EVERY * PROMPT


def _ask(index: PrefixIndex, residency: Residency, prompt: int) -> None:
    tokens = random.Random(prompt).randbytes(4 * BLOCK_SIZE * PROMPT)
    index.asked(chain(tokens, BLOCK_SIZE, residency.root))


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def show(blocks: int, budget: int) -> None:
    begin = time.perf_counter()
    lines = list(churn(blocks, budget))
    columns = ("blocks", "indexed", "parked", "forgotten", "memory() MiB", "mean MiB", "peak MiB", "of the mean")
    table = Table(*columns, title=f"budget {budget / MIB:.0f} MiB" if budget else "no budget")
    for column in table.columns:
        column.justify = "right"
    steady = mean(line.mean for line in lines[WARM:])
    for line in lines:
        sizes = (f"{size / MIB:.1f}" for size in (line.said, line.mean, line.peak))
        counts = (f"{count:,}" for count in (line.blocks, line.indexed, line.parked, line.forgotten))
        table.add_row(*counts, *sizes, f"{line.mean / steady - 1:+.1%}")
    Console(width=110).print(table)
    print(f"{(time.perf_counter() - begin) / lines[-1].blocks * 1e6:.2f} µs a block")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=10_000_000)
    parser.add_argument("--budget", type=quantity, default=192 * MIB)
    arguments = parser.parse_args()
    for budget in (arguments.budget, 0):
        process = multiprocessing.get_context("spawn").Process(target=show, args=(arguments.blocks, budget))
        process.start()
        process.join()


if __name__ == "__main__":
    main()
