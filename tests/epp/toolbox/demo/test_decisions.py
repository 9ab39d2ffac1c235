"""What the demo takes from the picker's page of decisions."""

from __future__ import annotations

from typing import Any

from epp.toolbox.demo.decisions import parse_predictions
from epp.toolbox.demo.verdicts import Prediction


def tiers(gpu: int, cpu: int) -> dict[str, int]:
    return {"gpu": gpu, "cpu": cpu, "storage": 0, "total": gpu + cpu}


def decision(**changes: Any) -> dict[str, Any]:
    return {
        "id": "tierpick-chat-1-0",
        "chosen": "127.0.0.1:8001",
        "predicted": tiers(64, 128),
        "candidates": [
            {"endpoint": "127.0.0.1:8001", "name": "sim-1", "cached_tokens": tiers(64, 128)},
            {"endpoint": "127.0.0.1:8000", "name": "sim-0", "cached_tokens": tiers(256, 0)},
            {"endpoint": "127.0.0.1:8002", "name": "sim-2", "cached_tokens": None},
        ],
    } | changes


def test_a_prediction_is_the_chosen_pods_and_the_best_of_all_candidates() -> None:
    assert parse_predictions({"decisions": [decision()]}) == {
        "tierpick-chat-1-0": Prediction(pod="sim-1", gpu=64, cpu=128, storage=0, best=256)
    }


def test_a_decision_without_exact_knowledge_predicts_nothing() -> None:
    assert parse_predictions({"decisions": [decision(predicted=None)]}) == {}
