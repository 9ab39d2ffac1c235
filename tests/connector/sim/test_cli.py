from __future__ import annotations

import argparse
import json
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest

from connector.sim import cli


def parse(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return parser.parse_args(flags)


def test_flags_become_sizes_and_times() -> None:
    args = parse("--hbm-blocks", "10", "--cpu-chunks", "20", "--blocks-per-chunk", "2", "--decode-ms", "5")
    config = cli.engine_config(args)
    assert (config.hbm_blocks, config.offload.cpu_chunks, config.offload.blocks_per_chunk) == (10, 20, 2)
    assert cli.service_model(args).decode_s == 0.005


@pytest.mark.parametrize(
    ("flag", "value", "reason"),
    [
        ("--engines", "0", "less than 1"),
        ("--hbm-blocks", "1", "less than 2"),
        ("--storage-chunks", "-2", "less than -1"),
        ("--speed", "0", "not a positive number"),
        ("--cpu-gbps", "nan", "not a positive number"),
    ],
)
def test_nonsense_is_refused(flag: str, value: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(flag, value)
    assert reason in capsys.readouterr().err


def test_storage_without_a_cpu_tier_is_refused_instead_of_ignored(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--storage-chunks", "-1"]) == 2
    assert "needs a CPU tier" in capsys.readouterr().err


def test_a_port_in_use_and_a_missing_tokenizer_are_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for flags in (["--port", port], ["--events-port", port], ["--tokenizer", "/nowhere"]):
            assert cli.main(flags) == 1
            error = capsys.readouterr().err
            assert error.startswith("error: ")
            assert error.count("\n") == 1


def test_a_bad_key_file_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--curve-secret-key-file", "/nowhere/engine.key_secret"]) == 2
    assert "/nowhere/engine.key_secret: not a CURVE key file" in capsys.readouterr().err
    assert cli.main(["--curve-client-keys-dir", "/nowhere"]) == 2
    assert "the engine has none" in capsys.readouterr().err


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_several_engines_in_one_process_say_where_they_are_and_stop_cleanly(stop: signal.Signals) -> None:
    command = [sys.executable, "-m", "connector.sim", "--engines", "2", "--name", "e", "--served-model-name", "m"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        told = [json.loads(process.stdout.readline()) for _ in range(2)]
        names = []
        for engine in told:
            with urllib.request.urlopen(f"http://{engine['http']}/health", timeout=5) as response:
                names.append(response.headers["x-sim-engine"])
        process.send_signal(stop)
        output, errors = process.communicate(timeout=10)
    assert names == [engine["name"] for engine in told] == ["e-0", "e-1"]
    assert all(set(engine) == {"name", "http", "events", "replay", "model"} for engine in told)
    assert len({engine[key] for engine in told for key in ("http", "events", "replay")}) == 6
    assert (process.returncode, output, errors) == (0, "", "")
