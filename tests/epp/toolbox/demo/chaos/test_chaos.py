"""A short chaos as a newcomer runs it: real Envoy, real picker, simulated engines; faults that are quick."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from epp.toolbox import cli
from epp.toolbox.demo.chaos import run
from epp.toolbox.demo.chaos.faults import Fault, Kind

pytestmark = [pytest.mark.envoy, pytest.mark.filterwarnings("ignore::DeprecationWarning:envoy_data_plane.*")]

FAULTS = [
    Fault(Kind.ENGINE_KILLED, 0, 0.2, 0),
    Fault(Kind.REPLAY_CUT, 1, 0.5, 2),
    Fault(Kind.PICKER_KILLED, 0, 0.2, 0),
    Fault(Kind.CACHE_RESET, 0, 0.0, 0),
]


def test_no_request_fails_and_no_live_feed_promises_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "schedule", lambda seed, count, engines: FAULTS[:count])
    monkeypatch.setattr(run, "TRAFFIC_BETWEEN_S", 0.7)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    file = tmp_path / "figures.json"
    code = cli.main(["demo", "--chaos", "--engines=2", f"--faults={len(FAULTS)}", f"--json={file}"])
    figures = json.loads(file.read_text())
    assert code == 0, figures
    assert figures["passed"], figures["not_passed_because"]
    assert figures["faults"]["injected"] == len(FAULTS)
    assert set(figures["faults"]["kinds"]) == {fault.kind.name.lower() for fault in FAULTS}
    assert figures["requests"]["total"] > 30
    assert figures["requests"]["failed"] == figures["wrong_by_too_much_while_live"] == 0
    assert figures["requests"]["unpicked"] > 0, "the picker was killed, so some requests had to do without it"
    probes = figures["faults"]["predictions_after"]
    assert probes["exact"] == sum(probes.values()) >= 4 * len(FAULTS)
    assert figures["predicted_tokens_after_faults"] > 0, "where nothing is predicted, nothing is tested"
    for kind in ("engine_killed", "picker_killed"):
        assert figures["faults"]["kinds"][kind]["noticed_s"]["max"] < 2.0
    assert figures["faults"]["live_again_s"]["max"] < 5.0
    assert figures["not_live_at_the_end"] == []
