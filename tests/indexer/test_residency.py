import hashlib
import pickle
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.index import PrefixIndex
from indexer.keys import encode_extras
from indexer.match import Prompt, match
from indexer.parking import MAX_BLOCKS
from indexer.residency import MAX_OTHER_TIERS
from indexer.wire import BlockRemoved, BlocksCleared, BlockStored, Notes, Tier, Tiers

SIZE = 2


def pack(ids):
    return struct.pack(f"<{len(ids)}I", *ids)


def tokens(blocks, start=0):
    """Of some made-up text: blocks `start` to `start + blocks`."""
    return list(range(100 + start * SIZE, 100 + (start + blocks) * SIZE))


def names(blocks, start=0):
    """What the engine calls those blocks."""
    return list(range(1000 + start, 1000 + start + blocks))


def stored(blocks=1, start=0, tier="gpu", **changes):
    """The engine's event for the text's blocks from `start`. Below HBM engines leave extra keys out."""
    fields = {
        "hashes": names(blocks, start),
        "parent": names(1, start - 1)[0] if start else None,
        "tokens": pack(tokens(blocks, start)),
        "block_size": SIZE,
        "tier": tier,
        "extras": {} if tier == "gpu" else None,
    }
    return BlockStored(**{**fields, **changes})


def placeholder(*hashes, tier="cpu", **changes):
    return BlockStored(hashes=list(hashes), tier=tier, **changes)


def removed(blocks=1, start=0, tier="gpu", **changes):
    return BlockRemoved(names(blocks, start), tier, **changes)


def runs(residency, blocks=8, **prompt):
    """(HBM, CPU, storage) blocks that serve the text; one more token keeps the last block eligible for HBM."""
    found = match(residency._index, Prompt(pack([*tokens(blocks), 1]), **prompt), [residency])
    return found.gpu[0], found.cpu[0], found.storage[0]


# --- copies


def test_a_block_stays_until_its_last_copy_is_removed(pod):
    pod.apply([stored(3), stored(3), removed(3)])
    assert runs(pod) == (3, 0, 0)
    pod.apply([removed(3)])
    assert runs(pod) == (0, 0, 0)


def test_tiers_count_their_copies_apart(pod):
    pod.apply([stored(2), stored(2), stored(2, tier="cpu"), removed(2, tier="cpu")])
    assert runs(pod) == (2, 0, 0)
    pod.apply([stored(2, tier="cpu"), removed(2), removed(2)])
    assert runs(pod) == (0, 2, 0)


def test_removing_what_is_unknown_is_ignored_and_leaves_no_debt(pod):
    pod.apply([removed(3), removed(3), stored(3), removed(3), removed(3), stored(3)])
    assert runs(pod) == (3, 0, 0)
    pod.apply([removed(3)])
    assert runs(pod) == (0, 0, 0)


def test_a_removal_takes_each_of_its_hashes_for_itself(pod):
    pod.apply([stored(3), stored(1), BlockRemoved([*names(3), 5], "gpu")])
    assert runs(pod) == (1, 0, 0)


def test_a_hash_twice_in_one_event_is_two_copies(pod):
    pod.apply([stored(1), placeholder(*names(1), *names(1)), removed(1, tier="cpu"), removed(1)])
    assert runs(pod) == (0, 1, 0)


def test_clearing_forgets_copies(pod):
    pod.apply([stored(2), stored(2), BlocksCleared(), stored(2), removed(2)])
    assert runs(pod) == (0, 0, 0)


def test_a_session_that_repeats_its_prefix_has_no_second_copy(pod):
    pod.apply([stored(2, repeats=True), stored(3, repeats=True)])
    assert runs(pod) == (3, 0, 0)
    pod.apply([removed(3)])
    assert runs(pod) == (0, 0, 0)


# --- publishers and tiers


def test_publishers_do_not_touch_each_other(index, pod):
    other = index.publisher("other")
    pod.apply([stored(3)])
    other.apply([stored(3)])
    pod.apply([removed(1)])
    assert (runs(pod), runs(other)) == ((0, 0, 0), (3, 0, 0))
    pod.apply([stored(1), BlocksCleared()])
    other.apply([removed(1, start=2)])
    assert (runs(pod), runs(other)) == ((0, 0, 0), (2, 0, 0))


