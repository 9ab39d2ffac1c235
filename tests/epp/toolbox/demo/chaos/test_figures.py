"""What the figures come to, when they mean that the demo has passed, and that the tables say the same in words."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Sequence

import pytest
from rich.console import Console

from epp.toolbox.demo.chaos.faults import Kind
from epp.toolbox.demo.chaos.figures import Group, Report, Seen, as_json
from epp.toolbox.demo.chaos.judge import Finding, Pick, Probe, Standing
from epp.toolbox.demo.chaos.report import show
from epp.toolbox.demo.drive import Call
from epp.toolbox.demo.traffic import Style
from epp.toolbox.demo.verdicts import Prediction

EXACT, WRONG, LITTLE, FAILED = (
    Probe("probe-1", "sim-0", 64, 64),
    Probe("probe-2", "sim-0", 64, 48),
    Probe("probe-3", "sim-0", 48, 64),
    Probe("probe-4", "sim-0", 48, None),
)


def seen(
    kind: Kind = Kind.ENGINE_KILLED, *, noticed: float | None = 0.02, live: float | None = 0.5,
    probes: Sequence[Probe] = (EXACT,),
) -> Seen:  # fmt: skip
    return Seen(kind, "sim-0", noticed, live, tuple(probes))


def finding(standing: Standing, why: str = "") -> Finding:
    call = Call("talk-1", "", Style.TEXT, "p", False, 0, 1, 1, 200, "", 100, 48, served="sim-0")
    return Finding(call, Pick(Prediction("sim-0", 64, 0, 0, 64), True, {}), standing, why)


def report(*faults: Seen, findings: Sequence[Finding] = (), not_live: Sequence[str] = ()) -> Report:
    good = finding(Standing.EXACT)
    return Report(1, 4, 30.0, Group(faults or (seen(),)), (good, *findings), 3, tuple(not_live))


def shown(of: Report) -> str:
    output = io.StringIO()
    show(of, Console(file=output, width=120))
    return output.getvalue()


def test_times_are_over_all_faults_and_over_those_of_a_kind() -> None:
    killed = [seen(live=live) for live in (0.1, 0.2, 0.9)]
    cut = seen(Kind.LINK_CUT, live=2.0)
    of = report(*killed, cut)
    assert (of.faults.live.p50, of.faults.live.max) == (0.2, 2.0)
    assert (of.by_kind()[Kind.ENGINE_KILLED].live.p50, of.by_kind()[Kind.ENGINE_KILLED].live.max) == (0.2, 0.9)
    assert list(of.by_kind()) == [Kind.ENGINE_KILLED, Kind.LINK_CUT]


def test_a_run_without_faults_of_its_own_making_has_passed() -> None:
    excused = [finding(s, "why") for s in (Standing.BELOW, Standing.EXPLAINED, Standing.UNSURE, Standing.UNPICKED)]
    of = report(seen(), findings=excused)
    assert of.passed
    assert of.wrong == 0
    text = shown(of)
    rows = dict(re.findall(r"^│ (.+?) +│ +(.+?) │$", text, re.MULTILINE))
    assert rows["faults injected"] == "1"
    assert rows["requests failed"] == "0 of 5"
    assert rows["predicted too much while live"] == "0 of 4"
    assert rows["time to live again, p50 / max"] == "0.50 / 0.50 s"
    assert "Passed: no request failed" in text


@pytest.mark.parametrize(
    ("of", "because"),
    [
        (report(findings=[finding(Standing.FAILED, "HTTP 503")]), "1 requests failed"),
        (report(findings=[finding(Standing.WRONG)]), "1 predictions too high while live"),
        (report(seen(probes=[EXACT, WRONG])), "1 predictions too high while live"),
        (report(seen(probes=[EXACT, LITTLE])), "1 of 2 predictions after faults not exact"),
        (report(seen(probes=[EXACT, FAILED])), "1 of 2 predictions after faults not exact"),
        (report(seen(live=None), seen()), "1 faults after which a feed was not live again in time"),
        (report(not_live=["127.0.0.1:80"]), "1 feeds not live at the end"),
        (report(seen(probes=[])), "nothing was found after a fault, so nothing was tested"),
    ],
)
def test_what_must_not_happen_is_named(of: Report, because: str) -> None:
    assert not of.passed
    assert because in of.shortcomings
    assert because in shown(of)


def test_a_prediction_too_high_is_shown_with_both_figures() -> None:
    text = shown(report(seen(probes=[WRONG]), findings=[finding(Standing.WRONG)]))
    assert "talk-1: predicted 64, delivered 48 by sim-0" in text
    assert "probe-2: predicted 64, delivered 48 by sim-0" in text


def test_the_json_is_json_and_has_what_the_table_has() -> None:
    figures = json.loads(json.dumps(as_json(report(seen(noticed=None), findings=[finding(Standing.BELOW, "other")]))))
    assert figures["passed"]
    assert figures["faults"]["injected"] == figures["faults"]["kinds"]["engine_killed"]["injected"] == 1
    assert figures["faults"]["live_again_s"] == {"p50": 0.5, "max": 0.5}
    assert figures["faults"]["noticed_s"] == {"p50": None, "max": None}
    assert figures["faults"]["predictions_after"] == {"exact": 1, "below": 0, "above": 0, "unknown": 0}
    assert (figures["requests"]["total"], figures["requests"]["exact"], figures["requests"]["below"]) == (2, 1, 1)
    assert figures["requests"]["tried_again_by_envoy"] == 3
    assert figures["requests"]["reasons"] == {"below: other": 1}
    assert figures["wrong_by_too_much_while_live"] == 0
