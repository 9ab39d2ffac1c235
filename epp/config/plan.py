"""The `plugins` list: every entry's type, name and parameters checked, before anything is created."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from epp.config import strict
from epp.config.builtin import BUILT_IN, KNOWN_IN_LLM_D, RENAMED, BuiltIn
from epp.config.document import PluginEntry
from epp.config.errors import Findings, did_you_mean
from epp.config.registry import Parameters, PluginType, plugin_types
from epp.config.roles import Role, has_role

NOT_AVAILABLE = '"{}" is known in llm-d, but not available in tierpick yet'


@dataclass(slots=True, frozen=True)
class Planned:
    """One plugin instance to be."""

    path: str
    name: str
    kind: PluginType
    parameters: Parameters
    given: Mapping[str, Any] = field(default_factory=dict)
    """Parameters as the file has them."""
    is_default: bool = False
    """Nobody configured it."""

    def has_role(self, role: Role) -> bool:
        return has_role(self.kind.cls, role)


class Plan:
    """All plugin instances by name, in the order of the file; what is created by default follows."""

    def __init__(self, findings: Findings) -> None:
        self._types = {**BUILT_IN, **plugin_types()}
        self._by_name: dict[str, Planned] = {}
        self._broken: set[str] = set()
        self._findings = findings

    def __iter__(self) -> Iterator[Planned]:
        return iter(self._by_name.values())

    def get(self, name: str) -> Planned | None:
        return self._by_name.get(name)

    def with_role(self, role: Role) -> list[Planned]:
        return [planned for planned in self if planned.has_role(role)]

    def of_class(self, cls: type[Any]) -> list[Planned]:
        return [planned for planned in self if issubclass(planned.kind.cls, cls)]

    def resolve(self, name: str, path: str) -> Planned | None:
        """The plugin that a `pluginRef` names. One whose own entry is wrong is not reported a second time."""
        planned = self._by_name.get(name)
        if planned is None and name not in self._broken:
            missing = f'no plugin is named "{name}"{did_you_mean(name, self._by_name)}'
            self._findings.error(path, missing if self._is_available(name) else NOT_AVAILABLE.format(name))
        return planned

    @property
    def is_complete(self) -> bool:
        """Every entry so far was right."""
        return not self._broken

    def add_default(self, type_name: str, why: str) -> Planned:
        """A plugin nobody configured, with its type as name and default parameters."""
        kind = self._types[type_name]
        planned = Planned(f"default {type_name}", type_name, kind, kind.parameters(), is_default=True)
        taken = self._by_name.setdefault(type_name, planned)
        if taken is not planned:
            self._findings.error(f"{taken.path}.name", f'"{type_name}" is the name of a default plugin; choose another')
        self._findings.note("", f"{type_name} added: {why}")
        return planned

    def add_entries(self, entries: Sequence[PluginEntry]) -> None:
        for position, entry in enumerate(entries):
            self._add(entry, f"plugins[{position}]")

    def _add(self, entry: PluginEntry, path: str) -> None:
        name = entry.name or entry.type
        kind = self._kind(entry.type, path)
        given = entry.parameters or {}
        parameters = strict.convert(given, kind.parameters, f"{path}.parameters", self._findings) if kind else None
        if kind is None or parameters is None:
            self._broken.add(name)
        elif name in self._by_name:
            self._findings.error(f"{path}.name", f'"{name}" is already the name of {self._by_name[name].path}')
        else:
            self._by_name[name] = Planned(path, name, kind, parameters, given)
            self._say_what_is_ignored(self._by_name[name])

    def _kind(self, type_name: str, path: str) -> PluginType | None:
        if type_name in RENAMED:
            self._findings.warn(f"{path}.type", f"{type_name} is deprecated; use {RENAMED[type_name]}")
            type_name = RENAMED[type_name]
        kind = self._types.get(type_name)
        if kind is not None:
            return kind
        if not type_name:
            self._findings.error(f"{path}.type", "required, but missing")
        elif not self._is_available(type_name):
            self._findings.error(f"{path}.type", NOT_AVAILABLE.format(type_name))
        else:
            self._findings.error(f"{path}.type", f'unknown type "{type_name}"{did_you_mean(type_name, self._types)}')
        return None

    def _is_available(self, type_name: str) -> bool:
        """False for what llm-d has and tierpick has not; nonsense is nobody's."""
        return type_name in self._types or type_name not in KNOWN_IN_LLM_D

    def _say_what_is_ignored(self, planned: Planned) -> None:
        cls = planned.kind.cls
        if issubclass(cls, BuiltIn):
            self._findings.note(planned.path, f"{planned.kind.type} is built in: {cls.note}")
        for parameter in getattr(cls, "without_effect", ()):
            if parameter in planned.given:
                self._findings.warn(f"{planned.path}.parameters.{parameter}", "has no effect in tierpick")
