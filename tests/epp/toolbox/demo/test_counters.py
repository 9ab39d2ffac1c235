from __future__ import annotations

from epp.toolbox.demo.counters import EngineCounters, Found, parse_counters

PAGE = """\
# HELP vllm:prefix_cache_hits_total Prefix cache hits, in terms of number of cached tokens.
# TYPE vllm:prefix_cache_hits_total counter
vllm:prefix_cache_hits_total{engine="0",model_name="tiny"} 416.0
vllm:prefix_cache_hits_created{engine="0",model_name="tiny"} 1.795959568073957e+09
vllm:external_prefix_cache_hits_total{engine="0",model_name="tiny"} 32.0
vllm:prompt_tokens_total{engine="0",model_name="tiny"} 2.79e+03
vllm:request_success_total{engine="0",finished_reason="stop",model_name="tiny"} 3.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="tiny"} 22.0
"""


def test_counters_are_read_by_vllms_names_and_summed_over_labels() -> None:
    assert parse_counters(PAGE) == EngineCounters(requests=25, prompt_tokens=2790, hbm_tokens=416, lower_tokens=32)


def test_what_no_tier_held_was_recomputed() -> None:
    assert parse_counters(PAGE).recomputed_tokens == 2790 - 416 - 32


def test_what_was_found_is_told_apart_by_tier_and_adds_up() -> None:
    assert parse_counters(PAGE).found == Found(hbm=416, lower=32)
    assert Found(416, 32) + Found(16, 64) == Found(432, 96)
    assert Found(416, 32).total == 448


def test_a_page_without_the_families_counts_nothing() -> None:
    assert parse_counters("up 1\n") == EngineCounters()


def test_a_phase_is_the_difference_of_two_readings() -> None:
    later, earlier = EngineCounters(5, 100, 40, 20), EngineCounters(2, 30, 10, 5)
    assert later - earlier == EngineCounters(3, 70, 30, 15)
    assert (later - earlier) + earlier == later
