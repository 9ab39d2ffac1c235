"""The plain-number metrics, held against prometheus_client's own."""

from __future__ import annotations

import prometheus_client
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Metric, generate_latest

from epp.telemetry.families import Names, counter, gauge, histogram


class Page:
    def __init__(self, *families: object) -> None:
        self.families = families

    def collect(self) -> list[Metric]:
        return [metric for family in self.families for metric in family.collect()]  # type: ignore[attr-defined]


def text(*families: object) -> str:
    return generate_latest(Page(*families)).decode()


@given(st.lists(st.floats(0, 20, allow_nan=False), min_size=1, max_size=30), st.integers(1, 40))
def test_a_histogram_reads_exactly_like_prometheus_clients(values: list[float], folded: int) -> None:
    bounds = (0, 0.5, 1, 5, 10)
    registry = CollectorRegistry()
    theirs = prometheus_client.Histogram("seconds", "Text.", ("who",), buckets=bounds, registry=registry)
    ours = histogram("seconds", "Text.", bounds, ("who",))
    for number, value in enumerate(values, 1):
        theirs.labels("x").observe(value)
        ours.child("x").observe(value)
        if number % folded == 0:
            ours.child("x").fold()
    expected = [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]
    assert sorted(text(ours).splitlines()) == sorted(expected)


def test_counters_and_gauges_read_exactly_like_prometheus_clients() -> None:
    registry = CollectorRegistry()
    prometheus_client.Counter("a_total", "A.", ("x", "y"), registry=registry).labels("1", 'q"\n').inc(2)
    prometheus_client.Gauge("b", "B.", registry=registry).set(1.5)
    ours = counter("a_total", "A.", ("x", "y"))
    ours.child("1", 'q"\n').inc(2)
    level = gauge("b", "B.")
    level.child().set(2.5)
    level.child().dec()
    expected = [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]
    assert text(ours, level).splitlines() == expected


def test_a_histogram_without_observations_is_not_shown() -> None:
    family = histogram("seconds", "Text.", (1, 2), ("who",))
    family.child("x")
    assert "seconds_bucket" not in text(family)


def test_a_family_has_a_bounded_number_of_children_and_the_rest_share_one() -> None:
    family = counter("a_total", "A.", ("who",), limit=3)
    for number in range(10):
        family.child(str(number)).inc()
    assert [line for line in text(family).splitlines() if line[0] != "#"] == [
        'a_total{who="0"} 1.0',
        'a_total{who="1"} 1.0',
        'a_total{who="2"} 1.0',
        'a_total{who="other"} 7.0',
    ]


def test_a_forgotten_child_vanishes_and_starts_from_zero() -> None:
    family = counter("a_total", "A.", ("who",))
    family.child("x").inc(5)
    family.forget("x")
    assert "who" not in text(family)
    assert family.child("x").value == 0


class TestNames:
    def test_the_first_names_are_themselves_and_later_ones_other(self) -> None:
        names = Names(limit=2)
        assert [names.bound(name) for name in ("a", "b", "c", "a", "")] == ["a", "b", "other", "a", ""]

    def test_names_that_would_break_the_page_or_bloat_it_are_other(self) -> None:
        names = Names()
        assert [names.bound(name) for name in ("\ud800", "a\nb", "x" * 257)] == ["other"] * 3
        assert names.bound("modèle/日本-7B") == "modèle/日本-7B"
