"""A real engine's recordings through the product's own code."""

import argparse
from pathlib import Path

import pytest

from epp.toolbox.replay import add_parser, replay

RECORDINGS = Path(__file__).parents[2] / "recordings"
REPORTED = {
    "A-gpu-only": 17,
    "B-offload-selfdesc": 20,
    "C-offload-selfdesc-chunk2-bigcpu": 20,
    "D-offload-placeholder-bytes-cbor": 20,
    "E-offload-selfdesc": 20,
    "F-tiering-fs": 20,
}


def tierpick(*argv):
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    args = parser.parse_args(["replay", *map(str, argv)])
    return args.run(args)


@pytest.mark.parametrize(("name", "reported"), REPORTED.items())
def test_every_prediction_is_exact(name, reported):
    predictions = [p for p in replay(RECORDINGS / f"{name}.jsonl") if p.reported is not None]
    assert [p for p in predictions if p.predicted != p.reported] == []
    assert len(predictions) == reported
    assert any(p.predicted for p in predictions)


@pytest.mark.parametrize("name", REPORTED)
def test_without_being_told_what_a_reset_cleared_it_never_predicts_too_much(name):
    predictions = [p for p in replay(RECORDINGS / f"{name}.jsonl", ignore_actions=True) if p.reported is not None]
    assert [p for p in predictions if p.predicted > p.reported] == []


def test_all_recordings_at_once(capsys):
    assert tierpick(*sorted(RECORDINGS.glob("*.jsonl"))) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "exact 117 of 117"
    assert sum("exact" in line for line in lines[:-1]) == 117


def test_a_wrong_prediction_is_shown_and_fails(capsys):
    assert tierpick("--ignore-actions", RECORDINGS / "B-offload-selfdesc.jsonl") == 1
    out = capsys.readouterr().out
    assert out.endswith("exact 19 of 20\n")
    assert out.count("WRONG") == 1


def test_what_is_no_recording_is_named(tmp_path, capsys):
    assert tierpick(tmp_path / "none.jsonl") == 2
    (tmp_path / "bad.requests.jsonl").write_text("not json\n")
    (tmp_path / "bad.jsonl").write_text("")
    assert tierpick(tmp_path / "bad.jsonl") == 2
    err = capsys.readouterr().err
    assert "none" in err
    assert "bad.jsonl" in err
