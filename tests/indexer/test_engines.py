"""What engines and connectors other than ours put on the wire, and what may be predicted from it.

Frames in, cached blocks out. The forms are those of the engines' public sources and of their pull requests; ENGINES.md
in `indexer/` is the summary.
"""

import struct
from hashlib import sha256

import msgspec
import pytest

from indexer.frames import live_message
from indexer.match import Prompt, match
from indexer.wire import decode_batch, parse_topic

pack = msgspec.msgpack.encode

SIZE = 4
GROUP = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
TEXT = list(range(100, 100 + 8 * SIZE))


def tokens(blocks, start=0):
    return TEXT[start * SIZE : blocks * SIZE]


def digest(number, salt=""):
    """What the engine calls block `number` of the text."""
    return sha256(f"{salt}/{number}".encode()).digest()


def name(number, salt=""):
    return int.from_bytes(digest(number, salt)[-8:], "big")


def names(blocks, start=0, salt=""):
    return [name(number, salt) for number in range(start, blocks)]


def signed(value):
    return value - 2**64 if value >= 2**63 else value


class Publisher:
    """One event source as the picker hears it."""

    def __init__(self, index, topic="kv@10.0.0.1:8000@qwen"):
        self.index = index
        self.topic = topic.encode()
        self.seq = 0
        self.residency = index.publisher(topic, parse_topic(topic)[1])

    def says(self, *events, rank=0):
        """Reasons of what was left out."""
        return self.says_bytes(pack([1770000000.5, list(events), rank]))

    def says_bytes(self, payload):
        message = live_message([self.topic, self.seq.to_bytes(8, "big"), payload])
        self.seq += 1
        batch = decode_batch(message.payload)
        self.residency.apply(batch)
        return [skipped.reason for skipped in batch.skipped]

    def serves(self, blocks=8, **prompt):
        """(HBM, CPU, storage, other) blocks of the text; one more token keeps the last one eligible for HBM."""
        ids = [*tokens(blocks), 1]
        asked = Prompt(struct.pack(f"<{len(ids)}I", *ids), prompt.pop("model", "qwen"), **prompt)
        found = match(self.index, asked, [self.residency])
        return found.gpu[0], found.cpu[0], found.storage[0], found.other[0]


@pytest.fixture
def engine(index):
    return Publisher(index)


def vllm_map(blocks, start=0, medium="GPU", **changes):
    return {
        "type": "BlockStored",
        "block_hashes": names(blocks, start),
        "parent_block_hash": name(start - 1) if start else None,
        "token_ids": tokens(blocks, start),
        "block_size": SIZE,
        "lora_id": None,
        "medium": medium,
        "lora_name": None,
        **changes,
    }


def vllm_removed(*numbers, medium="GPU", **changes):
    return {"type": "BlockRemoved", "block_hashes": [name(number) for number in numbers], "medium": medium, **changes}


NOTHING = (0, 0, 0, 0)


# --- vLLM


@pytest.mark.parametrize("length", [6, 7, 8, 9, 12], ids=["0.9", "0.11", "0.14", "0.18", "0.23"])
def test_vllm_up_to_0_23_sends_arrays(engine, length):
    stored = list(vllm_map(4, extra_keys=[None] * 4, group_idx=0, kind="full_attention", window=None).values())
    engine.says(stored[:length])
    assert engine.serves() == (4, 0, 0, 0)
    removed = ["BlockRemoved", [name(3)]] if length < 7 else ["BlockRemoved", [name(3)], "GPU"]
    engine.says(removed)
    assert engine.serves() == (3, 0, 0, 0)
    engine.says(["AllBlocksCleared"])
    assert engine.serves() == NOTHING


@pytest.mark.parametrize("call", [name, digest], ids=["integers", "digests"])
def test_vllm_maps_name_blocks_by_integers_or_digests(engine, call):
    hashes = [call(number) for number in range(4)]
    engine.says(vllm_map(4, block_hashes=hashes, extra_keys=[None] * 4, **GROUP))
    engine.says({"type": "BlockRemoved", "block_hashes": hashes[2:], "medium": "GPU", "group_idx": 0})
    assert engine.serves() == (2, 0, 0, 0)


def test_offloading_without_self_describing_events_is_known_by_hash(engine):
    placeholder = {**vllm_map(0, medium="CPU"), "token_ids": [], "block_size": 0}
    engine.says(vllm_map(4), *[{**placeholder, "block_hashes": [digest(number)]} for number in range(3)])
    engine.says(vllm_removed(0, 1, 2, 3))
    assert engine.serves() == (0, 3, 0, 0)
    engine.says(vllm_removed(1, medium="CPU"))
    assert engine.serves() == (0, 1, 0, 0)


