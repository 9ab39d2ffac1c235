"""The demo as a newcomer runs it: real Envoy, real picker, simulated engines."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from epp.toolbox import cli
from epp.toolbox.demo import run
from epp.toolbox.demo.sizes import BLOCK_SIZE

pytestmark = [pytest.mark.envoy, pytest.mark.filterwarnings("ignore::DeprecationWarning:envoy_data_plane.*")]


def processes_that_mention(text: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if text in command:
            found.append(command)
    return found


def test_a_short_run_is_exact_loses_no_request_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "EXACT_MOVES", 60)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    file = tmp_path / "figures.json"
    assert cli.main(["demo", "--engines=2", "--seconds=5", f"--json={file}"]) == 0
    figures = json.loads(file.read_text())
    assert figures["passed"], figures["not_passed_because"]
    assert figures["exact"]["predictions"]["exact"] == figures["exact"]["requests"] == 60
    assert figures["round_robin"]["failures"] == figures["tierpick"]["failures"] == []
    assert figures["round_robin"]["requests"] == figures["tierpick"]["requests"] > 100
    assert figures["tierpick"]["predictions"]["unknown"] == 0
    assert figures["tierpick"]["total"]["recomputed_tokens"] < figures["round_robin"]["total"]["recomputed_tokens"]
    assert figures["tierpick"]["total"]["cpu_tokens"] > 0
    assert_that_both_tiers_were_tested(figures["exact"])
    assert processes_that_mention(str(tmp_path)) == []


def assert_that_both_tiers_were_tested(exact: dict[str, Any]) -> None:
    tiers = ("hbm_tokens", "cpu_tokens")
    predicted = exact["predictions"]["predicted_tokens_by_pod"]
    assert predicted == {pod: {tier: counters[tier] for tier in tiers} for pod, counters in exact["pods"].items()}
    assert max(counters["cpu_tokens"] for counters in exact["pods"].values()) > 24 * BLOCK_SIZE
    # the share depends on timing: a fifth to a quarter, seldom an eighth
    assert exact["total"]["cpu_tokens"] > 0.05 * (exact["total"]["hbm_tokens"] + exact["total"]["cpu_tokens"])
    assert min(exact["predictions"]["requests_found"].values()) > 0


async def test_an_interrupt_stops_everything_that_was_started(tmp_path: Path) -> None:
    demo = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "epp.toolbox.cli", "demo", "--seconds=5", "--engines=2",
        stderr=asyncio.subprocess.PIPE, env=os.environ | {"TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert demo.stderr is not None
    while b"concurrent" not in (line := await demo.stderr.readline()):
        assert line, "the demo ended before its traffic began"
    assert processes_that_mention(str(tmp_path))
    demo.send_signal(signal.SIGINT)
    _, rest = await demo.communicate()
    assert demo.returncode == run.INTERRUPTED, rest.decode()
    assert processes_that_mention(str(tmp_path)) == []
