import contextlib
import math
import struct
import time
import tracemalloc
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.index import PrefixIndex
from indexer.keys import encode_extras
from indexer.match import Prompt, match
from indexer.wire import (
    MAX_EVENTS,
    MAX_PAYLOAD,
    BadPayload,
    BlockRemoved,
    BlocksCleared,
    BlockStored,
    Load,
    Notes,
    SnapshotPart,
    Tier,
    Tiers,
    canonical_tier,
    decode_batch,
    parse_topic,
    uint64_hash,
)

pack = msgspec.msgpack.encode

STORED = {
    "type": "BlockStored",
    "block_hashes": [11, 12],
    "parent_block_hash": 10,
    "token_ids": [1, 2, 3, 4],
    "block_size": 2,
    "lora_id": 7,
    "medium": "CPU",
    "lora_name": "sql",
    "extra_keys": [["sql", "salt"], None],
    "group_idx": 1,
    "kv_cache_spec_kind": "full_attention",
    "kv_cache_spec_sliding_window": 128,
}
STORED_ARRAY = ["BlockStored", *list(STORED.values())[1:]]
EXPECTED = BlockStored(
    hashes=[11, 12],
    parent=10,
    tokens=struct.pack("<4I", 1, 2, 3, 4),
    block_size=2,
    tier="cpu",
    lora_name="sql",
    extras={0: encode_extras(["salt"])},
    group=1,
    kind="full_attention",
    window=128,
)
REMOVED = {"type": "BlockRemoved", "block_hashes": [11], "medium": "GPU", "group_idx": 0}


def batch(*events):
    return decode_batch(pack([1.5, list(events), 0]))


def only_event(event):
    decoded = batch(event)
    assert not decoded.skipped
    assert len(decoded.events) == 1
    return decoded.events[0]


def reason(event):
    """Of the bad event, which must not cost us its good neighbour."""
    decoded = batch(event, REMOVED)
    assert decoded.events == [BlockRemoved([11], "gpu", 0)]
    (skipped,) = decoded.skipped
    return skipped.reason


@pytest.mark.parametrize("rest", [[], [3], [None], ["zero"], [{"any": [1.5]}], [3, "no notes"], [3, None, "more"]])
def test_what_follows_the_events_costs_none_of_them(rest):
    decoded = decode_batch(pack([1.5, [STORED], *rest]))
    assert (decoded.timestamp, decoded.events) == (1.5, [EXPECTED])


@pytest.mark.parametrize("names", [("ts", "events", "data_parallel_rank"), ("TS", "Events", "attn_dp_rank")])
def test_a_batch_may_be_a_map(names):
    decoded = decode_batch(pack(dict(zip(names, (1.5, [STORED, ["AllBlocksCleared"]], 2), strict=True))))
    assert decoded.events == [EXPECTED, BlocksCleared()]
    assert decoded.timestamp == 1.5


@pytest.mark.parametrize("event", [STORED, STORED_ARRAY, pack(STORED), pack(STORED_ARRAY)])
def test_a_stored_event_may_be_a_map_or_an_array_and_wrapped_in_a_bin(event):
    assert only_event(event) == EXPECTED


def test_maps_and_arrays_mix_in_one_batch():
    assert batch(STORED, STORED_ARRAY, REMOVED, ["BlockRemoved", [5]]).events == [
        EXPECTED,
        EXPECTED,
        BlockRemoved([11], "gpu", 0),
        BlockRemoved([5]),
    ]


@pytest.mark.parametrize("length", [*range(2, 6), *range(8, 12)])
def test_trailing_elements_may_be_missing(length):
    event = only_event(STORED_ARRAY[:length])
    assert event.hashes == [11, 12]
    assert event.lora_name == ("sql" if length > 7 else "")
    assert event.tier == ("cpu" if length > 6 else "gpu")
    assert event.group == (1 if length > 9 else None)


