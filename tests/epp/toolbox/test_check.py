"""`tierpick check`: a verdict on a configuration without a running picker."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from epp.toolbox import cli

CONFIG = Path(__file__).parents[3] / "config"
READY = sorted(path for path in CONFIG.glob("*.yaml") if path.name != "endpoints.yaml")
NAME_A_TOKENIZER = [path for path in READY if "/etc/epp/tokenizer" in path.read_text()]

Check = Callable[..., tuple[int, str, str]]


@pytest.fixture
def check(capsys: pytest.CaptureFixture[str]) -> Check:
    """Exit status, standard output and standard error."""

    def check(file: Path) -> tuple[int, str, str]:
        status = cli.main(["check", str(file)])
        told = capsys.readouterr()
        return status, told.out, told.err

    return check


@pytest.fixture
def written(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str | bytes) -> Path:
        file = tmp_path / "config.yaml"
        file.write_bytes(text.encode() if isinstance(text, str) else text)
        return file

    return write


@pytest.mark.parametrize("path", READY, ids=lambda path: path.name)
def test_a_ready_configuration_is_summed_up(
    check: Check, written: Callable[[str], Path], path: Path, tmp_path: Path
) -> None:
    Tokenizer(WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    status, out, err = check(written(path.read_text().replace("/etc/epp/tokenizer", str(tmp_path))))
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("endpoints: ")
    assert lines[1].startswith("producers: token-producer")
    assert any(line.startswith("profile default: ") and line.endswith(" -> max-score-picker") for line in lines)
    assert "warning" not in out


@pytest.mark.parametrize("path", NAME_A_TOKENIZER, ids=lambda path: path.name)
def test_a_tokenizer_that_is_not_here_is_named(check: Check, path: Path) -> None:
    status, out, err = check(path)
    assert (status, out) == (1, "")
    assert err.startswith(f"{path}: plugins[")
    assert "].parameters: /etc/epp/tokenizer/tokenizer.json: " in err
    assert len(err.splitlines()) == 1


def test_the_source_of_endpoints_is_shown(check: Check, written: Callable[[str], Path]) -> None:
    assert check(written(""))[1].startswith("endpoints: by --endpoints\n")
    text = """
    apiVersion: llm-d.ai/v1alpha1
    kind: EndpointPickerConfig
    plugins: [{type: file-discovery, name: file, parameters: {path: /etc/epp/endpoints.yaml}}, {type: queue-scorer}]
    dataLayer: {discovery: {pluginRef: file}}
    schedulingProfiles: [{name: default, plugins: [{pluginRef: queue-scorer}]}]
    """
    assert check(written(text))[1].startswith("endpoints: file (file-discovery)\nproducers: none\n")


def test_every_problem_has_a_line_of_its_own(check: Check, written: Callable[[str], Path]) -> None:
    file = written("""
    apiVersion: llm-d.ai/v1alpha1
    kind: EndpointPickerConfig
    plugins: [{type: queue-scorrer}, {type: kv-cache-utilization-scorer, parameter: {}}]
    """)
    status, _, err = check(file)
    assert status == 1
    assert all(line.startswith(f"{file}: plugins[") for line in err.splitlines())
    assert 'did you mean "parameters"?' in err


@pytest.mark.parametrize("text", ["a: b: c", "- [", "kind: EndpointPickerConfig\nkind: X", b"\xff\xfe\xff"])
def test_what_is_no_yaml_is_said_with_the_file(check: Check, written: Callable[..., Path], text: str | bytes) -> None:
    file = written(text)
    status, _, err = check(file)
    assert status == 1
    assert err.startswith(f"{file}: ")


def test_a_file_that_is_not_there(check: Check, tmp_path: Path) -> None:
    status, _, err = check(tmp_path / "absent.yaml")
    assert status == 1
    assert "No such file" in err
