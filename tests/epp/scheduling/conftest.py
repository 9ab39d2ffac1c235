from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from epp.config.environment import Environment
from epp.config.registry import instantiate, plugin_types
from epp.fleet.endpoint import Endpoint, EndpointSpec
from epp.fleet.fleet import Fleet
from epp.requests.model import InferenceRequest
from epp.scheduling.plugin import PrefixMatch, Scheduling
from epp.telemetry import Telemetry


@pytest.fixture
def environment() -> Environment:
    return Environment(Fleet(), Telemetry(CollectorRegistry()), rng=random.Random(1))


@pytest.fixture
def build(environment: Environment) -> Callable[..., Any]:
    """A plugin of a type, by name or by its type; keywords are its parameters."""

    def make(kind: str, name: str = "", **parameters: Any) -> Any:
        found = plugin_types()[kind]
        return instantiate(found, name or kind, found.parameters(**parameters), environment)

    return make


@pytest.fixture
def fleet_of() -> Callable[..., list[Endpoint]]:
    """`fleet_of(3, waiting=[0, 1, 2], inflight_requests=[4, 5, 6])`; load fields by name, a list each."""

    def make(count: int, **figures: Sequence[Any]) -> list[Endpoint]:
        endpoints = [Endpoint(EndpointSpec(f"10.0.0.{slot}:8000"), slot) for slot in range(count)]
        for field, values in figures.items():
            for endpoint, value in zip(endpoints, values, strict=True):
                setattr(endpoint if field.startswith("inflight") else endpoint.load, field, value)
        return endpoints

    return make


@pytest.fixture
def scheduling_of() -> Callable[..., Scheduling]:
    """Matches are given as producer name → blocks by slot, out of 10 blocks of 64 tokens."""

    def make(endpoints: Sequence[Endpoint], tokens: int = 640, **matches: Sequence[float]) -> Scheduling:
        scheduling = Scheduling(
            InferenceRequest("r", "/v1/completions", {}, b"", tokens=[bytes(4 * tokens)]), endpoints, 0.0
        )
        for name, blocks in matches.items():
            cached = [int(block * 64) for block in blocks]
            scheduling.matches[name.replace("_", "-")] = PrefixMatch(10, 64, list(blocks), cached)
        return scheduling

    return make
