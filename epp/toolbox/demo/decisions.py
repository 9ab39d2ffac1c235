"""Predictions out of the picker's `/debug/decisions`. Pure."""

from __future__ import annotations

from typing import Any

from epp.toolbox.demo.verdicts import Prediction


def parse_predictions(page: dict[str, Any]) -> dict[str, Prediction]:
    """By request id. Decisions made without exact knowledge of the caches are left out."""
    return {d["id"]: _prediction(d) for d in page["decisions"] if d["predicted"] is not None}


def _prediction(decision: dict[str, Any]) -> Prediction:
    candidates = decision["candidates"]
    names = {candidate["endpoint"]: candidate["name"] for candidate in candidates}
    predicted = decision["predicted"]
    return Prediction(
        pod=names[decision["chosen"]],
        gpu=predicted["gpu"],
        cpu=predicted["cpu"],
        storage=predicted["storage"],
        best=max(c["cached_tokens"]["total"] for c in candidates if c["cached_tokens"] is not None),
    )
