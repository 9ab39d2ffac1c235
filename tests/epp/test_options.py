"""The defaults that users rely on without saying so."""

from __future__ import annotations

from dataclasses import asdict

from epp.options import Options

DEFAULTS = {
    # llm-d's
    "grpc_port": 9002,
    "grpc_health_port": 9003,
    "metrics_port": 9090,
    "config_file": "",
    "config_text": "",
    "disable_endpoint_subset_filter": False,
    "emit_endpoint_scores": False,
    "secure_serving": True,
    "cert_path": "",
    "enable_cert_reload": False,
    "drain_timeout": 30.0,
    "metrics_staleness_threshold": 2.0,
    "pool_name": "epp",  # llm-d's where endpoints come from a file
    "verbosity": 2,
    # not llm-d's, on purpose
    "refresh_metrics_interval": 1.0,
    # ours
    "bind": "0.0.0.0",
    "endpoints": (),
    "max_body_bytes": 64 * 1024 * 1024,
    "observe_streams": 0.01,
    "decisions": 1000,
    "index_memory_budget": 2 * 1024**3,
    "log_encoder": "json",
    "without_effect": (),
}


def test_the_promised_defaults() -> None:
    assert asdict(Options()) == DEFAULTS
