"""Stand-ins for tokens where there is no tokenizer: equal text gives equal "tokens", about as many as a real one.

Four bytes make one token, as in llm-d. Good enough to find requests that begin alike and to weigh their length; never
comparable with what an engine reports.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import xxhash

from epp.requests.model import ChatPrompt, Prompt

MEDIA_TOKENS = 225
"""An image of 640 × 360 at one token per 1024 pixels; the size of a picture is not looked up."""


def estimate(prompt: Prompt) -> bytes:
    """Little-endian uint32 pseudo tokens; token ids are taken as they are."""
    if isinstance(prompt, bytes):
        return prompt
    text = prompt.encode() if isinstance(prompt, str) else b"".join(_chat(prompt))
    return text + bytes(-len(text) % 4)


def _chat(chat: ChatPrompt) -> Iterator[bytes]:
    if chat.tools:
        yield msgspec.json.encode(chat.tools)
    for message in chat.messages:
        yield f"\n{message['role']}\n".encode()
        yield from _content(message.get("content"))
        if calls := message.get("tool_calls"):
            yield msgspec.json.encode(calls)


def _content(content: Any) -> Iterator[bytes]:
    if isinstance(content, str):
        yield content.encode()
        return
    for part in content or ():
        yield part.encode() if isinstance(part, str) else _part(part)


def _part(part: Mapping[str, Any]) -> bytes:
    text = part.get("text")
    if isinstance(text, str):
        return text.encode()
    return xxhash.xxh3_64_digest(msgspec.json.encode(part)) * (MEDIA_TOKENS // 2)
