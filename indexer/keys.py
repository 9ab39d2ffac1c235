"""Block keys: what a prompt's blocks are called in the index, computed from tokens alone.

`key = xxh3_64(little-endian uint32 tokens of the block ‖ extras, seed = key of the block before)`; the first block's
seed is the root, a hash of the model's or LoRA adapter's name. A key says everything that must be equal for a KV block
to be reusable and nothing of how an engine hashes, so engines with different hashes and seeds share keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import chain as join
from struct import Struct
from typing import Any

import msgspec
from xxhash import xxh3_64_intdigest, xxh3_128_digest

MAX_EXTRA = 128
"""Bytes of what is kept of a block's extras."""
AT_ONCE = 64
"""Blocks that are cut out of tokens at once."""

_encode = msgspec.msgpack.Encoder().encode


def root_key(name: str) -> int:
    """Seed of all chains of a model or LoRA adapter."""
    return int(xxh3_64_intdigest(name.encode("utf-8", "surrogatepass")))


def chain(tokens: bytes, block_size: int, parent: int, extras: Mapping[int, bytes] | None = None) -> list[int]:
    """Keys of the whole blocks of `tokens` (little-endian uint32) that follow `parent`; a partial last block has none.

    `block_size` is in tokens, > 0. `extras`: block number → `encode_extras(…)`; blocks with none are absent.
    """
    digest, key, size = xxh3_64_intdigest, parent, 4 * block_size
    if extras:
        blocks = enumerate(_blocks(tokens, size))
        return [key := digest(block + extras.get(number, b""), key) for number, block in blocks]
    if len(tokens) == size:
        return [digest(tokens, key)]
    return [key := digest(block, key) for block in _blocks(tokens, size)]


def _blocks(tokens: bytes, size: int) -> Iterable[bytes]:
    count = len(tokens) // size
    if count <= AT_ONCE:
        return _blocks_of(size, count).unpack(tokens[: count * size])
    rest = count % AT_ONCE
    end = (count - rest) * size
    pieces = _blocks_of(size, AT_ONCE).iter_unpack(tokens[:end])
    return join(join.from_iterable(pieces), _blocks_of(size, rest).unpack(tokens[end : end + rest * size]))


@lru_cache(maxsize=4 * AT_ONCE)
def _blocks_of(size: int, count: int) -> Struct:
    return Struct(f"{size}s" * count)


def block_key(tokens: bytes, before: int, extra: bytes = b"") -> int:
    """Key of one block, given its tokens and the key of the block before it."""
    return int(xxh3_64_intdigest(tokens + extra, before))


def encode_extras(items: Sequence[Any]) -> bytes:
    """What besides tokens tells a block apart: its salt, media identifiers, (identifier, offset) pairs … as bytes, of
    which there are few however long a salt is."""
    encoded = _encode(list(items))
    return encoded if len(encoded) <= MAX_EXTRA else xxh3_128_digest(encoded)


def opaque(block_hash: int) -> int:
    """A key for a block whose content no prompt that is matched can have: of no form that `chain` gives."""
    return block_hash | 1 << 64


def is_opaque(key: int) -> bool:
    return key >> 64 != 0


def is_salt(extra: bytes) -> bool:
    """Is this all that `encode_extras` was given, one short text? Media have pairs, and embeddings bytes."""
    return len(extra) > 1 and extra[0] == 0x91 and (0xA0 <= extra[1] < 0xC0 or extra[1] in (0xD9, 0xDA, 0xDB))
