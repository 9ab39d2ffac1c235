"""What an answer says it cost: prompt, completion and cached tokens, from JSON answers and from event streams.

Engines differ (OpenAI, Responses, Anthropic, SGLang shapes) and proxies cut streams anywhere, so the reader buffers
lines, looks only at those that can hold usage, and merges per field: a later event that repeats a field as 0 does not
erase it. It never raises; what has the wrong type counts as not said.
"""

from __future__ import annotations

from typing import Any

import msgspec

MAX_LINE_BYTES = 1 << 20
MAX_JSON_BYTES = 16 << 20
_MAX_COUNT = 1 << 48


class _Answer(msgspec.Struct, gc=False):
    usage: Any = None
    message: Any = None
    """Anthropic's `message_start` holds usage one level down,"""
    response: Any = None
    """and so does the Responses API's `response.completed`."""
    meta_info: Any = None
    """SGLang's native `/generate`."""


_decoder = msgspec.json.Decoder(_Answer)


class UsageReader:
    """Feed it the body as it comes; the three figures are None until (and unless) the engine states them."""

    __slots__ = ("_broken", "_pending", "_streaming", "cached_tokens", "completion_tokens", "prompt_tokens")

    def __init__(self, *, streaming: bool) -> None:
        self.prompt_tokens: int | None = None
        self.completion_tokens: int | None = None
        self.cached_tokens: int | None = None
        self._streaming = streaming
        self._pending = bytearray()
        self._broken = False
        """The current line (or the JSON body) has outgrown its bound and is being skipped."""

    @property
    def waiting(self) -> int:
        """Bytes kept because the rest of them is still to come."""
        return len(self._pending)

    def feed(self, data: bytes, end: bool = False) -> None:
        if self._streaming:
            self._feed_stream(data, end)
        else:
            self._feed_json(data, end)

    def _feed_json(self, data: bytes, end: bool) -> None:
        if self._broken:
            return
        if len(self._pending) + len(data) > MAX_JSON_BYTES:
            self._broken, self._pending = True, bytearray()
            return
        if end and not self._pending:
            self._read(data)
            return
        self._pending += data
        if end:
            self._read(self._pending)
            self._pending = bytearray()

    def _feed_stream(self, data: bytes, end: bool) -> None:
        cut = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if cut:
            self._read_lines(self._complete(data[:cut]))
            data = data[cut:]
        if self._broken or len(self._pending) + len(data) > MAX_LINE_BYTES:
            self._broken, self._pending = True, bytearray()
            return
        self._pending += data
        if end and self._pending:
            self._read_lines(bytes(self._pending))
            self._pending = bytearray()

    def _complete(self, lines: bytes) -> bytes:
        """With what was waiting for them, or without the rest of a line that is being skipped."""
        if self._broken:
            self._broken = False
            return _after_first_line(lines)
        if self._pending:
            lines, self._pending = bytes(self._pending + lines), bytearray()
        return lines

    def _read_lines(self, lines: bytes) -> None:
        if b"usage" not in lines and b"meta_info" not in lines:
            return
        for line in lines.splitlines():
            if line.startswith(b"data:") and (b"usage" in line or b"meta_info" in line):
                self._read(line[5:])

    def _read(self, document: bytes | bytearray) -> None:
        try:
            answer = _decoder.decode(document)
        except (msgspec.DecodeError, RecursionError):
            return
        for holder in (answer.message, answer.response):
            if isinstance(holder, dict):
                self._merge(holder.get("usage"))
        self._merge(answer.usage)
        self._merge(answer.meta_info)

    def _merge(self, usage: Any) -> None:
        if not isinstance(usage, dict):
            return
        self.prompt_tokens = _larger(self.prompt_tokens, usage, "prompt_tokens", "input_tokens")
        self.completion_tokens = _larger(self.completion_tokens, usage, "completion_tokens", "output_tokens")
        self.cached_tokens = _larger(self.cached_tokens, usage, "cache_read_input_tokens", "cached_tokens")
        for name in ("prompt_tokens_details", "input_tokens_details"):
            if isinstance(details := usage.get(name), dict):
                self.cached_tokens = _larger(self.cached_tokens, details, "cached_tokens")


def _after_first_line(lines: bytes) -> bytes:
    ends = [end for end in (lines.find(b"\n"), lines.find(b"\r")) if end >= 0]
    return lines[min(ends) + 1 :]


def _larger(known: int | None, fields: dict[str, Any], *names: str) -> int | None:
    for name in names:
        if name in fields and (count := _count(fields[name])) is not None and (known is None or count > known):
            known = count
    return known


def _count(value: Any) -> int | None:
    """A whole, not negative number, or text that says one."""
    if isinstance(value, str):
        value = int(value) if len(value) < 16 and value.isascii() and value.isdigit() else None
    elif isinstance(value, float):
        value = int(value) if value.is_integer() else None
    return value if type(value) is int and 0 <= value < _MAX_COUNT else None  # a bool is no count
