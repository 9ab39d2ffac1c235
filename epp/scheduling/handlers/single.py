"""The handler of configurations with one profile: run it, its target is the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from epp.config.environment import Environment
from epp.config.registry import Parameters, plugin
from epp.scheduling.plugin import ProfileResult, Scheduling


@plugin("single-profile-handler")
class SingleProfileHandler:
    name: str
    type: str

    def __init__(self, name: str, parameters: Parameters, environment: Environment) -> None: ...

    def next_profiles(
        self, scheduling: Scheduling, profiles: Sequence[str], results: Mapping[str, ProfileResult | None]
    ) -> Sequence[str]:
        return () if results else profiles

    def primary(self, results: Mapping[str, ProfileResult | None]) -> str:
        return next(iter(results))