def test_vllms_file_tier_never_says_what_was_deleted(engine):
    """So what is predicted there is what was ever written: a hint."""
    engine.says(vllm_map(4), vllm_map(4, medium="STORAGE", locality="REMOTE"), vllm_removed(0, 1, 2, 3))
    assert engine.serves() == (0, 0, 4, 0)


def test_the_inventory_of_a_store_beside_the_cpu_tier_counts_as_a_second_copy(engine):
    """vLLM's `kvcr` tier speaks of CPU RAM and storage, with `ownership`."""
    engine.says(vllm_map(2), vllm_map(2, medium="CPU"), vllm_map(2, medium="CPU", ownership="kvcr"))
    engine.says(vllm_removed(0, 1), vllm_removed(0, 1, medium="CPU", ownership="kvcr"))
    assert engine.serves() == (0, 2, 0, 0)
    engine.says(vllm_removed(0, 1, medium="CPU"))
    assert engine.serves() == NOTHING


@pytest.mark.parametrize(("medium", "served"), [("CPU", (0, 3, 0, 0)), ("STORAGE", (0, 0, 3, 0))])
def test_simple_cpu_offload_says_everything_block_by_block(engine, medium, served):
    below = {"medium": medium, "locality": "LOCAL", **GROUP}
    engine.says(vllm_map(3, extra_keys=[None] * 3, **GROUP))
    engine.says(*[vllm_map(number + 1, number, **below) for number in range(3)])
    engine.says(vllm_removed(0, 1, 2, group_idx=0))
    assert engine.serves() == served
    engine.says(vllm_removed(0, medium=medium, group_idx=0))
    assert engine.serves() == NOTHING


def test_simple_cpu_offload_tells_the_salt_in_its_own_tier_too(engine):
    salted = vllm_map(3, medium="CPU", block_hashes=names(3, salt="tenant"), extra_keys=[["tenant"], None, None])
    engine.says(salted)
    assert engine.serves() == NOTHING
    assert engine.serves(salt="tenant") == (0, 3, 0, 0)


# --- SGLang


def sglang_bytes(blocks):
    """The oldest form, six elements, byte by byte."""
    event = b"\x96" + b"\xabBlockStored"
    event += bytes([0x90 + blocks]) + b"".join(b"\xd3" + struct.pack(">q", signed(name(i))) for i in range(blocks))
    event += b"\xc0"
    event += b"\xdc" + struct.pack(">H", blocks * SIZE) + b"".join(bytes([0xCC, token]) for token in tokens(blocks))
    event += bytes([SIZE]) + b"\xc0"
    return b"\x93\xcb" + struct.pack(">d", 1770000000.5) + b"\x91" + event + b"\xc0"


def sglang(blocks, start=0, medium="GPU"):
    parent = signed(name(start - 1)) if start else None
    return ["BlockStored", list(map(signed, names(blocks, start))), parent, tokens(blocks, start), SIZE, None, medium]


def test_sglangs_oldest_events_have_six_elements(engine):
    assert engine.says_bytes(sglang_bytes(3)) == []
    assert engine.serves() == (3, 0, 0, 0)
    engine.says(["BlockRemoved", [signed(name(2))]], rank=None)
    assert engine.serves() == (2, 0, 0, 0)


def test_sglang_later_appended_medium_adapter_and_extra_keys(engine):
    engine.says([*sglang(3), None, [None] * 3])
    assert engine.serves() == (3, 0, 0, 0)
    engine.says(["BlockRemoved", [signed(name(2))], "GPU"])
    assert engine.serves() == (2, 0, 0, 0)


def test_sglang_now_sends_maps(engine):
    engine.says(vllm_map(3, session_id="s", cache_salt=None), vllm_removed(2))
    assert engine.serves() == (2, 0, 0, 0)


@pytest.mark.parametrize(
    ("medium", "served"),
    [
        ("CPU_PINNED", (0, 3, 0, 0)),
        ("CPU_TIER1", (0, 3, 0, 0)),
        ("CPU_TIER2", (0, 0, 3, 0)),
        ("DISK", (0, 0, 3, 0)),
        ("EXTERNAL", (0, 0, 3, 0)),
        ("HOLOGRAM", (0, 0, 0, 3)),
    ],
)
def test_sglangs_hicache_moves_blocks_down_and_tells_both_ends(engine, medium, served):
    engine.says(sglang(3), *[sglang(number + 1, number, medium) for number in range(3)])
    engine.says(["BlockRemoved", list(map(signed, names(3))), "GPU"])
    assert engine.serves() == served
    engine.says(["BlockRemoved", [signed(name(1))], medium])
    assert sum(engine.serves()) == 1


