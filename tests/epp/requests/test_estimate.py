"""Estimated tokens: equal beginnings stay equal, lengths are about right."""

from __future__ import annotations

from epp.requests.estimate import MEDIA_TOKENS, estimate
from epp.requests.model import ChatPrompt


def chat(*contents: object, tools: list[object] | None = None) -> ChatPrompt:
    return ChatPrompt([{"role": "user", "content": content} for content in contents], tools)


def test_four_bytes_make_a_token_padded_with_zeros() -> None:
    assert estimate("abcde") == b"abcde\0\0\0"
    assert estimate("ü") == "ü".encode() + b"\0\0"


def test_token_ids_are_taken_as_they_are() -> None:
    assert estimate(b"\1\0\0\0") == b"\1\0\0\0"


def test_a_longer_chat_begins_like_the_shorter_one() -> None:
    short, long = estimate(chat("one", "two")), estimate(chat("one", "two", "three"))
    assert long.startswith(short.rstrip(b"\0"))


def test_tools_and_calls_count() -> None:
    assert estimate(chat("one", tools=[{"name": "f"}])) != estimate(chat("one"))
    called = ChatPrompt([{"role": "assistant", "content": None, "tool_calls": [{"id": 1}]}])
    assert estimate(called) != estimate(ChatPrompt([{"role": "assistant", "content": None}]))


def test_pictures_count_as_a_fixed_number_of_tokens_and_differ_by_what_they_show() -> None:
    one, other = (estimate(chat([{"type": "image_url", "image_url": url}, "text"])) for url in ("a", "b"))
    assert one != other
    assert abs(len(one) // 4 - MEDIA_TOKENS) < 10
