"""Quantities as Go and Kubernetes write them."""

from __future__ import annotations

import re
from typing import Annotated

import msgspec

_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)"

Duration = Annotated[str, msgspec.Meta(pattern=rf"^(0|({_PART})+)$", description="a duration such as 400ms or 1m30s")]

Quantity = (
    Annotated[int, msgspec.Meta(ge=0)]
    | Annotated[
        str,
        msgspec.Meta(pattern=r"^\d+(\.\d+)?([kKMGTPE]i?|m)?$", description="a quantity such as 10Gi or 1k"),
    ]
)


def seconds(duration: str) -> float:
    """`duration` has passed the pattern of `Duration`."""
    return sum(float(number) * _UNITS[unit] for number, unit in re.findall(_PART, duration))
