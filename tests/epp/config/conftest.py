from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from epp.config.environment import Environment
from epp.config.errors import ConfigError
from epp.config.loader import Configuration, load
from epp.fleet.fleet import Fleet
from epp.telemetry import Telemetry

READY = Path(__file__).parents[3] / "config"

Load = Callable[[str], Configuration]
Problems = Callable[[str], list[str]]


@pytest.fixture
def environment() -> Environment:
    return Environment(Fleet(), Telemetry(CollectorRegistry()), rng=random.Random(1))


@pytest.fixture
def loaded(environment: Environment) -> Load:
    return lambda text: load(text, environment)


@pytest.fixture
def problems(environment: Environment) -> Problems:
    """What is wrong with a text; [] where it loads."""

    def find(text: str) -> list[str]:
        try:
            load(text, environment)
        except ConfigError as error:
            return list(error.problems)
        return []

    return find
