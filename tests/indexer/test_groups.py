"""Engines with several KV-cache groups: what they tell of them, and what can be expected then. That the rules are
vLLM's own is proven by vLLM itself: tests/connector/vllm/test_hit_rule.py."""

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.index import PrefixIndex
from indexer.keys import encode_extras
from indexer.match import Prompt, match
from indexer.wire import BlockRemoved, BlocksCleared, BlockStored, Groups, Lookup, Notes, Tier, Tiers

SIZE = 2
FULL = Lookup([0], "full_attention", SIZE)
WINDOW = Lookup([1], "sliding_window", SIZE, window=2 * SIZE + 1)
"""Two blocks must be held before the place where a hit ends."""
STATE = Lookup([1], "mamba", SIZE)


def pack(ids):
    return struct.pack(f"<{len(ids)}I", *ids)


def text(blocks):
    return list(range(100, 100 + blocks * SIZE))


def name(end):
    """The engine's hash of what ends with the text's block of that number (blocks of `SIZE`)."""
    return 1000 + end


def stored(lookup, first, end, tier="gpu", group=None, **changes):
    """Blocks `first` to `end`, counted in `SIZE`, of a lookup's group."""
    step = lookup.block // SIZE
    fields = {
        "hashes": [name(number) for number in range(first + step, end + 1, step)],
        "parent": name(first) if first else None,
        "tokens": pack(text(end)[first * SIZE :]),
        "block_size": lookup.block,
        "tier": tier,
        "extras": {},
        "group": lookup.groups[0] if group is None else group,
        "kind": lookup.kind,
        "window": lookup.window if "window" in lookup.kind else 0,
    }
    return BlockStored(**fields | changes)


def removed(lookup, *ends, tier="gpu"):
    return BlockRemoved([name(end) for end in ends], tier, lookup.groups[0])


def tell(pod, *lookups, alignment=SIZE, chunk=0):
    tiers = Tiers(cpu=Tier(chunk=chunk), storage=Tier(chunk=chunk)) if chunk else None
    pod.told(Notes(groups=Groups(list(lookups), alignment), tiers=tiers))


def cached(pod, tokens, **prompt):
    """Tokens that HBM, CPU RAM and storage would serve of the text's first `tokens`."""
    ids = [*text(40)][:tokens]
    found = match(pod._index, Prompt(pack(ids), **prompt), [pod])
    served = tuple(sum(column) for column in found.tokens([pod.block_size])[:3])
    assert sum(served) == found.cached_tokens(0)
    return served


# --- what is told


def test_a_group_that_holds_nothing_is_known_when_it_is_told(pod):
    pod.apply([stored(FULL, 0, 4)])
    assert cached(pod, 9) == (8, 0, 0)
    tell(pod, FULL, WINDOW)
    assert cached(pod, 9) == (0, 0, 0)
    pod.apply([stored(WINDOW, 0, 4)])
    assert cached(pod, 9) == (8, 0, 0)


def test_a_group_of_full_attention_that_holds_nothing_counts_too(pod):
    tell(pod, Lookup([0, 1], "full_attention", SIZE))
    pod.apply([stored(FULL, 0, 4)])
    assert (cached(pod, 9), pod.held("gpu")) == ((0, 0, 0), 0)
    pod.apply([stored(FULL, 0, 4, group=1)])
    assert (cached(pod, 9), pod.held("gpu")) == ((8, 0, 0), 4)


def test_groups_whose_blocks_are_never_reused_are_not_needed(pod):
    tell(pod, FULL, Lookup([1, 2], "scratch", 1))
    pod.apply([stored(FULL, 0, 4), stored(FULL, 0, 4, group=2)])
    assert (cached(pod, 9), pod.skipped) == ((8, 0, 0), {"not_a_prefix_cache": 1})


@pytest.mark.parametrize(
    "lookups",
    [
        [],
        [Lookup([], "full_attention", SIZE)],
        [Lookup([32], "full_attention", SIZE)],
        [FULL, Lookup([1], "sliding_window", SIZE)],
        [FULL, Lookup([1], "sliding_window", 3, window=9)],
        [FULL, Lookup([1], "chunked_local_attention", SIZE, window=3)],
        [FULL, Lookup([1], "cross_attention", SIZE)],
    ],
    ids=["none", "of no group", "too many", "no window", "a window out of line", "a chunk out of line", "another kind"],
)
def test_where_the_rule_cannot_be_known_nothing_is_expected(pod, lookups):
    pod.apply([stored(FULL, 0, 4)])
    tell(pod, *lookups)
    pod.apply([stored(FULL, 0, 6)])
    assert cached(pod, 13) == (0, 0, 0)


