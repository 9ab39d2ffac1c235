"""What a plugin may use of the process around it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from epp.fleet.fleet import Fleet
    from epp.telemetry import Telemetry


@dataclass(slots=True)
class Environment:
    fleet: Fleet
    telemetry: Telemetry
    clock: Callable[[], float] = time.monotonic
    rng: random.Random = field(default_factory=random.Random)
    shared: dict[str, Any] = field(default_factory=dict)
    """Services that several plugin instances share, created by the first that needs them (e.g. "kv-events")."""
    services: list[Any] = field(default_factory=list)
    """Objects with `async start()` and `async stop()` that the app runs: feeds, scrapers, watchers."""
    index_budget: int = 0
    """Bytes for the index of engines' caches; 0 = no bound."""
    lookup: Callable[[str], Any] = lambda name: None
    """Plugin instance by name, once all of the configuration is loaded."""
