"""A whole picker for benches: the real `epp` with exact tokens, event-fed indexes of two tiers, and eight endpoints.

The endpoints are one engine under eight loopback addresses; nothing publishes events, so scores come from load, from
speculation and from a walk of the index that ends early (its full cost has a bench of its own).
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.bench.bench_tokens import model_directory

ENDPOINTS = 8

CONFIG = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: token-producer
  parameters: {{tokenizerPath: {tokenizer}}}
- type: precise-prefix-cache-producer
  name: gpu-prefix-cache-producer
  parameters: {{tier: gpu, speculativeIndexing: true}}
- type: precise-prefix-cache-producer
  name: cpu-prefix-cache-producer
  parameters: {{tier: cpu, speculativeIndexing: true}}
- type: prefix-cache-scorer
  name: gpu-prefix-cache-scorer
  parameters: {{prefixMatchInfoProducerName: gpu-prefix-cache-producer}}
- type: prefix-cache-scorer
  name: cpu-prefix-cache-scorer
  parameters: {{prefixMatchInfoProducerName: cpu-prefix-cache-producer}}
- type: no-hit-lru-scorer
  parameters: {{prefixMatchInfoProducerName: cpu-prefix-cache-producer}}
- type: queue-scorer
- type: kv-cache-utilization-scorer
"""


@contextlib.contextmanager
def command() -> Iterator[list[str]]:
    """The command line for `bench_ext_proc.measure`: `{port}`, `{health_port}` and `{engine_port}` are filled there."""
    with tempfile.TemporaryDirectory() as directory:
        config = Path(directory, "config.yaml")
        config.write_text(CONFIG.format(tokenizer=json.dumps(str(model_directory(Path(directory))))))
        endpoints = ",".join(f"127.0.0.{last}:{{engine_port}}" for last in range(1, ENDPOINTS + 1))
        yield [
            *(sys.executable, "-m", "epp.cli", f"--config-file={config}", "--bind=127.0.0.1", "--secure-serving=false"),
            *("--grpc-port={port}", "--grpc-health-port={health_port}", "--metrics-port=0", f"--endpoints={endpoints}"),
            *("--zap-encoder=console", "-v=1"),
        ]
