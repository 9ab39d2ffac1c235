"""When a feed was live again, and when it first was not, as looks at the picker tell."""

from __future__ import annotations

from epp.toolbox.demo.chaos.watch import Look, unlike_live

A, B = "10.0.0.1:80", "10.0.0.2:80"


def look(at: float, **states: str) -> Look:
    return Look(at, {{"a": A, "b": B}[name]: {"state": s, "heard_seconds_ago": 0.2} for name, s in states.items()})


def test_a_feed_is_live_again_once_it_says_so_and_has_heard_something_new() -> None:
    seen = look(10.0, a="live")
    assert seen.is_live([A])
    assert seen.is_live([A], heard_since=9.8)
    assert not seen.is_live([A], heard_since=9.9)


def test_all_feeds_concerned_must_be_live() -> None:
    assert not look(10.0, a="live", b="syncing").is_live([A, B])
    assert not look(10.0, a="live").is_live([A, B])
    assert look(10.0, a="live", b="live").is_live([A, B])


def test_a_feed_that_never_brought_anything_is_not() -> None:
    assert not Look(10.0, {A: {"state": "live", "heard_seconds_ago": None}}).is_live([A])


def test_the_first_look_that_shows_something_else_tells_when_a_fault_was_noticed() -> None:
    looks = [look(1.0, a="lost"), look(2.0, a="live"), look(3.0, a="unsure"), look(4.0, a="live")]
    assert unlike_live(looks, A, since=1.5) == 3.0
    assert unlike_live(looks, A, since=3.5) is None


def test_a_picker_that_does_not_answer_is_not_live_either() -> None:
    assert unlike_live([look(1.0, a="live"), Look(2.0, {})], A, since=0.0) == 2.0
