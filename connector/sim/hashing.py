"""Block hashes as vLLM computes them by default (`--prefix-caching-hash-algo sha256`).

A block's hash is the SHA-256 of the pickle (protocol 5) of `(parent hash, token ids, extra keys)`; the first block's
parent is the hash of a fixed seed, so engines agree on hashes without any configuration. Events carry the last eight
bytes as an unsigned integer. Left out: the CBOR and xxHash algorithms, media and prompt-embedding keys.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType

BlockHash = NewType("BlockHash", bytes)
"""A block's full 32-byte digest."""

ExtraKeys = tuple[tuple[str, ...], ...]
"""What besides tokens goes into a block's hash, each item tagged with its source."""


def _digest(value: object) -> BlockHash:
    return BlockHash(hashlib.sha256(pickle.dumps(value, protocol=5)).digest())


ROOT = _digest("vllm-none-hash")
"""The parent of every first block (vLLM's NONE_HASH without PYTHONHASHSEED)."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What keeps two requests with equal tokens from sharing blocks."""

    cache_salt: str = ""
    lora_name: str = ""
    lora_id: int | None = None

    def extra_keys(self, block_index: int) -> ExtraKeys | None:
        """The tagged keys of one block: the adapter on every block, the salt on the first only."""
        lora = (("lora", self.lora_name, self.lora_name),) if self.lora_name else ()
        salt = (("cache_salt", self.cache_salt),) if self.cache_salt and block_index == 0 else ()
        return (lora + salt) or None

    def event_keys(self, block_index: int) -> list[str] | None:
        """The same keys as events show them: untagged."""
        keys = self.extra_keys(block_index)
        return None if keys is None else [key[1] for key in keys]


NOBODY = Identity()


def extend_hashes(hashes: list[BlockHash], tokens: Sequence[int], block_size: int, identity: Identity) -> None:
    """Append the hashes of the blocks of `tokens` that are full and not hashed yet."""
    parent = hashes[-1] if hashes else ROOT
    for index in range(len(hashes), len(tokens) // block_size):
        block = tuple(tokens[index * block_size : (index + 1) * block_size])
        parent = _digest((parent, block, identity.extra_keys(index)))
        hashes.append(parent)


def external_hash(block_hash: BlockHash) -> int:
    """The unsigned 64-bit form that events carry."""
    return int.from_bytes(block_hash[-8:], "big")
