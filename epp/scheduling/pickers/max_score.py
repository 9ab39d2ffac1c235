"""max-score-picker: the highest weighted sum; equal sums have equal chances."""

from __future__ import annotations

from collections.abc import Sequence

from epp.config.registry import plugin
from epp.fleet.endpoint import Endpoint
from epp.scheduling.pickers.base import BasePicker, PickerParameters
from epp.scheduling.plugin import Scheduling
from epp.scheduling.profile import one_of_the_best


@plugin("max-score-picker", PickerParameters)
class MaxScorePicker(BasePicker):
    def pick(
        self, scheduling: Scheduling, endpoints: Sequence[Endpoint], scores: Sequence[float]
    ) -> Sequence[Endpoint]:
        if self._count == 1:
            return [one_of_the_best(endpoints, scores, self._rng)]
        chance = self._rng.random
        ranked = sorted(range(len(endpoints)), key=lambda i: (-scores[i], chance()))
        return [endpoints[i] for i in ranked[: self._count]]