def test_the_life_of_a_block_from_hbm_to_cpu_to_nowhere(index, pod):
    pod.apply([stored(2), placeholder(*names(2)), removed(2)])
    assert runs(pod) == (0, 2, 0)
    assert (pod.held("gpu"), pod.held("cpu")) == (0, 2)
    pod.apply([removed(2, tier="cpu")])
    assert runs(pod) == (0, 0, 0)
    assert len(index) == 0


def test_a_placeholder_may_come_right_after_the_hbm_copy_is_gone(pod):
    pod.apply([stored(2), removed(2), placeholder(*names(2))])
    assert runs(pod) == (0, 2, 0)


def test_hashes_of_blocks_that_nobody_holds_are_forgotten(index, pod, monkeypatch):
    monkeypatch.setattr("indexer.hashes.GRACE", 10)
    for number in range(50):
        pod.apply([stored(hashes=[number], tokens=pack([number, 0])), BlockRemoved([number])])
    assert index.known_hashes == 10


@pytest.mark.parametrize(
    ("event", "left"),
    [
        (BlocksCleared(), (0, 0, 0)),
        (BlocksCleared(("gpu",)), (0, 3, 0)),
        (BlocksCleared(("gpu", "cpu")), (0, 0, 3)),
        (BlocksCleared(("cpu", "storage")), (3, 0, 0)),
        (BlocksCleared(()), (3, 0, 0)),
    ],
)
def test_a_clear_empties_the_tiers_it_names_or_all(pod, event, left):
    pod.apply([stored(3), stored(3, tier="cpu"), stored(3, tier="storage"), event])
    assert runs(pod) == left
    pod.apply([stored(3)])
    assert runs(pod) == (3, 0, 0)


def test_a_closed_publisher_holds_nothing_and_hears_nothing(index, pod):
    pod.apply([stored(3)])
    pod.close()
    pod.close()
    pod.apply([stored(3)])
    assert runs(pod) == (0, 0, 0)
    while index.sweep():
        pass
    assert len(index) == index.known_hashes == 0


def test_a_medium_without_a_name_is_a_tier_of_its_own(index, pod):
    pod.blocks_per_chunk = 1
    pod.apply([stored(3), stored(4, tier="cxl"), removed(2, start=1)])
    found = match(index, Prompt(pack([*tokens(5), 1])), [pod])
    assert (found.gpu, found.cpu, found.storage, found.other) == ([1], [0], [0], [3])


def test_the_number_of_such_tiers_is_limited_but_not_of_the_usual_ones(pod):
    pod.apply([stored(1, tier=f"cxl{i}") for i in range(MAX_OTHER_TIERS + 3)])
    pod.apply([stored(1), stored(1, tier="cpu"), stored(1, tier="storage")])
    assert pod.skipped == {"too_many_tiers": 3}
    assert (pod.held("gpu"), pod.held("cpu"), pod.held("storage")) == (1, 1, 1)


# --- parents


def test_a_child_that_comes_before_its_parent_is_joined(pod):
    pod.apply([stored(2, start=4), stored(2, start=2)])
    assert (runs(pod), pod.parked) == ((0, 0, 0), 4)
    pod.apply([stored(2)])
    assert (runs(pod), pod.parked) == ((6, 0, 0), 0)


def test_copies_and_removals_of_waiting_children_count(pod):
    pod.apply([stored(2, start=1), stored(2, start=1), removed(2, start=1), removed(1, start=2), stored(1)])
    assert runs(pod) == (2, 0, 0)
    pod.apply([removed(1, start=1)])
    assert runs(pod) == (1, 0, 0)


def test_children_that_wait_in_a_cleared_tier_are_forgotten(pod):
    pod.blocks_per_chunk = 1
    pod.apply([stored(2, start=1), stored(2, start=1, tier="cpu"), BlocksCleared(("gpu",)), stored(1)])
    assert runs(pod) == (1, 2, 0)
    pod.apply([stored(2, start=5), BlocksCleared(), stored(5)])
    assert runs(pod) == (5, 0, 0)


