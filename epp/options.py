"""The process's settings, one field a flag, with llm-d's defaults. `epp.cli` fills it; everything else reads it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class Options:
    grpc_port: int = 9002
    """ext_proc listener; 0 = a free port."""
    grpc_health_port: int = 9003
    """Plaintext gRPC health; 0 = a free port."""
    metrics_port: int = 9090
    """HTTP /metrics and /debug; 0 = a free port."""
    bind: str = "0.0.0.0"
    """Address of the three listeners."""
    config_file: str = ""
    config_text: str = ""
    """Either of the two, or neither for llm-d's default configuration."""
    endpoints: tuple[str, ...] = ()
    """Static endpoints `ip:port`, instead of a discovery plugin."""
    disable_endpoint_subset_filter: bool = False
    emit_endpoint_scores: bool = False
    secure_serving: bool = True
    cert_path: str = ""
    """Directory with tls.crt and tls.key; "" = self-signed."""
    enable_cert_reload: bool = False
    drain_timeout: float = 30.0
    """Seconds after SIGTERM in which requests in flight may finish."""
    refresh_metrics_interval: float = 1.0
    """Seconds between two scrapes of one endpoint. llm-d's default is 0.05: see ARCHITECTURE.md."""
    metrics_staleness_threshold: float = 2.0
    """Seconds after which an endpoint's figures no longer count in the pool gauges."""
    max_body_bytes: int = 64 << 20
    """Request bodies above it are answered 413."""
    observe_streams: float = 0.01
    """Share of event-stream answers whose chunks are read for the delivered cached tokens; JSON answers always are."""
    decisions: int = 1000
    """Decisions kept for /debug/decisions."""
    index_memory_budget: int = 2 << 30
    """Bytes for all that is known of engines' caches; beyond it the least useful is forgotten. 0 = no bound."""
    pool_name: str = "epp"
    """Label of the pool metrics."""
    verbosity: int = 2
    log_encoder: str = "json"
    without_effect: tuple[str, ...] = ()
    """Flags given that do nothing here, `--flag: why`."""
