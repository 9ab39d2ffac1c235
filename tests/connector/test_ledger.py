from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connector.events import AllBlocksCleared, BlockRemoved, BlockStored, TierCleared, encode_batch
from connector.ledger import PART_BLOCKS, PART_BYTES, REMEMBERED, REMOVED_AT_ONCE, Ledger
from indexer import PrefixIndex, Prompt, Residency, decode_batch, match

from .walk import BLOCK, CHUNK, PROMPTS, Copies, Walk, steps


def stored(hashes: str, parent: str | None = None, medium: str = "GPU", **more: Any) -> BlockStored:
    """An event whose hashes are letters' codes, a block's tokens its code twice."""
    event = BlockStored(
        block_hashes=[ord(letter) for letter in hashes],
        parent_block_hash=None if parent is None else ord(parent),
        token_ids=[ord(letter) for letter in hashes for _ in range(BLOCK)],
        block_size=BLOCK,
        lora_id=None,
        medium=medium,
        lora_name=None,
        extra_keys=[None] * len(hashes) if medium == "GPU" else None,
        group_idx=0,
        kv_cache_spec_kind="full_attention",
    )
    return msgspec.structs.replace(event, **more)


def placeholder(letter: str, medium: str = "CPU") -> BlockStored:
    return BlockStored([ord(letter)], None, [], 0, None, medium, None, group_idx=0)


def removed(hashes: str, medium: str = "GPU") -> BlockRemoved:
    return BlockRemoved([ord(letter) for letter in hashes], medium, 0)


def told_again(ledger: Ledger) -> list[Any]:
    return [event for part in ledger.freeze().parts() for event in part]


# --- what is published


def test_events_of_hbm_pass_as_they_are() -> None:
    events = [stored("ab"), removed("b"), stored("b", "a", session_id="s")]
    told = Ledger().apply(events)
    assert [id(event) for event in told] == [id(event) for event in events]


def test_blocks_in_a_window_are_held_though_more_tokens_than_theirs_are_told() -> None:
    window = {"group_idx": 0, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 4}
    event = stored("abcd", **window)
    event = msgspec.structs.replace(event, block_hashes=event.block_hashes[2:], extra_keys=[None] * 2)
    ledger = Ledger()
    assert ledger.apply([event, stored("abcd", group_idx=1)])[0] is event
    assert ledger.odd == 0
    [again, _] = told_again(ledger)
    assert again == stored("cd", **window, token_ids=[], parent_block_hash=None, extra_keys=None)
    ledger.apply([removed("cd")])
    assert [event.group_idx for event in told_again(ledger)] == [1]


WINDOW = {"group_idx": 0, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 4}


def with_lead(hashes: str, lead: int, parent: str | None = None) -> BlockStored:
    """The last blocks of those, and how many are before them."""
    event = stored(hashes, parent, **WINDOW, lead_blocks=lead)
    return msgspec.structs.replace(
        event, block_hashes=event.block_hashes[lead:], extra_keys=[None] * (len(hashes) - lead)
    )


def test_blocks_of_a_window_are_told_again_with_the_tokens_of_those_before_them_that_are_not_held() -> None:
    ledger = Ledger()
    ledger.apply([with_lead("abcde", 2)])
    assert told_again(ledger) == [with_lead("abcde", 2)]
    ledger.apply([removed("c")])
    assert told_again(ledger) == [with_lead("abcde", 3)]
    ledger.apply([removed("de"), stored("xyz", "w", **WINDOW), removed("x")])
    assert told_again(ledger) == [with_lead("xyz", 1, "w")]


def test_a_long_run_of_such_blocks_is_told_in_pieces_that_begin_where_the_first_does() -> None:
    ledger = Ledger()
    letters = "".join(map(chr, range(0x100, 0x130)))
    ledger.apply([with_lead(letters, 2)])
    again = told_again(ledger)
    assert "".join(chr(block_hash) for event in again for block_hash in event.block_hashes) == letters[2:]
    assert [(event.lead_blocks, event.parent_block_hash) for event in again] == [
        (2, None),
        (0, ord(letters[15])),
        (0, ord(letters[31])),
    ]


