"""The engine by its behaviour: what is cached, what is evicted, and what it says on the wire about it."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from connector.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, TierCleared
from connector.sim.hashing import Identity
from connector.sim.model import INSTANT, ServiceModel
from connector.sim.offload import OffloadConfig
from connector.sim.requests import Phase


def tokens(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


def believed(events: list[Event]) -> dict[str, Counter[int]]:
    """What a consumer that counts references holds after these events, per medium."""
    held: dict[str, Counter[int]] = {}
    for event in events:
        if isinstance(event, AllBlocksCleared):
            for tier in event.tiers or []:
                held[tier] = Counter()
        elif isinstance(event, TierCleared):
            held[event.medium] = Counter()
        elif isinstance(event, BlockStored):
            held.setdefault(event.medium, Counter()).update(event.block_hashes)
        else:
            held[event.medium] -= Counter(event.block_hashes)
            held[event.medium] = +held[event.medium]
    return held


def assert_events_tell_the_truth(bench: Any) -> None:
    held = believed(bench.events())
    for medium, residency in bench.engine.residency().items():
        assert held.get(medium, Counter()) == residency, medium


def test_a_repeated_prompt_is_found_up_to_the_block_before_its_last_token(bench: Any) -> None:
    b = bench()
    assert b.ask(tokens(0, 12)).cached_tokens == 0
    assert b.ask(tokens(0, 12)).cached_tokens == 8
    assert b.ask(tokens(0, 13)).cached_tokens == 12


def test_decoding_fills_blocks_that_a_later_prompt_finds(bench: Any) -> None:
    b = bench()
    first = b.ask(tokens(0, 3), max_tokens=10)
    assert b.ask([*first.tokens, 1]).cached_tokens == 12


def test_the_answer_does_not_depend_on_what_was_cached(bench: Any) -> None:
    b = bench(offload=OffloadConfig(cpu_chunks=4))
    cold = b.ask(tokens(0, 13), max_tokens=5)
    warm = b.ask(tokens(0, 13), max_tokens=5)
    assert warm.cached_tokens == 12
    assert warm.tokens == cold.tokens


def test_salted_prompts_share_nothing_with_others(bench: Any) -> None:
    b = bench()
    b.ask(tokens(0, 9))
    assert b.ask(tokens(0, 9), identity=Identity("tenant")).cached_tokens == 0
    assert b.ask(tokens(0, 9), identity=Identity("tenant")).cached_tokens == 8


def test_what_hbm_evicted_comes_back_from_the_cpu_tier(bench: Any) -> None:
    b = bench(offload=OffloadConfig(cpu_chunks=32))
    b.ask(tokens(0, 17))
    b.ask(tokens(100, 32 - 4))
    assert b.ask(tokens(0, 17)).cached_tokens == 16
    assert_events_tell_the_truth(b)


def test_a_load_may_cover_the_whole_prompt_and_the_last_token_is_computed_again(bench: Any) -> None:
    b = bench(offload=OffloadConfig(cpu_chunks=32))
    b.ask(tokens(0, 16))
    b.ask(tokens(100, 32 - 4))
    assert b.ask(tokens(0, 16), max_tokens=2).cached_tokens == 16


def test_only_whole_chunks_come_back_and_only_if_that_gains_a_chunk(bench: Any) -> None:
    b = bench(offload=OffloadConfig(cpu_chunks=32, blocks_per_chunk=2))
    for filler, found in ((31, 8), (28, 4)):  # the shorter one leaves the first block of the prompt in HBM
        b.ask(tokens(0, 13))
        b.ask(tokens(100 * filler, filler))
        assert b.ask(tokens(0, 13)).cached_tokens == found


def test_blocks_filled_while_decoding_are_offloaded_only_on_request(bench: Any) -> None:
    for prompt_only, expected in ((True, 1), (False, 3)):
        b = bench(offload=OffloadConfig(cpu_chunks=32, prompt_only=prompt_only))
        b.ask(tokens(0, 4), max_tokens=9)
        assert len(b.engine.residency()["CPU"]) == expected


def test_a_full_cpu_tier_evicts_the_tail_of_the_oldest_request(bench: Any) -> None:
    b = bench(offload=OffloadConfig(cpu_chunks=4))
    b.ask(tokens(0, 12))
    b.ask(tokens(100, 8))
    removed = [e for e in b.events() if isinstance(e, BlockRemoved) and e.medium == "CPU"]
    third_of_first = b.events()[0].block_hashes[2]
    assert [event.block_hashes for event in removed] == [[third_of_first]]


def test_storage_outlives_the_cpu_tier_and_is_promoted_through_it(bench: Any) -> None:
    b = bench(offload=OffloadConfig(cpu_chunks=4, storage_chunks=-1))
    b.ask(tokens(0, 17))
    b.ask(tokens(100, 17))
    b.ask(tokens(200, 17))
    assert b.ask(tokens(0, 17)).cached_tokens == 16
    assert_events_tell_the_truth(b)


def test_storing_the_end_of_a_prompt_never_evicts_its_beginning(bench: Any) -> None:
    b = bench(offload=OffloadConfig(cpu_chunks=3))
    for prompt in (tokens(0, 9), tokens(100, 5), tokens(0, 13)):
        b.ask(prompt)
    b.engine.reset_prefix_cache(external=False)
    assert b.ask(tokens(0, 13)).cached_tokens == 12


def test_a_load_leaves_the_blocks_that_an_earlier_request_still_needs(bench: Any) -> None:
    b = bench(offload=OffloadConfig(cpu_chunks=32))
    for prompt in (tokens(0, 9), tokens(100, 17)):
        b.ask(prompt)
    b.engine.reset_prefix_cache(external=False)
    first, second = b.request([*tokens(0, 8), *tokens(50, 16)]), b.request(tokens(100, 17))
    b.step()
    assert (first.phase, second.phase) == (Phase.LOADED, Phase.WAITING)
    b.drain()
    assert (first.cached_tokens, second.cached_tokens) == (8, 16)


def test_chunks_are_read_from_storage_one_behind_the_other(bench: Any) -> None:
    model = ServiceModel(1e9, 0, 0, cpu_gbps=1e9, storage_gbps=1, bytes_per_token=10**9)
    b = bench(model=model, offload=OffloadConfig(cpu_chunks=8, storage_chunks=-1))
    b.ask(tokens(0, 9))
    assert b.engine.reset_prefix_cache(external=True)
    began = b.now
    assert b.ask(tokens(0, 9)).cached_tokens == 8
    assert b.now - began == pytest.approx(8, abs=1e-3)


def test_requests_that_promote_more_than_the_cpu_tier_holds_still_end(bench: Any) -> None:
    b = bench(offload=OffloadConfig(cpu_chunks=4, storage_chunks=-1))
    for start in (0, 100):
        b.ask(tokens(start, 29))
    pair = [b.request(tokens(start, 29)) for start in (0, 100)]
    b.drain()
    assert [request.phase for request in pair] == [Phase.FINISHED] * 2
    assert_events_tell_the_truth(b)


def test_a_storage_tier_with_a_capacity_says_what_it_removes(bench: Any) -> None:
    b = bench(offload=OffloadConfig(cpu_chunks=8, storage_chunks=5))
    b.ask(tokens(0, 17))
    b.ask(tokens(100, 17))
    assert sum(b.engine.residency()["STORAGE"].values()) == 5
    assert_events_tell_the_truth(b)


def test_resetting_hbm_leaves_the_cpu_tier_and_the_event_waits_for_the_next_step(bench: Any) -> None:
    b = bench(offload=OffloadConfig(cpu_chunks=8))
    b.ask(tokens(0, 9))
    assert b.engine.reset_prefix_cache(external=False)
    assert not b.engine.has_work
    assert b.ask(tokens(0, 9)).cached_tokens == 8
    assert [e.tiers for e in b.events() if isinstance(e, AllBlocksCleared)] == [["GPU"]]
    assert_events_tell_the_truth(b)


def test_an_external_reset_clears_one_tier_after_the_other_unless_events_are_plain(bench: Any) -> None:
    for plain, told in (
        (False, [AllBlocksCleared(["GPU"]), TierCleared("CPU")]),
        (True, [AllBlocksCleared()]),
    ):
        b = bench(offload=OffloadConfig(cpu_chunks=8), plain_events=plain)
        b.ask(tokens(0, 9))
        assert b.engine.reset_prefix_cache(external=True)
        assert b.engine.take_events() == told
        assert b.ask(tokens(0, 9)).cached_tokens == 0


def test_a_reset_is_refused_while_a_request_holds_blocks(bench: Any) -> None:
    b = bench(offload=OffloadConfig(cpu_chunks=8))
    b.request(tokens(0, 9), max_tokens=3)
    b.step()
    assert not b.engine.reset_prefix_cache(external=True)
    b.drain()
    assert b.ask(tokens(0, 9)).cached_tokens == 8


def test_a_long_prompt_is_computed_in_steps_of_the_token_budget(bench: Any) -> None:
    b = bench(max_num_batched_tokens=8)
    request = b.request(tokens(0, 20))
    assert [[len(event.block_hashes) for event in b.step()] for _ in range(3)] == [[2], [2], [1]]
    assert request.phase is Phase.FINISHED


def test_running_requests_are_limited_and_the_others_wait_in_order(bench: Any) -> None:
    b = bench(max_num_seqs=2)
    requests = [b.request(tokens(100 * i, 4), max_tokens=2) for i in range(4)]
    b.step()
    assert (b.engine.running_count, b.engine.waiting_count) == (2, 2)
    b.drain()
    assert [output.request for output in b.outputs if output.finished] == requests
    assert (b.engine.running_count, b.engine.waiting_count, b.engine.usage) == (0, 0, 0)


def test_a_request_that_finds_no_free_blocks_waits_for_one_that_ends(bench: Any) -> None:
    b = bench()
    first, second = b.request(tokens(0, 20), max_tokens=3), b.request(tokens(100, 20))
    b.step()
    assert (first.phase, second.phase) == (Phase.RUNNING, Phase.WAITING)
    b.drain()
    assert second.phase is Phase.FINISHED


def test_when_decoding_runs_out_of_blocks_the_youngest_starts_over_and_loses_no_token(bench: Any) -> None:
    b = bench()
    pair = [b.request(tokens(100 * i, 15), max_tokens=12) for i in range(2)]
    b.drain()
    alone = [bench().ask(tokens(100 * i, 15), max_tokens=12) for i in range(2)]
    assert b.engine.stats.preemptions > 0
    assert [request.preemptions > 0 for request in pair] == [False, True]
    assert [request.tokens for request in pair] == [request.tokens for request in alone]
    assert_events_tell_the_truth(b)


@pytest.mark.parametrize(("prompt", "max_tokens"), [(33, 1), (16, 17), (0, 1), (4, 0)])
def test_a_request_that_can_never_run_is_refused(bench: Any, prompt: int, max_tokens: int) -> None:
    with pytest.raises(ValueError, match="token"):
        bench().request(tokens(0, prompt), max_tokens=max_tokens)


def test_two_identical_requests_in_one_step_share_their_blocks(bench: Any) -> None:
    b = bench()
    first, second = b.request(tokens(0, 9)), b.request(tokens(0, 9))
    b.drain()
    assert (first.cached_tokens, second.cached_tokens) == (0, 8)


def test_a_second_reader_waits_while_the_first_loads_the_same_chunks(bench: Any) -> None:
    b = bench(offload=OffloadConfig(cpu_chunks=32))
    b.ask(tokens(0, 9))
    b.engine.reset_prefix_cache(external=False)
    first, second = b.request(tokens(0, 9)), b.request(tokens(0, 9))
    b.step()
    assert (first.phase, second.phase) == (Phase.LOADED, Phase.WAITING)
    b.drain()
    assert (first.cached_tokens, second.cached_tokens) == (8, 8)
    assert b.engine.stats.external_hits == 8


def test_steps_and_copies_take_the_time_that_the_model_says(bench: Any) -> None:
    model = ServiceModel(100, decode_s=0.5, overhead_s=0.25, cpu_gbps=1, bytes_per_token=10**9, speed=2)
    b = bench(model=model, offload=OffloadConfig(cpu_chunks=32))
    b.ask(tokens(0, 9), max_tokens=3)
    prefill, decode = (0.25 + 0.09) / 2, (0.25 + 0.5) / 2
    stored_at = prefill + 8 / 2  # the copy starts with the step behind the one that decided it
    assert b.now == pytest.approx(max(prefill + 2 * decode, stored_at))
    b.engine.reset_prefix_cache(external=False)
    began = b.now
    b.ask(tokens(0, 9))
    assert b.now - began == pytest.approx(8 / 2 + (0.25 + 0.01) / 2)


def test_an_abort_frees_everything_in_whatever_phase_it_comes(bench: Any) -> None:
    slow = ServiceModel(1000, 0.01, 0.001, cpu_gbps=1, bytes_per_token=10**8)
    b = bench(model=slow, offload=OffloadConfig(cpu_chunks=32), max_num_seqs=1)
    b.ask(tokens(0, 13))
    b.engine.reset_prefix_cache(external=False)
    loading = b.request(tokens(0, 13), max_tokens=9)
    b.step(meanwhile=lambda: b.engine.abort(loading))
    assert loading.phase is Phase.LOADING
    running, waiting = b.request(tokens(50, 9), max_tokens=9), b.request(tokens(90, 9), max_tokens=9)
    b.step()
    assert (running.phase, waiting.phase) == (Phase.RUNNING, Phase.WAITING)
    for request in (running, waiting, running):
        b.engine.abort(request)
    b.drain()
    assert {request.phase for request in (loading, running, waiting)} == {Phase.FINISHED}
    assert (b.engine.running_count, b.engine.waiting_count, b.engine.usage) == (0, 0, 0)
    assert b.engine.stats.ended == {"length": 1, "abort": 3}
    assert_events_tell_the_truth(b)


def test_an_aborted_prompt_is_offloaded_only_as_far_as_it_was_computed(bench: Any) -> None:
    b = bench(offload=OffloadConfig(cpu_chunks=8), max_num_batched_tokens=10)
    request = b.request(tokens(0, 20))
    b.step()  # ten tokens: two full blocks, and a third that holds two of them
    b.engine.abort(request)
    b.drain()
    assert len(b.engine.residency()["CPU"]) == 2


@pytest.mark.parametrize(
    "offload",
    [
        OffloadConfig(),
        OffloadConfig(cpu_chunks=12),
        OffloadConfig(cpu_chunks=6, blocks_per_chunk=2, prompt_only=False),
        OffloadConfig(cpu_chunks=8, storage_chunks=-1),
        OffloadConfig(cpu_chunks=8, storage_chunks=20),
        OffloadConfig(cpu_chunks=12, self_describing=False),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "model", [INSTANT, ServiceModel(1000, 0.01, cpu_gbps=0.5, storage_gbps=0.1)], ids=["instant", "slow"]
)
def test_under_any_traffic_the_events_add_up_to_what_the_tiers_hold(
    bench: Any, offload: OffloadConfig, model: ServiceModel
) -> None:
    chance = random.Random(5)
    b = bench(model=model, offload=offload, hbm_blocks=14, max_num_batched_tokens=16)
    trunks = [tokens(1000 * i, 30) for i in range(4)]
    live = []
    for _ in range(150):
        trunk = chance.choice(trunks)
        prompt = trunk[: chance.randrange(1, 31)] + [chance.randrange(9) for _ in range(chance.choice([0, 3]))]
        live.append(b.request(prompt, chance.choice([1, 1, 12])))
        for _ in range(chance.randrange(4)):
            b.step()
        if chance.random() < 0.1:
            b.engine.abort(chance.choice(live))
        if chance.random() < 0.05:
            b.drain()
            b.engine.reset_prefix_cache(external=chance.random() < 0.5)
    b.drain()
    b.ask([7])
    assert_events_tell_the_truth(b)
    assert all(request.phase is Phase.FINISHED for request in live)
    assert b.engine.usage == 0
