"""Layers of recurrent states and of full attention in turn (a tiny Qwen3-Next): hits end where a state is held.

Runs before the tests whose engine lives as long as the session: beside a model without experts vLLM makes none with
them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import pytest

pytest.importorskip("vllm", reason="runs in the vLLM venv: make test-vllm")

from .engine import Engine, tokens
from .predictions import Picker

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]  # vLLM and torch warn a lot

MODEL = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "mlp_only_layers": [0, 1, 2],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 1,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
REQUESTS = 60


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    model, storage = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("storage")
    (model / "config.json").write_text(json.dumps(MODEL))
    tiers = {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": 2 << 20,
        "blocks_per_chunk": 1,
        "secondary_tiers": [{"type": "fs", "root_dir": str(storage), "n_read_threads": 1}],
        "tierpick": {"heartbeat_s": 0.2},
    }
    engine = Engine(
        model,
        storage,
        num_gpu_blocks_override=24,
        enable_prefix_caching=True,
        max_model_len=4096,
        max_num_batched_tokens=4096,
        kv_cache_memory_bytes=512 << 20,
        kv_transfer_config={
            "kv_connector": "TieredOffloadingConnector",
            "kv_connector_module_path": "connector.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": tiers,
        },
    )
    yield engine
    engine.close()


def test_what_all_tiers_serve_is_predicted_exactly(engine: Engine) -> None:
    [states, full] = engine.scheduler.kv_cache_config.kv_cache_groups
    assert [type(group.kv_cache_spec).__name__ for group in (states, full)] == ["MambaSpec", "FullAttentionSpec"]
    block = states.kv_cache_spec.block_size
    rng = random.Random(1)
    texts = [tokens(6 * block, seed) for seed in range(4)]
    picker = Picker(engine)
    asked = []
    for _ in range(REQUESTS):
        prompt = rng.choice(texts)[: rng.randrange(1, 7) * block + rng.choice((0, 1, 5))] + tokens(rng.randrange(40), 9)
        asked.append((picker.predict(prompt), engine.complete(prompt)[1]))
    assert [sum(predicted) for predicted, _ in asked] == [cached for _, cached in asked]
    for tier in zip(*(predicted for predicted, _ in asked), strict=True):
        assert sum(served > 0 for served in tier) > REQUESTS / 20
