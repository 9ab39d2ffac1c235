"""The demo's model directory is one that real libraries read, and what the demo counts in is what they give."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer
from transformers import AutoTokenizer

from epp.toolbox.demo.traffic import final_histories, plan, render


def test_any_text_survives_the_tokenizer(tokenizer: Tokenizer) -> None:
    text = "Naïve café, 漢字 and\n\ttabs"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_bytes_are_token_ids_of_the_vocabulary(tokenizer: Tokenizer) -> None:
    assert all(tokenizer.id_to_token(byte) is not None for byte in range(256))


def test_the_demos_own_rendering_is_the_templates(model_directory: Path) -> None:
    reference = AutoTokenizer.from_pretrained(str(model_directory))
    for history in list(final_histories(plan(1, 5)))[:3]:
        rendered = reference.apply_chat_template(history.messages(), tokenize=False, add_generation_prompt=True)
        assert rendered == render(history.messages())


def test_the_demos_token_counts_are_the_reference_tokenizers(model_directory: Path, tokenizer: Tokenizer) -> None:
    reference = AutoTokenizer.from_pretrained(str(model_directory))
    text = next(iter(final_histories(plan(1, 5)))).rendered()
    assert tokenizer.encode(text).ids == reference.encode(text, add_special_tokens=False)
