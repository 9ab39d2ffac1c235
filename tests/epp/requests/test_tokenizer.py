"""A tokenizer directory gives the ids `transformers` gives, whole or in pieces, remembered or new."""

from __future__ import annotations

import json
import random
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers

from epp.requests import segments
from epp.requests.model_files import TokenizerError
from epp.requests.segments import AtTokens, AtWords, Whole
from epp.requests.tokenizer import Tokenizer as OurTokenizer
from epp.requests.tokenizer import Untokenisable

from .conftest import train, write_model

TEXTS = [
    "",
    " ",
    "Hello, world! It's 12345 o'clock; don't we'll I'M.",
    "\n\n\n  indented\n\ttabbed \r\n   \n",
    " " * 300 + "x" + "\t" * 70,
    "多语言文本，包括中文。日本語のテキスト、ア・イ・ウ。한국어 텍스트",
    "مرحبا بالعالم नमस्ते दुनिया สวัสดี Привет мир Ελληνικά",
    "emoji 😀👨‍👩‍👧‍👦 flags 🇩🇪 and e\u0301 combining ≠ =\u0338 \u00a0nbsp\u3000ideographic",
    "<|im_start|>user\ninjected<|im_end|> <|im_st art|> <｜User｜>hi<｜Assistant｜><｜end▁of▁sentence｜>",
    "<think>a</think> </td｜> <｜td｜> <|place_holder_mm_span_0001|> <",
    '{"key": [1.5e-7, null], "k2":"v"}',
    "def f(x):\n    return x['key'] + x.attr  # comment\n\n\nclass A: pass\n" * 40,
    "control \x00\x01\x1c\x7f\x85 characters",
    "0123456789" * 50,
    "x" * 5000,
]
FRAGMENTS = [
    *(
        "hello",
        "World",
        "don",
        "'t",
        "'RE",
        "a",
        "Z",
        "x_y",
        "12",
        "3456",
        "½",
        "₂",
        "é",
        "e\u0301",
        "ſ",
        "日本語",
        "ア・イ",
    ),
    *(
        "。",
        "，",
        "한국어",
        "مرحبا",
        "😀",
        " ",
        "  ",
        "\n",
        "\n\n",
        "\t",
        "\r\n",
        "\u3000",
        "\x1c",
        "\x85",
        "\x00",
        ".",
        "!",
    ),
    *(
        "{",
        "}",
        "_",
        "--",
        "=",
        "\u0338",
        "<",
        "/",
        "<think>",
        "<|im_start|>",
        "<|im_end|>",
        "<｜User｜>",
        "<｜td｜>",
        "<｜",
    ),
]
texts = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=50).map("".join)


def ids(tokens: bytes) -> list[int]:
    return list(array("I", tokens))


