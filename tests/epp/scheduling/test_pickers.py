from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from epp.fleet.endpoint import Endpoint
from epp.scheduling.plugin import Scheduling

Build = Callable[..., Any]
FleetOf = Callable[..., list[Endpoint]]
SchedulingOf = Callable[..., Scheduling]


def test_the_highest_score_wins(build: Build, fleet_of: FleetOf, scheduling_of: SchedulingOf) -> None:
    endpoints = fleet_of(4)
    scheduling = scheduling_of(endpoints)
    scores = [0.5, 3.0, 2.0, 1.0]
    assert [e.slot for e in build("max-score-picker").pick(scheduling, endpoints, scores)] == [1]
    picked = build("max-score-picker", max_num_of_endpoints=3).pick(scheduling, endpoints, scores)
    assert [e.slot for e in picked] == [1, 2, 3]


def test_weighted_chances_follow_the_scores(build: Build, fleet_of: FleetOf, scheduling_of: SchedulingOf) -> None:
    endpoints = fleet_of(4)
    scheduling = scheduling_of(endpoints)
    picker = build("weighted-random-picker")
    drawn = [picker.pick(scheduling, endpoints, [1.0, 2.0, 5.0, 0.0])[0].slot for _ in range(8000)]
    assert [drawn.count(slot) / 8000 for slot in range(4)] == pytest.approx([1 / 8, 2 / 8, 5 / 8, 0], abs=0.02)


def test_zero_scores_are_fallbacks_behind_all_others(
    build: Build, fleet_of: FleetOf, scheduling_of: SchedulingOf
) -> None:
    endpoints = fleet_of(3)
    picker = build("weighted-random-picker", max_num_of_endpoints=3)
    for _ in range(50):
        assert picker.pick(scheduling_of(endpoints), endpoints, [0.0, 1e-9, 0.0])[0].slot == 1