def test_a_known_child_needs_no_parent(index, pod):
    index.publisher("other").apply([stored(4)])
    pod.apply([stored(2, start=2)])
    assert pod.parked == 0
    pod.apply([stored(2)])
    assert runs(pod) == (4, 0, 0)


def test_a_child_that_waits_is_told_apart_by_what_another_learns(index, pod):
    other = index.publisher("other")
    pod.apply([stored(1, start=1)])
    other.apply([stored(2)])
    pod.apply([removed(1, start=1), stored(1)])
    assert runs(pod) == (1, 0, 0)


def test_waiting_is_bounded(pod):
    for number in range(MAX_BLOCKS + 100):
        pod.apply([stored(hashes=[number], parent=10**9 + number)])
    assert pod.parked == MAX_BLOCKS
    assert pod.dropped >= 100


# --- placeholders and chunks


def test_placeholders_wait_for_the_event_that_says_what_they_are(pod):
    pod.apply([placeholder(*names(2)), placeholder(*names(2)), removed(1, tier="cpu"), removed(1, start=1, tier="cpu")])
    assert (runs(pod), pod.parked) == ((0, 0, 0), 2)
    pod.apply([stored(2), removed(2)])
    assert (runs(pod), pod.parked) == ((0, 2, 0), 0)
    pod.apply([removed(2, tier="cpu")])
    assert runs(pod) == (0, 0, 0)


def test_a_placeholder_that_is_removed_while_it_waits_never_comes(pod):
    pod.apply([placeholder(*names(2)), removed(2, tier="cpu"), stored(2), removed(2)])
    assert runs(pod) == (0, 0, 0)


def test_a_placeholder_of_a_chunk_stands_for_all_its_blocks(pod):
    pod.blocks_per_chunk = 4
    pod.apply([stored(8), placeholder(names(8)[3]), placeholder(names(8)[7]), removed(8)])
    assert runs(pod) == (0, 8, 0)
    assert runs(pod, blocks=7) == (0, 4, 0)


def test_chunks_that_overlap_announce_shared_blocks_once_each(pod):
    """Two prompts share a chunk's first block: [a b] and [a c]. Evicting one leaves the other whole."""
    pod.apply([stored(2)])
    a, b = names(2)
    other = BlockStored([a, 77], None, pack([*tokens(1), 7, 7]), SIZE, "cpu")
    pod.apply([stored(2, tier="cpu"), BlockStored([77], a, pack([7, 7]), SIZE, extras={}), other, removed(2)])
    pod.apply([BlockRemoved([77, a], "cpu"), BlockRemoved([77], "gpu")])
    assert pod.blocks_per_chunk == 2
    assert runs(pod) == (0, 2, 0)
    pod.apply([BlockRemoved([b, a], "cpu")])
    assert pod.held("cpu") == 0


def test_the_chunk_is_learned_from_the_events_of_the_cpu_tier(pod):
    assert pod.blocks_per_chunk == 1
    pod.apply([stored(8)])
    assert pod.blocks_per_chunk == 1
    pod.apply([stored(4, tier="cpu")])
    assert pod.blocks_per_chunk == 4
    pod.apply([stored(6, tier="cpu")])
    assert pod.blocks_per_chunk == 2


def test_a_cpu_tier_with_extra_keys_has_no_chunks(pod):
    pod.apply([stored(4, tier="cpu", extras={})])
    assert pod.blocks_per_chunk == 1
    assert runs(pod) == (0, 4, 0)


def test_a_chunk_that_was_told_wins(pod):
    pod.blocks_per_chunk = 2
    pod.apply([stored(8), stored(4, tier="cpu")])
    assert pod.blocks_per_chunk == 2


# --- salt, media, adapters


def test_salted_prompts_match_their_own_blocks_only(pod):
    salted = stored(3, extras={0: encode_extras(["tenant"])})
    pod.apply([salted])
    assert runs(pod) == (0, 0, 0)
    assert runs(pod, salt="tenant") == (3, 0, 0)
    assert runs(pod, salt="other") == (0, 0, 0)