@pytest.fixture(scope="session", params=["tiny", "deepseek"])
def pair(request: pytest.FixtureRequest, oracle: Callable[[Path], Any]) -> tuple[OurTokenizer, Any]:
    directory = request.getfixturevalue(f"{request.param}_directory")
    return OurTokenizer(directory), oracle(directory)


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that even short texts are cut."""
    monkeypatch.setattr(segments, "PIECE_CHARS", 12)


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_ids_equal_those_of_transformers(pair: tuple[OurTokenizer, Any], text: str, special: bool) -> None:
    ours, oracle = pair
    expected = oracle(text, add_special_tokens=special)["input_ids"]
    assert ids(ours.encode(text, add_special_tokens=special)) == expected
    assert ids(ours.encode(text, add_special_tokens=special)) == expected, "from the cache"


@settings(max_examples=150, deadline=None)
@given(text=texts)
def test_any_text_has_the_ids_of_transformers(pair: tuple[OurTokenizer, Any], text: str) -> None:
    ours, oracle = pair
    assert ids(ours.encode(text)) == oracle(text, add_special_tokens=False)["input_ids"]


@settings(max_examples=100, deadline=None)
@given(text=texts, edits=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 3), texts), max_size=4))
def test_edits_and_extensions_of_a_known_text_have_the_ids_of_transformers(
    pair: tuple[OurTokenizer, Any], text: str, edits: list[tuple[int, int, str]]
) -> None:
    ours, oracle = pair
    for at, removed, inserted in edits:
        ours.encode(text)
        text = text[:at] + inserted + text[at + removed :]
        assert ids(ours.encode(text)) == oracle(text, add_special_tokens=False)["input_ids"]


def test_encoding_in_a_thread_and_inline_agree(pair: tuple[OurTokenizer, Any]) -> None:
    ours, _ = pair
    pieces = [text for text in TEXTS if text]
    assert ours.encode_batch(pieces) == ours.encode_inline(pieces)


def test_only_the_new_end_of_a_conversation_is_encoded_again(tiny_directory: Path) -> None:
    tokenizer = OurTokenizer(tiny_directory)
    text = "the quick brown fox jumps over the lazy dog. " * 50
    tokenizer.encode(text)
    plan = tokenizer.plan(text + "And then it slept.", add_special_tokens=False)
    assert "".join(plan.pieces).endswith("And then it slept.")
    assert len("".join(plan.pieces)) < 60


# every pre-tokenizer that is known to be safe to cut, against the backend itself

BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + BLANKS
QWEN2 = LLAMA3.replace("{1,3}", "")
O200K = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
MARKS = QWEN2.replace(r"]?\p{L}+", r"]?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]+", r"[^\s\p{L}\p{M}\p{N}]+")


def byte_level(*before: Any, use_regex: bool = False) -> Any:
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    return pre_tokenizers.Sequence([*before, last])


def split(pattern: str) -> Any:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


def variant(pre_tokenizer: Any, normalizer: Any = None, tokens: list[AddedToken] | None = None) -> Tokenizer:
    backend = train(["<|im_start|>", "<|im_end|>", "<think>"])
    backend.pre_tokenizer = pre_tokenizer
    backend.normalizer = normalizer
    backend.add_tokens(tokens or [])
    return backend


def assert_exact(tokenizer: OurTokenizer, backend: Tokenizer, samples: int = 400) -> None:
    chance = random.Random(5)
    for _ in range(samples):
        text = "".join(chance.choice(FRAGMENTS) for _ in range(chance.randint(1, 40)))
        assert ids(tokenizer.encode(text)) == backend.encode(text, add_special_tokens=False).ids, ascii(text)


CUTTABLE = {
    "gpt2": (byte_level(use_regex=True), None),
    "llama3": (byte_level(split(LLAMA3)), None),
    "qwen2": (byte_level(split(QWEN2)), normalizers.NFC()),
    "o200k": (byte_level(split(O200K)), None),
    "marks": (byte_level(split(MARKS)), normalizers.Sequence([normalizers.NFC()])),
    "digits": (byte_level(pre_tokenizers.Digits(individual_digits=True), use_regex=True), None),
}


@pytest.mark.parametrize("family", CUTTABLE)
def test_known_pre_tokenizers_are_cut_at_words_and_stay_exact(family: str, tmp_path: Path) -> None:
    backend = variant(*CUTTABLE[family], [AddedToken("<｜User｜>"), AddedToken("hello.")])
    tokenizer = OurTokenizer(write_model(tmp_path, backend, {}))
    assert isinstance(tokenizer._cutter, AtWords)
    assert_exact(tokenizer, backend)


ASCII = [*filter(str.isascii, FRAGMENTS), "\n    ", "\n \n", "\r\n\t", "/", "'s", '("', " (", "\x0c", "\x1f", "s"]


@pytest.mark.parametrize("family", CUTTABLE)
def test_ascii_text_has_the_tokens_that_the_tokenizer_itself_makes(family: str, tmp_path: Path) -> None:
    backend = variant(*CUTTABLE[family])
    tokenizer = OurTokenizer(write_model(tmp_path, backend, {}))
    chance = random.Random(7)
    for _ in range(2000):
        text = "".join(chance.choices(ASCII, k=chance.randint(1, 12)))
        [encoded] = tokenizer.encode_inline([text])
        assert ids(encoded) == backend.encode(text, add_special_tokens=False).ids, ascii(text)


UNKNOWN = {
    "unknown alternative": (byte_level(split(r"\w+-\w+|" + QWEN2)), None),
    "looks behind": (byte_level(split(r"(?<=a)b|" + QWEN2)), None),
    "punctuation not covered": (byte_level(split(r" ?\p{L}+|\s+")), None),
    "prefix space": (pre_tokenizers.ByteLevel(add_prefix_space=True), None),
    "other normalizer": (byte_level(use_regex=True), normalizers.NFKC()),
    "sentencepiece": (None, normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])),
}


@pytest.mark.parametrize("family", UNKNOWN)
def test_unknown_tokenizers_are_cut_at_added_tokens_only_and_stay_exact(family: str, tmp_path: Path) -> None:
    backend = variant(*UNKNOWN[family])
    tokenizer = OurTokenizer(write_model(tmp_path, backend, {}))
    assert isinstance(tokenizer._cutter, AtTokens)
    assert_exact(tokenizer, backend)


def test_a_pre_tokenizer_that_treats_the_first_text_differently_is_never_cut(tmp_path: Path) -> None:
    backend = variant(pre_tokenizers.Metaspace(prepend_scheme="first"))
    tokenizer = OurTokenizer(write_model(tmp_path, backend, {}))
    assert isinstance(tokenizer._cutter, Whole)
    assert_exact(tokenizer, backend, samples=50)


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word"])
def test_added_tokens_that_see_their_neighbours_keep_the_text_whole(flag: str, tmp_path: Path) -> None:
    tokens = [AddedToken("hello", normalized=False, **{flag: True}), AddedToken("World", normalized=True)]
    backend = variant(byte_level(split(QWEN2)), None, tokens)
    tokenizer = OurTokenizer(write_model(tmp_path, backend, {}))
    assert tokenizer._cutter.cut("a<think>b hello c") == ["a<think>b hello c"]
    assert_exact(tokenizer, backend)


# the files of a directory


def test_special_tokens_known_to_the_config_only_are_added_as_transformers_adds_them(
    tmp_path: Path, oracle: Callable[[Path], Any]
) -> None:
    config = {
        "eos_token": "<eos>",
        "pad_token": {
            "__type": "AddedToken",
            "content": "<pad>",
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "single_word": False,
        },
        "additional_special_tokens": ["<extra>"],
        "added_tokens_decoder": {
            "700": {
                "content": "<tool>",
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "single_word": False,
                "special": False,
            }
        },
    }
    directory = write_model(tmp_path, variant(byte_level(use_regex=True)), config)
    text = "a<eos>b<pad>c<extra>d<tool>e"
    assert ids(OurTokenizer(directory).encode(text)) == oracle(directory)(text, add_special_tokens=False)["input_ids"]


def test_names_of_special_tokens_are_those_of_transformers(pair: tuple[OurTokenizer, Any]) -> None:
    ours, oracle = pair
    assert ours.special_tokens() == oracle.special_tokens_map


def test_a_template_file_wins_over_the_config(tmp_path: Path) -> None:
    directory = write_model(tmp_path, variant(byte_level(use_regex=True)), {"chat_template": "config"})
    assert OurTokenizer(directory).chat_templates() == {"default": "config"}
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    (directory / "chat_template.jinja").write_text("file")
    assert OurTokenizer(directory).chat_templates() == {"default": "file", "tool_use": "tools"}


def test_models_whose_chats_the_engine_writes_by_its_own_code_have_no_template(tmp_path: Path) -> None:
    directory = write_model(tmp_path, variant(byte_level(use_regex=True)), {"chat_template": "config"})
    (directory / "config.json").write_text(json.dumps({"model_type": "gpt_oss"}))
    assert OurTokenizer(directory).chat_templates() == {}


def test_an_unusable_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        OurTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        OurTokenizer(tmp_path)


def test_text_that_is_not_unicode_has_no_tokens(tiny_directory: Path) -> None:
    with pytest.raises(Untokenisable):
        OurTokenizer(tiny_directory).plan("\ud800", add_special_tokens=False)
