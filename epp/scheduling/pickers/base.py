"""What all pickers share: how many endpoints to return, and where chance comes from."""

from __future__ import annotations

from typing import Annotated

import msgspec

from epp.config.environment import Environment
from epp.config.registry import Parameters


class PickerParameters(Parameters, frozen=True):
    max_num_of_endpoints: Annotated[int, msgspec.Meta(ge=1)] = 1
    """How many to return: the first is the target, the others are fallbacks."""


class BasePicker:
    name: str
    type: str

    def __init__(self, name: str, parameters: PickerParameters, environment: Environment) -> None:
        self._count = parameters.max_num_of_endpoints
        self._rng = environment.rng
