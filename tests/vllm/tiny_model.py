"""A tiny Qwen3 as a model directory: configuration, tokenizer and chat template. vLLM makes up its weights."""

from __future__ import annotations

import json
from pathlib import Path

from epp.toolbox.demo import model

NAME = "tiny"
BLOCK_SIZE = 32
"""Tokens; vLLM's attention on CPUs takes multiples of 32 only."""
_LAYERS, _KV_HEADS, _HEAD = 2, 1, 32
BLOCK_BYTES = 2 * BLOCK_SIZE * _KV_HEADS * _HEAD * _LAYERS * 2
"""Keys and values in bfloat16."""


def write_tiny_qwen3(directory: Path) -> None:
    vocabulary = model.write_model(directory).get_vocab_size()
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": vocabulary,
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": _LAYERS, "num_attention_heads": 2,
        "num_key_value_heads": _KV_HEADS, "head_dim": _HEAD, "hidden_act": "silu", "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": True, "attention_bias": False,
        "torch_dtype": "bfloat16", "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config, indent=1))
