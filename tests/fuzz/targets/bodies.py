"""Request bodies: as clients write them, with any field replaced by anything."""

from __future__ import annotations

from typing import Any

import msgspec

from tests.fuzz.source import Source
from tests.fuzz.trial import CANARY, CANARY_TOKEN

PATHS = (
    "/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/team/v1/chat/completions/?x=1#y", "", "/", "//",
    "completions", "/v1/completions/render",
)  # fmt: skip
ROLES = ("system", "user", "assistant", "tool", "developer", "", "\x00")
SPECIALS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>")

_Raw = msgspec.Raw
_encode = msgspec.json.encode


def request(source: Source) -> tuple[str, bytes]:
    """Path and body, which mostly go together."""
    chat = source.chance(0.5)
    path = PATHS[chat] if source.chance(0.9) else source.pick(PATHS)
    return path, _body(source, chat)


def _body(source: Source, chat: bool) -> bytes:
    if source.chance(0.03):
        return source.noise(60, 5000)
    fields = _chat(source) if chat else _completion(source)
    for _ in range(source.pick((0, 0, 0, 0, 1, 2))):
        fields[source.pick(list(fields))] = _Raw(source.json(1))
    if source.chance(0.05):
        fields[source.text()] = _Raw(source.json(1))
    written = _encode(fields)
    if source.chance(0.03):
        written = written[:-1] + b"," + written[1:]  # every name twice
    return source.mutate(written) if source.chance(0.1) else written


def _common(source: Source) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "model": source.pick(("m", "m", "tiny", "tiny", source.text(), "x" * 5000)),
        "stream": source.chance(0.5),
    }
    optional = {
        "cache_salt": source.text(),
        "max_tokens": source.pick((16, 0, -1, 1.5, 2**63, 10**30)),
        "add_special_tokens": source.chance(0.5),
        "truncate_prompt_tokens": 5,
        "kv_transfer_params": {"prompt_token_ids": [1]},
        "prompt_embeds": None,
    }
    fields |= {name: value for name, value in optional.items() if source.chance(0.1)}
    return fields


def _completion(source: Source) -> dict[str, Any]:
    shapes = (
        lambda: text(source),
        lambda: [text(source) for _ in range(source.size(3, 3000))],
        lambda: [source.integer() if source.chance(0.02) else CANARY_TOKEN - n for n in range(source.size(50, 5000))],
        lambda: [[1, 2, source.pick((3, 3, -1, True, 2**32))] for _ in range(source.size(4, 1000))],
        lambda: _Raw(source.json()),
    )
    return _common(source) | {"prompt": source.pick(shapes)()}


def _chat(source: Source) -> dict[str, Any]:
    fields = _common(source) | {"messages": [_message(source) for _ in range(source.size(4, 500))]}
    optional = {
        "tools": [_tool(source) for _ in range(source.below(3))],
        "chat_template_kwargs": {
            source.pick(("enable_thinking", "messages", "range", "loop", "bos_token", "x")): _Raw(source.json(3))
        },
        "add_generation_prompt": source.chance(0.5),
        "continue_final_message": True,
        "documents": [{"title": "t", "text": text(source)}],
        "reasoning_effort": source.pick(("none", "low", 5)),
        "chat_template": source.pick((None, "{{ messages }}")),
    }
    return fields | {name: value for name, value in optional.items() if source.chance(0.15)}


def _message(source: Source) -> Any:
    message: dict[str, Any] = {"role": source.pick(ROLES), "content": _content(source)}
    optional = {
        "tool_calls": [
            {
                "id": "1",
                "type": "function",
                "function": {
                    "name": "f",
                    "arguments": source.pick(('{"a": 1}', "[", "NaN", source.json().decode("latin-1"))),
                },
            }
        ],
        "reasoning_content": text(source),
        "name": source.text(),
        "tool_call_id": "1",
    }
    message |= {name: value for name, value in optional.items() if source.chance(0.15)}
    if source.chance(0.05):
        message[source.pick(list(message))] = _Raw(source.json(2))
    return message if source.chance(0.99) else _Raw(source.json(2))


def _content(source: Source) -> Any:
    if source.chance(0.7):
        return text(source)
    kinds = ("text", "text", "input_text", "thinking", "refusal", "image_url", "input_audio", "?")
    return [
        {"type": source.pick(kinds), "text": text(source)} if source.chance(0.8) else _Raw(source.json(3))
        for _ in range(source.size(3, 300))
    ]


def _tool(source: Source) -> Any:
    parameters = (
        {"type": "object", "properties": {"a": {"type": "string"}}} if source.chance(0.8) else _Raw(source.json(2))
    )
    return {"type": "function", "function": {"name": "f", "description": text(source), "parameters": parameters}}


def text(source: Source) -> str:
    """With the word in it that must not be in any log."""
    kind = source.below(6)
    if kind == 0:
        return f"{CANARY} " + "a word and another, " * source.size(20, 3000)
    if kind == 1:
        return source.pick(SPECIALS) * source.size(3, 3000) + CANARY
    if kind == 2:
        return CANARY + source.pick(("a", " ", "\n", "'", "é", "0", "\u0301", "🙂", "\t \n")) * source.size(100, 30_000)
    return f"{CANARY} {source.text()}"