def test_unknown_trailing_elements_and_fields_are_ignored():
    assert only_event([*STORED_ARRAY, 5, {"what": "ever"}]) == EXPECTED
    assert only_event({**STORED, "locality": "LOCAL", "new": [1]}) == EXPECTED
    assert only_event(["BlockRemoved", [1], "GPU", 2, "more"]) == BlockRemoved([1], "gpu", 2)


@pytest.mark.parametrize(("token_ids", "block_size"), [([], 0), (None, None)])
def test_placeholders_have_no_tokens(token_ids, block_size):
    changes = {"token_ids": token_ids, "block_size": block_size, "parent_block_hash": None, "extra_keys": None}
    event = only_event({**STORED, **changes})
    assert (event.tokens, event.block_size, event.parent, event.extras) == (b"", 0, None, None)
    assert only_event({"type": "BlockStored", "block_hashes": [11]}) == BlockStored([11])


def test_a_parent_of_zero_is_none():
    assert only_event({**STORED, "parent_block_hash": 0}).parent is None


@pytest.mark.parametrize(
    ("sent", "meant"),
    [
        (5, 5),
        (2**16, 2**16),
        (2**32, 2**32),
        (2**64 - 1, 2**64 - 1),
        (-1, 2**64 - 1),
        (-(2**63), 2**63),
        (bytes(24) + b"\x01\x02\x03\x04\x05\x06\x07\x08", 0x0102030405060708),
        (b"\xff" * 8, 2**64 - 1),
        (b"\x01\x02\x03", 0x010203),
    ],
)
def test_hashes_of_any_form_are_uint64(sent, meant):
    assert uint64_hash(sent) == meant
    assert only_event({**REMOVED, "block_hashes": [sent, 1]}).hashes == [meant, 1]
    assert only_event({**STORED, "parent_block_hash": sent}).parent == meant


@pytest.mark.parametrize("bad", [b"", "11", 1.5, None, [1], True])
def test_other_hashes_are_refused(bad):
    assert reason({**REMOVED, "block_hashes": [bad]}) == "bad_field"


@pytest.mark.parametrize(
    "change",
    [
        {"block_hashes": 5},
        {"token_ids": 5},
        {"token_ids": ["a"]},
        {"token_ids": [[1, 2], [2, "a"]]},
        {"token_ids": [[1, 2], []]},
        {"token_ids": [-1, 0, 0, 0]},
        {"token_ids": [2**32, 0, 0, 0]},
        {"block_size": -1},
        {"block_size": 1 << 40},
        {"medium": 5},
        {"medium": "x" * 1000},
        {"lora_name": ["sql"]},
        {"lora_name": None},
        {"lora_name": {"cache_salt": 5}},
        {"extra_keys": "salt"},
        {"extra_keys": ["salt", None]},
        {"extra_keys": [None]},
        {"group_idx": -1},
        {"kv_cache_spec_kind": 5},
    ],
)
def test_a_bad_field_costs_its_own_event_only(change):
    assert reason({**STORED, **change}) == "bad_field"
    assert reason(["BlockStored", *list({**STORED, **change}.values())[1:]]) == "bad_field"


@pytest.mark.parametrize("event", [{"type": "BlockMoved"}, ["BlockMoved", [1]]])
def test_unknown_types_are_named(event):
    assert reason(event) == "unknown_type"


@pytest.mark.parametrize(
    "event", [5, "BlockStored", [], {}, [5, [1]], {"type": 5}, {"block_hashes": [1]}, None, pack(5)]
)
def test_what_is_no_event_is_skipped(event):
    assert reason(event) in {"bad_field", "malformed"}


def test_the_detail_names_the_field():
    (skipped,) = batch({**STORED, "group_idx": -1}).skipped
    assert "group_idx" in skipped.detail


