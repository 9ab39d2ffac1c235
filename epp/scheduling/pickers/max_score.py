"""max-score-picker: the highest weighted sum; equal sums have equal chances."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from epp.config.environment import Environment
from epp.config.registry import Parameters, plugin
from epp.fleet.endpoint import Endpoint
from epp.scheduling.plugin import Scheduling
from epp.scheduling.profile import one_of_the_best


class PickerParameters(Parameters, frozen=True):
    max_num_of_endpoints: Annotated[int, msgspec.Meta(ge=1)] = 1
    """How many to return: the first is the target, the others are fallbacks."""


@plugin("max-score-picker", PickerParameters)
class MaxScorePicker:
    name: str
    type: str

    def __init__(self, name: str, parameters: PickerParameters, environment: Environment) -> None:
        self._count = parameters.max_num_of_endpoints
        self._rng = environment.rng

    def pick(
        self, scheduling: Scheduling, endpoints: Sequence[Endpoint], scores: Sequence[float]
    ) -> Sequence[Endpoint]:
        if self._count == 1:
            return [one_of_the_best(endpoints, scores, self._rng)]
        chance = self._rng.random
        ranked = sorted(range(len(endpoints)), key=lambda i: (-scores[i], chance()))
        return [endpoints[i] for i in ranked[: self._count]]