def test_blocks_before_them_that_have_extra_keys_are_left_to_their_hashes() -> None:
    ledger = Ledger()
    ledger.apply([stored("abc", **WINDOW, extra_keys=[("salt",), None, None]), removed("a")])
    assert told_again(ledger) == [stored("bc", "a", **WINDOW)]


def test_a_chunk_of_a_window_is_described_with_the_tokens_before_it() -> None:
    ledger = Ledger({"CPU": 1})
    ledger.apply([with_lead("abcd", 2)])
    [told] = ledger.apply([placeholder("d")])
    assert told == msgspec.structs.replace(with_lead("abcd", 3), medium="CPU")


def test_a_placeholder_of_an_unknown_block_gets_the_kind_of_its_group() -> None:
    ledger = Ledger()
    ledger.apply([stored("ab", kv_cache_spec_kind="sliding_window", kv_cache_spec_sliding_window=4), removed("ab")])
    [told] = ledger.apply([placeholder("x")])
    assert (told.kv_cache_spec_kind, told.kv_cache_spec_sliding_window) == ("sliding_window", 4)
    assert told_again(ledger) == [told]


def test_a_placeholder_gets_all_that_was_said_of_its_hash() -> None:
    ledger = Ledger()
    keys = [["sql", "salt"], ["sql"]]
    ledger.apply([stored("ab", lora_id=3, lora_name="sql", extra_keys=keys)])
    assert ledger.apply([placeholder("a"), placeholder("b")]) == [
        stored("a", None, "CPU", lora_id=3, lora_name="sql", extra_keys=[["sql", "salt"]]),
        stored("b", "a", "CPU", lora_id=3, lora_name="sql", extra_keys=[["sql"]]),
    ]


def test_a_self_describing_event_gets_the_extra_keys_that_it_lacks() -> None:
    ledger = Ledger()
    ledger.apply([stored("ab", extra_keys=[["salt"], None])])
    assert ledger.apply([stored("ab", None, "CPU")]) == [stored("ab", None, "CPU", extra_keys=[["salt"], None])]


def test_what_is_not_known_passes_unchanged() -> None:
    events = [placeholder("a"), stored("bc", "a", "CPU"), stored("cd", "b", "STORAGE"), removed("z", "CPU")]
    assert Ledger().apply(events) == events


def test_a_block_that_hbm_has_lost_meanwhile_is_still_known() -> None:
    ledger = Ledger()
    ledger.apply([stored("a"), removed("a")])
    assert ledger.apply([placeholder("a")]) == [stored("a", None, "CPU", extra_keys=[None])]
    ledger.apply([AllBlocksCleared(), removed("a", "CPU")])
    assert ledger.apply([placeholder("a")]) == [stored("a", None, "CPU", extra_keys=[None])]


def test_what_is_known_of_lost_blocks_is_bounded() -> None:
    ledger = Ledger()
    ledger.apply([stored("a"), removed("a")])
    for number in range(1000, 1000 + REMEMBERED):
        ledger.apply([stored(chr(number)), removed(chr(number))])
    [told] = ledger.apply([placeholder("a")])
    assert (told.block_hashes, told.token_ids) == ([97], [])


def test_groups_are_kept_apart() -> None:
    ledger = Ledger()
    ledger.apply([stored("a"), stored("a", group_idx=1, block_size=1, token_ids=[7])])
    other = msgspec.structs.replace(placeholder("a"), group_idx=1)
    assert [event.token_ids for event in ledger.apply([placeholder("a"), other])] == [[97, 97], [7]]
    assert ledger.held("CPU") == 2


