"""random-picker: any of the candidates that the filters left; scores do not matter."""

from __future__ import annotations

from collections.abc import Sequence

from epp.config.environment import Environment
from epp.config.registry import plugin
from epp.fleet.endpoint import Endpoint
from epp.scheduling.pickers.max_score import PickerParameters
from epp.scheduling.plugin import Scheduling


@plugin("random-picker", PickerParameters)
class RandomPicker:
    name: str
    type: str

    def __init__(self, name: str, parameters: PickerParameters, environment: Environment) -> None:
        self._count = parameters.max_num_of_endpoints
        self._rng = environment.rng

    def pick(
        self, scheduling: Scheduling, endpoints: Sequence[Endpoint], scores: Sequence[float]
    ) -> Sequence[Endpoint]:
        return self._rng.sample(endpoints, min(self._count, len(endpoints)))
