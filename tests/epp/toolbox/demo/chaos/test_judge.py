"""What a fault explains, and what it does not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from epp.toolbox.demo.chaos.faults import Kind
from epp.toolbox.demo.chaos.judge import Finding, Pick, Probe, Standing, Struck, findings, parse_picks
from epp.toolbox.demo.drive import Call
from epp.toolbox.demo.traffic import Style
from epp.toolbox.demo.verdicts import Prediction, Verdict

HERE, ELSEWHERE = "sim-0", "sim-1"


def call(name: str = "subject", *, sent: float = 10.0, first: float = 12.0, cached: int = 8, served: str = HERE,
         error: str = "") -> Call:  # fmt: skip
    return Call(name, "", Style.TEXT, "aaaabbbb", False, sent, first, first, 200, error, 8, cached, served=served)


def pick(predicted: int, *, live: bool = True) -> Pick:
    return Pick(Prediction(HERE, predicted, 0, 0, predicted), live, {})


def finding(subject: Call, its_pick: Pick | None, *struck: Struck, others: Sequence[Call] = ()) -> Finding:
    picks = {} if its_pick is None else {subject.id: its_pick}
    picks |= {other.id: pick(other.cached_tokens or 0) for other in others}
    return findings([subject, *others], picks, struck, lambda c: [ord(x) for x in c.prompt], 4)[0]


def standing(*arguments: Any, **options: Any) -> Standing:
    return finding(*arguments, **options).standing


def test_what_was_delivered_as_predicted_is_exact() -> None:
    assert standing(call(), pick(8)) is Standing.EXACT


def test_too_much_with_nobody_about_is_wrong() -> None:
    assert standing(call(), pick(16)) is Standing.WRONG


def test_too_much_beside_another_request_is_shown_apart() -> None:
    found = finding(call(), pick(16), others=[call("other", sent=11.0, first=13.0)])
    assert (found.standing, found.why) == (Standing.EXPLAINED, "evicted while queued")


def test_too_little_is_no_fault() -> None:
    assert standing(call(), pick(4)) is Standing.BELOW


def test_a_feed_that_was_not_live_promised_nothing() -> None:
    assert standing(call(), pick(16, live=False)) is Standing.UNSURE


def test_a_failed_request_stays_one_whatever_was_predicted() -> None:
    assert standing(call(error="HTTP 503"), pick(8)) is Standing.FAILED


def test_without_a_decision_the_picker_was_not_asked() -> None:
    assert standing(call(), None) is Standing.UNPICKED


def test_what_another_engine_delivers_says_nothing_of_the_prediction() -> None:
    assert standing(call(served=ELSEWHERE), pick(16)) is Standing.ELSEWHERE


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind.strikes_the_cache])
def test_a_cache_lost_between_pick_and_answer_explains(kind: Kind) -> None:
    found = finding(call(), pick(16), Struck(kind, HERE, 11.0, 11.5))
    assert (found.standing, found.why) == (Standing.EXPLAINED, "the fault struck in between")


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind.strikes_the_cache])
@pytest.mark.parametrize(("began", "ended"), [(5.0, 6.0), (9.0, 13.0), (12.5, 13.0)])
def test_a_cache_lost_well_before_or_afterwards_does_not(kind: Kind, began: float, ended: float) -> None:
    assert standing(call(), pick(16), Struck(kind, HERE, began, ended)) is Standing.WRONG


def test_a_silence_explains_for_as_long_as_it_cannot_be_noticed() -> None:
    unnoticed = Struck(Kind.LINK_STALLED, HERE, 8.0, 20.0)
    assert standing(call(), pick(16), unnoticed) is Standing.EXPLAINED
    assert standing(call(sent=8.0 + Kind.LINK_STALLED.noticeable_after + 0.1), pick(16), unnoticed) is Standing.WRONG


def test_a_silence_that_is_over_explains_nothing() -> None:
    assert standing(call(), pick(16), Struck(Kind.LINK_STALLED, HERE, 8.0, 9.0)) is Standing.WRONG


def test_a_fault_of_another_engine_explains_nothing() -> None:
    assert standing(call(), pick(16), Struck(Kind.CACHE_RESET, ELSEWHERE, 11.0, 11.5)) is Standing.WRONG


def candidate(name: str, tokens: int | None, feed: str) -> dict[str, Any]:
    cached = None if tokens is None else {"gpu": tokens, "cpu": 0, "storage": 0, "total": tokens}
    return {"endpoint": f"{name}:80", "name": name, "cached_tokens": cached, "feed": feed}


def test_picks_are_read_with_what_was_known_of_every_engine() -> None:
    predicted = {"gpu": 16, "cpu": 32, "storage": 0, "total": 48}
    candidates = [candidate("sim-0", 48, "live"), candidate("sim-1", 64, "unsure"), candidate("sim-2", None, "")]
    decided = {"id": "a", "chosen": "sim-0:80", "predicted": predicted, "candidates": candidates}
    blind = {"id": "b", "chosen": "sim-0:80", "predicted": None, "candidates": candidates}
    assert parse_picks({"decisions": [decided, blind]}) == {
        "a": Pick(Prediction("sim-0", 16, 32, 0, best=64), live=True, everywhere={"sim-0": 48})
    }


@pytest.mark.parametrize(
    ("predicted", "delivered", "verdict"),
    [
        (16, 16, Verdict.EXACT),
        (16, 0, Verdict.ABOVE),
        (0, 16, Verdict.BELOW),
        (None, 16, Verdict.UNKNOWN),
        (16, None, Verdict.UNKNOWN),
    ],
)
def test_a_probe_compares_two_figures_if_there_are_two(
    predicted: int | None, delivered: int | None, verdict: Verdict
) -> None:
    assert Probe("probe", HERE, predicted, delivered).verdict is verdict
