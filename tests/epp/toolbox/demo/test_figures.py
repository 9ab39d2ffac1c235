"""The figures at the end: what is counted, what passes, and that JSON holds all of it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace

import pytest

from epp.toolbox.demo.counters import EngineCounters, Found
from epp.toolbox.demo.drive import Call
from epp.toolbox.demo.figures import Latency, Place, Report, as_json, percentile, predictions, traffic
from epp.toolbox.demo.sizes import sizes
from epp.toolbox.demo.traffic import Style
from epp.toolbox.demo.verdicts import Judgement, Prediction, Reason, Verdict

PODS = {"pod-0": EngineCounters(2, 200, 100, 50), "pod-1": EngineCounters(1, 100, 0, 25)}


def call(name: str = "c", *, stream: bool = True, sent: float = 0.0, first: float = 0.1, error: str = "") -> Call:
    return Call(name, "", Style.TEXT, "p", stream, sent, first, first + 0.2, 200, error, 100, 64)


def judgement(
    predicted: int,
    delivered: int,
    verdict: Verdict,
    reason: Reason = Reason.NONE,
    *,
    cpu: int = 0,
    storage: int = 0,
    pod: str = "pod-0",
) -> Judgement:
    subject = replace(call(), cached_tokens=delivered)
    best = predicted + cpu + storage + 16
    return Judgement(subject, Prediction(pod, predicted, cpu, storage, best), verdict, reason)


EXACT = judgement(64, 64, Verdict.EXACT)
BELOW = judgement(32, 64, Verdict.BELOW, Reason.SIBLING)
SEQUENTIAL = [judgement(64, 64, Verdict.EXACT), judgement(0, 128, Verdict.EXACT, cpu=128, pod="pod-1")]
DELIVERED = {"pod-0": EngineCounters(1, 100, 64, 0), "pod-1": EngineCounters(1, 200, 0, 128)}


def report(
    exact: list[Judgement], *calls: Call, delivered: Mapping[str, EngineCounters] = DELIVERED, cpu_chunks: int = 8
) -> Report:
    figures = traffic(calls or [call()], PODS)
    fleet = replace(sizes(4, 10_000, 500), cpu_chunks=cpu_chunks)
    concurrent, sequential = predictions([EXACT, BELOW]), predictions(exact)
    return Report(1, fleet, figures, figures, concurrent, traffic([call()], delivered), sequential)


@pytest.mark.parametrize(("share", "expected"), [(0.5, 5), (0.9, 9), (1.0, 10), (0.0, 1)])
def test_percentiles_are_by_nearest_rank(share: float, expected: float) -> None:
    assert percentile([10, 9, 8, 7, 6, 5, 4, 3, 2, 1], share) == expected


def test_nothing_has_no_percentile() -> None:
    assert math.isnan(percentile([], 0.5))


def test_time_to_first_token_is_that_of_good_streamed_answers_only() -> None:
    calls = [call(first=0.1), call(first=5, stream=False), call(first=9, error="HTTP 503")]
    figures = traffic(calls, PODS)
    assert figures.ttft == Latency(1, pytest.approx(100), pytest.approx(100))
    assert figures.whole.count == 2
    assert figures.requests == 3
    assert figures.failures == ("c: HTTP 503",)


def test_the_total_is_the_sum_of_the_pods() -> None:
    assert traffic([call()], PODS).total == EngineCounters(3, 300, 100, 75)


def test_predictions_are_summed_and_misses_put_into_words() -> None:
    figures = predictions([EXACT, BELOW])
    assert (figures.exact, figures.total, figures.all_exact) == (1, 2, False)
    assert figures.reasons == {(Verdict.BELOW, Reason.SIBLING): 1}
    assert (figures.best_tokens, figures.predicted_tokens, figures.delivered_tokens) == (128, 96, 128)
    assert figures.misses == ("c: predicted 32 HBM + 0 CPU + 0 storage, delivered 64 on pod-0 (sibling in flight)",)


def test_predictions_are_told_apart_by_pod_and_tier() -> None:
    both = judgement(32, 176, Verdict.EXACT, cpu=128, storage=16)
    nothing = judgement(0, 0, Verdict.EXACT, pod="pod-1")
    figures = predictions([EXACT, both, nothing, judgement(0, 64, Verdict.EXACT, cpu=64, pod="pod-1")])
    assert figures.found_by_pod == {"pod-0": Found(96, 144), "pod-1": Found(0, 64)}
    assert figures.found == Found(96, 208)
    assert figures.places == {Place.HBM: 1, Place.BOTH: 1, Place.NOWHERE: 1, Place.CPU: 1}


def test_a_run_passes_when_nothing_failed_and_every_sequential_prediction_was_exact_in_both_tiers() -> None:
    assert report(SEQUENTIAL).shortcomings == []
    assert report(SEQUENTIAL).passed


@pytest.mark.parametrize(
    ("exact", "why"),
    [
        ([*SEQUENTIAL, judgement(0, 64, Verdict.BELOW)], "1 of 3 sequential predictions not exact"),
        ([*SEQUENTIAL, judgement(0, 64, Verdict.UNKNOWN)], "1 of 3 sequential predictions not exact"),
        ([], "0 of 0 sequential predictions not exact"),
    ],
    ids=["one was wrong", "one is not comparable", "none was made"],
)
def test_a_run_does_not_pass_when(exact: list[Judgement], why: str) -> None:
    assert report(exact).shortcomings[0] == why
    assert not report(exact).passed


def test_a_run_does_not_pass_when_a_request_failed_in_any_phase() -> None:
    assert report(SEQUENTIAL, call(error="HTTP 503")).shortcomings == ["2 failed requests"]


def test_a_run_does_not_pass_when_the_sum_is_right_but_the_tiers_are_not() -> None:
    delivered = DELIVERED | {"pod-1": EngineCounters(1, 200, 64, 64)}
    assert report(SEQUENTIAL, delivered=delivered).shortcomings == [
        "pod-1: predicted 0 tokens in HBM and 128 in CPU RAM, delivered 64 and 64 one request after another"
    ]


def test_a_run_does_not_pass_when_tiers_are_right_over_all_pods_but_not_on_each() -> None:
    delivered = {"pod-0": DELIVERED["pod-1"], "pod-1": DELIVERED["pod-0"]}
    assert [why[:5] for why in report(SEQUENTIAL, delivered=delivered).shortcomings] == ["pod-0", "pod-1"]


def test_a_run_that_found_nothing_in_cpu_ram_has_not_tested_it_and_does_not_pass() -> None:
    delivered = {"pod-0": DELIVERED["pod-0"]}
    assert report(SEQUENTIAL[:1], delivered=delivered).shortcomings == [
        "nothing was found in CPU RAM one request after another"
    ]
    assert report(SEQUENTIAL[:1], delivered=delivered, cpu_chunks=0).passed


def test_a_run_that_found_nothing_in_hbm_does_not_pass_either() -> None:
    delivered = {"pod-1": DELIVERED["pod-1"]}
    assert report(SEQUENTIAL[1:], delivered=delivered).shortcomings == [
        "nothing was found in HBM one request after another"
    ]


def test_json_holds_the_figures_and_is_json() -> None:
    figures = json.loads(json.dumps(as_json(report(SEQUENTIAL)), allow_nan=False))
    assert (figures["passed"], figures["not_passed_because"]) == (True, [])
    assert figures["exact"]["predictions"]["predicted_tokens_by_pod"] == {
        "pod-0": {"hbm_tokens": 64, "cpu_tokens": 0}, "pod-1": {"hbm_tokens": 0, "cpu_tokens": 128},
    }  # fmt: skip
    assert figures["exact"]["predictions"]["requests_found"] == {
        "in HBM": 1, "in HBM and then CPU RAM": 0, "in CPU RAM": 1, "nowhere": 0,
    }  # fmt: skip
    assert figures["tierpick"]["pods"]["pod-0"] == {
        "requests": 2, "prompt_tokens": 200, "hbm_tokens": 100, "cpu_tokens": 50, "recomputed_tokens": 50,
    }  # fmt: skip
    assert figures["tierpick"]["predictions"]["below"] == 1
    assert figures["tierpick"]["predictions"]["reasons"] == {"below": {"sibling in flight": 1}, "above": {}}
    assert figures["round_robin"]["ttft_ms"] == {"count": 1, "p50": 100.0, "p90": 100.0}


def test_a_percentile_of_nothing_is_null_in_json() -> None:
    figures = as_json(report(SEQUENTIAL, call(stream=False)))
    assert figures["tierpick"]["ttft_ms"] == {"count": 0, "p50": None, "p90": None}