def test_invalid_text_costs_its_own_event_only():
    payload = pack([1.5, [{**STORED, "medium": "XXX"}, REMOVED], 0]).replace(b"XXX", b"\xff\xff\xff")
    decoded = decode_batch(payload)
    assert decoded.events == [BlockRemoved([11], "gpu", 0)]
    assert [skipped.reason for skipped in decoded.skipped] == ["malformed"]


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xc1", b"garbage", pack([]), pack([1.5]), pack(5), pack({"ts": 1.5}), pack(["x", []]), pack([1.5, 5])],
)
def test_what_is_no_batch_is_refused(payload):
    with pytest.raises(BadPayload):
        decode_batch(payload)


def counted(count):
    return b"\xdd" + count.to_bytes(4, "big")


def stored_with(field, packed):
    return pack([1.5, [{"type": "BlockStored", "block_hashes": [1], field: msgspec.Raw(packed)}], 0])


MANY = 1 << 20
SMALL_BYTES = {
    "events that are nothing": b"\x93\x01" + counted(MANY) + b"\xc0" * MANY + b"\x00",
    "empty pairs of tokens": stored_with("token_ids", counted(MANY) + b"\x90" * MANY),
    "pairs of tokens": stored_with("token_ids", counted(MANY // 3) + b"\x92\x01\x02" * (MANY // 3)),
    "tokens": stored_with("token_ids", counted(MANY // 5) + b"\xce\xff\xff\xff\xff" * (MANY // 5)),
    "empty lists as extra keys": stored_with("extra_keys", counted(MANY) + b"\x90" * MANY),
    "empty maps as extra keys": stored_with("extra_keys", b"\x91" + counted(MANY) + b"\x80" * MANY),
    "maps in maps as extra keys": stored_with("extra_keys", b"\x91\x91" + b"\x81\xc0" * 400 + b"\x80" * MANY),
    "empty maps as a session": stored_with("session_id", counted(MANY) + b"\x80" * MANY),
    "empty maps as cleared tiers": pack(
        [1.5, [{"type": "AllBlocksCleared", "tiers": msgspec.Raw(counted(MANY) + b"\x80" * MANY)}], 0]
    ),
    "empty maps as what nobody reads": stored_with("lookahead", counted(MANY) + b"\x80" * MANY),
}


@pytest.mark.parametrize("payload", SMALL_BYTES.values(), ids=SMALL_BYTES)
def test_small_bytes_do_not_become_large_objects(payload):
    """An empty map takes one byte of a message and 64 of memory."""
    began = time.process_time()
    tracemalloc.start()
    try:
        with contextlib.suppress(BadPayload):
            decode_batch(payload)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 40 * len(payload)
    assert time.process_time() - began < 2  # of which tracing takes most


@pytest.mark.parametrize("said", [math.nan, math.inf, -math.inf])
def test_what_is_no_time_is_read_as_none(said):
    assert decode_batch(pack([said, [REMOVED], 0])).timestamp == 0.0
    assert decode_batch(pack({"ts": said, "events": [REMOVED]})).timestamp == 0.0


def test_a_batch_of_more_events_than_any_step_has_is_refused():
    removed = pack(["BlockRemoved", [1], "GPU"])
    full = b"\x93\x01" + counted(MAX_EVENTS) + removed * MAX_EVENTS + b"\x00"
    assert len(decode_batch(full).events) == MAX_EVENTS
    with pytest.raises(BadPayload, match="length"):
        decode_batch(b"\x93\x01" + counted(MAX_EVENTS + 1) + removed * (MAX_EVENTS + 1) + b"\x00")


def test_nesting_and_claimed_lengths_do_not_hurt():
    for payload in (
        b"\x91" * 500_000,
        b"\x93\xcb" + bytes(8) + b"\x91" * 500_000,
        b"\xdd\xff\xff\xff\xff",
        b"\xdf" * 9,
    ):
        with pytest.raises(BadPayload):
            decode_batch(payload)
    deep = b"\x91" * 100_000 + b"\xc0"
    payload = pack([1.5, [{**STORED, "extra_keys": "DEEP"}], 0]).replace(pack("DEEP"), deep)
    with pytest.raises(BadPayload):
        decode_batch(payload)


def test_a_giant_payload_is_refused_unread():
    with pytest.raises(BadPayload, match="limit"):
        decode_batch(bytes(MAX_PAYLOAD + 1))


@given(st.binary(max_size=200))
def test_any_bytes_are_a_batch_or_a_bad_payload(payload):
    try:
        decode_batch(payload)
    except BadPayload:
        pass


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.lists(st.sampled_from(list(STORED)), max_size=4),
    st.lists(values, min_size=4, max_size=4),
    st.lists(values, max_size=3),
)
def test_any_values_in_any_field_are_an_event_or_counted(fields, replacements, others):
    mangled = {**STORED, **dict(zip(fields, replacements, strict=False))}
    events = [mangled, list(mangled.values()), *others]
    decoded = batch(*events)
    assert len(decoded.events) + len(decoded.skipped) == len(events)


@settings(deadline=None)
@given(st.data())
def test_a_flipped_byte_never_gets_through_as_another_error(data):
    payload = bytearray(pack([1.5, [STORED, REMOVED, STORED_ARRAY, ["AllBlocksCleared"]], 0]))
    payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    try:
        decode_batch(bytes(payload))
    except BadPayload:
        pass


RECORDED = [
    bytes.fromhex(msgspec.json.decode(line)["frames"][2])
    for path in sorted((Path(__file__).parents[1] / "recordings").glob("?-*.jsonl"))
    if ".requests." not in path.name
    for line in path.read_text().splitlines()
]
"""Payloads of real engines."""

splices = st.binary(max_size=4) | st.sampled_from(
    [
        b"\xdd\xff\xff\xff\xff",  # an array of 4 billion elements
        b"\xdf\xff\xff\xff\xff",  # such a map
        b"\xc6\xff\xff\xff\xff",  # 4 GB of bytes
        b"\xdb\x7f\xff\xff\xff",  # 2 GB of text
        b"\xc9\xff\xff\xff\xff\x01",  # such an extension
        b"\x91" * 3000,
        b"\x81\xa1x" * 3000,
        b"\xd6\xff\x00\x00\x00\x00",  # a timestamp
        b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00",  # NaN
        b"\xcf" + b"\xff" * 8,
    ]
)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(RECORDED), st.lists(st.tuples(st.floats(0, 1), st.integers(0, 12), splices), max_size=4))
def test_a_mangled_payload_harms_nobody(payload, cuts):
    index = PrefixIndex()
    residency = index.publisher("pod")
    residency.apply(decode_batch(payload))
    for where, gone, splice in cuts:
        at = int(where * len(payload))
        payload = payload[:at] + splice + payload[at + gone :]
    try:
        batch = decode_batch(payload)
    except BadPayload:
        return
    residency.apply(batch)
    assert all(residency.held(tier) >= 0 for tier in residency.tiers())
    match(index, Prompt(bytes(400)), [residency])


odd_values = (
    values
    | st.sampled_from([2**64 - 1, -(2**63), float("nan"), float("inf"), b"", b"x" * 40, "x" * 600])
    | st.builds(lambda depth: msgspec.msgpack.decode(b"\x91" * depth + b"\xc0"), st.integers(1, 40))
)


def flat(payload):
    """What a batch says, one block of a removal at a time; how many events were left out."""
    batch = decode_batch(payload)
    said = []
    for event in batch:
        if isinstance(event, BlockRemoved):
            said += [BlockRemoved([block_hash], event.tier, event.group) for block_hash in event.hashes]
        else:
            said.append(event)
    return said, len(batch.skipped)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(RECORDED), st.data())
def test_an_odd_value_in_a_real_event_costs_no_other_event(payload, data):
    timestamp, events, rank = msgspec.msgpack.decode(payload)
    for _ in range(data.draw(st.integers(1, 3))):
        event = data.draw(st.sampled_from(events))
        field = data.draw(st.sampled_from(sorted(event)))
        inside = event[field]
        if isinstance(inside, list) and inside and data.draw(st.booleans()):
            inside[data.draw(st.integers(0, len(inside) - 1))] = data.draw(odd_values)
        else:
            event[field] = data.draw(odd_values)
    said, left_out = flat(pack([timestamp, events, rank]))
    alone = [flat(pack([timestamp, [event], rank])) for event in events]
    assert said == [one for single, _ in alone for one in single]
    assert left_out == sum(skipped for _, skipped in alone)


def test_evictions_in_a_row_become_one_event():
    def removed(block, **changes):
        return {**REMOVED, "block_hashes": [block], **changes}

    assert batch(removed(1), removed(2), removed(3, group_idx=1), removed(4, medium="CPU", group_idx=1)).events == [
        BlockRemoved([1, 2], "gpu", 0),
        BlockRemoved([3], "gpu", 1),
        BlockRemoved([4], "cpu", 1),
    ]


def test_evictions_keep_their_place_among_other_events():
    events = batch(REMOVED, STORED, REMOVED, REMOVED).events
    assert [type(event) for event in events] == [BlockRemoved, BlockStored, BlockRemoved]
    assert events[2].hashes == [11, 11]


@pytest.mark.parametrize(
    ("event", "tiers"),
    [
        ({"type": "AllBlocksCleared"}, None),
        (["AllBlocksCleared"], None),
        ({"type": "AllBlocksCleared", "tiers": ["GPU"]}, ("gpu",)),
        (["AllBlocksCleared", ["GPU", "CPU"]], ("gpu", "cpu")),
        ({"type": "AllBlocksCleared", "tiers": []}, ()),
        # Not our field: the engine did not say, and then everything may be gone.
        (["AllBlocksCleared", "GPU"], None),
        ({"type": "AllBlocksCleared", "tiers": [5]}, None),
        (["AllBlocksCleared", 1, 2, 3], None),
    ],
)
def test_cleared_says_which_tiers_or_does_not(event, tiers):
    assert only_event(event) == BlocksCleared(tiers)


@pytest.mark.parametrize(
    ("mediums", "tier"),
    [
        ([None, "", "GPU", "gpu"], "gpu"),
        (["CPU", "cpu", "CPU_PINNED", "cpu_tier1"], "cpu"),
        (["STORAGE", "DISK", "FS", "OBJ", "SHARED_STORAGE", "OBJECT_STORE", "EXTERNAL"], "storage"),
        (["CPU_TIER2", "NVME", "local_disk"], "storage"),
        (["CXL"], "cxl"),
    ],
)
def test_mediums_have_one_name_each(mediums, tier):
    assert {canonical_tier(medium) for medium in mediums} == {tier}


@pytest.mark.parametrize(
    ("keys", "extras"),
    [
        ([None, None], {}),
        ([[], ["image-1"]], {1: encode_extras(["image-1"])}),
        ([["sql"], ["sql"]], {}),
        ([["sql", "sql"], None], {0: encode_extras(["sql"])}),
        (
            [["image-1", "salt"], [["image-1", 16]]],
            {0: encode_extras(["image-1", "salt"]), 1: encode_extras([["image-1", 16]])},
        ),
        ([[b"digest"], None], {0: encode_extras([b"digest"])}),
    ],
)
def test_extra_keys_without_the_adapter(keys, extras):
    assert only_event({**STORED, "extra_keys": keys}).extras == extras


@pytest.mark.parametrize("blocks", [1, 2, 15, 16, 63, 64, 65, 192, 1000])
def test_blocks_without_extra_keys_have_none_and_as_many_are_said(blocks):
    event = {**STORED, "block_hashes": list(range(blocks)), "token_ids": list(range(2 * blocks))}
    assert only_event({**event, "extra_keys": [None] * blocks}).extras == {}
    assert only_event({**event, "extra_keys": [None] * (blocks - 1) + [["a"]]}).extras.keys() == {blocks - 1}
    for others in (blocks - 1, blocks + 1):
        assert reason({**event, "extra_keys": [None] * others}) == "bad_field"


def test_an_adapter_is_dropped_only_where_it_is_one():
    unnamed = {**STORED, "lora_id": None, "lora_name": None, "extra_keys": [["sql"], None]}
    assert only_event(unnamed).extras == {0: encode_extras(["sql"])}


@pytest.mark.parametrize("lora_id", [None, 0])
def test_no_adapter_is_no_number_or_zero(lora_id):
    assert only_event({**STORED, "lora_id": lora_id, "lora_name": None}).lora_name == ""


def test_an_adapter_known_by_number_only_is_not_taken_for_the_base_model():
    assert reason({**STORED, "lora_name": None}) == "bad_field"
    assert reason(STORED_ARRAY[:7]) == "bad_field"


@pytest.mark.parametrize(("parent", "extras"), [(None, {0: encode_extras(["tenant"])}), (10, {})])
@pytest.mark.parametrize("form", ["map", "array"])
def test_sglang_says_the_salt_on_every_block_and_it_is_in_the_first(form, parent, extras):
    fields = {**STORED, "lora_id": None, "lora_name": None, "extra_keys": None, "parent_block_hash": parent}
    salted = {**fields, "cache_salt": "tenant"}
    if form == "array":
        salted = [*list(fields.values())[:7], {"cache_salt": "tenant"}]
    assert only_event(salted).extras == extras


def test_of_pairs_of_tokens_the_first_counts():
    event = only_event({**STORED, "token_ids": [[1, 2], [2, 3], [3, 4], [4, 5]]})
    assert event.tokens == EXPECTED.tokens


def test_a_session_that_starts_at_the_first_block_may_repeat_what_was_said():
    assert only_event({**STORED, "parent_block_hash": None, "session_id": "s"}).repeats
    assert not only_event({**STORED, "session_id": "s"}).repeats
    assert not only_event({**STORED, "parent_block_hash": None}).repeats


@pytest.mark.parametrize(
    ("topic", "parsed"),
    [
        ("kv@10.0.0.7:8000@qwen", ("10.0.0.7:8000", "qwen")),
        ("kv@pod@org/model@revision", ("pod", "org/model@revision")),
        ("kv@pod", ("kv@pod", "")),
        ("x", ("x", "")),
        ("", ("", "")),
    ],
)
def test_topics(topic, parsed):
    assert parse_topic(topic) == parsed


NOTES = {
    "instance": "0123456789abcdef0123456789abcdef",
    "load": {"waiting": 3, "running": 20, "kv_usage": 0.5},
    "tiers": {"GPU": {"capacity": 100, "held": 20}, "CPU": {"held": 7, "chunk": 4}, "STORAGE": {"pool": "nfs"}},
    "heartbeat": 1.0,
    "snapshot": {"part": 2, "parts": 3},
}
EXPECTED_NOTES = Notes(
    instance="0123456789abcdef0123456789abcdef",
    load=Load(3, 20, 0.5),
    tiers=Tiers(gpu=Tier(capacity=100, held=20), cpu=Tier(held=7, chunk=4), storage=Tier(pool="nfs")),
    heartbeat=1.0,
    snapshot=SnapshotPart(2, 3),
)


def noted(notes, *events):
    return decode_batch(pack([1.5, list(events), 0, notes]))


@pytest.mark.parametrize("event", [STORED, STORED_ARRAY])
def test_notes_are_the_fourth_of_a_batch_whatever_its_events_look_like(event):
    decoded = noted(NOTES, event)
    assert (decoded.events, decoded.notes, list(decoded.skipped)) == ([EXPECTED], EXPECTED_NOTES, [])
    assert (decoded.instance, decoded.part) == (NOTES["instance"], SnapshotPart(2, 3))


def test_every_note_is_optional_and_those_of_later_versions_are_ignored():
    assert noted({}, STORED).notes == Notes()
    later = noted({"mood": "good", "tiers": {"GPU": {"colour": 1}, "TAPE": {}}, "load": None}, STORED)
    assert (later.notes, list(later.skipped)) == (Notes(tiers=Tiers(gpu=Tier())), [])


def test_a_batch_without_notes_has_none():
    for decoded in (batch(STORED), batch(STORED_ARRAY), noted(None, STORED), noted(None, STORED_ARRAY)):
        assert (decoded.notes, decoded.instance, decoded.part, list(decoded.skipped)) == (None, "", None, [])


@pytest.mark.parametrize(
    "field",
    [
        {"load": {"waiting": -1, "running": 0, "kv_usage": 0.0}},
        {"load": {"waiting": 0, "running": 0, "kv_usage": float("nan")}},
        {"load": {"waiting": 0, "running": 0, "kv_usage": 1.1}},
        {"load": {"waiting": 1 << 63, "running": 0, "kv_usage": 0.0}},
        {"load": {"waiting": 1}},
        {"load": 5},
        {"tiers": {"CPU": {"chunk": 0}}},
        {"tiers": {"CPU": {"chunk": 1 << 20}}},
        {"tiers": {"GPU": {"capacity": -1}}},
        {"tiers": {"STORAGE": {"pool": "x" * 1000}}},
        {"tiers": []},
        {"heartbeat": -1},
        {"heartbeat": float("inf")},
        {"snapshot": {"part": 0, "parts": 1}},
        {"snapshot": {"part": 1, "parts": 1 << 40}},
        {"snapshot": {"part": 1}},
    ],
)
def test_of_malformed_notes_only_the_instance_is_left_and_no_event_is_lost(field):
    decoded = noted({"instance": "me", **field}, STORED, REMOVED)
    assert decoded.events == [EXPECTED, BlockRemoved([11], "gpu", 0)]
    assert decoded.notes == Notes("me")
    assert [skipped.reason for skipped in decoded.skipped] == ["bad_notes"]


@pytest.mark.parametrize("notes", [5, "text", [1], b"\xc1", {"instance": "x" * 65}, {"instance": 7}])
def test_what_is_no_notes_at_all_is_left_out(notes):
    decoded = noted(notes, STORED)
    assert (decoded.events, decoded.notes) == ([EXPECTED], None)
    assert [skipped.reason for skipped in decoded.skipped] == ["bad_notes"]


@given(st.dictionaries(st.sampled_from([*NOTES, "other"]), values, max_size=5))
def test_any_notes_are_read_or_counted(notes):
    decoded = noted(notes, STORED)
    assert decoded.events == [EXPECTED]
    try:
        wanted, left_out = msgspec.convert(notes, Notes), 0
    except msgspec.ValidationError:
        wanted, left_out = decoded.notes and Notes(notes.get("instance", "")), 1
    assert (decoded.notes, len(decoded.skipped)) == (wanted, left_out)


def test_of_a_batch_of_all_forms_only_what_nobody_knows_is_left_out():
    cleared, unheard_of, nameless = {"type": "AllBlocksCleared"}, {"type": "NewThing", "x": 1}, {"block_hashes": [1]}
    decoded = batch(STORED_ARRAY, REMOVED, cleared, unheard_of, nameless, ["NewThing", 1], STORED_ARRAY)
    assert decoded.events == [EXPECTED, BlockRemoved([11], "gpu", 0), BlocksCleared(), EXPECTED]
    assert [skipped.reason for skipped in decoded.skipped] == ["unknown_type", "bad_field", "unknown_type"]
