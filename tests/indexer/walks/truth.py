"""The truth of the walks: engines as plain sets of blocks, and the hit rule written out. Knows nothing of the indexer.

The universe is small, so that everything meets everything: ten prompts that share beginnings, one of them salted, two
of an adapter. A block is its prompt's beginning up to its end; its hash is an arbitrary number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from connector.events import CPU, GPU, STORAGE, AllBlocksCleared, BlockRemoved, BlockStored, Hash, TierCleared

BLOCK_SIZE = 2
"""Tokens."""
ADAPTER = "an adapter"
SALT = "salt"
TIERS = {GPU: "gpu", CPU: "cpu", STORAGE: "storage"}
"""What events call a tier → what the indexer calls it."""


@dataclass(frozen=True, eq=False, repr=False)
class Block:
    number: int
    tokens: tuple[int, ...]
    before: Block | None
    adapter: str
    salt: str

    def __repr__(self) -> str:
        return f"block {self.number}"

    @property
    def extra_keys(self) -> list[str] | None:
        keys = [self.adapter] if self.adapter else []
        return [*keys, *([self.salt] if self.salt and self.before is None else [])] or None


@dataclass(frozen=True, eq=False)
class Prompt:
    blocks: tuple[Block, ...]
    rest: int
    """Tokens behind the last whole block."""
    adapter: str
    salt: str

    @property
    def tokens(self) -> list[int]:
        return [token for block in self.blocks for token in block.tokens] + [0] * self.rest

    def __len__(self) -> int:
        """In tokens."""
        return BLOCK_SIZE * len(self.blocks) + self.rest


def _universe() -> tuple[list[Block], list[Prompt]]:
    blocks: dict[tuple[str, str, str], Block] = {}
    prompts: list[Prompt] = []
    words = [
        ("abcdef", "", "", 0),
        ("abcdef", "", "", 1),
        ("abcgh", "", "", 0),
        ("abi", "", "", 1),
        ("ajklmnop", "", "", 1),
        ("ajkq", "", "", 0),
        ("rs", "", "", 0),
        ("abcd", SALT, "", 1),
        ("tuvw", "", ADAPTER, 0),
        ("abcdef", "", ADAPTER, 1),
    ]
    for word, salt, adapter, rest in words:
        path: list[Block] = []
        for length, letter in enumerate(word, 1):
            name = word[:length], salt, adapter
            if name not in blocks:
                before = path[-1] if path else None
                blocks[name] = Block(len(blocks), (ord(letter), length), before, adapter, salt)
            path.append(blocks[name])
        prompts.append(Prompt(tuple(path), rest, adapter, salt))
    return list(blocks.values()), prompts


BLOCKS, PROMPTS = _universe()


def chunks(size: int) -> list[tuple[Block, ...]]:
    """All there are of so many blocks."""
    all_of_them = (prompt.blocks[i : i + size] for prompt in PROMPTS for i in range(0, len(prompt.blocks), size))
    return list({chunk[-1]: chunk for chunk in all_of_them if len(chunk) == size}.values())


@dataclass(frozen=True, slots=True)
class Held:
    """What an engine has at one moment. Of the tiers below HBM, the last blocks of the chunks there."""

    gpu: Set[Block] = frozenset()
    cpu: Set[Block] = frozenset()
    storage: Set[Block] = frozenset()

    def tier(self, name: str) -> Set[Block]:
        return {"gpu": self.gpu, "cpu": self.cpu, "storage": self.storage}[name]


@lru_cache(1 << 14)
def served(held: Held, chunk: int) -> Sequence[tuple[int, int, int]]:
    """For each prompt."""
    return [_served(prompt, held, chunk) for prompt in PROMPTS]


def _served(prompt: Prompt, held: Held, chunk: int) -> tuple[int, int, int]:
    """Blocks that come from HBM, CPU RAM and storage, as vLLM does it."""
    gpu = 0
    while gpu < (len(prompt) - 1) // BLOCK_SIZE and prompt.blocks[gpu] in held.gpu:
        gpu += 1
    cpu = storage = 0
    reached = gpu
    for number in range(gpu // chunk, len(prompt.blocks) // chunk):
        end = (number + 1) * chunk
        if prompt.blocks[end - 1] in held.cpu:
            cpu += end - reached
        elif prompt.blocks[end - 1] in held.storage:
            storage += end - reached
        else:
            break
        reached = end
    return (gpu, cpu, storage) if reached - gpu >= chunk else (gpu, 0, 0)


@dataclass
class Engine:
    """One life of an engine. What happens in a step waits in `events`, in the order in which it happened."""

    chunk: int
    seed: int
    """Of its hashes; engines with equal ones have equal hashes."""
    describes: bool
    """Do events below HBM describe the blocks, or give a chunk's last hash only?"""
    names_tiers: bool
    """Is a reset told with the tiers that it emptied?"""
    storage: set[Block] = field(default_factory=set)
    """May be one that several engines share."""
    gpu: Counter[Block] = field(default_factory=Counter)
    """Copies."""
    cpu: set[Block] = field(default_factory=set)
    announced: set[Block] = field(default_factory=set)
    """What it has said that it knows to be in storage."""
    events: list[tuple[str, Any]] = field(default_factory=list)
    """Each with its tier; "" = of all of them."""

    @property
    def held(self) -> Held:
        return Held(frozenset(self.gpu), frozenset(self.cpu), frozenset(self.announced))

    def hash(self, block: Block) -> int:
        return (block.number + 1) * 0x9E3779B97F4A7C15 + self.seed & (1 << 64) - 1

    # --- what it does

    def compute(self, prompt: Prompt, length: int, *, again: bool) -> None:
        """Blocks up to `length`. What is in HBM from the first block on is used, unless another request computes the
        same at the same time (`again`); further copies come about like that, and behind holes."""
        first, length = 0, min(length, len(prompt.blocks))
        while not again and first < length and prompt.blocks[first] in self.gpu:
            first += 1
        if new := prompt.blocks[first:length]:
            self.gpu.update(new)
            self._say(GPU, self._stored(GPU, new, described=True))

    def evict(self, block: Block) -> None:
        """One copy."""
        if block in self.gpu:
            self.gpu[block] -= 1
            if not self.gpu[block]:
                del self.gpu[block]
            self._say(GPU, BlockRemoved([self.hash(block)], GPU, group_idx=0))

    def offload(self, chunk: Sequence[Block]) -> None:
        """Its copy has been made while its blocks were in HBM; by now they may be gone from there."""
        if chunk[-1] not in self.cpu:
            self.cpu.add(chunk[-1])
            self._say(CPU, self._stored(CPU, chunk, described=self.describes))

    def write(self, chunk: Sequence[Block]) -> None:
        """From CPU RAM to storage."""
        if chunk[-1] in self.cpu and chunk[-1] not in self.announced:
            self.storage.add(chunk[-1])
            self._announce(chunk)

    def find(self, chunk: Sequence[Block]) -> None:
        """In storage, where another engine, or a former life, has put it."""
        if chunk[-1] in self.storage and chunk[-1] not in self.announced:
            self._announce(chunk)

    def _announce(self, chunk: Sequence[Block]) -> None:
        self.announced.add(chunk[-1])
        self._say(STORAGE, self._stored(STORAGE, chunk, described=self.describes))

    def promote(self, chunk: Sequence[Block]) -> None:
        """From storage to CPU RAM."""
        if chunk[-1] in self.storage:
            self.find(chunk)
            self.offload(chunk)

    def drop(self, chunk: Sequence[Block]) -> None:
        if chunk[-1] in self.cpu:
            self.cpu.remove(chunk[-1])
            self._say(CPU, self._removed(CPU, chunk))

    def lose_file(self, chunk: Sequence[Block]) -> None:
        """Somebody has deleted it from storage, and this engine has noticed."""
        if chunk[-1] in self.announced:
            self.announced.remove(chunk[-1])
            self._say(STORAGE, self._removed(STORAGE, chunk))

    def reset(self, *, below: bool) -> None:
        """HBM, and CPU RAM with it or not. One that does not name tiers means all of them, if it says it right."""
        self.gpu.clear()
        self._say(GPU if self.names_tiers else "", AllBlocksCleared())
        if below:
            self.cpu.clear()
            if self.names_tiers:
                self._say(CPU, TierCleared(CPU))
            else:
                self.storage.clear()
                self.announced.clear()

    # --- how it says so

    def _say(self, medium: str, event: object) -> None:
        self.events.append((medium, event))

    def _stored(self, medium: str, blocks: Sequence[Block], *, described: bool) -> BlockStored:
        hashes: list[Hash] = [self.hash(block) for block in blocks]
        if not described:
            return BlockStored(hashes[-1:], None, [], 0, None, medium, None, group_idx=0)
        before = blocks[0].before
        return BlockStored(
            block_hashes=hashes,
            parent_block_hash=self.hash(before) if before is not None else None,
            token_ids=[token for block in blocks for token in block.tokens],
            block_size=BLOCK_SIZE,
            lora_id=7 if blocks[0].adapter else None,
            medium=medium,
            lora_name=blocks[0].adapter or None,
            extra_keys=[block.extra_keys for block in blocks] if medium == GPU else None,
            group_idx=0,
            kv_cache_spec_kind="full_attention",
        )

    def _removed(self, medium: str, chunk: Sequence[Block]) -> BlockRemoved:
        named = chunk if self.describes else chunk[-1:]
        return BlockRemoved([self.hash(block) for block in named], medium, group_idx=0)
