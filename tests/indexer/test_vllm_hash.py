"""The hashes are a real engine's: the recordings'."""

import json
import struct
from pathlib import Path

import pytest

from indexer.vllm_hash import is_unsalted_first_block
from indexer.wire import uint64_hash

RECORDINGS = Path(__file__).parents[1] / "recordings"


def first_blocks(name):
    """(hash, tokens, extra keys) of every prompt's first block that was stored in HBM."""
    for line in (RECORDINGS / name).read_text().splitlines():
        for event in json.loads(line)["batch"][1]:
            if event["type"] == "BlockStored" and event["medium"] == "GPU" and event["parent_block_hash"] is None:
                block_hash = event["block_hashes"][0]
                if isinstance(block_hash, dict):
                    block_hash = bytes.fromhex(block_hash["__bytes__"])
                size = event["block_size"]
                yield (
                    uint64_hash(block_hash),
                    struct.pack(f"<{size}I", *event["token_ids"][:size]),
                    event["extra_keys"][0],
                )


@pytest.mark.parametrize(
    "name", ["A-gpu-only.jsonl", "D-offload-placeholder-bytes-cbor.jsonl", "E-offload-selfdesc.jsonl"]
)
def test_it_tells_salted_blocks_from_others_in_either_algorithm(name):
    blocks = list(first_blocks(name))
    assert {bool(extra) for _, _, extra in blocks} == {True, False}
    for block_hash, tokens, extra in blocks:
        assert is_unsalted_first_block(block_hash, tokens) == (not extra)


@pytest.mark.parametrize("token", [0, 23, 24, 255, 256, 65535, 65536, 2**32 - 1])
def test_any_token_id_can_be_hashed(token):
    assert not is_unsalted_first_block(1, struct.pack("<I", token))
