from __future__ import annotations

from typing import Any

import msgspec
import pytest

from epp.config.units import Duration, Quantity, seconds


@pytest.mark.parametrize(
    ("text", "value"),
    [("0", 0.0), ("200ms", 0.2), ("1m30s", 90.0), ("1.5h", 5400.0), (".5s", 0.5), ("2us", 2e-6), ("5m0.25s", 300.25)],
)
def test_go_durations(text: str, value: float) -> None:
    assert seconds(msgspec.convert(text, Duration)) == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "5", "s", "1 s", "-1s", "1d", 5])
def test_other_durations_are_refused(text: Any) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(text, Duration)


@pytest.mark.parametrize(
    ("value", "valid"), [(0, True), ("10Gi", True), ("1k", True), ("1.5M", True), (-1, False), ("1Gb", False)]
)
def test_kubernetes_quantities(value: Any, valid: bool) -> None:
    try:
        msgspec.convert(value, Quantity)
    except msgspec.ValidationError:
        assert not valid
    else:
        assert valid
