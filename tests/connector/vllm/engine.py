"""A real vLLM engine in this process, stepped by hand: a tiny model of random weights, and tiers as tiny."""

from __future__ import annotations

import random
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import vllm
import zmq
from vllm.lora.request import LoRARequest
from vllm.v1.engine.llm_engine import LLMEngine

from .ports import free_port

BLOCK = 32
BLOCK_BYTES = 8192  # two layers of one head of 32 bfloat16 numbers, K and V
HBM_BLOCKS = 24
CPU_CHUNKS = 20
BLOCKS_PER_CHUNK = 2
Batch = list[Any]
Copies = Counter[tuple[str, int | None, int]]
END = b"\xff" * 8


class Engine:
    """A vLLM engine with our connector, and a subscriber to its events; `settings` replace those of the engine."""

    def __init__(self, model: Path, storage: Path, **settings: Any) -> None:
        ports = free_port(), free_port()
        self.storage = storage
        self.inner = LLMEngine.from_engine_args(
            vllm.EngineArgs(
                **{
                    "model": str(model),
                    "skip_tokenizer_init": True,
                    "load_format": "dummy",
                    "dtype": "bfloat16",
                    "enforce_eager": True,
                    "max_model_len": 512,
                    "max_num_seqs": 4,
                    "max_num_batched_tokens": 512,
                    "block_size": BLOCK,
                    "num_gpu_blocks_override": HBM_BLOCKS,
                    "kv_cache_memory_bytes": 64 << 20,
                    "disable_log_stats": False,
                    "kv_events_config": {
                        "enable_kv_cache_events": True,
                        "endpoint": f"tcp://*:{ports[0]}",
                        "replay_endpoint": f"tcp://*:{ports[1]}",
                        "topic": "kv@test@tiny",
                    },
                    "kv_transfer_config": {
                        "kv_connector": "TieredOffloadingConnector",
                        "kv_connector_module_path": "connector.vllm",
                        "kv_role": "kv_both",
                        "kv_connector_extra_config": {
                            "spec_name": "TieringOffloadingSpec",
                            "cpu_bytes_to_use": CPU_CHUNKS * BLOCKS_PER_CHUNK * BLOCK_BYTES,
                            "blocks_per_chunk": BLOCKS_PER_CHUNK,
                            "secondary_tiers": [{"type": "fs", "root_dir": str(storage), "n_read_threads": 1}],
                            "tierpick": {"heartbeat_s": 0.2, "removal_scan_per_s": 2000},
                        },
                    },
                }
                | settings
            )
        )
        self.core = self.inner.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.connector = self.scheduler.connector
        self._ids = iter(range(1_000_000))
        self._context = zmq.Context()
        self._events = self._context.socket(zmq.SUB)
        self._events.connect(f"tcp://127.0.0.1:{ports[0]}")
        self._events.subscribe(b"")
        self._replay_port = ports[1]
        self.messages: list[tuple[int, Batch]] = []
        self.wait_for(lambda: self.messages)  # the first heartbeat: subscribed

    def add(
        self,
        tokens: Sequence[int],
        max_tokens: int = 1,
        *,
        adapter: LoRARequest | None = None,
        hbm_only: bool = False,
        **prompt: Any,
    ) -> str:
        request = str(next(self._ids))
        params = vllm.SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            extra_args={"kv_transfer_params": {"max_load_tokens": 0}} if hbm_only else None,
        )
        self.inner.add_request(request, {"prompt_token_ids": list(tokens), **prompt}, params, lora_request=adapter)
        return request

    def run(self, after_step: Callable[[], None] = lambda: None) -> dict[str, tuple[tuple[int, ...], int]]:
        """Step until nothing is left to do; what each request got, and how many of its tokens were cached."""
        answers = {}
        deadline = time.monotonic() + 60
        while self.inner.has_unfinished_requests() or self.scheduler.has_requests():
            assert time.monotonic() < deadline
            for output in self.inner.step():
                if output.finished:
                    answers[output.request_id] = tuple(output.outputs[0].token_ids), output.num_cached_tokens or 0
            after_step()
        return answers

    def complete(self, tokens: Sequence[int], max_tokens: int = 1, **more: Any) -> tuple[tuple[int, ...], int]:
        """`more`: as for `add`."""
        request = self.add(tokens, max_tokens, **more)
        return self.run()[request]

    def read(self, seconds: float = 0.0) -> None:
        while self._events.poll(seconds * 1000):
            _, number, payload = self._events.recv_multipart()
            self.messages.append((int.from_bytes(number, "big"), msgspec.msgpack.decode(payload)))

    def wait_for(self, condition: Callable[[], Any], seconds: float = 10.0) -> Any:
        deadline = time.monotonic() + seconds
        while True:
            self.read()
            if found := condition():
                return found
            assert time.monotonic() < deadline, "it never came"
            time.sleep(0.002)

    def events(self, since: int = 0) -> list[dict[str, Any]]:
        """The events of messages from number `since` on."""
        self.read()
        return [event for number, batch in self.messages if number >= since for event in batch[1]]

    def next_number(self) -> int:
        """The number of the next message, once all that was published has come."""
        number, _ = self.snapshot()
        self.wait_for(lambda: self.messages[-1][0] >= number)
        return self.messages[-1][0] + 1

    def snapshot(self) -> tuple[int, Copies]:
        """What the engine says it holds, and as of which message."""
        number, batches = self.snapshot_parts()
        return number, copies(batches)

    def snapshot_parts(self) -> tuple[int, list[Batch]]:
        self._ask()  # what is queued for the publisher now is in the answer to whoever asks once this is answered
        return self._ask()

    def _ask(self) -> tuple[int, list[Batch]]:
        with self._context.socket(zmq.DEALER) as asker:
            asker.connect(f"tcp://127.0.0.1:{self._replay_port}")
            asker.send_multipart([b"", struct.pack(">Q", 2**64 - 1)])
            parts = []
            while True:
                assert asker.poll(5000)
                frames = asker.recv_multipart()
                if frames[2] == END:
                    break
                parts.append((int.from_bytes(frames[2], "big"), msgspec.msgpack.decode(frames[3])))
        assert parts
        assert len({number for number, _ in parts}) == 1
        return parts[0][0], [batch for _, batch in parts]

    def heard(self, number: int) -> Copies:
        """What a subscriber to all messages up to `number` takes for held."""
        self.wait_for(lambda: self.messages[-1][0] >= number)
        return copies(batch for seq, batch in self.messages if seq <= number)

    def close(self) -> None:
        self._events.close(0)
        self._context.term()
        self.core.shutdown()


def copies(batches: Iterable[Batch]) -> Copies:
    """Copies of each block by medium, group and hash, as a consumer counts them."""
    held: Copies = Counter()
    for batch in batches:
        for event in batch[1]:
            if event["type"] == "AllBlocksCleared":
                for gone in [key for key in held if key[0] in event["tiers"]]:
                    del held[gone]
                continue
            step = 1 if event["type"] == "BlockStored" else -1
            for block in event["block_hashes"]:
                key = event["medium"], event.get("group_idx"), block
                held[key] += step
                assert held[key] >= 0, "removed what was never stored"
    return +held


def tokens(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(10, 500), k=count)
