"""What a plugin class is good for, told from what it can do."""

from __future__ import annotations

from enum import Enum
from typing import Any

DISCOVERY_PACKAGE = "epp.fleet.discovery"


class Role(Enum):
    """The value is the method that makes a class one."""

    PRODUCER = "produce"
    FILTER = "filter"
    SCORER = "score"
    PICKER = "pick"
    HANDLER = "next_profiles"


IN_PROFILES = (Role.FILTER, Role.SCORER, Role.PICKER)


def has_role(cls: type[Any], role: Role) -> bool:
    return hasattr(cls, role.value)


def is_discovery(cls: type[Any]) -> bool:
    return cls.__module__.startswith(DISCOVERY_PACKAGE)
