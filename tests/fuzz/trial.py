"""One input, watched: what it raises, says in the log, costs in CPU time and in memory."""

from __future__ import annotations

import gc
import io
import json
import re
import resource
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from epp.logs import TRACE, configure
from tests.fuzz.target import Script, Target

CPU_SECONDS = 1.0
MEMORY_FACTOR = 64
MEMORY_SLACK = 64 << 20
CANARY = "xyzzy-canary"
"""Prompt text of the inputs. It must not be in any log line."""
CANARY_TOKEN = 4_123_456_789
"""A token id of the inputs, which must not be either."""

_ROOT = Path(__file__).parents[2]


@dataclass(slots=True, frozen=True)
class Finding:
    target: str
    what: str
    """The same for the same fault, whatever the input."""
    detail: str
    script: Script


@dataclass(slots=True, frozen=True)
class Seen:
    accepted: bool
    cpu: float
    """Seconds."""
    finding: Finding | None = None


class Watch:
    """Log lines as the picker would write them at its highest verbosity."""

    def __init__(self) -> None:
        self._lines = io.StringIO()
        configure(TRACE, "json", self._lines)

    def take(self) -> str:
        lines = self._lines.getvalue()
        if lines:
            self._lines.seek(0)
            self._lines.truncate()
        return lines


def attempt(name: str, target: Target, script: Script, watch: Watch) -> Seen:
    before, began = peak_rss(), time.process_time()
    accepted, what, detail = False, "", ""
    try:
        accepted = target.run(script)
    except Exception as error:
        what, detail = f"{type(error).__name__} at {_place(error)}", traceback.format_exc()
    cpu = time.process_time() - began
    lines = watch.take()
    if not what and lines:
        what, detail = _in_log(lines), lines
    grown = peak_rss() - before
    if not what and grown > sum(map(len, script)) * MEMORY_FACTOR + MEMORY_SLACK:
        what, detail = "memory", f"{grown >> 20} MiB for {sum(map(len, script))} bytes"
    if not what and cpu > CPU_SECONDS and (cpu := _again(target, script, watch)) > CPU_SECONDS:
        what, detail = "hang", f"{cpu:.1f} s of CPU for {sum(map(len, script))} bytes"
    return Seen(accepted, cpu, Finding(name, what, detail, script) if what else None)


def _again(target: Target, script: Script, watch: Watch) -> float:
    """Once may be the garbage collector's fault, or the machine's."""
    gc.collect()
    began = time.process_time()
    target.run(script)
    watch.take()
    return time.process_time() - began


def _in_log(lines: str) -> str:
    if CANARY in lines or str(CANARY_TOKEN) in lines:
        return "prompt in the log"
    for line in lines.splitlines():
        fields = json.loads(line)
        if fields["level"] in ("error", "panic"):
            places = re.findall(
                r'File "[^"]*/([^/"]+)", line (\d+)', fields.get("exc_info") or fields.get("traceback", "")
            )
            return f"logged: {fields['msg'][:60]} {':'.join(places[-1]) if places else ''}".rstrip()
    return ""


def _place(error: BaseException) -> str:
    """The last line of the project's own that it went through."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if _is_own(frame.filename)] or frames
    return f"{Path(own[-1].filename).name}:{own[-1].lineno}"


def _is_own(filename: str) -> bool:
    path = Path(filename)
    return path.is_relative_to(_ROOT) and ".venv" not in path.parts


def peak_rss() -> int:
    """Bytes, of the process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def minimise(name: str, target: Target, finding: Finding, watch: Watch, seconds: float = 5.0) -> Script:
    """A smaller script with the same finding: pieces left out, then slices of pieces."""
    deadline = time.monotonic() + seconds

    def still(script: Script) -> bool:
        if time.monotonic() > deadline:
            return False
        found = attempt(name, target, script, watch).finding
        return found is not None and found.what == finding.what

    script = finding.script
    for at in reversed(range(len(script))):
        shorter = script[:at] + script[at + 1 :]
        if shorter and still(shorter):
            script = shorter
    for at in range(len(script)):
        script = _shorten(script, at, still)
    return script


def _shorten(script: Script, at: int, still: object) -> Script:
    assert callable(still)
    step = len(script[at])
    while step:
        start = 0
        while start < len(script[at]):
            piece = script[at]
            shorter = (*script[:at], piece[:start] + piece[start + step :], *script[at + 1 :])
            if still(shorter):
                script = shorter
            else:
                start += step
        step //= 2
    return script