def test_a_reset_is_one_of_hbm() -> None:
    ledger = Ledger()
    ledger.apply([stored("ab"), stored("ab", None, "CPU")])
    assert ledger.apply([AllBlocksCleared()]) == [AllBlocksCleared(["GPU"])]
    assert (ledger.held("GPU"), ledger.held("CPU")) == (0, 2)


def test_the_reset_of_a_lower_tier_removes_every_copy_that_was_announced_in_bounded_events() -> None:
    ledger = Ledger()
    letters = "".join(map(chr, range(100, 100 + REMOVED_AT_ONCE)))
    announced = [stored(letters, None, "CPU"), stored("d", None, "CPU"), stored("d", None, "CPU"), stored("x")]
    published = ledger.apply([*announced, TierCleared("CPU")])
    assert [len(event.block_hashes) for event in published[4:]] == [REMOVED_AT_ONCE, 2]
    assert Copies().hear(published).without_empty() == {"GPU": Counter([ord("x")])}
    assert ledger.apply([TierCleared("CPU"), TierCleared("STORAGE")]) == []


def test_repeated_reports_of_what_is_held_are_no_further_copies() -> None:
    ledger = Ledger()
    ledger.apply([stored("ab"), stored("abc", session_id="s"), removed("ab")])
    assert ledger.held("GPU") == 1
    ledger.apply([stored("c", "b", session_id="s"), removed("c")])
    assert ledger.held("GPU") == 1


# --- chunks


def test_a_chunk_announced_by_its_last_hash_is_widened_to_all_its_blocks() -> None:
    ledger = Ledger({"CPU": 3})
    ledger.apply([stored("abcdef", extra_keys=[["s"], *[None] * 5])])
    assert ledger.apply([placeholder("c"), placeholder("f")]) == [
        stored("abc", None, "CPU", extra_keys=[["s"], None, None]),
        stored("def", "c", "CPU", extra_keys=[None] * 3),
    ]
    assert ledger.held("CPU") == 6


@pytest.mark.parametrize("names", ["f", "def", "fc", "defabc"])
def test_a_removal_takes_what_was_announced_however_it_names_the_chunk(names: str) -> None:
    ledger = Ledger({"CPU": 3})
    ledger.apply([stored("abcdef"), placeholder("c"), placeholder("f")])
    [event] = ledger.apply([removed(names, "CPU")])
    assert event.block_hashes == [ord(letter) for letter in ("def" if len(names) in (1, 3) else "defabc")]
    assert ledger.held("CPU") == 6 - len(event.block_hashes)
    assert ledger.apply([removed(names, "CPU")]) == []


@pytest.mark.parametrize("names", ["c", "abc"])
def test_a_chunk_longer_than_told_is_removed_as_it_was_announced(names: str) -> None:
    ledger = Ledger({"STORAGE": 1})
    ledger.apply([stored("abc", None, "STORAGE"), stored("abd", None, "STORAGE")])
    assert ledger.apply([removed(names, "STORAGE")]) == [removed("abc", "STORAGE")]
    assert Copies().hear(told_again(ledger)) == {"STORAGE": Counter(map(ord, "abd"))}


def test_a_chunk_of_which_only_the_last_block_is_known_is_announced_and_removed_as_that() -> None:
    ledger = Ledger({"CPU": 2})
    told = ledger.apply([stored("b", "a"), placeholder("b"), stored("ac"), stored("ac", None, "CPU"), stored("a")])
    assert [event.block_hashes for event in told] == [[98], [98], [97, 99], [97, 99], [97]]
    assert ledger.apply([removed("ab", "CPU")]) == [removed("b", "CPU")]
    assert ledger.held("CPU") == 2  # the other chunk that begins with the same block


