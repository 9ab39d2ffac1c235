"""LoRA adapters: each has a cache of its own, in every tier and in every event."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("vllm", reason="runs in the vLLM venv: make test-vllm")

import torch
from safetensors.torch import save_file
from vllm.lora.request import LoRARequest

from .conftest import MODEL as MODEL_CONFIG
from .engine import BLOCK, Engine, tokens
from .predictions import MODEL, Picker

if TYPE_CHECKING:
    Adapters = dict[str, LoRARequest | None]

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]  # vLLM and torch warn a lot

RANK = 8
REQUESTS = 120


def adapter(path: Path, number: int) -> LoRARequest:
    """Of random weights, so large that its answers are its own."""
    path.mkdir()
    generator = torch.Generator().manual_seed(number)
    weights = {}
    for layer in range(MODEL_CONFIG["num_hidden_layers"]):
        for name, inputs, outputs in (("self_attn.v_proj", 64, 32), ("mlp.down_proj", 128, 64)):
            module = f"base_model.model.model.layers.{layer}.{name}"
            for side, shape in (("A", (RANK, inputs)), ("B", (outputs, RANK))):
                weights[f"{module}.lora_{side}.weight"] = torch.randn(shape, generator=generator).bfloat16()
    save_file(weights, path / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": 64 * RANK,
        "target_modules": ["v_proj", "down_proj"],
        "bias": "none",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": MODEL,
    }
    (path / "adapter_config.json").write_text(json.dumps(config))
    return LoRARequest(path.name, number, str(path))


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    engine = Engine(
        model, tmp_path_factory.mktemp("storage"), enable_lora=True, max_loras=2, max_lora_rank=RANK
    )  # fmt: skip
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    """By the name that requests call them; the base model is one of them."""
    path = tmp_path_factory.mktemp("adapters")
    return {MODEL: None, **{name: adapter(path / name, number) for number, name in ((1, "poet"), (2, "lawyer"))}}


def traffic(adapters: Adapters) -> Iterator[tuple[str, list[int]]]:
    """The same prompts for all."""
    rng = random.Random(5)
    texts = [tokens(10 * BLOCK, seed) for seed in range(2)]
    for _ in range(REQUESTS):
        yield rng.choice(list(adapters)), rng.choice(texts)[: rng.randrange(1, 10) * BLOCK + rng.choice((0, 5))]


def test_a_prediction_is_exact_for_each_adapter_in_every_tier(engine: Engine, adapters: Adapters) -> None:
    picker, answers = Picker(engine), {}
    hits: Counter[str] = Counter()
    for name, prompt in traffic(adapters):
        predicted = picker.predict(prompt, name)
        answer, cached = engine.complete(prompt, 4, adapter=adapters[name])
        assert sum(predicted) == cached
        assert answers.setdefault((name, tuple(prompt)), answer) == answer
        hits.update({tier: bool(served) for tier, served in zip(("gpu", "cpu", "storage"), predicted, strict=True)})
    assert min(hits[tier] for tier in ("gpu", "cpu", "storage")) >= 5
    shared = {prompt for _, prompt in answers}
    assert any(len({answers.get((name, prompt)) for name in adapters} - {None}) == 3 for prompt in shared)


def test_every_event_of_an_adapter_names_it(engine: Engine, adapters: Adapters) -> None:
    start = engine.next_number()
    prompt = tokens(6 * BLOCK, seed=77)
    for name in adapters:
        engine.complete(prompt, adapter=adapters[name])
    events = [event for event in engine.events(start) if event["type"] == "BlockStored"]
    told = {
        (event["medium"], event["lora_name"], tuple(map(tuple, filter(None, event["extra_keys"])))) for event in events
    }
    assert {medium for medium, _, _ in told} == {"GPU", "CPU", "STORAGE"}
    assert {name for _, name, _ in told} == {None, "poet", "lawyer"}
    assert all(set(extras) == ({(name,)} if name else set()) for _, name, extras in told)


def test_a_picker_that_starts_from_a_snapshot_expects_the_same(engine: Engine, adapters: Adapters) -> None:
    always, late = Picker(engine), Picker.of_snapshot(engine)
    known = set()
    for name, prompt in traffic(adapters):
        predicted = late.predict(prompt, name)
        assert predicted == always.predict(prompt, name)
        known.update({name} if any(predicted) else ())
    assert known == set(adapters)
