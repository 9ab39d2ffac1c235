"""From plan to plugin instances: created, completed with the producers they need, ordered by those needs.

A plugin says what it needs with `requires`: names of producers, as a sequence or as a method that returns one. A few
producers are created when somebody needs them and nobody configured them, as in llm-d.
"""

from __future__ import annotations

import graphlib
from collections.abc import Mapping, Sequence
from typing import Any

from epp.config.environment import Environment
from epp.config.errors import ConfigError, Findings, did_you_mean
from epp.config.plan import Plan, Planned
from epp.config.registry import instantiate
from epp.config.roles import Role

TOKENS = "token-producer"
APPROXIMATE = "approx-prefix-cache-producer"
PRECISE = "precise-prefix-cache-producer"
ON_DEMAND = frozenset({TOKENS, APPROXIMATE, "inflight-load-producer"})


class Assembly:
    """Instances by name, and who needs whom."""

    def __init__(self, plan: Plan, environment: Environment, findings: Findings) -> None:
        self._plan = plan
        self._environment = environment
        self._findings = findings
        self.instances: dict[str, Any] = {}

    def create_all(self) -> None:
        """Creates what is planned and, until nothing is missing, what that needs. Raises `ConfigError`."""
        pending = list(self._plan)
        while pending:
            for planned in pending:
                self._create(planned)
            self._findings.raise_errors()
            pending = [p for planned in pending for p in self._add_missing(planned)]
        self._findings.raise_errors()
        self._warn_of_approximation()

    def producers(self) -> list[Any]:
        """Each after those it needs; otherwise in the order of the file."""
        needs = {p.name: self._sources(p) for p in self._plan.with_role(Role.PRODUCER)}
        try:
            order = list(graphlib.TopologicalSorter(needs).static_order())
        except graphlib.CycleError as error:
            self._findings.error("plugins", f"producers need each other: {' → '.join(error.args[1])}")
            self._findings.raise_errors()
        return [self.instances[name] for name in order]

    def _create(self, planned: Planned) -> None:
        try:
            instance = instantiate(planned.kind, planned.name, planned.parameters, self._environment)
        except ConfigError as error:
            for problem in error.problems:
                self._findings.error(f"{planned.path}.parameters", problem)
        except (ValueError, OSError) as error:
            self._findings.error(f"{planned.path}.parameters", str(error))
        else:
            self.instances[planned.name] = instance

    def _requires(self, planned: Planned) -> Sequence[str]:
        needs = getattr(self.instances[planned.name], "requires", ())
        return list(needs() if callable(needs) else needs)

    def _sources(self, planned: Planned) -> list[str]:
        """The producer instances behind `requires`: any instance that makes tokens serves who needs tokens."""
        makers = [p.name for p in self._plan if p.kind.type == TOKENS]
        return [name for need in self._requires(planned) for name in (makers if need == TOKENS else [need])]

    def _add_missing(self, planned: Planned) -> list[Planned]:
        added = []
        for need in self._requires(planned):
            source = self._plan.get(need)
            if need == TOKENS and any(p.kind.type == TOKENS for p in self._plan):
                continue
            if source is None and need in ON_DEMAND:
                added.append(self._plan.add_default(need, f"{planned.name} needs it"))
            elif source is None or not source.has_role(Role.PRODUCER):
                producers = [p.name for p in self._plan.with_role(Role.PRODUCER)]
                path = _parameter_path(planned.path, planned.given, need)
                self._findings.error(path, f'no producer is named "{need}"{did_you_mean(need, producers)}')
        return added

    def _warn_of_approximation(self) -> None:
        """Exact events are useless to a scorer that reads another index, and to an index that gets guessed tokens."""
        precise = [p.name for p in self._plan if p.kind.type == PRECISE]
        if not precise:
            return
        index = self._plan.get(APPROXIMATE)
        for planned in self._plan:
            if index is not None and index.is_default and APPROXIMATE in self._requires(planned):
                self._findings.warn(
                    planned.path,
                    f'"{planned.name}" uses an approximate index although "{precise[0]}" is configured; set '
                    f"prefixMatchInfoProducerName to choose",
                )
            if planned.kind.type == TOKENS and set(planned.given) <= {"estimate"}:
                self._findings.warn(
                    planned.path, f'"{planned.name}" only estimates tokens, and "{precise[0]}" can match none of them'
                )


def _parameter_path(path: str, given: Mapping[str, Any], value: str) -> str:
    """Where the file says `value`, as near as can be told."""
    named = [key for key, item in given.items() if item == value]
    return f"{path}.parameters.{named[0]}" if named else path
