from __future__ import annotations

import hashlib
import pickle

from connector.sim.hashing import NOBODY, ROOT, BlockHash, Identity, extend_hashes, external_hash


def hashes_of(tokens: list[int], identity: Identity = NOBODY, block_size: int = 4) -> list[BlockHash]:
    hashes: list[BlockHash] = []
    extend_hashes(hashes, tokens, block_size, identity)
    return hashes


def test_a_block_is_the_sha256_of_the_pickle_of_parent_tokens_and_extra_keys() -> None:
    first, second = hashes_of([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert first == hashlib.sha256(pickle.dumps((ROOT, (1, 2, 3, 4), None), 5)).digest()
    assert second == hashlib.sha256(pickle.dumps((first, (5, 6, 7, 8), None), 5)).digest()


def test_the_external_form_is_the_last_eight_bytes_as_an_unsigned_integer() -> None:
    assert external_hash(BlockHash(bytes(24) + b"\xff" + bytes(7))) == 0xFF << 56


def test_hashing_in_pieces_gives_the_same_chain() -> None:
    tokens = list(range(20))
    hashes = hashes_of(tokens[:9])
    extend_hashes(hashes, tokens, 4, Identity())
    assert hashes == hashes_of(tokens)


def test_a_salt_is_in_the_first_block_only_and_still_changes_all_of_them() -> None:
    salted = Identity(cache_salt="tenant")
    assert (salted.extra_keys(0), salted.extra_keys(1)) == ((("cache_salt", "tenant"),), None)
    assert set(hashes_of(list(range(12)), salted)).isdisjoint(hashes_of(list(range(12))))


def test_an_adapter_is_in_every_block_and_goes_before_the_salt() -> None:
    both = Identity(cache_salt="tenant", lora_name="sql", lora_id=1)
    assert both.extra_keys(0) == (("lora", "sql", "sql"), ("cache_salt", "tenant"))
    assert both.event_keys(0) == ["sql", "tenant"]
    assert both.event_keys(3) == ["sql"]
