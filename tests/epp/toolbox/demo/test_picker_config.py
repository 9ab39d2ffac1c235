"""The ready configuration is used as it is, but for the paths of this run."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from epp.toolbox.demo import picker_config
from epp.toolbox.processes import PartFailed


def test_only_the_two_paths_differ_from_the_ready_configuration(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    picker_config.write_picker_config(path, Path("/run/endpoints.yaml"), Path("/run/model"))
    written, ready = yaml.safe_load(path.read_text()), yaml.safe_load(picker_config.READY_CONFIG.read_text())
    changed = [(a, b) for a, b in zip(written["plugins"], ready["plugins"], strict=True) if a != b]
    assert [(a["type"], a["parameters"]) for a, _ in changed] == [
        ("file-discovery", changed[0][1]["parameters"] | {"path": "/run/endpoints.yaml"}),
        ("token-producer", {"tokenizerPath": "/run/model"}),
    ]
    assert {**written, "plugins": []} == {**ready, "plugins": []}


def test_further_endpoints_can_be_named_for_retries(tmp_path: Path) -> None:
    ready = picker_config.READY_CONFIG.read_text()
    config = yaml.safe_load(picker_config.picker_config(ready, tmp_path, tmp_path, picked=3))
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    assert config["plugins"][-1] == {"type": "max-score-picker", "parameters": {"maxNumOfEndpoints": 3}}
    assert config["schedulingProfiles"][0]["plugins"][-1] == {"pluginRef": "max-score-picker"}


def test_a_missing_ready_configuration_is_a_failed_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picker_config, "READY_CONFIG", tmp_path / "absent.yaml")
    with pytest.raises(PartFailed, match=r"picker: its ready configuration cannot be read: .*absent.yaml"):
        picker_config.write_picker_config(tmp_path / "out", tmp_path, tmp_path)
