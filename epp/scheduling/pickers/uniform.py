"""random-picker: any of the candidates that the filters left; scores do not matter."""

from __future__ import annotations

from collections.abc import Sequence

from epp.config.registry import plugin
from epp.fleet.endpoint import Endpoint
from epp.scheduling.pickers.base import BasePicker, PickerParameters
from epp.scheduling.plugin import Scheduling


@plugin("random-picker", PickerParameters)
class RandomPicker(BasePicker):
    def pick(
        self, scheduling: Scheduling, endpoints: Sequence[Endpoint], scores: Sequence[float]
    ) -> Sequence[Endpoint]:
        return self._rng.sample(endpoints, min(self._count, len(endpoints)))
