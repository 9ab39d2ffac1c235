"""What the demo tells the picker about its engines is what the picker's file discovery reads."""

from __future__ import annotations

from pathlib import Path

from epp.fleet.discovery.file import endpoint_specs
from epp.toolbox.demo.fleet import Engine, write_endpoints


def test_file_discovery_reads_addresses_names_and_event_sockets(tmp_path: Path) -> None:
    path = tmp_path / "endpoints.yaml"
    write_endpoints(path, [Engine("sim-0", "127.0.0.1:8000", "tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558")])
    [spec] = endpoint_specs(path.read_bytes())
    assert (spec.name, spec.address) == ("sim-0", "127.0.0.1:8000")
    assert (spec.kv_events, spec.kv_replay) == ("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558")