@pytest.mark.parametrize("form", ["map", "array"])
def test_sglangs_salted_prompts_have_hashes_of_their_own(engine, form):
    def salted(blocks, start):
        event = sglang(blocks, start)
        event[1] = list(map(signed, names(blocks, start, "tenant")))
        event[2] = signed(name(start - 1, "tenant")) if start else None
        if form == "array":
            return [*event, {"cache_salt": "tenant"}]
        fields = ("type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium")
        return {**dict(zip(fields, event, strict=True)), "cache_salt": "tenant"}

    engine.says(sglang(1), salted(2, 0), salted(4, 2))
    assert engine.serves() == (1, 0, 0, 0)
    assert engine.serves(salt="tenant") == (4, 0, 0, 0)
    assert engine.serves(salt="other") == NOTHING


def test_sglang_with_eagle_sends_pairs_of_tokens(engine):
    pairs = [[token, token + 1] for token in tokens(3)]
    engine.says(["BlockStored", names(3), None, pairs, SIZE, None, "GPU"])
    assert engine.serves() == (3, 0, 0, 0)


def test_an_adapter_that_sglang_only_numbers_is_not_the_base_model(engine):
    assert engine.says(vllm_map(3, lora_id=2)) == ["bad_field"]
    assert engine.serves() == NOTHING


# --- LMCache


def lmcache(number, chunk=SIZE, **changes):
    """One chunk an event; never a removal."""
    ids = TEXT[number * chunk : (number + 1) * chunk]
    event = vllm_map(0, medium="CPU", block_hashes=[name(number)], token_ids=ids, block_size=chunk)
    return {**event, **changes}


def test_lmcache_with_the_engines_own_hashes_and_block_size_is_a_hint(engine):
    """Evictions are not told, so it goes on being predicted."""
    engine.says(vllm_map(3), *[lmcache(n, parent_block_hash=name(n - 1) if n else None) for n in range(3)])
    engine.says(vllm_removed(0, 1, 2))
    assert engine.serves() == (0, 3, 0, 0)
    engine.says({"type": "AllBlocksCleared"})
    assert engine.serves() == NOTHING


def test_lmcache_with_larger_chunks_than_the_engines_blocks_is_not_indexed(engine):
    engine.says(vllm_map(4), lmcache(0, 2 * SIZE), lmcache(1, 2 * SIZE, parent_block_hash=name(0)))
    engine.says(vllm_removed(0, 1, 2, 3))
    assert engine.serves() == NOTHING
    assert engine.residency.skipped == {"other_block_size": 2}
    engine.says(vllm_map(4))
    assert engine.serves() == (4, 0, 0, 0)


def test_lmcache_with_hashes_of_its_own_waits_for_what_never_comes(engine):
    """Nothing says whether a salt is in them."""
    engine.says(vllm_map(3), lmcache(0, block_hashes=[-5], parent_block_hash=0))
    engine.says(vllm_removed(0, 1, 2))
    assert (engine.serves(), engine.residency.parked) == (NOTHING, 1)


def test_lmcaches_first_events_had_a_token_too_many(engine):
    engine.says(vllm_map(3), lmcache(0, token_ids=TEXT[: SIZE + 1], parent_block_hash=0))
    assert engine.residency.skipped == {"tokens_do_not_fill_blocks": 1}


# --- Mooncake


def mooncake_connector(number):
    """As vLLM's MooncakeStoreConnector: a block an event, a group but not its kind, and never a removal."""
    return vllm_map(number + 1, number, medium="cpu", group_idx=0)


def test_what_one_engine_puts_into_mooncake_every_engine_may_load(index):
    pods = [Publisher(index, f"kv@10.0.0.{number}:8000@qwen") for number in range(3)]
    for pod in pods[:2]:
        pod.residency.share("cpu", "mooncake")
    for pod in pods:
        pod.says(vllm_map(1, extra_keys=[None], **GROUP))
    first = pods[0]
    first.says(vllm_map(4, 1, group_idx=0, extra_keys=[None] * 3), *[mooncake_connector(n) for n in range(4)])
    first.says(vllm_removed(1, 2, 3, group_idx=0))
    assert [pod.serves() for pod in pods] == [(1, 3, 0, 0), (1, 3, 0, 0), (1, 0, 0, 0)]
    first.residency.close()
    assert pods[1].serves() == (1, 0, 0, 0), "nobody is left who says so"