def test_what_is_told_is_of_one_life(pod):
    tell(pod, FULL, STATE)
    pod.restart()
    pod.apply([stored(FULL, 0, 4)])
    assert cached(pod, 9) == (8, 0, 0)


def test_a_reset_is_no_new_life(pod):
    tell(pod, FULL, STATE)
    pod.apply([BlocksCleared(), stored(FULL, 0, 4)])
    assert cached(pod, 9) == (0, 0, 0)


# --- rules


def test_a_hit_ends_at_a_state_that_is_held(pod):
    pod.apply([stored(FULL, 0, 8), stored(STATE, 0, 8, hashes=[name(3), name(6)])])
    assert not pod.skipped
    assert [cached(pod, tokens)[0] for tokens in (17, 13, 12, 7, 6)] == [12, 12, 6, 6, 0]
    pod.apply([removed(STATE, 6)])
    assert cached(pod, 17) == (6, 0, 0)


def test_a_chunk_of_local_attention_reaches_back_to_its_own_start(pod):
    local = Lookup([1], "chunked_local_attention", SIZE, window=4 * SIZE)
    tell(pod, FULL, local)
    pod.apply([stored(FULL, 0, 8), stored(local, 0, 8)])
    pod.apply([removed(local, 1, 6)])
    assert [cached(pod, 2 * blocks + 1)[0] // SIZE for blocks in range(1, 9)] == [0, 0, 0, 4, 5, 5, 5, 8]


@pytest.mark.parametrize("tokens", [9, 10, 11])
def test_eagle_has_the_last_block_of_a_hit_computed_anew(pod, tokens):
    tell(pod, Lookup([0], "full_attention", SIZE, eagle=True))
    pod.apply([stored(FULL, 0, 10)])
    assert cached(pod, tokens) == ((tokens - 1) // SIZE * SIZE - SIZE, 0, 0)


# --- blocks of several sizes

LARGE = Lookup([0], "full_attention", 2 * SIZE)


def test_hits_end_where_blocks_of_all_sizes_do(pod):
    tell(pod, LARGE, WINDOW, alignment=2 * SIZE)
    pod.apply([stored(LARGE, 0, 6), stored(WINDOW, 0, 6)])
    assert (pod.block_size, cached(pod, 13), cached(pod, 12)) == (SIZE, (12, 0, 0), (8, 0, 0))
    pod.apply([removed(WINDOW, 5)])
    assert cached(pod, 13) == (8, 0, 0)


def test_of_blocks_of_a_window_is_told_how_many_are_before_them(pod):
    tell(pod, LARGE, WINDOW, alignment=2 * SIZE)
    pod.apply([stored(LARGE, 0, 6), stored(WINDOW, 2, 6, hashes=[name(5), name(6)], lead=2)])
    assert (cached(pod, 13), pod.parked) == ((12, 0, 0), 0)


@pytest.mark.parametrize("lead", [1, 3, 1 << 16])
def test_blocks_before_them_that_the_tokens_do_not_cover_make_an_event_useless(pod, lead):
    tell(pod, LARGE, WINDOW, alignment=2 * SIZE)
    pod.apply([stored(LARGE, 0, 6), stored(LARGE, 0, 6, lead=lead), stored(WINDOW, 0, 6, lead=lead)])
    assert (cached(pod, 13), pod.skipped) == ((0, 0, 0), {"tokens_do_not_fill_blocks": 2})


def test_without_being_told_nothing_is_expected_once_that_shows(pod):
    pod.apply([stored(FULL, 0, 4), stored(FULL, 0, 4, kind="mla_attention", group=1)])
    assert cached(pod, 9) == (8, 0, 0)
    pod.apply([stored(LARGE, 0, 4)])
    assert cached(pod, 9) == (0, 0, 0)
    pod.apply([stored(FULL, 0, 6), stored(FULL, 0, 6, group=1)])
    assert cached(pod, 9) == (0, 0, 0)


def test_a_salt_is_in_the_first_unit(pod):
    tell(pod, LARGE, WINDOW, alignment=2 * SIZE)
    salted = {0: encode_extras(["s"])}
    pod.apply([stored(LARGE, 0, 6, extras=salted), stored(WINDOW, 0, 6, extras=salted)])
    assert (cached(pod, 13), cached(pod, 13, salt="s")) == ((0, 0, 0), (12, 0, 0))


def test_text_never_hits_blocks_with_media_whose_removal_leaves_nothing(pod, index):
    tell(pod, LARGE, WINDOW, alignment=2 * SIZE)
    picture = encode_extras([["picture", 1]])
    events = [stored(LARGE, 0, 6, extras={1: picture}), stored(WINDOW, 0, 6, extras={3: picture})]
    pod.apply(events)
    assert cached(pod, 13) == (4, 0, 0)
    pod.apply([removed(LARGE, 2, 4, 6), removed(WINDOW, *range(1, 7))])
    assert (len(index), pod.parked) == (0, 0)
    pod.apply(events[::-1])
    pod.apply([removed(WINDOW, *range(1, 7)), removed(LARGE, 2, 4, 6)])
    assert (len(index), pod.parked) == (0, 0)


# --- below HBM


def test_below_hbm_the_last_chunks_of_a_window_are_enough(pod):
    tell(pod, FULL, WINDOW, chunk=2)
    pod.apply([stored(FULL, 0, 8, "cpu"), stored(WINDOW, 4, 8, "cpu", parent=None, tokens=b"", block_size=0)])
    assert cached(pod, 17) == (0, 16, 0)
    pod.apply([BlockRemoved([name(5), name(6)], "cpu", 1)])
    assert cached(pod, 17) == (0, 0, 0)
    pod.apply([stored(WINDOW, 4, 6, "storage", parent=None, tokens=b"", block_size=0)])
    assert sum(cached(pod, 17)) == 16


def test_where_windows_are_loaded_the_last_token_is_computed_anew(pod):
    tell(pod, FULL, WINDOW, chunk=2)
    for lookup in (FULL, WINDOW):
        pod.apply([stored(lookup, 0, 4, "cpu"), stored(lookup, 0, 8, "storage")])
    assert cached(pod, 16) == (0, 8, 7)
    pod.apply([stored(lookup, 0, 2) for lookup in (FULL, WINDOW)])
    assert cached(pod, 16) == (4, 4, 7)
    assert cached(pod, 17) == (4, 4, 8)


def test_a_load_of_states_ends_with_a_chunk_before_the_last_token(pod):
    tell(pod, FULL, STATE, chunk=2)
    for lookup in (FULL, STATE):
        pod.apply([stored(lookup, 0, 8, "cpu")])
    assert (cached(pod, 16), cached(pod, 17)) == ((0, 12, 0), (0, 16, 0))


def test_of_an_engine_that_does_not_tell_nothing_is_expected_there(pod):
    pod.blocks_per_chunk = 1
    for lookup in (FULL, WINDOW):
        pod.apply([stored(lookup, 0, 2), stored(lookup, 0, 8, "cpu")])
    assert (cached(pod, 17), pod.skipped) == ((4, 0, 0), {"not_a_prefix_cache": 1})


# --- whatever comes

KINDS = ["full_attention", "sliding_window", "sliding_window_mla", "mamba", "chunked_local_attention", "scratch", "odd"]
numbers = st.integers(0, 12)
lookups = st.builds(
    Lookup,
    groups=st.lists(st.integers(0, 3), max_size=3),
    kind=st.sampled_from(KINDS),
    block=st.sampled_from([1, 2, 3, 4, 8]),
    window=st.integers(0, 20),
    eagle=st.booleans(),
    draft=st.lists(st.integers(0, 3), max_size=2),
)
notes = st.builds(
    lambda told, alignment, chunk: Notes(groups=Groups(told, alignment), tiers=Tiers(cpu=Tier(chunk=chunk))),
    st.lists(lookups, max_size=4),
    st.sampled_from([1, 2, 4, 6, 8]),
    st.integers(1, 3),
)
events = st.builds(
    lambda lookup, first, blocks, tier, group, lead, extras: stored(
        Lookup([0], lookup.kind, 2 * lookup.block, lookup.window), first, first + blocks * lookup.block, tier, group,
        lead=lead, extras=extras,
    ),
    lookups, numbers, st.integers(0, 3), st.sampled_from(["gpu", "cpu"]), st.integers(0, 3), st.integers(0, 2),
    st.dictionaries(st.integers(0, 2), st.sampled_from([encode_extras(["s"]), encode_extras([["p", 1]])])),
)  # fmt: skip
removals = st.builds(
    lambda ends, tier, group: BlockRemoved(list(map(name, ends)), tier, group),
    st.lists(numbers, max_size=4), st.sampled_from(["gpu", "cpu"]), st.integers(0, 3),
)  # fmt: skip


@settings(max_examples=250, deadline=None)
@given(st.lists(notes | events | removals, max_size=12), st.integers(0, 40))
def test_whatever_is_told_nothing_raises_and_no_more_than_the_prompt_is_expected(told, tokens):
    pod = PrefixIndex().publisher("pod")
    for heard in told:
        if isinstance(heard, Notes):
            pod.told(heard)
        else:
            pod.apply([heard])
        assert 0 <= sum(cached(pod, tokens)) <= tokens
