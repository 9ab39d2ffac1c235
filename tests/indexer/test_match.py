"""The fleet-wide match against the rule as one would write it for one engine."""

import struct
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer import steps
from indexer.index import PrefixIndex
from indexer.match import Prompt, match
from indexer.plan import plan
from indexer.wire import BlockStored

SIZE = 2
TIERS = ("gpu", "cpu", "storage", "cxl")


def pack(ids):
    return struct.pack(f"<{len(ids)}I", *ids)


def rule(prompt_tokens, chunk, held):
    """Blocks per tier. `held`: tier → set of block numbers."""
    whole = prompt_tokens // SIZE
    gpu = 0
    while gpu < (prompt_tokens - 1) // SIZE and gpu in held["gpu"]:
        gpu += 1
    served = dict.fromkeys(TIERS, 0)
    served["gpu"] = gpu
    at = gpu // chunk
    gained = []
    while (at + 1) * chunk <= whole:
        last = (at + 1) * chunk - 1
        tier = next((tier for tier in TIERS[1:] if last in held[tier]), None)
        if tier is None:
            break
        gained += [tier for block in range(at * chunk, last + 1) if block >= gpu]
        at += 1
    if len(gained) >= chunk:
        for tier in gained:
            served[tier] += 1
    return tuple(served.values())


def hold(residency, held, text):
    """Announce single blocks of the text, which have to be known first; what is not held is taken back."""
    whole = len(text) // SIZE
    names = list(range(whole))
    residency._index.publisher("teacher").apply([BlockStored(names, None, pack(text), SIZE, extras={})])
    residency.apply([BlockStored(names, None, pack(text), SIZE, extras={})])
    residency.clear(["gpu"])
    for tier in TIERS:
        residency.apply([BlockStored(sorted(held[tier]), tier=tier)])


blocks = st.integers(0, 12)
holdings = st.fixed_dictionaries(
    {tier: st.sets(blocks) | st.integers(0, 13).map(lambda n: set(range(n))) for tier in TIERS}
)
engines = st.tuples(st.sampled_from([1, 2, 3, 4]), holdings)


@settings(max_examples=300, deadline=None)
@given(st.lists(engines, min_size=1, max_size=6), st.integers(0, 27))
def test_every_engine_gets_what_the_rule_says(fleet, prompt_tokens):
    text = list(range(26))
    index = PrefixIndex()
    residencies = []
    for number, (chunk, held) in enumerate(fleet):
        residency = index.publisher(str(number))
        residency.blocks_per_chunk = chunk
        hold(residency, held, text)
        residencies.append(residency)
    prompt = [*text, 99][:prompt_tokens]
    found = match(index, Prompt(pack(prompt)), residencies)
    for i, (chunk, held) in enumerate(fleet):
        expected = rule(len(prompt), chunk, held)
        assert (found.gpu[i], found.cpu[i], found.storage[i], found.other[i]) == expected
        assert found.blocks(i) == sum(expected)
        assert found.cached_tokens(i) == sum(expected) * SIZE


@settings(max_examples=100, deadline=None)
@given(st.lists(engines, min_size=1, max_size=6), st.lists(st.integers(0, 27), min_size=1, max_size=6))
@pytest.mark.parametrize("remembered", [1, 2, 5])
def test_what_is_remembered_of_prompts_before_changes_nothing(remembered, fleet, prompts):
    index = PrefixIndex()
    residencies = [index.publisher(str(number)) for number in range(len(fleet))]
    for residency, (chunk, held) in zip(residencies, fleet, strict=True):
        residency.blocks_per_chunk = chunk
        hold(residency, held, list(range(26)))
    groups = plan(index, residencies)
    for tokens in prompts * 2:
        prompt = Prompt(pack([*range(26), 99][:tokens]))
        index.plans.clear()
        afresh = match(index, prompt, residencies)
        with patch.object(steps, "MAX_STEPS", remembered), patch.object(steps, "MAX_SETS", remembered):
            for _ in range(3):
                assert match(index, prompt, residencies, groups) == afresh


def fleet_of(*held, chunk=1, text=range(16)):
    index = PrefixIndex()
    residencies = [index.publisher(str(number)) for number in range(len(held))]
    for residency, tiers in zip(residencies, held, strict=True):
        residency.blocks_per_chunk = chunk
        hold(residency, {tier: set(range(tiers.get(tier, 0))) for tier in TIERS}, list(text))
    return index, residencies


def columns(index, residencies, prompt_tokens):
    found = match(index, Prompt(pack(range(prompt_tokens))), residencies)
    return found.gpu, found.cpu, found.storage


def test_one_token_is_always_computed_from_hbm_but_a_load_may_reach_the_last():
    index, residencies = fleet_of({"gpu": 8}, {"cpu": 8}, {"gpu": 8, "cpu": 8}, {"gpu": 3, "cpu": 8})
    assert columns(index, residencies, 16) == ([7, 0, 7, 3], [0, 8, 1, 5], [0, 0, 0, 0])
    assert columns(index, residencies, 15) == ([7, 0, 7, 3], [0, 7, 0, 4], [0, 0, 0, 0])


def test_a_load_gains_at_least_a_chunk():
    index, residencies = fleet_of({"gpu": 3, "cpu": 4}, {"gpu": 3, "cpu": 8}, {"gpu": 4, "cpu": 8}, chunk=4)
    assert columns(index, residencies, 17) == ([3, 3, 4], [0, 5, 4], [0, 0, 0])


def test_storage_goes_on_where_cpu_ends_and_cpu_comes_first():
    index, residencies = fleet_of({"gpu": 1, "cpu": 3, "storage": 6}, {"storage": 2})
    assert columns(index, residencies, 17) == ([1, 0], [2, 0], [3, 2])