def test_a_cpu_event_without_its_salt_is_known_by_its_hash(pod):
    pod.apply([stored(3, extras={0: encode_extras(["tenant"])}), stored(3, tier="cpu"), removed(3)])
    assert runs(pod) == (0, 0, 0)
    assert runs(pod, salt="tenant") == (0, 3, 0)


def test_a_first_block_of_the_cpu_tier_with_an_unknown_hash_may_be_salted_and_waits(pod):
    pod.apply([stored(3, tier="cpu")])
    assert (runs(pod), pod.parked) == ((0, 0, 0), 3)
    pod.apply([stored(1, extras={0: encode_extras(["tenant"])}), removed(1)])
    assert runs(pod) == (0, 0, 0)
    assert runs(pod, salt="tenant") == (0, 3, 0)


def test_blocks_with_an_image_are_not_those_of_their_placeholder_tokens(index, pod):
    other = index.publisher("other")
    pod.apply([stored(3, extras={1: encode_extras(["image-1"])})])
    other.apply([stored(3, hashes=[1000, 7, 8], extras={1: encode_extras(["image-2"])})])
    assert (runs(pod), runs(other)) == ((1, 0, 0), (1, 0, 0))
    assert len(index) == 5


def test_media_are_told_apart_by_their_name_their_place_and_their_form(index, pod):
    """Engines name media by a string, newer ones by a pair with the offset."""
    media = [["image"], [["image", 0]], [["image", 1]], [["other", 0]], [["image", 0], ["other", 1]], [b"image"]]
    for number, items in enumerate(media):
        pod.apply([stored(2, hashes=[10 * number, 10 * number + 1], extras={0: encode_extras(items)})])
    assert len(index) == 2 * len(media)
    assert (runs(pod), runs(pod, salt="tenant")) == ((0, 0, 0), (0, 0, 0))
    pod.apply([BlockRemoved([10]), BlockRemoved([11])])
    assert len(index) == 2 * len(media) - 2


def vllm_hashes(ids):
    parent = hashlib.sha256(pickle.dumps("vllm-none-hash", 5)).digest()
    for start in range(0, len(ids), SIZE):
        parent = hashlib.sha256(pickle.dumps((parent, tuple(ids[start : start + SIZE]), None), 5)).digest()
        yield int.from_bytes(parent[-8:], "big")


def test_unless_its_hash_shows_that_it_is_not(pod):
    hashes = list(vllm_hashes(tokens(3)))
    pod.apply([stored(3, tier="cpu", hashes=hashes)])
    assert (runs(pod), pod.parked) == ((0, 3, 0), 0)


def test_in_the_cpu_tier_a_known_parent_is_enough(pod):
    pod.apply([stored(2), stored(2, start=2, tier="cpu")])
    assert runs(pod) == (2, 2, 0)


def test_adapters_have_blocks_of_their_own(pod):
    pod.apply([stored(3, lora_name="sql"), stored(2, hashes=[1, 2])])
    assert runs(pod, model="sql") == (3, 0, 0)
    assert runs(pod) == (2, 0, 0)
    pod.apply([stored(2, start=3, lora_name="sql")])
    assert runs(pod, model="sql") == (5, 0, 0)


def test_the_cpu_tier_of_an_adapter_waits_for_hashes(pod):
    pod.apply([stored(2, tier="cpu", lora_name="sql", hashes=list(vllm_hashes(tokens(2))))])
    assert (runs(pod, model="sql"), pod.parked) == ((0, 0, 0), 2)


def test_a_model_is_known_by_its_topic_by_its_adapters_or_by_any_alias(index):
    llama, qwen, unnamed = index.publisher("a", "llama"), index.publisher("b", "qwen"), index.publisher("c")
    for pod in (llama, qwen, unnamed):
        pod.apply([stored(3)])
    assert [runs(pod, model="llama") for pod in (llama, qwen, unnamed)] == [(3, 0, 0), (0, 0, 0), (0, 0, 0)]
    assert [runs(pod, model="alias") for pod in (llama, qwen, unnamed)] == [(3, 0, 0)] * 3
    assert index.knows_model("llama")
    assert not index.knows_model("alias")


