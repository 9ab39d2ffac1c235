"""Usage is read from any shape, cut anywhere, and never raises."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.requests import usage
from epp.requests.usage import UsageReader

Figures = tuple[int | None, int | None, int | None]


def figures(reader: UsageReader) -> Figures:
    return reader.prompt_tokens, reader.completion_tokens, reader.cached_tokens


def from_json(body: Any) -> Figures:
    reader = UsageReader(streaming=False)
    reader.feed(body if isinstance(body, bytes) else json.dumps(body).encode(), True)
    return figures(reader)


def from_stream(*chunks: bytes) -> Figures:
    reader = UsageReader(streaming=True)
    for chunk in chunks:
        reader.feed(chunk)
    reader.feed(b"", True)
    return figures(reader)


OPENAI = {"prompt_tokens": 10, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 8}}
SHAPES = {
    "openai": ({"choices": [], "usage": OPENAI}, (10, 3, 8)),
    "responses": (
        {"usage": {"input_tokens": 10, "output_tokens": 3, "input_tokens_details": {"cached_tokens": 8}}},
        (10, 3, 8),
    ),
    "anthropic": ({"usage": {"input_tokens": 10, "output_tokens": 3, "cache_read_input_tokens": 8}}, (10, 3, 8)),
    "sglang": ({"meta_info": {"prompt_tokens": 10, "completion_tokens": 3, "cached_tokens": 8}}, (10, 3, 8)),
    "no details": ({"usage": {"prompt_tokens": 10, "completion_tokens": 3}}, (10, 3, None)),
    "numeric strings": ({"usage": {"prompt_tokens": "10", "completion_tokens": 3.0}}, (10, 3, None)),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_usage_of_a_json_answer(shape: str) -> None:
    body, expected = SHAPES[shape]
    assert from_json(body) == expected


@pytest.mark.parametrize("shape", SHAPES)
def test_usage_of_a_stream(shape: str) -> None:
    body, expected = SHAPES[shape]
    assert from_stream(b"data: " + json.dumps(body).encode() + b"\n\n", b"data: [DONE]\n\n") == expected


@pytest.mark.parametrize(
    "usage",
    [
        "oops", None, 5, [], [OPENAI], {}, {"prompt_tokens": "many"}, {"prompt_tokens": -1}, {"prompt_tokens": True},
        {"prompt_tokens": 1.5}, {"prompt_tokens": 1e300}, {"prompt_tokens": 10**30}, {"prompt_tokens": "9" * 99},
        {"prompt_tokens_details": 0}, {"prompt_tokens_details": {"cached_tokens": None}}, {"prompt_tokens": "²"},
    ],
)  # fmt: skip
def test_figures_of_a_wrong_type_count_as_not_stated(usage: Any) -> None:
    assert from_json({"usage": usage}) == (None, None, None)
    assert from_json({"usage": usage, "message": usage, "response": usage, "meta_info": usage}) == (None, None, None)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"<html>", b'{"usage":' + b"[" * 100_000, b"\xff\xfe"])
def test_answers_that_are_no_json_state_nothing(body: bytes) -> None:
    assert from_json(body) == (None, None, None)
    assert from_stream(b"data: " + body + b"\n\n") == (None, None, None)


STREAM = (
    b'data: {"id":"1","choices":[{"delta":{"content":"usage"}}],"usage":null}\r\n\r\n'
    b": comment\r\n"
    b'data:{"choices":[],"usage":{"prompt_tokens":10}}\n\n'
    b"event: x\n"
    b'data: {"usage":{"prompt_tokens":0,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":8}}}\r\r'
    b"data: [DONE]\n\n"
)


@pytest.mark.parametrize("cut", range(len(STREAM) + 1))
def test_a_stream_may_be_cut_at_any_byte(cut: int) -> None:
    assert from_stream(STREAM[:cut], STREAM[cut:]) == (10, 3, 8)


def test_a_stream_may_come_byte_by_byte() -> None:
    assert from_stream(*(bytes([byte]) for byte in STREAM)) == (10, 3, 8)


def test_a_json_answer_may_come_in_pieces() -> None:
    body = json.dumps({"usage": OPENAI}).encode()
    reader = UsageReader(streaming=False)
    for byte in body:
        reader.feed(bytes([byte]))
    reader.feed(b"", True)
    assert figures(reader) == (10, 3, 8)


def test_the_last_event_needs_no_line_end() -> None:
    reader = UsageReader(streaming=True)
    reader.feed(b'data: {"usage":{"prompt_tokens":10}}', True)
    assert reader.prompt_tokens == 10


def test_fields_of_several_events_are_merged_and_not_erased() -> None:
    start = {"type": "message_start", "message": {"usage": {"input_tokens": 10, "cache_read_input_tokens": 8}}}
    delta = {"type": "message_delta", "usage": {"input_tokens": 0, "output_tokens": 3}}
    events = [b"data: " + json.dumps(event).encode() + b"\n\n" for event in (start, delta)]
    assert from_stream(*events) == (10, 3, 8)


def test_usage_within_a_completed_response() -> None:
    event = {"type": "response.completed", "response": {"usage": {"input_tokens": 10, "output_tokens": 3}}}
    assert from_stream(b"data: " + json.dumps(event).encode() + b"\n\n") == (10, 3, None)


def test_a_line_without_end_is_skipped_and_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "MAX_LINE_BYTES", 100)
    reader = UsageReader(streaming=True)
    for _ in range(50):
        reader.feed(b'data: {"usage":{"prompt_tokens":99}}'[:30])
        assert len(reader._pending) <= 100
    reader.feed(b'\ndata: {"usage":{"prompt_tokens":10}}\n')
    assert reader.prompt_tokens == 10


def test_a_json_answer_over_the_limit_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "MAX_JSON_BYTES", 100)
    reader = UsageReader(streaming=False)
    reader.feed(b" " * 90)
    reader.feed(json.dumps({"usage": OPENAI}).encode())
    reader.feed(b"", True)
    assert figures(reader) == (None, None, None)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["prompt_tokens", "input_tokens", "prompt_tokens_details", "cached_tokens", "usage", "x"]),
            inner,
        )
    ),
    max_leaves=8,
)


@given(usage=JSON, message=JSON, streaming=st.booleans())
def test_any_usage_is_read_without_an_error(usage: Any, message: Any, streaming: bool) -> None:
    reader = UsageReader(streaming=streaming)
    reader.feed(b"data: " * streaming + json.dumps({"usage": usage, "message": message}).encode(), True)
    for count in figures(reader):
        assert count is None or count >= 0


@pytest.mark.parametrize("streaming", [True, False])
def test_pieces_cost_what_their_bytes_cost(streaming: bool) -> None:
    """However little of a line, or of an answer, each of them brings."""
    reader = UsageReader(streaming=streaming)
    began = time.process_time()
    for _ in range(100_000):
        reader.feed(b"12345678")
    assert reader.waiting == 800_000
    assert time.process_time() - began < 1
