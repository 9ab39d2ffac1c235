"""The demo's figures: from calls, judgements and engine counters to one value and its JSON. Pure.

Figures of tokens come from the engines' counters and `usage`, latencies from the clients, predictions from the picker:
no part reports on itself.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from epp.toolbox.demo.counters import EngineCounters
from epp.toolbox.demo.drive import Call
from epp.toolbox.demo.sizes import Sizes
from epp.toolbox.demo.verdicts import Judgement, Reason, Verdict


def percentile(values: Iterable[float], share: float) -> float:
    """Nearest rank: the smallest value that at least `share` of all values do not exceed. NaN without values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


@dataclass(frozen=True, slots=True)
class Latency:
    """Milliseconds."""

    count: int
    p50: float
    p90: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Latency:
        return cls(len(seconds), percentile(seconds, 0.5) * 1e3, percentile(seconds, 0.9) * 1e3)


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one policy made of the traffic."""

    requests: int
    seconds: float
    failures: tuple[str, ...]
    pods: Mapping[str, EngineCounters]
    ttft: Latency
    """Streamed answers only."""
    whole: Latency
    """Until the last byte, all answers."""

    @property
    def total(self) -> EngineCounters:
        return sum(self.pods.values(), EngineCounters())


def traffic(calls: Sequence[Call], pods: Mapping[str, EngineCounters]) -> Traffic:
    good = [call for call in calls if not call.failed]
    return Traffic(
        requests=len(calls),
        seconds=max((c.done_at for c in calls), default=0.0) - min((c.sent_at for c in calls), default=0.0),
        failures=tuple(f"{call.id}: {call.error}" for call in calls if call.failed),
        pods=pods,
        ttft=Latency.of([call.first_at - call.sent_at for call in good if call.stream]),
        whole=Latency.of([call.done_at - call.sent_at for call in good]),
    )


@dataclass(frozen=True, slots=True)
class Predictions:
    """How predictions compare with deliveries; tokens over the comparable calls."""

    verdicts: Mapping[Verdict, int]
    reasons: Mapping[tuple[Verdict, Reason], int]
    best_tokens: int
    """On the pod that held most of each prompt."""
    predicted_tokens: int
    """On the pod that was chosen."""
    delivered_tokens: int
    predicted_by_pod: Mapping[str, int]
    """Predicted tokens of all requests that were sent to a pod."""
    misses: tuple[str, ...]
    """Each call that was not exact, in words."""

    @property
    def exact(self) -> int:
        return self.verdicts[Verdict.EXACT]

    @property
    def total(self) -> int:
        return sum(self.verdicts.values())

    @property
    def all_exact(self) -> bool:
        return 0 < self.exact == self.total


def predictions(judgements: Sequence[Judgement]) -> Predictions:
    by_pod: Counter[str] = Counter()
    for judgement in judgements:
        if judgement.prediction:
            by_pod[judgement.prediction.pod] += judgement.prediction.cached
    comparable = [(j.prediction, j.call.cached_tokens or 0) for j in judgements if j.prediction and not j.call.failed]
    return Predictions(
        verdicts=Counter(j.verdict for j in judgements),
        reasons=Counter((j.verdict, j.reason) for j in judgements if j.reason is not Reason.NONE),
        best_tokens=sum(p.best for p, _ in comparable),
        predicted_tokens=sum(p.cached for p, _ in comparable),
        delivered_tokens=sum(delivered for _, delivered in comparable),
        predicted_by_pod=by_pod,
        misses=tuple(_in_words(j) for j in judgements if j.verdict is not Verdict.EXACT),
    )


def _in_words(judgement: Judgement) -> str:
    call, prediction = judgement.call, judgement.prediction
    subject = f"{call.id} ({call.what})" if call.what else call.id
    if prediction is None:
        return f"{subject}: no prediction"
    predicted = f"{prediction.gpu} HBM + {prediction.cpu} CPU + {prediction.storage} storage"
    why = f" ({judgement.reason.value})" if judgement.reason is not Reason.NONE else ""
    return f"{subject}: predicted {predicted}, delivered {call.cached_tokens} on {prediction.pod}{why}"


@dataclass(frozen=True, slots=True)
class Report:
    seed: int
    sizes: Sizes
    round_robin: Traffic
    tierpick: Traffic
    concurrent: Predictions
    exact_traffic: Traffic
    exact: Predictions

    @property
    def failures(self) -> list[str]:
        return [*self.round_robin.failures, *self.tierpick.failures, *self.exact_traffic.failures]

    @property
    def passed(self) -> bool:
        return self.exact.all_exact and not self.failures


def as_json(report: Report) -> dict[str, Any]:
    """All figures, as values that JSON knows. Tokens are counts, times milliseconds unless the name says otherwise."""
    return {
        "passed": report.passed,
        "seed": report.seed,
        "fleet": asdict(report.sizes),
        "round_robin": _traffic_json(report.round_robin),
        "tierpick": _traffic_json(report.tierpick) | {"predictions": _predictions_json(report.concurrent)},
        "exact": _traffic_json(report.exact_traffic) | {"predictions": _predictions_json(report.exact)},
    }


def _traffic_json(figures: Traffic) -> dict[str, Any]:
    return {
        "requests": figures.requests,
        "failures": list(figures.failures),
        "seconds": round(figures.seconds, 3),
        "pods": {name: _counters_json(counters) for name, counters in figures.pods.items()},
        "total": _counters_json(figures.total),
        "ttft_ms": _latency_json(figures.ttft),
        "whole_answer_ms": _latency_json(figures.whole),
    }


def _counters_json(counters: EngineCounters) -> dict[str, int]:
    return {
        "requests": counters.requests,
        "prompt_tokens": counters.prompt_tokens,
        "hbm_tokens": counters.hbm_tokens,
        "cpu_tokens": counters.lower_tokens,
        "recomputed_tokens": counters.recomputed_tokens,
    }


def _latency_json(latency: Latency) -> dict[str, float | None]:
    # JSON has no NaN.
    figures = {"p50": latency.p50, "p90": latency.p90}
    return {"count": latency.count} | {k: None if math.isnan(v) else round(v, 2) for k, v in figures.items()}


def _predictions_json(figures: Predictions) -> dict[str, Any]:
    reasons: dict[str, dict[str, int]] = {Verdict.BELOW.value: {}, Verdict.ABOVE.value: {}}
    for (verdict, reason), count in figures.reasons.items():
        reasons[verdict.value][reason.value] = count
    return {
        **{verdict.name.lower(): figures.verdicts[verdict] for verdict in Verdict},
        "reasons": reasons,
        "best_available_tokens": figures.best_tokens,
        "predicted_tokens": figures.predicted_tokens,
        "delivered_tokens": figures.delivered_tokens,
        "predicted_tokens_by_pod": dict(figures.predicted_by_pod),
        "misses": list(figures.misses),
    }
