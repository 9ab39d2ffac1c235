"""The figures at the end: what is counted, what passes, and that JSON holds all of it."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from epp.toolbox.demo.counters import EngineCounters
from epp.toolbox.demo.drive import Call
from epp.toolbox.demo.figures import Latency, Predictions, Report, as_json, percentile, predictions, traffic
from epp.toolbox.demo.sizes import sizes
from epp.toolbox.demo.traffic import Style
from epp.toolbox.demo.verdicts import Judgement, Prediction, Reason, Verdict

PODS = {"pod-0": EngineCounters(2, 200, 100, 50), "pod-1": EngineCounters(1, 100, 0, 25)}


def call(name: str = "c", *, stream: bool = True, sent: float = 0.0, first: float = 0.1, error: str = "") -> Call:
    return Call(name, "", Style.TEXT, "p", stream, sent, first, first + 0.2, 200, error, 100, 64)


def judgement(predicted: int, delivered: int, verdict: Verdict, reason: Reason = Reason.NONE) -> Judgement:
    subject = replace(call(), cached_tokens=delivered)
    return Judgement(subject, Prediction("10.0.0.1:8000", predicted, 0, 0, best=predicted + 16), verdict, reason)


EXACT = judgement(64, 64, Verdict.EXACT)
BELOW = judgement(32, 64, Verdict.BELOW, Reason.SIBLING)


def report(exact: Predictions, *calls: Call) -> Report:
    figures = traffic(calls or [call()], PODS)
    return Report(1, sizes(4, 10_000, 500), figures, figures, predictions([EXACT, BELOW]), figures, exact)


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
    assert figures.misses == (
        "c: predicted 32 HBM + 0 CPU + 0 storage, delivered 64 on 10.0.0.1:8000 (sibling in flight)",
    )


def test_a_run_passes_when_nothing_failed_and_every_sequential_prediction_was_exact() -> None:
    assert report(predictions([EXACT])).passed


@pytest.mark.parametrize(
    "exact",
    [[EXACT, BELOW], [EXACT, judgement(64, 64, Verdict.UNKNOWN)], []],
    ids=["one was wrong", "one is not comparable", "none was made"],
)
def test_a_run_does_not_pass_when(exact: list[Judgement]) -> None:
    assert not report(predictions(exact)).passed


def test_a_run_does_not_pass_when_a_request_failed_in_any_phase() -> None:
    assert not report(predictions([EXACT]), call(error="HTTP 503")).passed


def test_json_holds_the_figures_and_is_json() -> None:
    figures = json.loads(json.dumps(as_json(report(predictions([EXACT]))), allow_nan=False))
    assert figures["passed"] is True
    assert figures["tierpick"]["pods"]["pod-0"] == {
        "requests": 2, "prompt_tokens": 200, "hbm_tokens": 100, "cpu_tokens": 50, "recomputed_tokens": 50,
    }  # fmt: skip
    assert figures["tierpick"]["predictions"]["below"] == 1
    assert figures["tierpick"]["predictions"]["reasons"] == {"below": {"sibling in flight": 1}, "above": {}}
    assert figures["round_robin"]["ttft_ms"] == {"count": 1, "p50": 100.0, "p90": 100.0}


def test_a_percentile_of_nothing_is_null_in_json() -> None:
    figures = as_json(report(predictions([EXACT]), call(stream=False)))
    assert figures["tierpick"]["ttft_ms"] == {"count": 0, "p50": None, "p90": None}
