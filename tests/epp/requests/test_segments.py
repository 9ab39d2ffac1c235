"""Where texts are cut, and what is remembered of the pieces."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.requests.pretokens import LEFT, RIGHT, analyse, cut_pattern, split_alternatives
from epp.requests.segments import PIECE_CHARS, AtTokens, AtWords, PieceCache, Whole, any_of


@given(st.lists(st.sampled_from(["word ", "longer,", "\n", "日本。", "'s", "<a>"]), max_size=3000).map("".join))
def test_pieces_are_the_text_and_end_after_a_letter_or_digit(text: str) -> None:
    pieces = AtWords(cut_pattern(["<a>"], normalised=False)).cut(text)
    assert "".join(pieces) == text
    for piece, following in pairwise(pieces):
        assert len(piece) > PIECE_CHARS
        assert re.fullmatch(f"[{LEFT}]", piece[-1])
        assert following[0] in RIGHT


def test_texts_with_a_common_beginning_share_their_first_pieces() -> None:
    cutter = AtWords(cut_pattern([], normalised=False))
    text = "the quick brown fox. " * 1000
    first, second = cutter.cut(text + "one"), cutter.cut(text + "two three")
    assert len(first) > 5
    assert first[:-1] == second[:-1]


def test_added_tokens_are_not_cut_in_two() -> None:
    pattern = cut_pattern(["<|user|>", "a.b"], normalised=False)
    assert not re.search(pattern, "user|>")
    assert not re.search(pattern, "a.b")
    assert re.search(pattern, "user>")


def test_characters_that_compose_are_no_cut_where_text_is_normalised() -> None:
    assert re.search(cut_pattern([], normalised=False), "a<")
    assert not re.search(cut_pattern([], normalised=True), "a<")


def test_a_text_is_cut_around_added_tokens() -> None:
    cutter = AtTokens(["<a>", "<ab>"], [])
    assert cutter.cut("x<a>y<ab><a>") == ["x", "<a>", "y", "<ab>", "<a>"]
    assert cutter.cut("") == []


def test_a_text_with_a_token_that_sees_its_neighbours_stays_whole() -> None:
    cutter = AtTokens(["<a>"], ["<mask>"])
    assert cutter.cut("x<a>y") == ["x", "<a>", "y"]
    assert cutter.cut("x<a>y <mask>") == ["x<a>y <mask>"]
    assert Whole().cut("x<a>y") == ["x<a>y"]


@given(st.sets(st.text("ab|<", min_size=1, max_size=4), min_size=1), st.text("ab|<"))
def test_the_longest_word_at_a_place_is_found(words: set[str], text: str) -> None:
    longest_first = "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True))
    assert re.findall(any_of(words), text) == re.findall(longest_first, text)


def test_no_words_are_found_nowhere() -> None:
    assert re.findall(any_of([]), "abc") == []


def test_the_cache_keeps_to_its_bytes_and_drops_the_least_recently_used() -> None:
    cache = PieceCache(3 * (PieceCache._OVERHEAD + 400))
    keys = cache.keys(["a", "b", "c", "d"])
    for key in keys[:3]:
        cache.put(key, bytes(400))
    assert cache.get(keys[0]) == bytes(400)
    cache.put(keys[3], bytes(400))
    assert [cache.get(key) is not None for key in keys] == [True, False, True, True]
    assert len(cache) == 3
    assert cache.bytes == cache.max_bytes


def test_what_is_larger_than_the_cache_is_not_kept() -> None:
    cache = PieceCache(1000)
    (key,) = cache.keys(["a"])
    cache.put(key, bytes(1000))
    assert (len(cache), cache.bytes) == (0, 0)


def test_a_key_put_twice_counts_once() -> None:
    cache = PieceCache(10_000)
    (key,) = cache.keys(["a"])
    cache.put(key, bytes(4))
    cache.put(key, bytes(4))
    assert cache.bytes == 4 + PieceCache._OVERHEAD


def test_alternatives_are_cut_at_outer_bars_only() -> None:
    assert split_alternatives(r"(?i:'s|'t)|[a|]|\||x") == [r"(?i:'s|'t)", "[a|]", r"\|", "x"]


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"type": "Unigram"}},
        {"model": {"type": "BPE", "dropout": 0.1}},
        {"model": {"type": "BPE", "end_of_word_suffix": "</w>"}},
        {"normalizer": {"type": "Lowercase"}},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFKC"}]}},
        {"pre_tokenizer": None},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True}},
        {"pre_tokenizer": {"type": "Whitespace"}},
    ],
    ids=str,
)
def test_a_tokenizer_with_any_unknown_part_is_unknown(change: dict[str, object]) -> None:
    known: dict[str, object] = {
        "model": {"type": "BPE"},
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False},
    }
    assert analyse(known) is not None
    assert analyse(known | change) is None
