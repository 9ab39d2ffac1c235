"""Child processes of the toolbox: started in a group of their own, logged to files, waited for, and always stopped.

A child that does not come up ends in `PartFailed`, which names the part and carries the end of its log. Children are
stopped when the `Children` block is left, however it is left; on Linux they also end when this process dies at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import random
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TypeVar

T = TypeVar("T")

TAIL_LINES = 15
LINE_LENGTH = 500
"""Of a shown log line: JSON logs carry whole tracebacks in one."""
STOP_GRACE_S = 5.0
POLL_S = 0.05
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)  # loaded here: not between fork and exec


class PartFailed(Exception):
    """A part did not start, or ended while it was needed. The text names it and shows the end of its log."""

    def __init__(self, part: str, reason: str, log_tail: str = "") -> None:
        tail = f"\n--- last lines of its log ---\n{log_tail}" if log_tail else " (its log is empty)"
        super().__init__(f"{part}: {reason}{tail}")
        self.part = part


_PORTS = range(15_000, 32_000)
"""Below the ports that the kernel gives to outgoing connections: one of those may take a port between the moment that
it is found free and the moment that somebody listens on it."""


def free_ports(count: int) -> list[int]:
    """`count` different TCP ports that nobody listens on at 127.0.0.1."""
    found: list[int] = []
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            return found
    raise OSError(f"no {count} free ports between {_PORTS.start} and {_PORTS.stop}")


def tail(path: Path, lines: int = TAIL_LINES) -> str:
    """The last lines of a text file, long ones cut; "" if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 64 * 1024))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    return "\n".join(line[:LINE_LENGTH] for line in text.splitlines()[-lines:])


class Child:
    """One running process: what it printed (`output`), what it logged (`log`)."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, output: Path, log: Path) -> None:
        self.name = name
        self.output = output
        self.log = log
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        return self._process.returncode

    def check(self) -> None:
        """Raises `PartFailed` if the process has ended."""
        if self.exit_code is not None:
            raise self.failed(f"ended with exit code {self.exit_code}")

    def failed(self, reason: str) -> PartFailed:
        return PartFailed(self.name, reason, tail(self.log) or tail(self.output))

    async def until(self, probe: Callable[[], Awaitable[T | None]], timeout_s: float) -> T:
        """The first answer of `probe` but None. Raises `PartFailed` if the process ends, or after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while (answer := await probe()) is None:
                    self.check()
                    await asyncio.sleep(POLL_S)
                return answer
        except TimeoutError:
            raise self.failed(f"not ready after {timeout_s:g} s") from None

    def signal_group(self, number: int) -> None:
        # The leader may be gone while members of its group are not.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    async def kill(self) -> None:
        """SIGKILL to the whole group; returns once it is dead."""
        self.signal_group(signal.SIGKILL)
        await self._process.wait()

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL; to the whole group."""
        if self.exit_code is None:
            self.signal_group(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), STOP_GRACE_S)
        await self.kill()


class Children:
    """The processes of one run, their files in `directory` (made if absent). Leaving the block stops all of them."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._children: list[Child] = []

    async def start(self, name: str, argv: Sequence[str]) -> Child:
        """Start `argv` with stdout in NAME.out and stderr in NAME.log. Raises `PartFailed` if it cannot be executed."""
        output, log = self._directory / f"{name}.out", self._directory / f"{name}.log"
        with output.open("wb") as out, log.open("wb") as err:
            try:
                process = await asyncio.create_subprocess_exec(
                    *argv, stdin=asyncio.subprocess.DEVNULL, stdout=out, stderr=err,
                    start_new_session=True, preexec_fn=_end_with_parent,
                )  # fmt: skip
            except OSError as error:
                raise PartFailed(name, f"cannot be started: {error}") from error
        child = Child(name, process, output, log)
        self._children.append(child)
        return child

    def release(self, child: Child) -> None:
        """Its end is expected from now on, and the caller's affair."""
        self._children.remove(child)

    def check(self) -> None:
        """Raises `PartFailed` for a child that has ended."""
        for child in self._children:
            child.check()

    def tails(self) -> str:
        """The end of each child's log, under its name; for a person who asks what went wrong."""
        return "\n".join(f"--- {child.name} ---\n{tail(child.log)}" for child in self._children)

    async def stop(self) -> None:
        children, self._children = self._children, []
        try:
            await asyncio.gather(*(child.stop() for child in children))
        finally:
            for child in children:
                if child.exit_code is None:
                    child.signal_group(signal.SIGKILL)

    async def __aenter__(self) -> Children:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()


def _end_with_parent() -> None:
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
