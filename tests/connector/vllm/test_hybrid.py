"""Layers of sliding windows and of full attention in turn, each kind with KV-cache blocks of its own."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("vllm", reason="runs in the vLLM venv: make test-vllm")

from .engine import BLOCK, Engine, tokens
from .predictions import Picker

if TYPE_CHECKING:
    Asked = tuple[list[int], tuple[int, int, int], int]

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]  # vLLM and torch warn a lot

MODEL = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 3 * BLOCK,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_local_base_freq": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
WINDOWS, FULL = 0, 1
"""The KV-cache groups' numbers."""
HBM_BLOCKS = 64
REQUESTS = 150


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    model = tmp_path_factory.mktemp("model")
    (model / "config.json").write_text(json.dumps(MODEL))
    engine = Engine(model, tmp_path_factory.mktemp("storage"), num_gpu_blocks_override=HBM_BLOCKS)
    kinds = [type(group.kv_cache_spec).__name__ for group in engine.scheduler.kv_cache_config.kv_cache_groups]
    assert kinds == ["SlidingWindowSpec", "FullAttentionSpec"]
    yield engine
    engine.close()


def prompts(seed: int) -> Iterator[list[int]]:
    rng = random.Random(seed)
    texts = [tokens(12 * BLOCK, 100 * seed + number) for number in range(5)]
    for _ in range(REQUESTS):
        text = rng.choice(texts)
        yield text[: rng.randrange(1, 12) * BLOCK + rng.choice((0, 1, 5))] + tokens(rng.randrange(40), rng.randrange(3))


def ask(engine: Engine, seed: int, *, hbm_only: bool) -> list[Asked]:
    """Prompts with what was predicted and what was cached."""
    picker = Picker(engine)
    return [(prompt, picker.predict(prompt), engine.complete(prompt, hbm_only=hbm_only)[1]) for prompt in prompts(seed)]


def test_the_groups_are_told(engine: Engine) -> None:
    engine.complete(tokens(BLOCK, seed=9))
    told = engine.wait_for(lambda: [batch[3]["groups"] for _, batch in engine.messages if "groups" in batch[3]])
    assert told[0] == {
        "lookups": [
            {"groups": [FULL], "kind": "full_attention", "block": BLOCK},
            {"groups": [WINDOWS], "kind": "sliding_window", "block": BLOCK, "window": 3 * BLOCK},
        ],
        "alignment": BLOCK,
    }


def test_a_prompt_reloaded_from_any_tier_gets_the_same_answer(engine: Engine) -> None:
    prompt = tokens(8 * BLOCK + 5, seed=1)
    answers = [engine.complete(prompt, 8)]
    for others in (0, 8, 30):
        for number in range(others):
            engine.complete(tokens(8 * BLOCK, seed=10 * others + number))
        answers.append(engine.complete(prompt, 8))
    [computed, *reloaded] = answers
    assert computed[1] == 0
    assert reloaded == [(computed[0], 8 * BLOCK)] * 3


def test_what_hbm_serves_is_predicted_exactly(engine: Engine) -> None:
    asked = ask(engine, 2, hbm_only=True)
    assert [predicted[0] for _, predicted, _ in asked] == [cached for _, _, cached in asked]
    assert sum(cached > 0 for _, _, cached in asked) > REQUESTS / 4


def test_what_all_tiers_serve_is_predicted_exactly(engine: Engine) -> None:
    asked = ask(engine, 3, hbm_only=False)
    assert [sum(predicted) for _, predicted, _ in asked] == [cached for _, _, cached in asked]
    for tier in zip(*(predicted for _, predicted, _ in asked), strict=True):
        assert sum(served > 0 for served in tier) > REQUESTS / 20


def test_a_snapshot_is_what_a_subscriber_to_everything_holds(engine: Engine) -> None:
    for prompt in prompts(4):
        engine.complete(prompt)
    number, held = engine.snapshot()
    assert held == engine.heard(number)
    lanes = Counter(key[:2] for key in held)
    assert all(lanes[medium, group] for medium in ("GPU", "CPU", "STORAGE") for group in (WINDOWS, FULL))


def test_a_picker_that_starts_from_a_snapshot_expects_the_same(engine: Engine) -> None:
    asked = list(prompts(5))
    for prompt in asked:
        engine.complete(prompt)
    always, late = Picker(engine), Picker.of_snapshot(engine)
    predictions = [late.predict(prompt) for prompt in asked[-30:]]
    assert predictions == [always.predict(prompt) for prompt in asked[-30:]]
    assert any(map(sum, predictions))
