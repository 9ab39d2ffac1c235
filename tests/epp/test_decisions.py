"""The ring of decisions: what it keeps, what it tells, and what it must never hold."""

from __future__ import annotations

import json
from typing import Any

import pytest

from epp.decisions import Decision, Decisions
from epp.fleet.endpoint import EndpointSpec, EngineLoad
from epp.fleet.fleet import Fleet
from epp.requests.model import InferenceRequest
from epp.routing import Outcome, Termination
from epp.scheduling.plugin import Certainty, PrefixMatch, ProfileResult, Scheduling, SchedulingResult, TierHit
from indexer.stream import State

CANARY = "my secret prompt"


def fleet(size: int = 3) -> Fleet:
    result = Fleet()
    result.apply(EndpointSpec(f"10.0.0.{i}:8000", f"pod-{i}") for i in range(size))
    return result


def scheduling(endpoints: Fleet, **fields: Any) -> Scheduling:
    request = InferenceRequest(
        "req-1", f"/v1/completions?q={CANARY}", {"authorization": CANARY}, CANARY.encode(),
        model="m", target_model="t", prompts=[CANARY], tokens=[b"secret tokens..."], **fields,
    )  # fmt: skip
    result = Scheduling(request, endpoints.endpoints, now=10.0)
    result.matches = {"gpu-index": PrefixMatch(4, 16, [1, 3, 0], [16, 48, 0])}
    result.hits = [TierHit(gpu=16), TierHit(gpu=32, cpu=16), None]
    result.certainty = Certainty([State.LIVE, State.UNSURE, None], [1.0, 0.75, 0.0])
    return result


def result(endpoints: Fleet, chosen: int = 1) -> SchedulingResult:
    candidates = endpoints.endpoints[:3]
    picked = [candidates[chosen], *(e for e in candidates if e is not candidates[chosen])][:2]
    raw = {"queue": [1.0, 0.5, 0.0], "prefix": [0.25, 0.75, 0.0]}
    return SchedulingResult({"default": ProfileResult(candidates, [2.75, 3.25, 0.0], raw, picked)}, "default")


@pytest.fixture
def decision() -> Decision:
    endpoints = fleet()
    endpoints.endpoints[1].load = EngineLoad(waiting=2, running=5, kv_usage=0.5)
    endpoints.endpoints[1].inflight_requests, endpoints.endpoints[1].inflight_tokens = 3, 700
    made = Decisions(wall_clock=lambda: 1.7e9).record(
        scheduling(endpoints), result(endpoints), arrived=9.0, weights={"queue": 2.0, "prefix": 3.0}
    )
    endpoints.endpoints[1].load = EngineLoad(waiting=99)
    endpoints.endpoints[1].inflight_requests = 99
    return made


def test_a_decision_tells_of_the_request_and_the_choice(decision: Decision) -> None:
    told = decision.to_json()
    assert {key: told[key] for key in ("id", "time", "model", "target_model", "path", "prompt_tokens", "chosen")} == {
        "id": "req-1",
        "time": 1.7e9,
        "model": "m",
        "target_model": "t",
        "path": "/v1/completions",
        "prompt_tokens": 4,
        "chosen": "10.0.0.1:8000",
    }
    assert told["fallbacks"] == ["10.0.0.0:8000"]
    assert told["blocks"] == {"gpu-index": {"total": 4, "size": 16}}
    assert told["predicted"] == {"gpu": 32, "cpu": 16, "storage": 0, "total": 48}


def test_candidates_come_best_first_with_every_score_and_the_load_as_it_was_seen(decision: Decision) -> None:
    best, second, last = decision.to_json()["candidates"]
    assert best == {
        "endpoint": "10.0.0.1:8000",
        "name": "pod-1",
        "score": 3.25,
        "scorers": {
            "queue": {"raw": 0.5, "weight": 2.0, "weighted": 1.0},
            "prefix": {"raw": 0.75, "weight": 3.0, "weighted": 2.25},
        },
        "cached_tokens": {"gpu": 32, "cpu": 16, "storage": 0, "total": 48},
        "feed": "unsure",
        "trust": 0.75,
        "load": {"waiting": 2, "running": 5, "kv_usage": 0.5, "inflight_requests": 3, "inflight_tokens": 700},
    }
    assert second["endpoint"] == "10.0.0.0:8000"
    assert (second["feed"], second["trust"]) == ("live", 1.0)
    assert (last["cached_tokens"], last["feed"], last["trust"]) == (None, "", None)


@pytest.mark.parametrize(("chosen", "feed"), [(0, "live"), (1, "unsure"), (2, "")])
def test_it_says_what_state_the_chosen_endpoints_feed_was_in(chosen: int, feed: str) -> None:
    endpoints = fleet()
    assert Decisions().record(scheduling(endpoints), result(endpoints, chosen), arrived=0.0).to_json()["feed"] == feed


