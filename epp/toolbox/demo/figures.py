"""The demo's figures: from calls, judgements and engine counters to one value and its JSON. Pure.

Figures of tokens come from the engines' counters and `usage`, latencies from the clients, predictions from the picker:
no part reports on itself.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from epp.toolbox.demo.counters import EngineCounters, Found
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


class Place(Enum):
    """Where the beginning of a prompt was, going by its prediction."""

    HBM = "in HBM"
    BOTH = "in HBM and then CPU RAM"
    CPU = "in CPU RAM"
    NOWHERE = "nowhere"

    @classmethod
    def of(cls, found: Found) -> Place:
        if found.hbm:
            return cls.BOTH if found.lower else cls.HBM
        return cls.CPU if found.lower else cls.NOWHERE


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
    found_by_pod: Mapping[str, Found]
    """What was predicted of all requests that were sent to a pod, tier by tier."""
    places: Mapping[Place, int]
    """Requests."""
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

    @property
    def found(self) -> Found:
        return sum(self.found_by_pod.values(), Found())


def predictions(judgements: Sequence[Judgement]) -> Predictions:
    known = [j.prediction for j in judgements if j.prediction]
    by_pod: defaultdict[str, Found] = defaultdict(Found)
    for prediction in known:
        by_pod[prediction.pod] += prediction.found
    comparable = [(j.prediction, j.call.cached_tokens or 0) for j in judgements if j.prediction and not j.call.failed]
    return Predictions(
        verdicts=Counter(j.verdict for j in judgements),
        reasons=Counter((j.verdict, j.reason) for j in judgements if j.reason is not Reason.NONE),
        best_tokens=sum(p.best for p, _ in comparable),
        predicted_tokens=sum(p.cached for p, _ in comparable),
        delivered_tokens=sum(delivered for _, delivered in comparable),
        found_by_pod=by_pod,
        places=Counter(Place.of(prediction.found) for prediction in known),
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
        return not self.shortcomings

    @property
    def shortcomings(self) -> list[str]:
        """Why the demo has not passed, in words; empty if it has."""
        inexact = self.exact.total - self.exact.exact
        reasons = [f"{len(self.failures)} failed requests"] if self.failures else []
        if not self.exact.all_exact:
            reasons.append(f"{inexact} of {self.exact.total} sequential predictions not exact")
        return [*reasons, *self._wrong_tiers(), *self._untested_tiers()]

    def _wrong_tiers(self) -> Iterator[str]:
        """Sums can be right where tiers are not: each pod's counters tell what it took from which."""
        for pod, counters in self.exact_traffic.pods.items():
            predicted, delivered = self.exact.found_by_pod.get(pod, Found()), counters.found
            if predicted != delivered:
                yield (
                    f"{pod}: predicted {predicted.hbm:,} tokens in HBM and {predicted.lower:,} in CPU RAM, "
                    f"delivered {delivered.hbm:,} and {delivered.lower:,} one request after another"
                )

    def _untested_tiers(self) -> Iterator[str]:
        """A tier in which nothing was found is one whose predictions were not tested."""
        found = self.exact_traffic.total.found
        if not found.hbm:
            yield "nothing was found in HBM one request after another"
        if not found.lower and self.sizes.cpu_chunks:
            yield "nothing was found in CPU RAM one request after another"


def as_json(report: Report) -> dict[str, Any]:
    """All figures, as values that JSON knows. Tokens are counts, times milliseconds unless the name says otherwise."""
    return {
        "passed": report.passed,
        "not_passed_because": report.shortcomings,
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
        "predicted_tokens_by_pod": {
            pod: {"hbm_tokens": found.hbm, "cpu_tokens": found.lower} for pod, found in figures.found_by_pod.items()
        },
        "requests_found": {place.value: figures.places[place] for place in Place},
        "misses": list(figures.misses),
    }
