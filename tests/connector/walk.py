"""A model of an engine's tiers that wanders about and tells of it as vLLM does; and the simplest consumer of that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Any

import msgspec
from hypothesis import strategies as st

from connector.events import AllBlocksCleared, BlockRemoved, BlockStored, TierCleared

BLOCK = 2
"""Tokens."""


class Copies(dict[str, "Counter[int | bytes]"]):
    """What a consumer that counts references holds, per medium."""

    def hear(self, events: Iterable[Any]) -> Copies:
        for event in events:
            if type(event).__name__ == "BlockStored":
                held = self.setdefault(event.medium, Counter())
                repeats = event.session_id is not None and event.parent_block_hash is None
                held.update(block_hash for block_hash in event.block_hashes if not (repeats and block_hash in held))
            elif type(event).__name__ == "BlockRemoved":
                for block_hash in event.block_hashes:
                    self[event.medium][block_hash] -= 1
                self[event.medium] = +self[event.medium]
            else:
                for medium in event.tiers:
                    self.pop(medium, None)
        return self

    def without_empty(self) -> dict[str, Counter[int | bytes]]:
        return {medium: held for medium, held in self.items() if held}


class StockStored(msgspec.Struct, omit_defaults=True, tag="BlockStored"):
    """As vLLM has it, and not ours."""

    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[list[int]] | None = None


class StockCleared(msgspec.Struct, omit_defaults=True, tag="AllBlocksCleared"):
    pass


StockStored.__name__ = "BlockStored"
StockCleared.__name__ = "AllBlocksCleared"

Path = tuple[int, ...]
"""A block of the model: the branches from a prompt's first block to it. The first branch says whether it is salted."""
CHUNK = 2
PROMPTS: list[Path] = [(salted, *(branch >> bit & 1 for bit in range(4))) for salted in (0, 1) for branch in range(16)]


class Walk:
    """An engine with any residency, that tells of it as vLLM does, in our structs and as digests or in vLLM's."""

    def __init__(self, *, stock: bool) -> None:
        self.stock = stock
        self.gpu: Counter[Path] = Counter()
        self.chunks: dict[str, dict[Path, None]] = {"CPU": {}, "STORAGE": {}}

    def name(self, block: Path) -> int | bytes:
        digest = sha256(bytes(block)).digest()
        return int.from_bytes(digest[-8:], "big") if self.stock else digest

    def tokens(self, block: Path) -> list[int]:
        return [len(block), block[-1]]

    def _event(self, blocks: Sequence[Path], medium: str, **more: Any) -> Any:
        first = blocks[0]
        keys = [("salt",) if block == (1,) else None for block in blocks] if medium == "GPU" else None
        return (StockStored if self.stock else BlockStored)(
            block_hashes=list(map(self.name, blocks)),
            parent_block_hash=self.name(first[:-1]) if len(first) > 1 else None,
            token_ids=[token for block in blocks for token in self.tokens(block)],
            block_size=BLOCK,
            lora_id=None,
            medium=medium,
            lora_name=None,
            extra_keys=keys,
            group_idx=0,
            kv_cache_spec_kind="full_attention",
            **more,
        )

    def compute(self, prompt: Path, again: int) -> list[Any]:
        blocks = [prompt[:end] for end in range(1, len(prompt) + 1)]
        hit = next((i for i, block in enumerate(blocks) if not self.gpu[block]), len(blocks))
        new = blocks[again % 5 :] if again % 3 == 0 else blocks[hit:]  # two requests may fill the same blocks
        self.gpu.update(new)
        return [self._event(new, "GPU")] if new else []

    def report(self, prompt: Path, _: int) -> list[Any]:
        blocks = [prompt[:end] for end in range(1, len(prompt) + 1)]
        hit = next((i for i, block in enumerate(blocks) if not self.gpu[block]), len(blocks))
        return [self._event(blocks[:hit], "GPU", session_id="s")] if hit else []

    def evict(self, _: Path, which: int) -> list[Any]:
        held = sorted(+self.gpu)
        if not held:
            return []
        block = held[which % len(held)]
        self.gpu[block] -= 1
        return [BlockRemoved([self.name(block)], "GPU", 0)]

    def store(self, prompt: Path, how: int) -> list[Any]:
        medium = ("CPU", "STORAGE")[how % 2]
        chunk = prompt[:CHUNK] if how % 3 else prompt[: 2 * CHUNK]
        blocks = [chunk[:end] for end in range(len(chunk) - CHUNK + 1, len(chunk) + 1)]
        if not all(self.gpu[block] for block in blocks) or (medium == "CPU" and chunk in self.chunks["CPU"]):
            return []
        self.chunks[medium][chunk] = None  # a file may be written again
        if how % 5 < 2:
            event = (StockStored if self.stock else BlockStored)(
                [self.name(chunk)], None, [], 0, None, medium, None, group_idx=0
            )
        else:
            event = self._event(blocks, medium)
        # by the time that the tier has the chunk, HBM may have evicted it
        return [*(self.evict(prompt, how) if how % 7 == 0 else []), event]

    def drop(self, _: Path, how: int) -> list[Any]:
        medium = ("CPU", "STORAGE")[how % 2]
        gone = list(self.chunks[medium])[: how % 3]
        hashes: list[int | bytes] = []
        for chunk in gone:
            del self.chunks[medium][chunk]
            hashes += [self.name(chunk[:-1])] if how % 5 < 2 else []
            hashes.append(self.name(chunk))
        return [BlockRemoved(hashes, medium, 0)] if hashes else []

    def reset(self, _: Path, how: int) -> list[Any]:
        if how % 4:
            return []
        self.gpu.clear()
        event = StockCleared() if self.stock else AllBlocksCleared()
        if how % 8:
            return [event]
        self.chunks["CPU"].clear()
        return [event, TierCleared("CPU")]

    def step(self, kind: int, prompt: int, how: int) -> list[Any]:
        acts = (self.compute, self.compute, self.compute, self.report, self.evict, self.evict, self.store, self.store)
        act = (*acts, self.drop, self.reset)[kind]
        return act(PROMPTS[prompt], how)

    def held(self) -> dict[str, Counter[int | bytes]]:
        below = {
            medium: Counter(self.name(chunk[:end]) for chunk in chunks for end in (len(chunk) - 1, len(chunk)))
            for medium, chunks in self.chunks.items()
        }
        gpu = Counter({self.name(block): count for block, count in (+self.gpu).items()})
        return {medium: held for medium, held in {"GPU": gpu, **below}.items() if held}


steps = st.lists(st.tuples(st.integers(0, 9), st.integers(0, len(PROMPTS) - 1), st.integers(0, 500)), max_size=60)
"""For `Walk.step`."""
