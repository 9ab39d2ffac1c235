"""Real vLLM engines of the tiny model, with HBM and CPU tiers so small that both evict all the time."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from epp.toolbox.processes import Child, Children, PartFailed, free_ports, tail

from ..envoy.chain import until
from . import tiny_model

HOST = "127.0.0.1"
READY_S = 150.0
TAIL_LINES = 40
HERE = Path(__file__).parent
HBM_BLOCKS = 24
"""One of them is vLLM's null block."""
CPU_BLOCKS = 48
MAX_TOKENS = (HBM_BLOCKS - 1) * tiny_model.BLOCK_SIZE
BUFFERED_BATCHES = 300

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # engine and worker in the server's process: starts twice as fast
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_TARGET_DEVICE": "cpu",
}


@dataclass(frozen=True)
class Kind:
    """What an engine runs with."""

    name: str
    connector: str = ""
    """"ours", "stock" (vLLM's own OffloadingConnector, nothing of tierpick in the engine), or "" = no offloading."""
    blocks_per_chunk: int = 1
    storage: str = ""
    """An fs tier below CPU RAM: "own" of each engine, "shared" by them, or "" = none."""
    pythonpath: str = ""
    """To lay another vLLM over the installed one."""

    @property
    def ours(self) -> bool:
        return self.connector == "ours"

    def __str__(self) -> str:
        return self.name

    def transfer(self, storage_root: Path) -> dict[str, Any]:
        """`--kv-transfer-config`."""
        extra: dict[str, Any] = {
            "cpu_bytes_to_use": CPU_BLOCKS * tiny_model.BLOCK_BYTES,
            "blocks_per_chunk": self.blocks_per_chunk,
        }
        connector = {"kv_connector": "OffloadingConnector"}
        if self.ours:
            connector = {"kv_connector": "TieredOffloadingConnector", "kv_connector_module_path": "connector.vllm"}
        else:
            extra |= {
                "spec_name": "StockOffloadingSpec", "spec_module_path": "stock_spec", "self_describing_kv_events": True
            }  # fmt: skip
        if self.storage:
            fs = {"type": "fs", "root_dir": str(storage_root), "n_read_threads": 1, "n_write_threads": 1}
            extra |= {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [fs]}
        return {**connector, "kv_role": "kv_both", "kv_connector_extra_config": extra}


class Engine:
    """One engine and its ports, which outlive its process: `start`, `kill`, `start` again is a restart in place."""

    def __init__(self, children: Children, python: Path, kind: Kind, name: str, directory: Path) -> None:
        self.kind = kind
        self.name = name
        self.storage = directory / ("storage" if kind.storage == "shared" else f"storage-{name}")
        self.port, self.events_port, self.replay_port = free_ports(3)
        self._children = children
        self._python = python
        self._model = directory / "model"
        self._starts = 0
        self._child: Child | None = None

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    @property
    def pid(self) -> int:
        """Of the process that leads its group; 0 = not running."""
        return self._child.pid if self._child else 0

    async def start(self, http: aiohttp.ClientSession) -> None:
        """Until it serves. Raises `PartFailed`, with the end of what it printed."""
        self._starts += 1
        self.storage.mkdir(exist_ok=True)
        self._child = await self._children.start(f"{self.name}-{self._starts}", self._command())
        try:
            await self._child.until(lambda: self._serves(http), READY_S)
        except PartFailed as failed:
            raise PartFailed(self.name, str(failed), self.tail()) from None

    def tail(self) -> str:
        """vLLM logs to its standard output; what it could not catch is elsewhere."""
        return tail(self._child.output, TAIL_LINES) if self._child else ""

    async def _serves(self, http: aiohttp.ClientSession) -> bool | None:
        try:
            async with http.get(f"{self.url}/health") as response:
                return response.status == 200 or None
        except aiohttp.ClientError:
            return None

    async def kill(self) -> None:
        """At once, as the kernel does when memory runs out."""
        assert self._child is not None
        self._child.signal_group(signal.SIGKILL)
        await self._child.stop()

    async def reset(self, http: aiohttp.ClientSession, *, external: bool) -> None:
        """Empties HBM, and with `external` the CPU tier as well."""
        await until(lambda: self._reset_once(http, external), 5)

    async def _reset_once(self, http: aiohttp.ClientSession, external: bool) -> bool | None:
        """None = refused, as it is while copies hold blocks."""
        query = "?reset_external=true" if external else ""
        async with http.post(f"{self.url}/reset_prefix_cache{query}") as response:
            response.raise_for_status()
            return (await response.json())["success"] or None

    def _command(self) -> list[str]:
        environment = _ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(filter(None, (self.kind.pythonpath, str(HERE))))}
        command = [
            "env", *(f"{name}={value}" for name, value in environment.items()),
            str(self._python), "-m", "vllm.entrypoints.openai.api_server",
            f"--model={self._model}", f"--served-model-name={tiny_model.NAME}", f"--host={HOST}", f"--port={self.port}",
            "--load-format=dummy", "--dtype=bfloat16", "--enforce-eager", "--disable-uvicorn-access-log",
            f"--max-model-len={MAX_TOKENS}", f"--max-num-batched-tokens={MAX_TOKENS}", "--max-num-seqs=16",
            f"--block-size={tiny_model.BLOCK_SIZE}", f"--num-gpu-blocks-override={HBM_BLOCKS}",
            f"--kv-cache-memory-bytes={64 << 20}", "--enable-prefix-caching", "--enable-prompt-tokens-details",
        ]  # fmt: skip
        if not self.kind.connector:
            return command
        events = {
            "enable_kv_cache_events": True, "publisher": "zmq", "buffer_steps": BUFFERED_BATCHES,
            "endpoint": f"tcp://*:{self.events_port}", "replay_endpoint": f"tcp://*:{self.replay_port}",
            "topic": f"kv@{self.address}@{tiny_model.NAME}",
        }  # fmt: skip
        return [
            *command, f"--kv-events-config={json.dumps(events)}",
            f"--kv-transfer-config={json.dumps(self.kind.transfer(self.storage))}",
        ]  # fmt: skip
