"""Regenerates the committed modules from the protos: `python -m proto.generate`. Needs grpcio-tools."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def generate(into: Path) -> None:
    """Write proto/ext_proc_pb2.py and its .pyi below `into`. Raises CalledProcessError."""
    outputs = (f"--python_out={into}", f"--pyi_out={into}")
    protoc = (sys.executable, "-m", "grpc_tools.protoc")
    subprocess.run([*protoc, "-I.", *outputs, "proto/ext_proc.proto"], cwd=ROOT, check=True)


if __name__ == "__main__":
    generate(ROOT)
