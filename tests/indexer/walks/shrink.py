"""A failing walk made short: parts of it are left out as long as what is left still fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def shrink(items: Sequence[T], fails: Callable[[Sequence[T]], bool], seconds: float = 20.0) -> list[T]:
    """Of a list that fails, one that is as short as was found in that time, and fails too."""
    until = time.monotonic() + seconds
    short = list(items)
    size = max(1, len(short) // 2)
    while True:
        at, before = 0, len(short)
        while at < len(short) and time.monotonic() < until:
            rest = short[:at] + short[at + size :]
            if fails(rest):
                short = rest
            else:
                at += size
        if time.monotonic() >= until or (size == 1 and len(short) == before):
            return short
        size = max(1, size // 2)
