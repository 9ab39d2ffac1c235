from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

from connector.sim.tokens import ByteCodec, DirectoryCodec, load_codec

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A word-level tokenizer in the byte-level spelling, with a template and a begin-of-text token."""
    words = ["<s>", "?", "user", "hi", "Ġthere", "Ġworld", "<", ">", "Ġ42"]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {"chat_template": TEMPLATE, "bos_token": {"content": "<s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def test_the_built_in_tokenizer_is_bytes_plus_three() -> None:
    assert load_codec(None).encode("aé", special=True) == [0x61 + 3, 0xC3 + 3, 0xA9 + 3]


def test_built_in_answers_encode_back_to_their_own_tokens() -> None:
    codec = ByteCodec()
    assert [codec.encode(codec.text(token), special=False) for token in codec.vocabulary] == [
        [token] for token in codec.vocabulary
    ]


def test_the_built_in_chat_form_flattens_parts_and_null() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}, {"type": "text", "text": "b"}]
    messages: list[dict[str, Any]] = [{"role": "user", "content": parts}, {"role": "assistant", "content": None}]
    assert ByteCodec().render(messages) == "<|user|>\na\n\nb\n<|assistant|>\n\n<|assistant|>\n"


def test_a_directory_brings_its_tokens_and_its_template(directory: Path) -> None:
    codec = DirectoryCodec(directory)
    assert codec.encode("hi there", special=True) == [0, 3, 4]
    assert codec.encode("hi there", special=False) == [3, 4]
    assert codec.render([{"role": "user", "content": "hi"}], add_generation_prompt=True) == "<s><user>hi<assistant>"


def test_answers_of_a_directory_are_whole_words(directory: Path) -> None:
    codec = DirectoryCodec(directory)
    assert [codec.text(token) for token in codec.vocabulary] == [" there", " world"]


def test_a_conversation_that_the_template_refuses_is_a_value_error(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text("{{ raise_exception('no system role') }}")
    with pytest.raises(ValueError, match="no system role"):
        DirectoryCodec(directory).render([{"role": "system", "content": "x"}])
