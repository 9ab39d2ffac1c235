"""Why a prediction was not exact follows from what else was on that endpoint at that time, and from nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from epp.toolbox.demo.drive import Call
from epp.toolbox.demo.traffic import Style
from epp.toolbox.demo.verdicts import Judgement, Prediction, Reason, Verdict, judge

HERE, ELSEWHERE = "10.0.0.1:8000", "10.0.0.2:8000"


def call(name: str, prompt: str, *, sent: float, first: float, cached: int | None, error: str = "") -> Call:
    return Call(name, "", Style.TEXT, prompt, True, sent, first, first + 1, 200, error, len(prompt), cached)


def predicted(tokens: int, endpoint: str = HERE) -> Prediction:
    return Prediction(endpoint, tokens, 0, 0, tokens)


def characters(call: Call) -> Sequence[int]:
    return [ord(c) for c in call.prompt]


def verdict_of(subject: Call, prediction: int, *others: tuple[Call, str]) -> tuple[Verdict, Reason]:
    predictions = {subject.id: predicted(prediction)} | {o.id: predicted(o.cached_tokens or 0, e) for o, e in others}
    judged = judge([subject, *(o for o, _ in others)], predictions, characters, chunk_tokens=4)[0]
    return judged.verdict, judged.reason


SUBJECT = call("subject", "aaaabbbbcccc", sent=10, first=12, cached=8)
TWIN = "aaaabbbbdddd"


def test_equal_figures_are_exact() -> None:
    assert verdict_of(SUBJECT, 8) == (Verdict.EXACT, Reason.NONE)


@pytest.mark.parametrize(("sent", "first"), [(9, 11), (9, 13), (10.5, 11), (11, 13)])
def test_a_sibling_between_pick_and_first_token_explains_below(sent: float, first: float) -> None:
    sibling = call("sibling", TWIN, sent=sent, first=first, cached=0)
    assert verdict_of(SUBJECT, 4, (sibling, HERE)) == (Verdict.BELOW, Reason.SIBLING)


@pytest.mark.parametrize(("sent", "first"), [(7, 9), (12.5, 13)])
def test_a_sibling_at_another_time_does_not(sent: float, first: float) -> None:
    sibling = call("sibling", TWIN, sent=sent, first=first, cached=0)
    assert verdict_of(SUBJECT, 4, (sibling, HERE)) == (Verdict.BELOW, Reason.OTHER)


def test_a_sibling_on_another_endpoint_does_not() -> None:
    sibling = call("sibling", TWIN, sent=9, first=11, cached=0)
    assert verdict_of(SUBJECT, 4, (sibling, ELSEWHERE)) == (Verdict.BELOW, Reason.OTHER)


def test_a_neighbour_that_shares_less_than_was_delivered_does_not() -> None:
    neighbour = call("neighbour", "aaaabbbXdddd", sent=9, first=11, cached=0)
    assert verdict_of(SUBJECT, 4, (neighbour, HERE)) == (Verdict.BELOW, Reason.OTHER)


def test_a_neighbour_between_pick_and_first_token_explains_above() -> None:
    neighbour = call("neighbour", "zzzz", sent=11, first=13, cached=0)
    assert verdict_of(SUBJECT, 12, (neighbour, HERE)) == (Verdict.ABOVE, Reason.EVICTED)


def test_an_answer_that_still_grew_explains_above() -> None:
    neighbour = call("neighbour", "zzzz", sent=8, first=9.5, cached=0)
    assert verdict_of(SUBJECT, 12, (neighbour, HERE)) == (Verdict.ABOVE, Reason.EVICTED)


def test_above_without_a_neighbour_is_not_explained() -> None:
    late = call("late", "zzzz", sent=13, first=14, cached=0)
    assert verdict_of(SUBJECT, 12, (late, HERE)) == (Verdict.ABOVE, Reason.OTHER)


def test_an_eviction_can_make_a_chunk_worth_loading_and_so_explain_below() -> None:
    neighbour = call("neighbour", "zzzz", sent=11, first=13, cached=0)
    assert verdict_of(SUBJECT, 5, (neighbour, HERE)) == (Verdict.BELOW, Reason.EVICTED)
    assert verdict_of(SUBJECT, 4, (neighbour, HERE)) == (Verdict.BELOW, Reason.OTHER)
    assert verdict_of(SUBJECT, 5) == (Verdict.BELOW, Reason.OTHER)


def test_failed_and_unknown_requests_are_not_comparable() -> None:
    failed = call("failed", "a", sent=1, first=2, cached=None, error="HTTP 503")
    unknown = call("unknown", "a", sent=1, first=2, cached=0)
    judged: list[Judgement] = judge([failed, unknown], {"failed": predicted(0)}, characters, chunk_tokens=4)
    assert [j.verdict for j in judged] == [Verdict.UNKNOWN, Verdict.UNKNOWN]
