"""A plugin is one class with a decorator; what it needs and what it refuses is its own affair."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from epp.config import registry
from epp.config.errors import ConfigError
from epp.config.loader import Configuration
from epp.config.registry import Parameters, plugin

HEAD = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n"

Load = Callable[[str], Configuration]
Problems = Callable[[str], list[str]]


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test declares is gone after it."""
    monkeypatch.setattr(registry, "_TYPES", dict(registry.plugin_types()))


class Base:
    name: str

    def __init__(self, name: str, parameters: Any, environment: Any) -> None:
        self.parameters = parameters


def test_one_class_is_all_it_takes(loaded: Load) -> None:
    class FavouriteParameters(Parameters, frozen=True):
        favourite_slot: int = 0

    @plugin("favourite-scorer", FavouriteParameters)
    class FavouriteScorer(Base):
        def score(self, scheduling: Any, endpoints: Sequence[Any]) -> Sequence[float]:
            return [float(endpoint.slot == self.parameters.favourite_slot) for endpoint in endpoints]

    configuration = loaded(HEAD + "plugins: [{type: favourite-scorer, name: f, parameters: {favouriteSlot: 3}}]")
    ((scorer, weight),) = configuration.profiles[0].scorers
    assert isinstance(scorer, FavouriteScorer)
    assert (scorer.name, scorer.type, scorer.parameters.favourite_slot, weight) == ("f", "favourite-scorer", 3, 1.0)


def producer(kind: str, *needs: str) -> None:
    @plugin(kind)
    class Made(Base):
        requires = needs

        def produce(self, scheduling: Any) -> None: ...


def test_producers_run_after_those_they_need(loaded: Load) -> None:
    producer("c", "b", "token-producer")
    producer("b", "a")
    producer("a")
    configuration = loaded(HEAD + "plugins: [{type: c}, {type: b}, {type: a}]")
    order = [p.name for p in configuration.producers]
    assert order.index("a") < order.index("b") < order.index("c")
    assert order.index("token-producer") < order.index("c")


def test_producers_that_need_each_other_are_refused(problems: Problems) -> None:
    producer("a", "b")
    producer("b", "a")
    (problem,) = problems(HEAD + "plugins: [{type: a}, {type: b}]")
    assert problem.startswith("plugins: producers need each other: ")
    assert {"a", "b"} == set(problem.rpartition(": ")[2].split(" → "))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("no good"), ["plugins[0].parameters: no good"]),
        (FileNotFoundError(2, "No such file", "x"), ["plugins[0].parameters: [Errno 2] No such file: 'x'"]),
        (ConfigError(["a: b", "c: d"]), ["plugins[0].parameters: a: b", "plugins[0].parameters: c: d"]),
    ],
)
def test_a_plugin_may_refuse_its_parameters(problems: Problems, error: Exception, expected: list[str]) -> None:
    @plugin("picky")
    class Picky(Base):
        def __init__(self, name: str, parameters: Any, environment: Any) -> None:
            raise error

    assert problems(HEAD + "plugins: [{type: picky}]") == expected


def test_parameters_without_effect_are_pointed_out(loaded: Load) -> None:
    configuration = loaded(HEAD + "plugins: [{type: active-request-scorer, parameters: {requestTimeout: 2m}}]")
    assert "plugins[0].parameters.requestTimeout: has no effect in tierpick" in configuration.warnings
