"""Whether processes are at rest, however busy the machine is: a thread that waits for a processor counts as running."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

SAMPLES = 3
"""In a row that must find everybody asleep: between two of them whoever was sent something has been woken."""
PAUSE_S = 0.002
_STATE, _PROCESS_GROUP = 0, 2
"""Of the fields that follow the name in /proc/PID/stat."""


async def until_at_rest(groups: Iterable[int], timeout_s: float = 20.0) -> None:
    """Until no thread of these process groups runs or reads a disk."""
    wanted, asleep = set(groups), 0
    async with asyncio.timeout(timeout_s):
        while asleep < SAMPLES:
            asleep = 0 if _is_busy(wanted) else asleep + 1
            await asyncio.sleep(PAUSE_S)


def _is_busy(groups: set[int]) -> bool:
    return any(_fields(thread)[_STATE] in "RD" for process in _processes(groups) for thread in _list(process / "task"))


def _processes(groups: set[int]) -> Iterable[Path]:
    for process in Path("/proc").iterdir():
        if process.name.isdecimal() and int(_fields(process)[_PROCESS_GROUP]) in groups:
            yield process


def _fields(process: Path) -> list[str]:
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["X", "0", "0"]  # it has just ended


def _list(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []
