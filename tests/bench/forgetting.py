"""Which blocks should a full index forget? Its own order beside the plain ones, on conversations under half the budget.

    python -m tests.bench.forgetting

Conversations of several turns come and go over a fleet whose engines hold everything; each begins with one of a few
system prompts, goes on where it was before, and some requests are one of a kind. The index has room for half of what
is in use. What counts is how many blocks of the prompts it still knows, of those that it would know without a budget.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence
from itertools import islice

from rich.console import Console
from rich.table import Table

from indexer import PrefixIndex, Prompt, Residency, match
from indexer.wire import BlockStored

BLOCK_SIZE = 16
ENGINES = 8
SYSTEM_PROMPTS = 8
SYSTEM_BLOCKS = 64
TURN_BLOCKS = 16
TURNS = 12
ACTIVE = 300
"""Conversations at a time."""
ONE_OFF = 0.3
"""Share of requests that nobody continues."""
REQUESTS = 6_000
WORKING_SET = SYSTEM_PROMPTS * SYSTEM_BLOCKS + ACTIVE * TURNS // 2 * TURN_BLOCKS
ROOM = WORKING_SET // 2
"""Blocks."""

Choose = Callable[[PrefixIndex, random.Random, int], Sequence[int]]


def own_order(index: PrefixIndex, rng: random.Random, count: int) -> Sequence[int]:
    return index.order.least_useful(count, index.gpu_bits)


def first_in_first_out(index: PrefixIndex, rng: random.Random, count: int) -> Sequence[int]:
    return list(islice(index.masks, count))


def any_of_them(index: PrefixIndex, rng: random.Random, count: int) -> Sequence[int]:
    return rng.sample(list(index.masks), count)


class Conversation:
    def __init__(self, rng: random.Random, number: int, turns: int) -> None:
        self.tokens = random.Random(-1 - rng.randrange(SYSTEM_PROMPTS)).randbytes(64 * SYSTEM_BLOCKS)
        self.turns = turns
        self.engine = number % ENGINES

    def next_turn(self, rng: random.Random) -> bytes:
        self.turns -= 1
        self.tokens += rng.randbytes(64 * TURN_BLOCKS)
        return self.tokens


class Engines:
    """Hold whatever was computed there, and announce what is new."""

    def __init__(self, index: PrefixIndex) -> None:
        self.residencies: list[Residency] = [index.publisher(str(number)) for number in range(ENGINES)]
        self._held: list[set[int]] = [set() for _ in range(ENGINES)]

    def compute(self, engine: int, tokens: bytes, keys: Sequence[int]) -> None:
        held = self._held[engine]
        known = next((at for at, key in enumerate(keys) if key not in held), len(keys))
        if known < len(keys):
            parent = keys[known - 1] if known else None
            event = BlockStored(keys[known:], parent, tokens[known * 64 :], BLOCK_SIZE, extras={})
            self.residencies[engine].apply([event])
            held.update(keys)


def hits(choose: Choose | None, room: int, seed: int = 1) -> tuple[int, int]:
    """Blocks predicted, and blocks in the index at the end."""
    rng, chance = random.Random(seed), random.Random(seed)
    index = PrefixIndex()
    index.order.matters = True
    engines = Engines(index)
    active = [Conversation(rng, number, rng.randrange(1, TURNS)) for number in range(ACTIVE)]
    found = 0
    for number in range(REQUESTS):
        at = min(int(rng.expovariate(6) * ACTIVE), ACTIVE - 1)
        conversation = Conversation(rng, number, 1) if rng.random() < ONE_OFF else active[at]
        tokens = conversation.next_turn(rng)
        prompt = Prompt(tokens + struct.pack("<I", 0))
        residency = engines.residencies[conversation.engine]
        found += match(index, prompt, [residency]).gpu[0]
        engines.compute(conversation.engine, tokens, prompt.keys(BLOCK_SIZE, residency.root))
        index.order.settle(1 << 20)
        while choose and len(index.masks) > room:
            index.forget_blocks(choose(index, chance, 64))
        if not active[at].turns:
            active[at] = Conversation(rng, number, TURNS)
    return found, len(index)


def main() -> None:
    found, everything = hits(None, 0)
    title = f"room for {ROOM:,} of the {WORKING_SET:,} blocks in use ({everything:,} in all)"
    table = Table("order", "hits known", title=title)
    for name, choose in (("its own", own_order), ("first in, first out", first_in_first_out), ("any", any_of_them)):
        table.add_row(name, f"{hits(choose, ROOM)[0] / found:.1%}")
    Console().print(table)


if __name__ == "__main__":
    main()
