"""The demo's model directory: a small byte-level BPE trained on the demo's own vocabulary, and a ChatML template.

There are no weights: simulated engines need none, and nothing is downloaded.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from epp.toolbox.demo.traffic import prose

NAME = "demo"
VOCABULARY = 1024
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)


def write_model(directory: Path) -> Tokenizer:
    """Write tokenizer.json, tokenizer_config.json and config.json into `directory`; returns the tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = _train()
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(directory / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "chat_template": CHAT_TEMPLATE,
    })  # fmt: skip
    _write_json(directory / "config.json", {"model_type": "qwen3", "vocab_size": tokenizer.get_vocab_size()})
    return tokenizer


def _train() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(text, special=True) for text in (END_OF_TEXT, TURN_START, TURN_END)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([prose(random.Random(0), 20_000)], trainer)
    return tokenizer


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=1))
