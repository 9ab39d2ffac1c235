"""The table says in words what the figures say."""

from __future__ import annotations

import io
from collections.abc import Mapping

from rich.console import Console

from epp.toolbox.demo.counters import EngineCounters
from epp.toolbox.demo.drive import Call
from epp.toolbox.demo.figures import Report, predictions, traffic
from epp.toolbox.demo.report import show
from epp.toolbox.demo.sizes import sizes
from epp.toolbox.demo.traffic import Style
from epp.toolbox.demo.verdicts import Judgement, Prediction, Reason, Verdict

PODS = {"engine-0": EngineCounters(2, 2000, 1000, 500), "engine-1": EngineCounters(1, 1000, 0, 250)}


def call(error: str = "") -> Call:
    return Call("exact-7", "the same prompt again", Style.TEXT, "p", True, 0, 0.05, 0.2, 200, error, 100, 64)


DELIVERED = {"engine-0": EngineCounters(1, 1000, 64, 128), "engine-1": EngineCounters()}


def judgement(predicted: int, verdict: Verdict, reason: Reason = Reason.NONE, cpu: int = 0) -> Judgement:
    return Judgement(call(), Prediction("engine-0", predicted, cpu, 0, predicted + cpu), verdict, reason)


def shown(exact: list[Judgement], error: str = "", delivered: Mapping[str, EngineCounters] = DELIVERED) -> str:
    figures = traffic([call(error)], PODS)
    concurrent = predictions([judgement(64, Verdict.EXACT), judgement(32, Verdict.BELOW, Reason.SIBLING),
                              judgement(80, Verdict.ABOVE, Reason.EVICTED)])  # fmt: skip
    output = io.StringIO()
    sequential = traffic([], delivered)
    report = Report(1, sizes(2, 10_000, 500), figures, figures, concurrent, sequential, predictions(exact))
    show(report, Console(file=output, width=120))
    return output.getvalue()


def test_a_good_run_ends_with_passed() -> None:
    text = shown([judgement(64, Verdict.EXACT, cpu=128)])
    assert "engine-1" in text
    assert "1,000 (50%)" in text
    assert "50 / 50 ms" in text
    assert "1 sibling in flight" in text
    assert "1 evicted while queued" in text
    assert "1 of 1 exact" in text
    assert "64 / 64 │  128 / 128" in text
    assert "began 0 in HBM, 1 in HBM and then CPU RAM, 0 in CPU RAM, 0 nowhere." in text
    assert text.rstrip().endswith("every sequential prediction was exact, in HBM and in CPU RAM.")


def test_a_wrong_sequential_prediction_is_shown_with_its_request() -> None:
    text = shown([judgement(48, Verdict.BELOW, Reason.OTHER, cpu=128)])
    assert "exact-7 (the same prompt again): predicted 48 HBM" in text
    assert "Not passed: 1 of 1 sequential predictions not exact; engine-0: predicted 48 tokens in HBM" in text


def test_a_run_without_cpu_ram_says_what_is_untested() -> None:
    text = shown([judgement(64, Verdict.EXACT)], delivered={"engine-0": EngineCounters(1, 1000, 64, 0)})
    assert "Not passed: nothing was found in CPU RAM one request after another." in text


def test_a_failed_request_is_shown_with_its_error() -> None:
    text = shown([judgement(64, Verdict.EXACT, cpu=128)], error="HTTP 503: no endpoint")
    assert "exact-7: HTTP 503: no endpoint" in text
