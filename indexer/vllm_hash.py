"""vLLM's hash of an unsalted first block, to tell from a CPU-tier event whether its block was salted.

Such events leave out extra keys, so tokens alone do not say what the block is. If vLLM's own hash of these tokens
without extras equals the announced one, there were none. Covers the two algorithms with a fixed seed (`sha256`, the
default, and `sha256_cbor`); for others the answer is "cannot say", never a wrong yes.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterable
from hashlib import sha256

_SEED = "vllm-none-hash"
"""What vLLM starts its chains from when PYTHONHASHSEED is not set."""


def is_unsalted_first_block(block_hash: int, tokens: bytes) -> bool:
    """`block_hash`: the announced uint64; `tokens`: the block's, little-endian uint32."""
    ids = struct.unpack(f"<{len(tokens) // 4}I", tokens)
    return any(int.from_bytes(digest[-8:], "big") == block_hash for digest in _digests(ids))


def _digests(ids: tuple[int, ...]) -> Iterable[bytes]:
    # Protocol 5 is part of vLLM's format.
    yield sha256(pickle.dumps((_PICKLE_ROOT, ids, None), protocol=5)).digest()
    yield sha256(_cbor_block(_CBOR_ROOT, ids)).digest()


def _cbor_block(parent: bytes, ids: tuple[int, ...]) -> bytes:
    """Canonical CBOR of the array (parent bytes, array of ids, null)."""
    return b"".join(
        (_cbor_head(4, 3), _cbor_head(2, len(parent)), parent, _cbor_head(4, len(ids)), *map(_cbor_uint, ids), b"\xf6")
    )


def _cbor_uint(value: int) -> bytes:
    return _cbor_head(0, value)


def _cbor_head(major: int, value: int) -> bytes:
    """A CBOR initial byte with its argument in the shortest form (values below 2**32)."""
    if value < 24:
        return bytes((major << 5 | value,))
    for extra, width in ((24, 1), (25, 2), (26, 4)):
        if value < 1 << 8 * width:
            return bytes((major << 5 | extra,)) + value.to_bytes(width, "big")
    raise ValueError(f"{value} is not a uint32")


_PICKLE_ROOT = sha256(pickle.dumps(_SEED, protocol=5)).digest()
_CBOR_ROOT = sha256(_cbor_head(3, len(_SEED)) + _SEED.encode()).digest()
