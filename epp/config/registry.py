"""Plugin types: a decorator to declare one, and the table that the configuration reads.

A new plugin is one file below `epp/scheduling/…`, `epp/producers` or `epp/fleet/discovery`: those packages are imported
whole, and the decorator does the rest.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

if TYPE_CHECKING:
    from epp.config.environment import Environment

PACKAGES = (
    "epp.scheduling.scorers",
    "epp.scheduling.filters",
    "epp.scheduling.pickers",
    "epp.scheduling.handlers",
    "epp.producers",
    "epp.fleet.discovery",
)


class Parameters(msgspec.Struct, forbid_unknown_fields=True, rename="camel", kw_only=True, frozen=True):
    """Base of every plugin's `parameters`: strict, camelCase in YAML. Subclasses say `frozen=True` again."""


PluginClass = type[Any]
ParametersClass = type[Parameters]


@dataclass(frozen=True, slots=True)
class PluginType:
    type: str
    cls: PluginClass
    """Called as `cls(name, parameters, environment)`."""
    parameters: ParametersClass


_TYPES: dict[str, PluginType] = {}
T = TypeVar("T", bound=type[Any])


def plugin(type_name: str, parameters: type[Parameters] = Parameters) -> Callable[[T], T]:
    """Declare a plugin class under its llm-d type name. Sets `cls.type`."""

    def register(cls: T) -> T:
        assert type_name not in _TYPES, type_name
        cls.type = type_name
        _TYPES[type_name] = PluginType(type_name, cls, parameters)
        return cls

    return register


def plugin_types() -> dict[str, PluginType]:
    """All known types; imports the plugin packages on first use."""
    for package_name in PACKAGES:
        package = importlib.import_module(package_name)
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{package_name}.{module.name}")
    return _TYPES


def instantiate(kind: PluginType, name: str, parameters: Parameters, environment: Environment) -> Any:
    instance = kind.cls(name, parameters, environment)
    instance.name = name
    return instance
