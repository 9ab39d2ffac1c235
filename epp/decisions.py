"""Why each request went where it went: a ring of recent decisions, kept cheaply and told in full only when asked.

On the request path a decision keeps references to what scheduling worked out anyway, plus the load figures that would
change under it. It never holds the request itself: no prompt, no body, no tokens can be read from here.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

from epp.fleet.endpoint import EngineLoad
from epp.routing import Outcome
from epp.scheduling.plugin import Certainty, ProfileResult, Scheduling, SchedulingResult, TierHit
from epp.telemetry import comparison

Seen = tuple[Sequence[EngineLoad], Sequence[int], Sequence[int]]
"""Engine load, requests and uncached tokens in flight: as they were at the decision, aligned with its candidates."""

_LONGEST_TEXT = 256


class Decision(Struct):
    id: str
    at: float
    """Wall clock, seconds since 1970."""
    model: str
    target_model: str
    path: str
    prompt_tokens: int
    blocks: Mapping[str, tuple[int, int]]
    """By producer: blocks of the prompt and tokens a block."""
    profiles: Mapping[str, ProfileResult | None]
    primary: str
    target: ProfileResult
    """Of the primary profile."""
    seen: Seen
    """Of the primary profile's candidates, before this request was counted."""
    hits: Sequence[TierHit | None]
    """By slot; empty where nothing exact was known."""
    certainty: Certainty | None = None
    unscored: str = ""
    skipped: Sequence[str] = ()
    weights: Mapping[str, float] | None = None
    """By scorer of the primary profile, where known."""
    delivered: int | None = None
    """Cached tokens the engine reported; None = not observed."""
    served: str = ""
    """The endpoint the data plane says has answered, which may be a fallback."""
    outcome: Outcome | None = None
    arrived: float = 0.0
    """Monotonic seconds; durations count from here."""

    @property
    def chosen(self) -> str:
        return self.target.picked[0].address

    @property
    def predicted(self) -> TierHit | None:
        return self._hit(self.target.picked[0].slot)

    def _hit(self, slot: int) -> TierHit | None:
        return self.hits[slot] if slot < len(self.hits) else None

    @property
    def feed(self) -> str:
        """State of the chosen endpoint's event feed when it was picked; "" = it has none."""
        certain = self._certain(self.target.picked[0].slot)
        return certain[0] if certain else ""

    def _certain(self, slot: int) -> tuple[str, float] | None:
        return self.certainty.of(slot) if self.certainty else None

    def finish(self, outcome: Outcome, *, delivered: int | None = None, served: str = "") -> None:
        self.outcome, self.delivered, self.served = outcome, delivered, served

    def to_json(self) -> dict[str, Any]:
        """Times in seconds, sizes in tokens, candidates best first."""
        return {
            "id": self.id,
            "time": self.at,
            "model": self.model,
            "target_model": self.target_model,
            "path": self.path,
            "prompt_tokens": self.prompt_tokens,
            "blocks": {name: {"total": total, "size": size} for name, (total, size) in self.blocks.items()},
            "unscored": self.unscored,
            "skipped_plugins": list(self.skipped),
            "profile": self.primary,
            "chosen": self.chosen,
            "fallbacks": [endpoint.address for endpoint in self.target.picked[1:]],
            "other_profiles": {
                name: [endpoint.address for endpoint in result.picked] if result else None
                for name, result in self.profiles.items()
                if name != self.primary
            },
            "predicted": _tiers(self.predicted),
            "feed": self.feed,
            "delivered_cached_tokens": self.delivered,
            "prediction": self._comparison(),
            "served": self.served,
            "outcome": self._outcome(),
            "candidates": sorted(self._candidates(), key=lambda candidate: -candidate["score"]),
        }

    def _comparison(self) -> str | None:
        """None where there is nothing to compare: a fallback that answered was never predicted for."""
        predicted = self.predicted
        if predicted is None or self.delivered is None or self.served not in ("", self.chosen):
            return None
        return comparison(predicted.cached, self.delivered)

    def _outcome(self) -> dict[str, Any] | None:
        outcome = self.outcome
        if outcome is None:
            return None
        return {
            "termination": outcome.termination.value,
            "status": outcome.status,
            "ttft": outcome.first_byte_at - self.arrived if outcome.first_byte_at else None,
            "duration": outcome.at - self.arrived,
            "response_bytes": outcome.response_bytes,
        }

    def _candidates(self) -> Iterator[dict[str, Any]]:
        target = self.target
        for index, (endpoint, load, requests, tokens) in enumerate(zip(target.endpoints, *self.seen, strict=True)):
            feed, trust = self._certain(endpoint.slot) or ("", None)
            yield {
                "endpoint": endpoint.address,
                "name": endpoint.spec.name,
                "score": target.scores[index],
                "scorers": {name: self._score(name, scores[index]) for name, scores in target.raw.items()},
                "cached_tokens": _tiers(self._hit(endpoint.slot)),
                "feed": feed,
                "trust": trust,
                "load": {
                    "waiting": load.waiting,
                    "running": load.running,
                    "kv_usage": load.kv_usage,
                    "inflight_requests": requests,
                    "inflight_tokens": tokens,
                },
            }

    def _score(self, scorer: str, raw: float) -> dict[str, float]:
        weight = None if self.weights is None else self.weights.get(scorer)
        return {"raw": raw} if weight is None else {"raw": raw, "weight": weight, "weighted": raw * weight}


