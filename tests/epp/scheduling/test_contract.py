"""What every scorer and every picker must keep, whoever writes the next one."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from epp.config.registry import plugin_types
from epp.config.roles import Role, has_role
from epp.fleet.endpoint import Endpoint
from epp.scheduling.plugin import ProfileResult, Scheduling, SchedulingResult

SCORERS = sorted(name for name, kind in plugin_types().items() if has_role(kind.cls, Role.SCORER))
PICKERS = sorted(name for name, kind in plugin_types().items() if has_role(kind.cls, Role.PICKER))
FILTERS = sorted(name for name, kind in plugin_types().items() if has_role(kind.cls, Role.FILTER))
PARAMETERS: dict[str, dict[str, Any]] = {"by-label": {"label": "zone"}}

Build = Callable[..., Any]
FleetOf = Callable[..., list[Endpoint]]
SchedulingOf = Callable[..., Scheduling]

BIG = 2**62


def extremes(fleet_of: FleetOf) -> list[Endpoint]:
    """Idle, ordinary and absurd endpoints."""
    return fleet_of(
        6,
        waiting=[0, 0, 3, BIG, BIG, 1],
        running=[0, BIG, 3, 0, BIG, 1],
        kv_usage=[0.0, 1.0, 0.5, 1e-300, 1.0, 0.25],
        inflight_requests=[0, BIG, 3, 0, 7, 1],
        inflight_tokens=[0, BIG, 10**5, 0, 7, 1],
    )


@pytest.fixture(params=["cold", "no match", "warm"])
def situation(request: pytest.FixtureRequest, fleet_of: FleetOf, scheduling_of: SchedulingOf) -> Scheduling:
    endpoints = extremes(fleet_of)
    if request.param == "no match":
        return scheduling_of(endpoints)
    blocks = [0.0] * 6 if request.param == "cold" else [0.0, 10.0, 3.5, 1e-300, 9.0, 10.0]
    return scheduling_of(endpoints, approx_prefix_cache_producer=blocks)


@pytest.mark.parametrize("kind", SCORERS)
class TestScorers:
    def test_scores_are_shares_aligned_with_the_endpoints(self, build: Build, kind: str, situation: Scheduling) -> None:
        scores = build(kind).score(situation, situation.endpoints)
        assert len(scores) == len(situation.endpoints)
        assert all(0.0 <= score <= 1.0 for score in scores)

    def test_the_order_of_endpoints_does_not_matter(self, build: Build, kind: str, situation: Scheduling) -> None:
        scorer = build(kind)
        expected = dict(zip(map(id, situation.endpoints), scorer.score(situation, situation.endpoints), strict=True))
        shuffled = random.Random(3).sample(list(situation.endpoints), len(situation.endpoints))
        assert list(scorer.score(situation, shuffled)) == [expected[id(endpoint)] for endpoint in shuffled]

    def test_a_subset_gets_as_many_scores(self, build: Build, kind: str, situation: Scheduling) -> None:
        scorer = build(kind)
        for count in (0, 1, 2):
            scores = scorer.score(situation, situation.endpoints[-count:] if count else [])
            assert len(scores) == count
            assert all(0.0 <= score <= 1.0 for score in scores)

    def test_endpoints_that_are_all_alike_are_not_told_apart(
        self, build: Build, kind: str, fleet_of: FleetOf, scheduling_of: SchedulingOf
    ) -> None:
        endpoints = fleet_of(4)
        scheduling = scheduling_of(endpoints, approx_prefix_cache_producer=[5.0] * 4)
        assert len(set(build(kind).score(scheduling, endpoints))) == 1

    def test_being_told_of_the_choice_harms_nothing(self, build: Build, kind: str, situation: Scheduling) -> None:
        scorer = build(kind)
        if hasattr(scorer, "picked"):
            scorer.score(situation, situation.endpoints)
            chosen = ProfileResult(situation.endpoints, [0.0] * 6, {}, situation.endpoints[:1])
            scorer.picked(situation, SchedulingResult({"default": chosen}, "default"))
            assert len(scorer.score(situation, situation.endpoints)) == 6


@pytest.mark.parametrize("kind", PICKERS)
class TestPickers:
    @pytest.mark.parametrize("count", [1, 3, 100])
    @pytest.mark.parametrize("scores", [[0.0] * 6, [1.0] * 6, [0.0, 0.1, 2.5, 1e6, 1e-300, 2.5]])
    def test_picks_are_different_candidates(
        self, build: Build, kind: str, situation: Scheduling, count: int, scores: Sequence[float]
    ) -> None:
        picked = build(kind, max_num_of_endpoints=count).pick(situation, situation.endpoints, scores)
        assert len(picked) == min(count, 6)
        assert len({id(endpoint) for endpoint in picked}) == len(picked)
        assert all(endpoint in situation.endpoints for endpoint in picked)

    def test_a_single_candidate_is_picked(self, build: Build, kind: str, situation: Scheduling) -> None:
        only = situation.endpoints[2:3]
        assert list(build(kind).pick(situation, only, [0.0])) == list(only)

    @pytest.mark.parametrize("score", [0.0, 1.0, 4.7])
    @pytest.mark.parametrize("count", [1, 2])
    def test_ties_are_spread_evenly(
        self, build: Build, kind: str, situation: Scheduling, score: float, count: int
    ) -> None:
        picker = build(kind, max_num_of_endpoints=count)
        drawn = [picker.pick(situation, situation.endpoints, [score] * 6)[0].slot for _ in range(3000)]
        expected = 3000 / 6
        chi_square = sum((drawn.count(slot) - expected) ** 2 / expected for slot in range(6))
        assert chi_square < 25  # 5 degrees of freedom: passed by chance less often than 1 in 5 000


@pytest.mark.parametrize("kind", FILTERS)
def test_filters_keep_some_of_the_candidates_in_order(build: Build, kind: str, situation: Scheduling) -> None:
    kept = build(kind, **PARAMETERS.get(kind, {})).filter(situation, situation.endpoints)
    assert [endpoint for endpoint in situation.endpoints if endpoint in kept] == list(kept)
