import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.keys import encode_extras
from indexer.wire import (
    MAX_PAYLOAD,
    BadPayload,
    BlockRemoved,
    BlocksCleared,
    BlockStored,
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


def test_a_batch_has_a_timestamp_and_a_rank():
    decoded = decode_batch(pack([1.5, [], 3]))
    assert (decoded.timestamp, decoded.rank, list(decoded)) == (1.5, 3, [])


@pytest.mark.parametrize("payload", [[1.5, []], [1.5, [], None], [1, [], None, "more"]])
def test_rank_may_be_absent_and_more_elements_may_follow(payload):
    assert decode_batch(pack(payload)).rank is None


@pytest.mark.parametrize("names", [("ts", "events", "data_parallel_rank"), ("TS", "Events", "attn_dp_rank")])
def test_a_batch_may_be_a_map(names):
    decoded = decode_batch(pack(dict(zip(names, (1.5, [STORED, ["AllBlocksCleared"]], 2), strict=True))))
    assert decoded.events == [EXPECTED, BlocksCleared()]
    assert (decoded.timestamp, decoded.rank) == (1.5, 2)


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


@pytest.mark.parametrize("length", range(5, 12))
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


def test_placeholders_have_no_tokens():
    event = only_event({**STORED, "token_ids": [], "block_size": 0, "parent_block_hash": None, "extra_keys": None})
    assert (event.tokens, event.block_size, event.parent, event.extras) == (b"", 0, None, None)


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
        {"token_ids": None},
        {"token_ids": ["a"]},
        {"token_ids": [-1, 0, 0, 0]},
        {"token_ids": [2**32, 0, 0, 0]},
        {"block_size": -1},
        {"block_size": None},
        {"block_size": 1 << 40},
        {"medium": 5},
        {"medium": "x" * 1000},
        {"lora_name": ["sql"]},
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


@given(st.data())
def test_a_flipped_byte_never_gets_through_as_another_error(data):
    payload = bytearray(pack([1.5, [STORED, REMOVED, STORED_ARRAY, ["AllBlocksCleared"]], 0]))
    payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    try:
        decode_batch(bytes(payload))
    except BadPayload:
        pass


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
        (["CPU", "cpu", "CPU_PINNED", "cpu_tier1", "CPU_TIER2"], "cpu"),
        (["STORAGE", "DISK", "FS", "OBJ", "SHARED_STORAGE", "OBJECT_STORE", "EXTERNAL"], "storage"),
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


def test_an_adapter_is_dropped_only_where_it_is_one():
    assert only_event({**STORED, "lora_name": None, "extra_keys": [["sql"], None]}).extras == {
        0: encode_extras(["sql"])
    }


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
