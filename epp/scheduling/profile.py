"""One profile run: filters narrow the candidates, scorers rate them, the picker chooses.

Pure computation over what the producers left on the `Scheduling`. A plugin that raises is skipped: a filter lets all
through, a scorer counts nothing, for a picker the best score decides.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, TypeVar

from epp.errors import Code, Refusal
from epp.fleet.endpoint import Endpoint
from epp.scheduling.failures import Failures
from epp.scheduling.plugin import Filter, Picker, Plugin, ProfileResult, Scheduling, Scorer

if TYPE_CHECKING:
    from epp.telemetry import Telemetry

P = TypeVar("P", bound=Plugin)
Timed = tuple[P, Callable[[float], None]]
"""A plugin and where its durations (seconds) are observed."""


@dataclass(slots=True, frozen=True)
class Profile:
    name: str
    filters: Sequence[Filter]
    scorers: Sequence[tuple[Scorer, float]]
    """With their weights: finite, not negative."""
    picker: Picker


def nothing_left() -> Refusal:
    return Refusal(Code.ResourceExhausted, "no endpoints available for the given request", reason="rejected-saturated")


class ProfileRun:
    """A profile made ready to run: metrics resolved once, failures isolated."""

    def __init__(self, profile: Profile, telemetry: Telemetry, failures: Failures, rng: random.Random) -> None:
        def timed(plugin: P, point: str) -> Timed[P]:
            return plugin, telemetry.plugin_duration(point, plugin.type, plugin.name).observe

        self.name = profile.name
        self._filters = [timed(f, "Filter") for f in profile.filters]
        self._scorers = [(timed(s, "Scorer"), weight) for s, weight in profile.scorers]
        self._picker = timed(profile.picker, "Picker")
        self._failures = failures
        self._rng = rng

    def __call__(self, scheduling: Scheduling) -> ProfileResult:
        """Raises `Refusal` where the filters leave nobody, or where a plugin refuses the request itself."""
        endpoints = self._filter(scheduling)
        raw: dict[str, Sequence[float]] = {}
        totals = self._score(scheduling, endpoints, raw)
        return ProfileResult(endpoints, totals, raw, self._pick(scheduling, endpoints, totals))

    def _filter(self, scheduling: Scheduling) -> Sequence[Endpoint]:
        endpoints = scheduling.endpoints
        before = perf_counter()
        for plugin, observe in self._filters:
            if not endpoints:
                break
            try:
                endpoints = plugin.filter(scheduling, endpoints)
            except Refusal:
                raise
            except Exception as error:
                self._failures.note(scheduling, plugin, "Filter", error)
            after = perf_counter()
            observe(after - before)
            before = after
        if not endpoints:
            raise nothing_left()
        return endpoints

    def _score(
        self, scheduling: Scheduling, endpoints: Sequence[Endpoint], raw: dict[str, Sequence[float]]
    ) -> list[float]:
        """Weighted sums; each scorer's own clamped scores go to `raw`."""
        weighted: list[Sequence[float]] = [[0.0] * len(endpoints)]
        before = perf_counter()
        for (plugin, observe), weight in self._scorers:
            try:
                scores = _clamped(plugin.score(scheduling, endpoints), len(endpoints))
            except Refusal:
                raise
            except Exception as error:
                self._failures.note(scheduling, plugin, "Scorer", error)
            else:
                raw[plugin.name] = scores
                weighted.append(scores if weight == 1.0 else [weight * score for score in scores])
            after = perf_counter()
            observe(after - before)
            before = after
        return list(map(sum, zip(*weighted, strict=True)))

    def _pick(
        self, scheduling: Scheduling, endpoints: Sequence[Endpoint], scores: Sequence[float]
    ) -> Sequence[Endpoint]:
        plugin, observe = self._picker
        before = perf_counter()
        try:
            picked = plugin.pick(scheduling, endpoints, scores)
            if not picked:
                raise ValueError("picked nothing")
        except Refusal:
            raise
        except Exception as error:
            self._failures.note(scheduling, plugin, "Picker", error)
            picked = [one_of_the_best(endpoints, scores, self._rng)]
        observe(perf_counter() - before)
        return picked


def one_of_the_best(endpoints: Sequence[Endpoint], scores: Sequence[float], rng: random.Random) -> Endpoint:
    """Equal scores have equal chances. Scores are finite."""
    best = max(scores)
    if scores.count(best) == 1:
        return endpoints[scores.index(best)]
    ties = [endpoint for endpoint, score in zip(endpoints, scores, strict=True) if score == best]
    return ties[int(rng.random() * len(ties))]


def _clamped(scores: Sequence[float], expected: int) -> Sequence[float]:
    """Into [0, 1]; NaN becomes 0."""
    if len(scores) != expected:
        raise ValueError(f"{len(scores)} scores for {expected} endpoints")
    if scores.count(scores[0]) == expected and 0.0 <= scores[0] <= 1.0:
        return scores
    return [score if 0.0 <= score <= 1.0 else float(score > 1.0) for score in scores]
