from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from epp.config.environment import Environment
from epp.fleet.endpoint import Endpoint, EndpointSpec
from epp.scheduling.plugin import ProfileResult, Scheduling, SchedulingResult

Build = Callable[..., Any]
FleetOf = Callable[..., list[Endpoint]]
SchedulingOf = Callable[..., Scheduling]


@pytest.mark.parametrize(
    ("kind", "parameters", "figures", "scores"),
    [
        ("queue-scorer", {}, {"waiting": [0, 5, 10]}, [1.0, 0.5, 0.0]),
        ("queue-scorer", {}, {"waiting": [7, 7, 7]}, [1.0, 1.0, 1.0]),
        ("running-requests-size-scorer", {}, {"running": [4, 2, 3]}, [0.0, 1.0, 0.5]),
        ("kv-cache-utilization-scorer", {}, {"kv_usage": [0.0, 0.25, 1.0]}, [1.0, 0.75, 0.0]),
        ("load-aware-scorer", {}, {"waiting": [0, 64, 500]}, [0.5, 0.25, 0.0]),
        ("load-aware-scorer", {"threshold": 10}, {"waiting": [0, 1, 10]}, [0.5, 0.45, 0.0]),
        ("active-request-scorer", {}, {"inflight_requests": [0, 1, 4]}, [1.0, 0.75, 0.0]),
        ("active-request-scorer", {}, {"inflight_requests": [2, 2, 2]}, [0.0, 0.0, 0.0]),
        (
            "active-request-scorer",
            {"idle_threshold": 2, "max_busy_score": 0.5},
            {"inflight_requests": [2, 3, 6]},
            [1.0, 0.25, 0.0],
        ),
    ],
)
def test_scores_by_load(
    build: Build,
    fleet_of: FleetOf,
    scheduling_of: SchedulingOf,
    kind: str,
    parameters: dict[str, Any],
    figures: dict[str, Any],
    scores: list[float],
) -> None:
    endpoints = fleet_of(3, **figures)
    assert list(build(kind, **parameters).score(scheduling_of(endpoints), endpoints)) == pytest.approx(scores)


class TestPrefixCacheScorer:
    def test_the_share_of_the_prompt_is_the_score(
        self, build: Build, fleet_of: FleetOf, scheduling_of: SchedulingOf
    ) -> None:
        endpoints = fleet_of(3)
        scheduling = scheduling_of(endpoints, gpu=[0.0, 2.5, 10.0])
        scorer = build("prefix-cache-scorer", prefix_match_info_producer_name="gpu")
        assert scorer.score(scheduling, endpoints) == [0.0, 0.25, 1.0]

    def test_length_may_count_beside_the_share(
        self, build: Build, fleet_of: FleetOf, scheduling_of: SchedulingOf
    ) -> None:
        endpoints = fleet_of(3)
        scheduling = scheduling_of(endpoints, approx_prefix_cache_producer=[0.0, 5.0, 10.0])
        scorer = build("prefix-cache-scorer", match_length_weight=0.4, match_length_scale_tokens=500)
        half = 0.4 * (320 / 500) ** 2 + 0.6 * 0.5
        assert scorer.score(scheduling, endpoints) == pytest.approx([0.0, half, 1.0])

    def test_without_an_account_of_the_prompt_all_are_zero(
        self, build: Build, fleet_of: FleetOf, scheduling_of: SchedulingOf
    ) -> None:
        endpoints = fleet_of(2)
        assert build("prefix-cache-scorer").score(scheduling_of(endpoints), endpoints) == [0.0, 0.0]

    def test_a_scale_of_nothing_is_refused(self, build: Build) -> None:
        with pytest.raises(ValueError, match="matchLengthScaleTokens must be positive"):
            build("prefix-cache-scorer", match_length_weight=0.1, match_length_scale_tokens=0)


class TestTokenLoadScorer:
    def test_tokens_in_flight_and_the_requests_own_count(
        self, build: Build, fleet_of: FleetOf, scheduling_of: SchedulingOf
    ) -> None:
        endpoints = fleet_of(3, inflight_tokens=[0, 400, 2000])
        scheduling = scheduling_of(endpoints, approx_prefix_cache_producer=[0.0, 10.0, 0.0])
        build("inflight-load-producer").produce(scheduling)
        scorer = build("token-load-scorer", queue_threshold_tokens=1000)
        assert scorer.score(scheduling, endpoints) == pytest.approx([0.36, 0.6, 0.0])

    def test_an_unscored_request_is_judged_by_load_alone(
        self, build: Build, fleet_of: FleetOf, scheduling_of: SchedulingOf
    ) -> None:
        endpoints = fleet_of(2, inflight_tokens=[0, 500])
        scorer = build("token-load-scorer", queue_threshold_tokens=1000)
        assert scorer.score(scheduling_of(endpoints, tokens=0), endpoints) == [1.0, 0.5]