def test_engines_of_different_sizes_roots_and_chunks_are_matched_side_by_side():
    index = PrefixIndex()
    text = list(range(24))
    small, large, adapter = (index.publisher(name) for name in ("small", "large", "adapter"))
    small.apply([BlockStored(list(range(12)), None, pack(text), 2, extras={})])
    large.apply([BlockStored([100, 101, 102], None, pack(text), 8, extras={})])
    adapter.apply([BlockStored(list(range(200, 212)), None, pack(text), 2, extras={}, lora_name="sql")])
    unknown = index.publisher("unknown")
    fleet = [small, large, adapter, unknown]
    prompt = Prompt(pack([*text, 1]))
    found = match(index, prompt, fleet)
    assert [found.cached_tokens(i) for i in range(4)] == [24, 24, 0, 0]
    found = match(index, Prompt(prompt.tokens, "sql"), fleet)
    assert [found.cached_tokens(i) for i in range(4)] == [0, 0, 24, 0]


def test_candidates_may_be_any_subset_in_any_order():
    index, residencies = fleet_of({"gpu": 1}, {"gpu": 5, "cpu": 6}, {"gpu": 3}, {})
    assert columns(index, [residencies[2], residencies[3], residencies[1]], 17) == ([3, 0, 5], [0, 0, 1], [0, 0, 0])
    assert columns(index, residencies[:1], 17)[0] == [1]
    assert columns(index, [], 17)[0] == []


def test_a_set_of_candidates_seen_before_follows_what_changes():
    index, residencies = fleet_of({"gpu": 4}, {"gpu": 2})
    assert columns(index, residencies, 17)[0] == [4, 2]
    residencies[0].clear(["gpu"])
    assert columns(index, residencies, 17)[0] == [0, 2]
    residencies[0].apply([BlockStored([0, 1, 2], tier="gpu")])
    residencies[1].apply([BlockStored([2, 3], tier="cpu")])
    assert columns(index, residencies, 17) == ([3, 2], [0, 2], [0, 0])
    residencies[1].blocks_per_chunk = 8
    assert columns(index, residencies, 17)[1] == [0, 0]
    residencies[1].close()
    assert columns(index, residencies, 17)[0] == [3, 0]


@pytest.mark.parametrize("blocks", [63, 64, 65, 500])
def test_long_prompts(blocks):
    text = list(range(blocks * SIZE))
    index, residencies = fleet_of({"gpu": blocks}, {"gpu": blocks - 5, "cpu": blocks - 2}, {"gpu": 1}, {}, text=text)
    found = match(index, Prompt(pack([*text, 1])), residencies)
    assert found.gpu == [blocks, blocks - 5, 1, 0]
    assert found.cpu == [0, 3, 0, 0]


@pytest.mark.parametrize("tier", ["gpu", "cpu", "storage"])
def test_a_prompt_of_120_000_tokens_that_is_all_held_is_found_to_the_last_block(tier):
    index = PrefixIndex()
    pod, text, step = index.publisher("pod"), pack(range(120_000)), 500
    for first in range(0, 7500, step):  # as chunked prefill announces it
        tokens = text[first * 64 : (first + step) * 64]
        parent = first - 1 if first else None
        pod.apply([BlockStored(list(range(first, first + step)), parent, tokens, 16, tier, extras={})])
    for prompt in (text + pack([1]), text + pack(range(40))):
        assert match(index, Prompt(prompt), [pod]).cached_tokens(0) == 120_000


@pytest.mark.parametrize("hole", [0, 250, 499])
def test_nothing_behind_a_hole_is_found(hole):
    text, held = list(range(500 * SIZE)), set(range(500)) - {hole}
    index = PrefixIndex()
    pods = {tier: index.publisher(tier) for tier in (*TIERS, "whole")}
    for tier, pod in pods.items():
        hold(pod, {name: held if name == tier else set() for name in TIERS}, text)
    hold(pods["whole"], {"gpu": held, "cpu": {hole}, "storage": set(), "cxl": set()}, text)
    found = match(index, Prompt(pack([*text, 1])), list(pods.values()))
    assert [found.blocks(i) for i in range(5)] == [hole, hole, hole, hole, hole + 1]


def test_keys_are_computed_once_for_each_size_and_root():
    prompt = Prompt(pack(range(100)))
    assert len(prompt) == 100
    assert prompt.keys(2, 5) is prompt.keys(2, 5)
    assert len(prompt.keys(2, 5)) == 50
    assert len(prompt.keys(3, 5)) == 33
    assert prompt.keys(2, 5) != prompt.keys(2, 6)


def test_a_salt_is_in_the_keys():
    assert not set(Prompt(pack(range(8)), salt="a").keys(2, 5)) & set(Prompt(pack(range(8))).keys(2, 5))


def test_many_candidate_sets_do_not_pile_up():
    index, residencies = fleet_of(*[{"gpu": 1}] * 12)
    for number in range(300):
        columns(index, [residency for i, residency in enumerate(residencies) if number >> i & 1], 17)
    assert len(index.plans) <= 64


def test_a_hot_prefix_is_found_wherever_it_is_however_many_hold_it():
    index = PrefixIndex()
    text, fleet = list(range(8 * SIZE + 1)), []
    for name in range(300):
        engine = index.publisher(str(name))
        for tier in ("gpu", "cpu", "storage"):
            engine.apply([BlockStored([*range(8)], None, pack(text[:-1]), SIZE, tier, extras={})])
        fleet.append(engine)
    for engine in fleet[::2]:
        engine.clear(["gpu"])
    found = match(index, Prompt(pack(text)), fleet)
    assert (found.gpu, found.cpu) == ([0, 8] * 150, [8, 0] * 150)