def _tiers(hit: TierHit | None) -> dict[str, int] | None:
    return None if hit is None else {"gpu": hit.gpu, "cpu": hit.cpu, "storage": hit.storage, "total": hit.cached}


class Decisions:
    """The ring. Bounded by decisions and, since a large fleet makes each one large, by candidates over all of them."""

    def __init__(
        self, capacity: int = 1000, *, candidates: int = 100_000, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self.capacity = capacity
        self._ring: deque[Decision] = deque()
        self._room = candidates
        self._wall_clock = wall_clock

    def __len__(self) -> int:
        return len(self._ring)

    def record(
        self,
        scheduling: Scheduling,
        result: SchedulingResult,
        *,
        arrived: float,
        weights: Mapping[str, float] | None = None,
    ) -> Decision:
        """To be called before the request counts as in flight; the caller completes it with `Decision.finish`."""
        request, target = scheduling.request, result.target
        endpoints = target.endpoints
        decision = Decision(
            id=request.id[:_LONGEST_TEXT],
            at=self._wall_clock(),
            model=request.model[:_LONGEST_TEXT],
            target_model=request.target_model[:_LONGEST_TEXT],
            path=request.path.partition("?")[0][:_LONGEST_TEXT],
            prompt_tokens=request.prompt_tokens,
            blocks={name: (match.total, match.block_size) for name, match in scheduling.matches.items()},
            profiles=result.profiles,
            primary=result.primary,
            target=target,
            seen=(
                [endpoint.load for endpoint in endpoints],
                [endpoint.inflight_requests for endpoint in endpoints],
                [endpoint.inflight_tokens for endpoint in endpoints],
            ),
            hits=scheduling.hits,
            certainty=scheduling.certainty,
            unscored=request.unscored,
            skipped=scheduling.skipped,
            weights=weights,
            arrived=arrived,
        )
        self._keep(decision)
        return decision

    def _keep(self, decision: Decision) -> None:
        self._ring.append(decision)
        self._room -= len(decision.target.endpoints)
        while self._ring and (len(self._ring) > self.capacity or self._room < 0):
            self._room += len(self._ring.popleft().target.endpoints)

    def newest(self, *, model: str = "", endpoint: str = "") -> Iterator[Decision]:
        """Newest first; of a model (as the client or the engine names it) and a chosen endpoint, where given."""
        for decision in reversed(tuple(self._ring)):
            if model in ("", decision.model, decision.target_model) and endpoint in ("", decision.chosen):
                yield decision