def mooncake_master(kind, legacy, *numbers, medium="cpu"):
    """RFC 1527's fields beside vLLM's; the master knows no tokens, parents or sizes."""
    hashes = [name(number) for number in numbers]
    said = {"event_id": 1, "timestamp": 1770000000500, "event_type": kind, "type": legacy, "model_name": "qwen"}
    stored = {"parent_hash": None, "parent_block_hash": None, "token_ids": None, "base_block_idx": None}
    where = {"block_size": None, "lora_name": None, "backend_id": "mooncake", "medium": medium, "dp_rank": 0}
    return {**said, **(stored if kind == "stored" else {}), **where, "seq_hashes": hashes, "block_hashes": hashes}


@pytest.mark.parametrize(("medium", "tier"), [("cpu", "cpu"), ("disk", "storage"), ("local_disk", "storage")])
def test_mooncakes_master_says_what_it_evicts(index, engine, medium, tier):
    """Of no use by itself, as it is no endpoint; with it as a publisher of the shared store, evictions are known."""
    master = Publisher(index, "kv@mooncake@qwen")
    for publisher in (engine, master):
        publisher.residency.share(tier, "mooncake")
    engine.says(vllm_map(4))
    payload = pack([1770000000500, [mooncake_master("stored", "BlockStored", 0, 1, 2, medium=medium)], 0])
    assert master.says_bytes(payload) == []
    engine.says(vllm_removed(0, 1, 2, 3))
    assert sum(engine.serves()) == 3
    master.says(mooncake_master("removed", "BlockRemoved", 1, medium=medium))
    assert sum(engine.serves()) == 1


def test_mooncakes_first_events_are_of_types_of_their_own(engine):
    stored = ["BlockStoreEvent", "key", [["memory", "tcp://10.0.0.9:6000"]], "qwen", 4, "0x1", "", [1, 2, 3, 4]]
    assert engine.says(stored, ["RemoveAllEvent"], vllm_map(1)) == ["unknown_type"] * 2
    assert engine.serves() == (1, 0, 0, 0)


# --- TPU, TensorRT-LLM, Dynamo


def test_a_tpus_host_memory_is_silent(engine):
    """vLLM's own events call HBM "GPU" there too; its TPU offload connector has none: what it could reload is not
    known, so that the prediction is a lower bound."""
    engine.says(vllm_map(4, extra_keys=[None] * 4), vllm_removed(2, 3))
    assert engine.serves() == (2, 0, 0, 0)


def test_tensorrt_llm_streams_maps_with_signed_hashes_and_without_tiers(engine):
    """A block is announced once and removed when it has left the host's memory too: HBM stands for both."""
    engine.says(vllm_map(4, block_hashes=list(map(signed, names(4))), medium=None), rank=1)
    engine.says(vllm_map(5, 4, block_hashes=[signed(name(4))], parent_block_hash=signed(name(3)), medium=None))
    assert engine.serves() == (5, 0, 0, 0)
    engine.says(vllm_removed(4, medium=None, block_hashes=[signed(name(4))]))
    assert engine.serves() == (4, 0, 0, 0)


def kvbm(number, medium):
    """Dynamo's consolidator: a block an event, absent fields left out, an empty topic."""
    event = vllm_map(number + 1, number, medium=medium)
    return {key: value for key, value in event.items() if value is not None or key == "parent_block_hash"}


def test_kvbm_names_its_tiers_by_number(index):
    engine = Publisher(index, "")
    engine.says(*[kvbm(number, None) for number in range(2)])
    assert engine.serves() == (2, 0, 0, 0)
    engine.says(*[kvbm(number, "CPU_TIER1") for number in range(4)])
    engine.says(*[kvbm(number, "CPU_TIER2") for number in range(6)])
    assert engine.serves() == (2, 2, 2, 0)
    engine.says({"type": "BlockRemoved", "block_hashes": [name(3)], "medium": "CPU_TIER1"})
    assert engine.serves() == (2, 1, 3, 0)


# --- llm-d's file backend


def fs_event(*elements):
    """Packed twice: the event is a bin among the batch's events."""
    return pack(list(elements))


@pytest.mark.parametrize("medium", ["SHARED_STORAGE", "OBJECT_STORE"])
def test_llmds_file_backend_speaks_for_a_medium_not_for_a_pod(index, engine, medium):
    """A file holds several blocks and is named by the last one's hash."""
    files = Publisher(index, f"kv@{medium}@qwen")
    files.seq = 1
    for publisher in (engine, files):
        publisher.residency.share("storage", medium)
    engine.residency.blocks_per_chunk = 2
    engine.says(vllm_map(6))
    assert files.says(fs_event("BlockStored", [name(1), name(3)], 0, [], 0, None, medium)) == []
    engine.says(vllm_removed(0, 1, 2, 3, 4, 5))
    assert engine.serves() == (0, 0, 4, 0)
    files.says(fs_event("BlockRemoved", [name(3)], medium))
    assert engine.serves() == (0, 0, 2, 0)