def test_a_chunk_exists_once_in_a_tier_whose_chunk_is_told_and_blocks_do_not_elsewhere() -> None:
    told, untold = Ledger({"STORAGE": 2}), Ledger()
    events = [stored("ab", None, "STORAGE"), stored("ab", None, "STORAGE"), removed("ab", "STORAGE")]
    assert told.apply(events) == [events[0], events[2]]
    assert untold.apply(events) == events
    assert (told.held("STORAGE"), untold.held("STORAGE")) == (0, 2)


def test_a_chunk_that_is_described_better_later_is_announced_anew() -> None:
    ledger = Ledger({"STORAGE": 2})
    assert ledger.apply([placeholder("b", "STORAGE"), stored("ab", None, "STORAGE")]) == [
        placeholder("b", "STORAGE"),
        removed("b", "STORAGE"),
        stored("ab", None, "STORAGE"),
    ]
    assert ledger.held("STORAGE") == 2


def test_chunks_that_share_blocks_count_them_twice() -> None:
    ledger = Ledger({"CPU": 2})
    ledger.apply([stored("ab"), stored("c", "a"), placeholder("b"), placeholder("c"), removed("b", "CPU")])
    assert Copies().hear(told_again(ledger))["CPU"] == Counter([ord("a"), ord("c")])


# --- what cannot be understood


class BlockFrozen(msgspec.Struct, tag=True):
    block_hashes: list[int]


ODD = [
    BlockFrozen([1]),
    {"type": "BlockStored"},
    None,
    stored("ab", token_ids=[1]),
    stored("ab", token_ids=[1, 2, 3, -4]),
    stored("ab", token_ids=[1, 2, 3, 1 << 32]),
    stored("ab", token_ids=["a", "b", "c", "d"]),
    stored("ab", extra_keys=[None]),
    stored("ab", extra_keys=5),
    stored("ab", extra_keys=[[object()], None]),
    stored("ab", block_hashes=[["a"], ["b"]]),
    stored("ab", block_hashes=None),
    stored("ab", block_size=None),
    stored("ab", medium=["GPU"]),
    stored("ab", group_idx=[0]),
    stored("ab", lora_name=["sql"]),
    removed("ab").__class__([{}], "GPU"),
    removed("ab").__class__(None, "GPU"),
    removed("ab").__class__([97], ["GPU"]),
]


@pytest.mark.parametrize("event", ODD, ids=repr)
def test_an_odd_event_passes_unchanged_and_leaves_no_trace(event: Any) -> None:
    ledger = Ledger({"CPU": 2})
    ledger.apply([stored("xy")])
    before = told_again(ledger)
    told = ledger.apply([event])
    assert len(told) == 1
    assert told[0] is event
    assert ledger.odd == 1
    assert told_again(ledger) == before


def test_an_event_without_a_medium_is_about_hbm() -> None:
    ledger = Ledger()
    ledger.apply([stored("ab", medium=None), BlockRemoved([97], None, 0)])
    assert (ledger.held("GPU"), ledger.media()) == (1, ["GPU"])


# --- telling it again


def test_a_picture_does_not_change_with_the_ledger() -> None:
    ledger = Ledger()
    ledger.apply([stored("ab"), stored("a")])
    picture = ledger.freeze()
    ledger.apply([AllBlocksCleared(), stored("xyz")])
    [part] = picture.parts()
    assert part == [stored("ab"), stored("a")]


def test_nothing_held_is_one_part_without_events() -> None:
    picture = Ledger().freeze()
    assert (picture.part_count, list(picture.parts())) == (1, [[]])


def test_parents_are_told_before_children_even_if_they_came_back_later() -> None:
    ledger = Ledger()
    ledger.apply([stored("abcd"), stored("xy", "d"), removed("b"), removed("a"), stored("a"), stored("b", "a")])
    order = [chr(block_hash) for event in told_again(ledger) for block_hash in event.block_hashes]
    assert order == list("abcdxy")


def test_hashes_that_claim_to_be_each_others_parents_end_somewhere() -> None:
    ledger = Ledger()
    ledger.apply([stored("a", "b"), stored("b", "a")])
    assert sorted(event.block_hashes[0] for event in told_again(ledger)) == [97, 98]


