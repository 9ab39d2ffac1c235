"""Metric families over plain numbers, written by one thread.

prometheus_client's own metrics take a lock for every increment and scan a histogram's buckets one by one; a request
touches some twenty of them. These are written only by the event loop's thread, need no lock, count observations many
at a time, find the bucket by bisection, and become prometheus_client values when somebody scrapes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, Generic, Protocol, TypeVar

from prometheus_client import Metric
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString as _untyped_float_text

_float_text: Callable[[float], str] = _untyped_float_text
OTHER = "other"
_LONGEST = 256


class Counter:
    """A counter, or a gauge where `dec` and `set` are used."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1) -> None:
        self.value += amount

    def dec(self, amount: float = 1) -> None:
        self.value -= amount

    def set(self, value: float) -> None:
        self.value = value

    def samples(self, name: str, labels: dict[str, str]) -> Iterator[Sample]:
        yield Sample(name, labels, self.value)


class Histogram:
    """Buckets are upper bounds, ascending, without infinity.

    `observe` only notes the value. What is noted is counted by `fold`: when it is read, and by the owner now and then,
    which bounds it.
    """

    __slots__ = ("_counts", "_noted", "_sum", "bounds", "observe")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._noted: list[float] = []
        self.observe: Callable[[float], None] = self._noted.append

    def count(self, value: float) -> None:
        """At once, for what may come any number of times a request."""
        self._counts[bisect_left(self.bounds, value)] += 1
        self._sum += value

    def fold(self) -> None:
        for value in self._noted:
            self.count(value)
        self._noted.clear()

    def samples(self, name: str, labels: dict[str, str]) -> Iterator[Sample]:
        """Nothing before the first observation, so that pre-resolved histograms do not fill the page with zeros."""
        self.fold()
        *below, count = accumulate(self._counts)
        if not count:
            return
        for bound, cumulated in zip(self.bounds, below, strict=True):
            yield Sample(f"{name}_bucket", {**labels, "le": _float_text(bound)}, cumulated)
        yield Sample(f"{name}_bucket", {**labels, "le": "+Inf"}, count)
        yield Sample(f"{name}_count", labels, count)
        yield Sample(f"{name}_sum", labels, self._sum)


class _Child(Protocol):
    def samples(self, name: str, labels: dict[str, str]) -> Iterator[Sample]: ...


ChildT = TypeVar("ChildT", bound=_Child)


class Family(Generic[ChildT]):
    """One metric name, its label names, and a bounded number of children: the last one is all `other`."""

    def __init__(
        self, kind: str, name: str, text: str, labels: Sequence[str], make: Callable[[], ChildT], limit: int = 2000
    ) -> None:
        self.kind = kind
        self.name = name
        self.text = text
        self.labels = tuple(labels)
        self.limit = limit
        self._make = make
        self._children: dict[tuple[str, ...], ChildT] = {}

    def child(self, *values: str) -> ChildT:
        found = self._children.get(values)
        if found is None:
            if len(self._children) >= self.limit:
                values = (OTHER,) * len(self.labels)
            found = self._children.setdefault(values, self._make())
        return found

    def children(self) -> Iterable[ChildT]:
        return self._children.values()

    def forget(self, *values: str) -> None:
        self._children.pop(values, None)

    def collect(self) -> Iterator[Metric]:
        metric = Metric(self.name.removesuffix("_total") if self.kind == "counter" else self.name, self.text, self.kind)
        for values, child in self._children.items():
            metric.samples.extend(child.samples(self.name, dict(zip(self.labels, values, strict=True))))
        yield metric


def counter(name: str, text: str, labels: Sequence[str] = (), limit: int = 2000) -> Family[Counter]:
    """`name` with its `_total`."""
    return Family("counter", name, text, labels, Counter, limit)


def gauge(name: str, text: str, labels: Sequence[str] = (), limit: int = 2000) -> Family[Counter]:
    return Family("gauge", name, text, labels, Counter, limit)


def histogram(
    name: str, text: str, bounds: Sequence[float], labels: Sequence[str] = (), limit: int = 2000
) -> Family[Histogram]:
    return Family("histogram", name, text, labels, lambda: Histogram(bounds), limit)


class Group:
    """Families as attributes, collected in the order of their assignment."""

    def collect(self) -> Iterator[Metric]:
        for family in self._families():
            yield from family.collect()

    def fold(self) -> None:
        """All histograms."""
        for family in self._families():
            if family.kind == "histogram":
                for child in family.children():
                    child.fold()

    def _families(self) -> Iterator[Family[Any]]:
        return (value for value in vars(self).values() if isinstance(value, Family))


class Names:
    """Label values that come from clients: the first `limit` distinct ones are themselves, later ones `other`.

    So are values no label should have: very long ones, and those with control characters or lone surrogates (which
    could not be encoded and would break the whole page).
    """

    def __init__(self, limit: int = 1000) -> None:
        self.limit = limit
        self._known: set[str] = {""}

    def __len__(self) -> int:
        return len(self._known) - 1

    def bound(self, value: str) -> str:
        if value in self._known:
            return value
        if len(self) >= self.limit or len(value) > _LONGEST or not value.isprintable():
            return OTHER
        self._known.add(value)
        return value
