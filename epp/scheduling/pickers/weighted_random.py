"""weighted-random-picker: chances in proportion to the scores; all zero, equal chances.

Weighted sampling without replacement after Efraimidis and Spirakis (A-Res): each candidate draws U^(1/score) and the
highest draws win. The logarithm orders the same and does not underflow for small scores.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from epp.config.registry import plugin
from epp.fleet.endpoint import Endpoint
from epp.scheduling.pickers.base import BasePicker, PickerParameters
from epp.scheduling.plugin import Scheduling


@plugin("weighted-random-picker", PickerParameters)
class WeightedRandomPicker(BasePicker):
    def pick(
        self, scheduling: Scheduling, endpoints: Sequence[Endpoint], scores: Sequence[float]
    ) -> Sequence[Endpoint]:
        draws = [self._draw(score) for score in scores]
        return [endpoints[i] for i in heapq.nlargest(self._count, range(len(draws)), key=draws.__getitem__)]

    def _draw(self, score: float) -> tuple[float, float]:
        """A score of zero loses against every other and draws with its like by chance."""
        chance = 1.0 - self._rng.random()
        return (math.log(chance) / score if score > 0.0 else -math.inf, chance)
