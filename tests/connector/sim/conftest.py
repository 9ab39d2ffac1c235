"""Shared means: an engine stepped by hand, and recordings of a real engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from connector.events import Event
from connector.sim.engine import Engine, EngineConfig, Output
from connector.sim.model import INSTANT, ServiceModel
from connector.sim.requests import Request

RECORDINGS = Path(__file__).parents[2] / "recordings"
VOCABULARY = range(3, 259)


class Bench:
    """An engine and a clock that moves by what each step says it takes."""

    def __init__(self, config: EngineConfig, model: ServiceModel = INSTANT) -> None:
        self.engine = Engine(config, model, VOCABULARY)
        self.now = 0.0
        self.batches: list[list[Event]] = []
        self.outputs: list[Output] = []
        self._count = 0

    def request(self, prompt: list[int], max_tokens: int = 1, **more: Any) -> Request:
        """Queue a request; it runs as the bench is stepped."""
        self._count += 1
        request = Request(f"r{self._count}", prompt, max_tokens, **more)
        self.engine.add(request, self.now)
        return request

    def step(self, meanwhile: Callable[[], None] | None = None) -> list[Event]:
        """One step, with `meanwhile` happening while it is under way; returns its events (empty: no message)."""
        step = self.engine.begin_step(self.now)
        if meanwhile is not None:
            meanwhile()
        else:
            self.now += step.seconds
        outputs, events = self.engine.end_step(step, self.now)
        self.outputs += outputs
        if events:
            self.batches.append(events)
        return events

    def drain(self) -> None:
        """Step until nothing is left to do."""
        for _ in range(10_000):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError("the engine never becomes idle")

    def ask(self, prompt: list[int], max_tokens: int = 1, **more: Any) -> Request:
        """Queue a request and run everything to the end."""
        request = self.request(prompt, max_tokens, **more)
        self.drain()
        return request

    def events(self) -> list[Event]:
        return [event for batch in self.batches for event in batch]


@pytest.fixture
def new_bench() -> Callable[..., Bench]:
    return Bench


@pytest.fixture
def bench() -> Callable[..., Bench]:
    """Make a bench from sizes; small by default: 8 usable blocks of 4 tokens."""

    def make(*, model: ServiceModel = INSTANT, **sizes: Any) -> Bench:
        sizes = {"block_size": 4, "hbm_blocks": 9, "max_num_batched_tokens": 64} | sizes
        return Bench(EngineConfig(**sizes), model)

    return make


@pytest.fixture
def read_recording() -> Callable[[str], tuple[list[dict[str, Any]], list[bytes]]]:
    """Reads one recording: its request and action lines in order, and the payloads of its messages."""

    def read(name: str) -> tuple[list[dict[str, Any]], list[bytes]]:
        lines = (RECORDINGS / f"{name}.requests.jsonl").read_text().splitlines()
        messages = (RECORDINGS / f"{name}.jsonl").read_text().splitlines()
        payloads = [bytes.fromhex(json.loads(message)["frames"][2]) for message in messages]
        return [json.loads(line) for line in lines[1:]], payloads

    return read