def test_where_all_feeds_are_live_each_counts_in_full() -> None:
    endpoints = fleet()
    run = scheduling(endpoints)
    run.certainty = Certainty([State.LIVE] * 3, ())
    told = Decisions().record(run, result(endpoints), arrived=0.0).to_json()
    assert {(candidate["feed"], candidate["trust"]) for candidate in told["candidates"]} == {("live", 1.0)}


def test_until_it_ends_a_decision_has_no_outcome(decision: Decision) -> None:
    told = decision.to_json()
    assert (told["outcome"], told["delivered_cached_tokens"], told["prediction"]) == (None, None, None)


@pytest.mark.parametrize(("delivered", "verdict"), [(48, "exact"), (32, "below"), (64, "above"), (None, None)])
def test_the_end_says_what_was_delivered_and_how_it_ended(
    decision: Decision, delivered: int | None, verdict: str | None
) -> None:
    outcome = Outcome(Termination.NATURAL, status=200, response_bytes=12, first_byte_at=9.5, at=11.0)
    decision.finish(outcome, delivered=delivered, served=decision.chosen)
    told = decision.to_json()
    assert (told["delivered_cached_tokens"], told["prediction"]) == (delivered, verdict)
    assert told["served"] == decision.chosen
    assert told["outcome"] == {
        "termination": "natural",
        "status": 200,
        "ttft": 0.5,
        "duration": 2.0,
        "response_bytes": 12,
    }


def test_what_a_fallback_delivered_is_not_held_against_the_prediction(decision: Decision) -> None:
    decision.finish(Outcome(Termination.NATURAL, status=200, at=11.0), delivered=48, served="10.9.9.9:8000")
    assert decision.to_json()["prediction"] is None


def test_a_stream_that_ended_before_any_answer_has_no_ttft(decision: Decision) -> None:
    decision.finish(Outcome(Termination.CLIENT, at=11.0))
    assert decision.to_json()["outcome"]["ttft"] is None


def test_neither_prompt_nor_tokens_nor_credentials_can_be_read_from_a_decision(decision: Decision) -> None:
    assert CANARY not in json.dumps(decision.to_json())
    assert CANARY not in repr(decision)
    assert "secret tokens" not in repr(decision)


def test_an_unscored_request_and_skipped_plugins_are_told() -> None:
    endpoints = fleet()
    run = scheduling(endpoints, unscored="path")
    run.hits, run.certainty, run.matches = [], None, {}
    made = Decisions().record(run, result(endpoints), arrived=0.0)
    run.skipped.append("late: went wrong after the decision")
    told = made.to_json()
    assert told["unscored"] == "path"
    assert (told["predicted"], told["feed"]) == (None, "")
    assert told["skipped_plugins"] == ["late: went wrong after the decision"]
    assert told["candidates"][0]["scorers"]["queue"] == {"raw": 0.5}


class TestRing:
    def test_it_keeps_the_newest(self) -> None:
        ring, endpoints = Decisions(capacity=2), fleet()
        made = [ring.record(scheduling(endpoints), result(endpoints), arrived=0.0) for _ in range(5)]
        assert list(ring.newest()) == [made[4], made[3]]

    def test_it_is_bounded_by_candidates_too(self) -> None:
        ring, endpoints = Decisions(candidates=10), fleet()
        for _ in range(20):
            ring.record(scheduling(endpoints), result(endpoints), arrived=0.0)
        assert len(ring) == 3

    def test_a_capacity_of_none_keeps_none(self) -> None:
        ring, endpoints = Decisions(capacity=0), fleet()
        made = ring.record(scheduling(endpoints), result(endpoints), arrived=0.0)
        assert (len(ring), made.chosen) == (0, "10.0.0.1:8000")

    def test_it_finds_by_model_as_client_or_engine_names_it_and_by_chosen_endpoint(self) -> None:
        ring, endpoints = Decisions(), fleet()
        for chosen in (0, 1):
            ring.record(scheduling(endpoints), result(endpoints, chosen), arrived=0.0)
        assert len(list(ring.newest(model="m"))) == len(list(ring.newest(model="t"))) == 2
        assert list(ring.newest(model="x")) == []
        assert [found.chosen for found in ring.newest(endpoint="10.0.0.0:8000")] == ["10.0.0.0:8000"]

    def test_long_texts_of_clients_are_cut(self) -> None:
        endpoints = fleet()
        run = scheduling(endpoints)
        run.request.id = run.request.model = "x" * 100_000
        made = Decisions().record(run, result(endpoints), arrived=0.0)
        assert len(made.id) == len(made.model) == 256