def test_a_new_model_name_forgets_what_the_old_one_held(pod):
    pod.apply([stored(3)])
    pod.model = "llama"
    assert runs(pod) == (0, 0, 0)
    pod.apply([stored(2)])
    assert runs(pod, model="llama") == (2, 0, 0)


def test_names_are_limited(index, pod, monkeypatch):
    monkeypatch.setattr("indexer.names.MAX_MODELS", 3)  # one of them is nobody's
    pod.apply([stored(1, lora_name=name, hashes=[ord(name)]) for name in "abc"])
    assert pod.skipped == {"too_many_models": 1}
    assert [runs(pod, model=name) for name in "abc"] == [(1, 0, 0), (1, 0, 0), (0, 0, 0)]


# --- engines that disagree


def test_engines_with_equal_hashes_share_what_is_known_of_them(index):
    for number in range(5):
        index.publisher(str(number)).apply([stored(4)])
    assert index.known_hashes == len(index) == 4


def test_an_engine_with_other_hashes_shares_blocks_but_keeps_its_own_names(index, pod):
    other = index.publisher("other")
    pod.apply([stored(3)])
    other.apply([stored(3, hashes=[5, 6, 7])])
    assert len(index) == 3
    assert (runs(pod), runs(other)) == ((3, 0, 0), (3, 0, 0))
    pod.apply([BlockRemoved([5, 6, 7])])
    other.apply([BlockRemoved([6])])
    assert (runs(pod), runs(other)) == ((3, 0, 0), (1, 0, 0))


def test_an_engine_that_means_something_else_by_a_hash_does_not_change_what_others_mean(index, pod):
    liar = index.publisher("liar")
    pod.apply([stored(3)])
    liar.apply([stored(3, tokens=pack([9] * 6))])
    assert (runs(pod), runs(liar)) == ((3, 0, 0), (0, 0, 0))
    pod.apply([placeholder(*names(3))])
    liar.apply([placeholder(*names(3)), removed(3)])
    assert runs(pod) == (3, 0, 0)
    pod.apply([removed(3)])
    assert runs(pod) == (0, 3, 0)
    found = match(index, Prompt(pack([9] * 7)), [pod, liar])
    assert (found.gpu, found.cpu) == ([0, 0], [0, 3])


def test_own_names_are_forgotten_with_their_blocks(index, pod, monkeypatch):
    monkeypatch.setattr("indexer.hashes.GRACE", 0)
    other = index.publisher("other")
    pod.apply([stored(3)])
    other.apply([stored(3, hashes=[5, 6, 7]), BlockRemoved([5, 6])])
    assert index.known_hashes == 4
    other.apply([BlocksCleared()])
    assert index.known_hashes == 3


# --- sliding windows, and what is not known at all

WINDOW = {"kind": "sliding_window", "window": 2 * SIZE + 1, "group": 0}
"""Two blocks must be held before the place where a hit ends."""
FULL = {"kind": "full_attention", "group": 1}


def test_a_hit_ends_where_the_window_before_it_is_held(pod):
    pod.apply([stored(6, **WINDOW), stored(6, **FULL)])
    assert runs(pod) == (6, 0, 0)
    pod.apply([removed(3, group=0)])
    assert runs(pod, 6) == (6, 0, 0)
    assert [runs(pod, blocks)[0] for blocks in range(1, 6)] == [0, 0, 0, 0, 5]
    pod.apply([removed(1, start=4, group=0), stored(2, **WINDOW)])
    assert runs(pod) == (2, 0, 0)
    pod.apply([removed(1, start=1, group=0)])
    assert runs(pod) == (1, 0, 0)  # nothing is before the first block
    pod.apply([removed(1, group=1)])
    assert runs(pod) == (0, 0, 0)