def test_parts_have_a_bounded_number_of_blocks() -> None:
    ledger = Ledger()
    letters = "".join(map(chr, range(1000, 1000 + 2 * PART_BLOCKS + 1)))
    ledger.apply([stored(letters), stored(letters[:3])])
    picture = ledger.freeze()
    sizes = [sum(len(event.block_hashes) for event in part) for part in picture.parts()]
    assert picture.part_count == len(sizes) == 3
    assert sizes == [PART_BLOCKS, PART_BLOCKS, 4]


def test_parts_have_a_bounded_number_of_bytes() -> None:
    ledger = Ledger()
    for number in range(100):
        ledger.apply([stored("ab", block_hashes=[number, number + 500], extra_keys=[["x" * 50_000], None])])
    parts = [encode_batch(part, 0.0) for part in ledger.freeze().parts()]
    assert len(parts) > 1
    assert max(map(len, parts)) <= PART_BYTES * 1.1


def test_what_hbm_says_later_of_a_vague_block_is_told_again_after_hbm_lost_it() -> None:
    ledger = Ledger()
    ledger.apply([placeholder("b"), stored("ab"), removed("ab")])
    assert told_again(ledger) == [stored("b", "a", "CPU", extra_keys=[None])]


# --- any walk of an engine, against a model of its tiers


class Consumer:
    """A picker's view of one engine."""

    def __init__(self) -> None:
        self.index = PrefixIndex()
        self.residency: Residency = self.index.publisher("e", "m")
        self.residency.blocks_per_chunk = CHUNK

    def hear(self, events: Sequence[object]) -> None:
        batch = decode_batch(encode_batch(events, 0.0))
        assert not batch.skipped
        self.residency.apply(batch)

    def predictions(self) -> list[tuple[int, int, int]]:
        found = []
        for prompt in PROMPTS:
            tokens = [token for end in range(1, len(prompt) + 1) for token in (end, prompt[end - 1])]
            packed = struct.pack(f"<{len(tokens) + 1}I", *tokens, 0)
            result = match(self.index, Prompt(packed, "m", "salt" if prompt[0] else ""), [self.residency])
            found.append((result.gpu[0], result.cpu[0], result.storage[0]))
        return found


@settings(max_examples=300, deadline=None)
@given(steps, st.booleans())
def test_what_is_published_adds_up_to_what_the_tiers_hold(walk_steps: list[tuple[int, int, int]], stock: bool) -> None:
    walk, ledger, heard = Walk(stock=stock), Ledger({"CPU": CHUNK, "STORAGE": CHUNK}), Copies()
    for step in walk_steps:
        heard.hear(ledger.apply(walk.step(*step)))
    truth = walk.held()
    assert heard.without_empty() == truth
    assert Copies().hear(told_again(ledger)).without_empty() == truth
    assert {medium: ledger.held(medium) for medium in truth} == {medium: len(held) for medium, held in truth.items()}
    assert ledger.odd == 0


@settings(max_examples=150, deadline=None)
@given(steps, st.booleans(), st.integers(0, 60))
def test_a_picker_that_joins_late_predicts_as_one_that_heard_everything(
    walk_steps: list[tuple[int, int, int]], stock: bool, joined: int
) -> None:
    walk, ledger, early, late = Walk(stock=stock), Ledger({"CPU": CHUNK, "STORAGE": CHUNK}), Consumer(), Consumer()
    for number, step in enumerate([*walk_steps, *[(5, 0, 1)] * 100]):  # in the end HBM loses copy after copy
        if number == joined:
            for part in ledger.freeze().parts():
                late.hear(part)
        published = ledger.apply(walk.step(*step))
        early.hear(published)
        if number >= joined:
            late.hear(published)
            if number % 4 == 0:
                assert late.predictions() == early.predictions()