class TestNoHitLruScorer:
    def send(self, scorer: Any, scheduling: Scheduling, to: Endpoint, prefill: Endpoint | None = None) -> None:
        scorer.score(scheduling, scheduling.endpoints)
        profiles: dict[str, ProfileResult | None] = {"default": ProfileResult([], [], {}, [to])}
        if prefill is not None:
            profiles["prefill"] = ProfileResult([], [], {}, [prefill])
        scorer.picked(scheduling, SchedulingResult(profiles, "default"))

    def test_somebody_holds_a_block_so_nobody_is_preferred(
        self, build: Build, fleet_of: FleetOf, scheduling_of: SchedulingOf
    ) -> None:
        endpoints = fleet_of(3)
        scheduling = scheduling_of(endpoints, approx_prefix_cache_producer=[0.0, 0.0, 1.0])
        assert build("no-hit-lru-scorer").score(scheduling, endpoints) == [0.5, 0.5, 0.5]

    def test_cold_prompts_go_around(self, build: Build, fleet_of: FleetOf, scheduling_of: SchedulingOf) -> None:
        endpoints = fleet_of(4)
        scorer = build("no-hit-lru-scorer")
        order = []
        for _ in range(12):
            scheduling = scheduling_of(endpoints)
            scores = scorer.score(scheduling, endpoints)
            best = endpoints[max(range(4), key=scores.__getitem__)]
            self.send(scorer, scheduling, best)
            order.append(best.slot)
        assert sorted(order[:4]) == [0, 1, 2, 3]
        assert order == order[:4] * 3

    def test_places_are_even_steps_from_one_to_zero(
        self, build: Build, fleet_of: FleetOf, scheduling_of: SchedulingOf
    ) -> None:
        endpoints = fleet_of(5)
        scorer = build("no-hit-lru-scorer")
        for position in (3, 1):
            self.send(scorer, scheduling_of(endpoints), endpoints[position])
        scores = scorer.score(scheduling_of(endpoints), endpoints)
        assert (scores[3], scores[1]) == (0.25, 0.0)
        assert sorted(scores) == [0.0, 0.25, 0.5, 0.75, 1.0]

    def test_warm_picks_do_not_cost_a_turn(self, build: Build, fleet_of: FleetOf, scheduling_of: SchedulingOf) -> None:
        endpoints = fleet_of(2)
        scorer = build("no-hit-lru-scorer")
        before = scorer.score(scheduling_of(endpoints), endpoints)
        first = endpoints[before.index(1.0)]
        self.send(scorer, scheduling_of(endpoints, approx_prefix_cache_producer=[5.0, 5.0]), first)
        assert scorer.score(scheduling_of(endpoints), endpoints) == before

    def test_the_prefill_endpoint_takes_a_turn_too(
        self, build: Build, fleet_of: FleetOf, scheduling_of: SchedulingOf
    ) -> None:
        endpoints = fleet_of(3)
        scorer = build("no-hit-lru-scorer")
        self.send(scorer, scheduling_of(endpoints), endpoints[0], prefill=endpoints[1])
        assert scorer.score(scheduling_of(endpoints), endpoints) == [0.5, 0.0, 1.0]

    def test_no_more_endpoints_are_remembered_than_configured(
        self, build: Build, fleet_of: FleetOf, scheduling_of: SchedulingOf
    ) -> None:
        endpoints = fleet_of(3)
        scorer = build("no-hit-lru-scorer", lru_size=2)
        for endpoint in endpoints:
            self.send(scorer, scheduling_of(endpoints), endpoint)
        assert scorer.score(scheduling_of(endpoints), endpoints) == [1.0, 0.5, 0.0]
        assert len(scorer._last_turn) == 2

    def test_a_new_pod_at_an_old_address_never_had_a_turn(
        self, build: Build, environment: Environment, scheduling_of: SchedulingOf
    ) -> None:
        fleet, scorer = environment.fleet, build("no-hit-lru-scorer")

        def scores_after(*pods: str) -> dict[str, float]:
            fleet.apply([EndpointSpec(f"10.0.0.{number}:8000", uid=uid) for number, uid in enumerate(pods)])
            scores = scorer.score(scheduling_of(fleet.endpoints), fleet.endpoints)
            return {e.spec.uid: score for e, score in zip(fleet.endpoints, scores, strict=True)}

        scores_after("a", "b", "c")
        for endpoint in fleet.endpoints:
            self.send(scorer, scheduling_of(fleet.endpoints), endpoint)
        assert scores_after("new", "b", "c") == {"new": 1.0, "b": 0.5, "c": 0.0}
        scores_after()
        assert not scorer._last_turn

    def test_pickers_that_start_together_do_not_begin_alike(
        self, build: Build, fleet_of: FleetOf, scheduling_of: SchedulingOf
    ) -> None:
        endpoints = fleet_of(8)
        firsts = {
            tuple(build("no-hit-lru-scorer").score(scheduling_of(endpoints), endpoints)).index(1.0) for _ in range(30)
        }
        assert len(firsts) > 2
