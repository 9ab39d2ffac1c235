from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from epp.toolbox.demo import cli


def parse(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    cli.add_parser(parser.add_subparsers())
    return parser.parse_args(["demo", *argv])


def test_the_defaults_are_those_that_the_readme_promises() -> None:
    arguments = parse()
    assert (arguments.engines, arguments.seconds, arguments.seed) == (4, 20, 1)
    assert (arguments.keep, arguments.json) == (False, None)
    assert (arguments.chaos, arguments.faults) == (False, 12)
    assert arguments.run is cli.run


@pytest.mark.parametrize("flag", ["--engines=0", "--engines=17", "--seconds=1", "--engines=four", "--faults=0"])
def test_values_out_of_range_are_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(flag)
    assert flag.partition("=")[0] in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_refused_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(f"--json={tmp_path}/absent/figures.json")
    assert "No such file or directory" in capsys.readouterr().err


def test_chaos_keeps_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(parse("--chaos", "--keep")) == 2
    assert "--keep" in capsys.readouterr().err


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cli, "_NEEDED", ("rich", "no_such_module"))
    assert cli.run(parse()) == 2
    assert "no_such_module: pip install 'tierpick[demo]'" in capsys.readouterr().err
