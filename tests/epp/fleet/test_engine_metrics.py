"""Load figures out of engines' metric pages, real and broken."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.fleet.endpoint import EngineLoad
from epp.fleet.engine_metrics import ENGINES, NotAnEngine, engine_of, read_load

VLLM_PAGE = (Path(__file__).parent / "resources" / "vllm-0.33.metrics.txt").read_bytes()
NOTHING = EngineLoad()
SMALL = b"vllm:num_requests_waiting 3\nvllm:num_requests_running 2\nvllm:kv_cache_usage_perc 0.5\n"


def read(page: bytes, engine: str = "vllm", last: EngineLoad = NOTHING, rank: int = 0) -> EngineLoad:
    return read_load(page, ENGINES[engine], last, rank, now=7.0).load


def missing(page: bytes) -> tuple[str, ...]:
    return read_load(page, ENGINES["vllm"], NOTHING, 0, now=7.0).missing


def test_a_real_vllm_page_shows_load_capacity_and_chunk_size() -> None:
    page = VLLM_PAGE.replace(
        b'num_requests_waiting{engine="0",model_name="tiny"} 0.0',
        b'num_requests_waiting{engine="0",model_name="tiny"} 4.0',
    )
    assert read(page) == EngineLoad(
        waiting=4,
        running=0,
        kv_usage=0.0,
        block_size=32,
        num_blocks=16,
        cpu_blocks_per_chunk=1,
        cpu_chunks=16,
        updated_at=7.0,
    )


def test_while_a_streamed_load_is_fresh_a_page_only_fills_in_what_that_lacks() -> None:
    streamed = EngineLoad(waiting=9, running=8, kv_usage=0.7, num_blocks=100, updated_at=6.0, streamed_until=8.0)
    wanted = replace(streamed, block_size=32, cpu_blocks_per_chunk=1, cpu_chunks=16)
    assert read(VLLM_PAGE, last=streamed) == wanted
    stale = replace(streamed, streamed_until=7.0)
    assert read(VLLM_PAGE, last=stale) == read(VLLM_PAGE)


@pytest.mark.parametrize(
    ("engine", "page"),
    [
        (
            "sglang",
            (
                b'sglang:num_queue_reqs{m="x"} 3.0\nsglang:num_running_reqs{m="x"} 2.0\nsglang:token_usage{m="x"} 0.5\n'
                b'sglang:cache_config_info{num_pages="100",page_size="16"} 1.0\n'
            ),
        ),
        (
            "trtllm-serve",
            (
                b"trtllm_num_requests_waiting 3\ntrtllm_num_requests_running 2\ntrtllm_kv_cache_utilization 0.5\n"
                b"trtllm_kv_cache_tokens_per_block 16\ntrtllm_kv_cache_max_blocks 100\n"
            ),
        ),
        (
            "triton-tensorrt-llm",
            (
                b'nv_trt_llm_request_metrics{model="m",request_type="context"} 9\n'
                b'nv_trt_llm_request_metrics{model="m",request_type="scheduled"} 2\n'
                b'nv_trt_llm_request_metrics{model="m",request_type="waiting"} 3\n'
                b'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="used"} 50\n'
                b'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction"} 0.5\n'
                b'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per"} 16\n'
                b'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max"} 100\n'
            ),
        ),
    ],
)
def test_other_engines_are_read_by_their_own_names(engine: str, page: bytes) -> None:
    expected = EngineLoad(waiting=3, running=2, kv_usage=0.5, block_size=16, num_blocks=100, updated_at=7.0)
    assert read(page, engine) == expected


def test_triton_without_llm_backend_shows_only_queues() -> None:
    load = read(b"nv_inference_pending_request_count 3\nnv_inference_exec_count 2\n", "triton")
    assert (load.waiting, load.running, load.kv_usage) == (3, 2, 0.0)


@pytest.mark.parametrize(
    ("labels", "engine"),
    [
        ({}, "vllm"),
        ({"llm-d.ai/engine-type": "sglang"}, "sglang"),
        ({"inference.networking.k8s.io/engine-type": "trtllm-serve"}, "trtllm-serve"),
        ({"llm-d.ai/engine-type": "never-heard-of"}, "vllm"),
    ],
)
def test_a_label_of_the_endpoint_says_which_engine_it_is(labels: dict[str, str], engine: str) -> None:
    assert engine_of(labels) is ENGINES[engine]


class TestNames:
    def test_a_longer_name_that_begins_alike_is_another_metric(self) -> None:
        page = b'vllm:num_requests_waiting_by_reason{reason="capacity"} 9\n' + SMALL
        assert read(page).waiting == 3

    def test_help_and_type_lines_are_no_samples(self) -> None:
        assert (
            read(b"# HELP vllm:num_requests_waiting 9\n# TYPE vllm:num_requests_waiting gauge\n" + SMALL).waiting == 3
        )

    def test_the_old_name_of_kv_usage_still_counts_and_the_new_one_wins(self) -> None:
        old = SMALL.replace(b"kv_cache", b"gpu_cache")
        assert read(old).kv_usage == 0.5
        assert missing(old) == ()
        assert read(b"vllm:gpu_cache_usage_perc 0.9\n" + SMALL).kv_usage == 0.5

    def test_an_absent_kv_usage_is_reported_and_not_taken_for_zero(self) -> None:
        page = SMALL.replace(b"kv_cache_usage_perc", b"renamed_again")
        assert missing(page) == ("kv_usage",)
        assert read(page, last=replace(NOTHING, kv_usage=0.8)).kv_usage == 0.8

    def test_absent_optional_figures_are_no_fault(self) -> None:
        assert missing(SMALL) == ()
        assert read(SMALL, last=replace(NOTHING, block_size=64)).block_size == 64

    def test_a_quote_inside_another_label_cannot_pose_as_a_label(self) -> None:
        page = SMALL + b'vllm:cache_config_info{a=",block_size=\\"99\\"",block_size="16"} 1.0\n'
        assert read(page).block_size == 16

    def test_a_label_without_a_number_is_unknown(self) -> None:
        page = SMALL + b'vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1.0\n'
        assert (read(page).block_size, read(page).num_blocks) == (16, 0)


class TestRanks:
    PAGE = b"".join(
        b'vllm:num_requests_%s{engine="%d",model_name="a } b"} %d.0\n' % (name, rank, value + rank)
        for name, value in ((b"waiting", 10), (b"running", 20))
        for rank in (0, 1, 2)
    )

    @pytest.mark.parametrize("rank", [0, 1, 2])
    def test_of_several_ranks_on_one_page_the_endpoints_own_counts(self, rank: int) -> None:
        load = read(self.PAGE, rank=rank)
        assert (load.waiting, load.running) == (10 + rank, 20 + rank)

    def test_a_rank_the_page_does_not_know_reads_the_first(self) -> None:
        assert read(self.PAGE, rank=5).waiting == 10


class TestBrokenPages:
    @pytest.mark.parametrize("value", [b"NaN", b"+Inf", b"-Inf", b"-1", b"1e308", b"", b"three", b"0x3"])
    def test_senseless_required_figures_make_the_page_unusable(self, value: bytes) -> None:
        page = SMALL.replace(b"waiting 3", b"waiting " + value)
        with pytest.raises(NotAnEngine):
            read(page)

    @pytest.mark.parametrize("value", [b"NaN", b"+Inf", b"-0.1", b"1.5", b"1e308"])
    def test_a_senseless_kv_usage_keeps_the_last_good_one(self, value: bytes) -> None:
        page = SMALL.replace(b"0.5", value)
        assert read(page, last=replace(NOTHING, kv_usage=0.8)).kv_usage == 0.8
        assert missing(page) == ("kv_usage",)

    @pytest.mark.parametrize("page", [b"", b"\n", b"<html><body>404</body></html>", b"{}", b"\xff\xfe\x00", SMALL[:30]])
    def test_what_is_not_an_engines_page_is_said_not_to_be(self, page: bytes) -> None:
        with pytest.raises(NotAnEngine):
            read(page)

    def test_a_number_cut_off_at_the_end_of_the_page_is_not_a_number(self) -> None:
        assert read(SMALL + b"vllm:kv_cache_usage_perc 0.").kv_usage == 0.5
        with pytest.raises(NotAnEngine):
            read(b"vllm:num_requests_waiting 3\nvllm:num_requests_running 12")

    def test_timestamps_are_ignored(self) -> None:
        assert read(SMALL.replace(b"waiting 3", b"waiting 3 1700000000000")).waiting == 3

    @given(st.integers(0, len(VLLM_PAGE)), st.binary(max_size=40))
    def test_any_damage_gives_finite_figures_or_not_an_engine(self, at: int, junk: bytes) -> None:
        try:
            load = read(VLLM_PAGE[:at] + junk + VLLM_PAGE[at:])
        except NotAnEngine:
            return
        assert 0 <= load.kv_usage <= 1
        assert min(load.waiting, load.running, load.block_size, load.num_blocks) >= 0


@pytest.mark.parametrize("state", ["weights_offloaded", "discard_all"])
def test_an_engine_that_sleeps_so_deeply_that_its_caches_are_gone_says_so(state: str) -> None:
    series = b'vllm:engine_sleep_state{engine="0",model_name="tiny",sleep_state="%s"}'
    awake, deep = series % b"awake", series % state.encode()
    page = VLLM_PAGE.replace(awake + b" 1.0", awake + b" 0.0")
    paused = read(page)  # its caches are as they were
    sleeping = read(page.replace(deep + b" 0.0", deep + b" 1.0"))
    assert (read(VLLM_PAGE).asleep, paused.asleep, sleeping.asleep) == (False, False, True)
    assert not read(VLLM_PAGE, last=sleeping).asleep
    assert not read(SMALL, last=sleeping).asleep
