"""What engines answer clients, as far as the picker reads it: usage, in JSON or in event streams."""

from __future__ import annotations

import msgspec

from epp.requests.usage import MAX_LINE_BYTES, UsageReader
from tests.fuzz.source import Source
from tests.fuzz.target import Script, Target
from tests.fuzz.trial import CANARY

_NAMES = (
    "prompt_tokens",
    "completion_tokens",
    "cached_tokens",
    "input_tokens",
    "output_tokens",
    "cache_read_input_tokens",
)
_encode = msgspec.json.encode


def chunks(source: Source, streaming: bool) -> list[bytes]:
    """An answer's body, cut anywhere."""
    body = b"".join(_line(source) for _ in range(source.size(4, 300))) if streaming else _document(source)
    if source.chance(0.2):
        body = source.mutate(body)
    cuts = sorted(source.place(body) for _ in range(source.pick((0, 0, 1, 3, 10))))
    return [body[start:end] for start, end in zip([0, *cuts], [*cuts, len(body)], strict=True)]


def _line(source: Source) -> bytes:
    ending = source.pick((b"\n\n", b"\n\n", b"\r\n\r\n", b"\r", b""))
    kind = source.below(5)
    if kind == 0:
        return b"data: [DONE]" + ending
    if kind == 1:
        return b"data: " + _encode({"choices": [{"delta": {"content": CANARY}}], "usage": None}) + ending
    if kind == 2:
        return source.pick((b": ping", b"event: usage", b"data:usage", b"usage" * source.size(2, 5000))) + ending
    return b"data: " + _document(source) + ending


def _document(source: Source) -> bytes:
    usage: dict[str, object] = {source.pick(_NAMES): _count(source) for _ in range(3)}
    details = msgspec.Raw(source.json(2)) if source.chance(0.2) else {"cached_tokens": _count(source)}
    usage[source.pick(("prompt_tokens_details", "input_tokens_details"))] = details
    where = source.pick(("usage", "usage", "meta_info"))
    document: dict[str, object] = {where: usage if source.chance(0.9) else msgspec.Raw(source.json(2))}
    if source.chance(0.2):
        document = {
            source.pick(("message", "response")): document if source.chance(0.8) else msgspec.Raw(source.json(2))
        }
    return _encode(document)


def _count(source: Source) -> object:
    return source.pick(
        (7, 100, "12", 3.0, 1.5, True, None, -1, 2**60, "１２", "9" * 5000, [], msgspec.Raw(source.json(3)))
    )


class Usage(Target):
    """Answers, in chunks, into the reader of usage."""

    share = 4

    def script(self, source: Source) -> Script:
        streaming = source.chance(0.6)
        return (bytes([streaming]), *chunks(source, streaming))

    def run(self, script: Script) -> bool:
        reader = UsageReader(streaming=script[0] == b"\1")
        for n, chunk in enumerate(script[1:]):
            reader.feed(chunk, n == len(script) - 2)
        found = (reader.prompt_tokens, reader.completion_tokens, reader.cached_tokens)
        assert all(count is None or (type(count) is int and 0 <= count < 1 << 48) for count in found)
        assert reader.waiting <= MAX_LINE_BYTES * 16
        return any(count is not None for count in found)
