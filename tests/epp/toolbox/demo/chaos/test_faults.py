from __future__ import annotations

import pytest

from epp.toolbox.demo.chaos.faults import SILENCE_S, Kind, schedule


def test_the_same_seed_is_the_same_schedule() -> None:
    assert schedule(7, 30, 4) == schedule(7, 30, 4)
    assert schedule(7, 30, 4) != schedule(8, 30, 4)


@pytest.mark.parametrize("seed", range(5))
def test_every_kind_comes_once_before_any_comes_again(seed: int) -> None:
    kinds = [fault.kind for fault in schedule(seed, 2 * len(Kind), 4)]
    assert set(kinds[: len(Kind)]) == set(kinds[len(Kind) :]) == set(Kind)


def test_a_longer_schedule_begins_like_a_shorter_one() -> None:
    assert schedule(1, 20, 4)[:5] == schedule(1, 5, 4)


def test_every_engine_is_struck() -> None:
    assert {fault.engine for fault in schedule(1, 40, 3)} == {0, 1, 2}


@pytest.mark.parametrize("kind", [Kind.ENGINE_STOPPED, Kind.LINK_STALLED])
def test_silence_lasts_long_enough_to_be_noticed(kind: Kind) -> None:
    assert all(fault.seconds > SILENCE_S for fault in schedule(3, 100, 4) if fault.kind is kind)


def test_messages_are_lost_in_ones_and_more() -> None:
    assert {fault.messages for fault in schedule(1, 50, 4)} == {1, 2, 3}