def test_every_window_must_be_held(pod):
    longer = WINDOW | {"window": 3 * SIZE + 1, "group": 2}
    pod.apply([stored(6, **WINDOW), stored(6, **FULL), stored(6, **longer)])
    pod.apply([removed(1, start=4, group=0), removed(1, group=2)])
    assert runs(pod) == (4, 0, 0)
    pod.apply([removed(1, start=3, group=2)])
    assert runs(pod) == (0, 0, 0)


def test_vllm_tells_the_tokens_of_blocks_behind_the_window_but_not_their_hashes(pod):
    pod.apply([stored(6, **WINDOW, hashes=names(2, 4)), stored(6, **FULL)])
    assert not pod.skipped
    assert (runs(pod), pod.parked) == ((6, 0, 0), 0)
    assert runs(pod, 5) == (0, 0, 0)
    pod.apply([removed(1, start=5, group=0)])
    assert runs(pod) == (0, 0, 0)


def test_windows_are_forgotten_with_hbm(pod, index):
    pod.apply([stored(3, **WINDOW), stored(3, **FULL), stored(3, tier="cpu", extras={}, **FULL)])
    pod.apply([BlocksCleared(("gpu",))])
    assert runs(pod) == (0, 0, 0)
    pod.apply([stored(3, **FULL)])
    assert runs(pod) == (0, 0, 0)
    pod.apply([stored(3, **WINDOW)])
    assert runs(pod) == (3, 0, 0)
    pod.close()
    while index.sweep():
        pass
    assert (len(index), index.known_hashes) == (0, 0)


def test_below_hbm_windows_are_not_known_so_nothing_is_expected_there(pod):
    pod.apply([stored(4, **WINDOW), stored(2, **FULL)])
    pod.apply([stored(4, tier="cpu", extras={}, **kind) for kind in (WINDOW, FULL)])
    assert runs(pod) == (2, 0, 0)
    assert pod.skipped == {"not_a_prefix_cache": 1}


