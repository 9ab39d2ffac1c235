"""From an HTTP request to an `InferenceRequest`: which path is parsed by what.

Only the shapes whose prompt can be scored are claimed; every other path the engine may serve (embeddings, audio,
multipart …) is routed unscored and its body is not validated. The body itself is never changed or re-serialised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
from msgspec import Raw

from epp.errors import Code, Refusal
from epp.requests import openai
from epp.requests.model import InferenceRequest

MAX_BODY_BYTES = 64 << 20
_PEEK_BYTES = 1 << 20
"""Bodies of unclaimed paths are searched for a model name up to this size."""

MAX_CONTAINERS = 1 << 19
"""Brackets and braces, those in texts included. More would hold up other requests for longer than any prompt does."""

Parser = Callable[[InferenceRequest], None]

_CLAIMED: Mapping[str, Parser] = {
    "chat/completions": openai.parse_chat,
    "completions": openai.parse_completion,
}
_BODYLESS = frozenset({"GET", "HEAD", "OPTIONS", "DELETE"})


def parse(
    request_id: str, path: str, headers: Mapping[str, str], body: bytes, *, max_body_bytes: int = MAX_BODY_BYTES
) -> InferenceRequest:
    """Raises `Refusal` 400 or 413, naming the field that is wrong; never quotes the body."""
    if len(body) > max_body_bytes:
        raise Refusal(Code.PayloadTooLarge, f"request body of {len(body)} bytes exceeds {max_body_bytes} bytes")
    path = effective_path(path, headers)
    request = InferenceRequest(request_id, path, headers, body)
    parser = None if headers.get(":method") in _BODYLESS else parser_for(path)
    if parser is None:
        request.unscored = "path"
        if len(body) <= _PEEK_BYTES:
            _peek(request)
    elif len(body) > MAX_CONTAINERS < body.count(b"[") + body.count(b"{"):  # short bodies need not be counted
        request.unscored = "too many values"
        _peek(request)
    else:
        parser(request)
    request.target_model = request.model
    return request


def effective_path(path: str, headers: Mapping[str, str]) -> str:
    """The path the client asked for; some gateways move it to a header. No path at all means completions."""
    return path or headers.get("x-original-path") or headers.get("x-forwarded-path") or "/v1/completions"


def parser_for(path: str) -> Parser | None:
    """Longest claimed suffix wins; query, fragment, a prefix (`/team-a/…`) and a trailing slash do not matter."""
    segments = path.partition("?")[0].partition("#")[0].strip("/").rsplit("/", 2)
    return _CLAIMED.get("/".join(segments[-2:])) or _CLAIMED.get(segments[-1])


class _Peek(msgspec.Struct, gc=False):
    model: Raw = Raw(b"null")
    stream: Raw = Raw(b"null")


_peek_decoder = msgspec.json.Decoder(_Peek)
_text_decoder = msgspec.json.Decoder(str)


def _peek(request: InferenceRequest) -> None:
    """Read the model's name where the body happens to be a JSON object; anything else is the engine's business."""
    if request.body[:1] != b"{":
        return
    try:
        seen = _peek_decoder.decode(request.body)
        request.stream = bytes(seen.stream) == b"true"
        request.model = _text_decoder.decode(seen.model)
    except (msgspec.DecodeError, RecursionError):
        return