@pytest.mark.parametrize("first", ["full", "window"])
@pytest.mark.parametrize("hashes", [names(8), names(4)], ids=["all told", "some behind the window"])
def test_of_a_window_in_blocks_of_another_size_nothing_is_known(pod, hashes, first):
    window = stored(4, **WINDOW, block_size=SIZE // 2, hashes=hashes)
    pod.apply([stored(4, **FULL), window] if first == "full" else [window, stored(4, **FULL)])
    pod.apply([window])
    assert runs(pod) == (0, 0, 0)


def test_a_step_may_leave_all_its_blocks_behind_the_window(pod):
    pod.apply([stored(4, **WINDOW), stored(4, **FULL), stored(2, start=4, **WINDOW, hashes=[])])
    assert not pod.skipped
    assert runs(pod) == (4, 0, 0)


@pytest.mark.parametrize("kind", ["sliding_window", "chunked_local_attention", "unknown"])
def test_an_engine_that_needs_a_group_of_unknown_rules_is_not_expected_to_hit(pod, kind):
    full = FULL | {"group": 0}
    pod.apply([stored(4, **full), stored(4, tier="cpu", extras={}, **full)])
    assert runs(pod, 3) == (3, 0, 0)
    pod.apply([stored(4, kind=kind, group=1)])
    assert runs(pod) == (0, 0, 0)


def test_a_group_that_no_event_has_told_of_may_be_of_any_kind(pod):
    pod.apply([stored(4, **FULL)])
    assert runs(pod) == (0, 0, 0)
    pod.apply([stored(3, **FULL | {"group": 0})])
    assert runs(pod) == (3, 0, 0)


# --- sizes, groups, kinds


def test_the_block_size_is_learned_and_changes_only_with_an_empty_cache(pod):
    assert pod.block_size == 0
    pod.apply([placeholder(5)])
    assert pod.block_size == 0
    pod.apply([stored(3)])
    other = BlockStored([9], None, pack(tokens(2)), 4, extras={})
    pod.apply([other])
    assert (pod.block_size, pod.skipped) == (SIZE, {"other_block_size": 1})
    pod.apply([BlocksCleared(), other])
    assert pod.block_size == 4
    assert runs(pod) == (1, 0, 0)


def test_blocks_below_hbm_of_another_size_are_not_indexed(pod):
    pod.apply([stored(3), BlockStored([9], None, pack(tokens(2)), 2 * SIZE, "cpu", extras={})])
    assert (pod.block_size, pod.blocks_per_chunk, pod.skipped) == (SIZE, 1, {"other_block_size": 1})
    pod.apply([BlocksCleared(), BlockStored([9], None, pack(tokens(2)), 2 * SIZE, "cpu", extras={})])
    assert (pod.block_size, pod.skipped) == (SIZE, {"other_block_size": 2})


def test_hbm_has_the_last_word_on_the_block_size(pod):
    pod.apply([BlockStored([9], None, pack(tokens(2)), 2 * SIZE, "cpu", extras={})])
    assert (pod.block_size, pod.held("cpu")) == (2 * SIZE, 1)
    pod.apply([stored(3), stored(3, tier="cpu")])
    assert (pod.block_size, pod.held("cpu")) == (SIZE, 3)
    assert runs(pod) == (3, 0, 0)


def test_no_lane_grows_for_ever(index, pod, monkeypatch):
    monkeypatch.setattr("indexer.residency.MAX_HELD", 5)
    pod.apply([stored(3), stored(1)])
    for number in range(12):
        pod.apply([stored(hashes=[number], tokens=pack([number, 0]), tier="cpu", extras={})])
    assert (pod.held("gpu"), pod.held("cpu")) == (3, 0)
    assert pod.skipped == {"too_many_blocks": 2}
    assert runs(pod) == (3, 0, 0)


def test_an_emptied_cache_may_change_its_block_size_too(pod):
    other = BlockStored([9], None, pack(tokens(2)), 4, extras={})
    pod.apply([stored(3), removed(3), other, stored(3)])
    assert (pod.block_size, pod.skipped) == (4, {"other_block_size": 1})
    assert runs(pod) == (1, 0, 0)


@pytest.mark.parametrize("change", [{"block_size": 0}, {"block_size": 3}, {"hashes": names(2)}, {"hashes": []}])
@pytest.mark.parametrize("before", [[], [placeholder(7, tier="gpu")], [stored(1)]])
def test_tokens_must_fill_the_blocks(pod, before, change):
    """Whatever kinds of events have been found fit before."""
    pod.apply([*before, stored(3, **change), stored(1)])
    assert pod.skipped == {"tokens_do_not_fill_blocks": 1}
    assert runs(pod) == (1, 0, 0)


@pytest.mark.parametrize("kind", ["full_attention", "mla_attention", "sink_full_attention"])
def test_kinds_that_are_a_prefix_cache(pod, kind):
    pod.apply([stored(2, kind=kind), stored(2, start=2, kind=kind, group=0)])
    assert runs(pod) == (4, 0, 0)


@pytest.mark.parametrize(
    "kind", ["sliding_window", "sliding_window_mla", "chunked_local_attention", "cross_attention", "unknown"]
)
def test_other_kinds_are_counted_and_left_out(pod, kind):
    pod.apply([stored(2, kind=kind, group=1), stored(2, kind=kind), removed(2, group=1)])
    assert pod.skipped == {"not_a_prefix_cache": 2}
    assert (pod.block_size, pod.parked) == (0, 0)


def test_a_group_without_a_kind_is_what_it_was_before(pod):
    full = {"kind": "full_attention", "group": 0}
    pod.apply([placeholder(*names(2), group=0), stored(2, **full), placeholder(*names(2), group=0)])
    pod.apply([stored(2, kind="unknown", group=1), placeholder(*names(2), group=1)])
    assert pod.skipped == {"unknown_group": 1, "not_a_prefix_cache": 2}
    pod.apply([removed(2, group=0), removed(2, group=1, tier="cpu")])
    assert (pod.held("gpu"), pod.held("cpu")) == (0, 2)


def test_a_group_may_turn_out_to_be_of_another_kind(pod):
    pod.apply([stored(2, kind="full_attention", group=0), placeholder(*names(1), group=0)])
    pod.apply([stored(2, kind="unknown", group=0), placeholder(*names(2), group=0)])
    assert pod.skipped == {"not_a_prefix_cache": 2}
    assert pod.held("cpu") == 1


def test_a_block_counts_if_all_groups_have_it(pod):
    groups = [{"kind": "full_attention", "group": group} for group in (0, 1)]
    pod.apply([stored(4, **groups[0]), stored(3, **groups[1])])
    assert runs(pod) == (3, 0, 0)
    pod.apply([removed(1, start=1, group=0)])
    assert runs(pod) == (1, 0, 0)
    pod.apply([stored(1, start=1, **groups[0]), removed(1, start=2, group=1)])
    assert runs(pod) == (2, 0, 0)
    assert pod.held("gpu") == 2
    pod.apply([stored(4, tier="cpu", extras={}, **groups[0]), stored(4, tier="cpu", extras={}, **groups[1])])
    assert runs(pod) == (2, 2, 0)


def test_counters(pod):
    pod.apply([stored(3), stored(2, tier="cpu"), removed(1)])
    assert (pod.stored_blocks, pod.removed_blocks) == (5, 1)
    pod.apply([stored(3), removed(1, 2), removed(1, tier="storage")])
    counted = {"stored_blocks": 8, "removed_blocks": 2, "removed_copies": 1, "skipped_removals": 1, "dropped": 0}
    assert pod.counted() == counted


def test_events_are_applied_in_order_whatever_the_batch(index):
    events = [
        stored(4),
        removed(2, start=2),
        stored(2, start=2, tier="cpu"),
        BlocksCleared(("cpu",)),
        stored(1, start=2),
    ]
    one, many = index.publisher("one"), index.publisher("many")
    one.apply(events)
    for event in events:
        many.apply([event])
    assert runs(one) == runs(many) == (3, 0, 0)


def test_holds_and_bits_tell_of_single_blocks(index, pod):
    pod.apply([stored(2), removed(1)])
    prompt = Prompt(pack(tokens(2)))
    first, second = prompt.keys(SIZE, pod.root_for(""))
    assert [pod.holds("gpu", key) for key in (first, second)] == [False, True]
    assert not pod.holds("cpu", second)
    assert index.masks[second] == pod.bits("gpu")


small = st.integers(0, 6)
hashes = st.lists(small, max_size=4)
tiers = st.sampled_from(["gpu", "cpu", "storage", "cxl"])
groups = st.none() | st.integers(0, 2)
kinds = st.sampled_from(["", "full_attention", "mamba", "sliding_window"])
any_event = (
    st.builds(
        BlockStored,
        hashes=hashes,
        parent=st.none() | small,
        tokens=st.lists(small, max_size=6).map(pack),
        block_size=st.integers(0, 3),
        tier=tiers,
        lora_name=st.sampled_from(["", "sql"]),
        extras=st.none() | st.just({}) | st.dictionaries(small, st.binary(max_size=2), max_size=2),
        group=groups,
        kind=kinds,
        window=st.sampled_from([0, 1, 5]),
        repeats=st.booleans(),
    )
    | st.builds(BlockRemoved, hashes=hashes, tier=tiers, group=groups)
    | st.builds(BlocksCleared, tiers=st.none() | st.lists(tiers, max_size=2).map(tuple))
)


pools = st.none() | st.sampled_from(["x", "y"])
any_notes = st.builds(Tier, pool=pools).map(lambda tier: Notes(tiers=Tiers(cpu=tier, storage=tier)))


@given(st.lists(st.tuples(st.integers(0, 1), any_event | any_notes), max_size=40))
def test_whatever_engines_send_nothing_raises_and_nothing_stays(events):
    index = PrefixIndex()
    pods = [index.publisher(name) for name in "ab"]
    for number, event in events:
        if isinstance(event, Notes):
            pods[number].told(event)
        else:
            pods[number].apply([event])
        for pod in pods:
            for tier in pod.tiers():
                assert pod.held(tier) >= 0
            runs(pod)
    for pod in pods:
        pod.close()
    while index.sweep():
        pass
    assert len(index) == index.known_hashes == 0
