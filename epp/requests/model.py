"""One inference request, as the parsers leave it and the producers complete it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct


@dataclass(slots=True, frozen=True)
class ChatPrompt:
    """Everything of a chat body that changes the rendered prompt, untouched (values as JSON gave them)."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Any] | None = None
    template_fields: Mapping[str, Any] = field(default_factory=dict)
    """`chat_template_kwargs`, `add_generation_prompt`, `continue_final_message`, `documents`, `chat_template`,
    `reasoning_effort` …, as sent; absent ones absent."""
    pieces: int = field(default=1, compare=False)
    """Messages, parts of messages, tools, … : what rendering takes time for."""


Prompt = str | bytes | ChatPrompt
"""Text, token ids (little-endian uint32), or a chat to be rendered."""


class InferenceRequest(Struct):
    id: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    model: str = ""
    """As the client named it."""
    target_model: str = ""
    """As the engine knows it (after a rewrite); equal to `model` without one."""
    stream: bool = False
    cache_salt: str = ""
    max_output_tokens: int | None = None
    add_special_tokens: bool | None = None
    """As sent: whether the engine puts BOS and the like around text; None = its default (completions yes, chat no)."""
    prompts: Sequence[Prompt] = ()
    """One per prompt of the body; empty = the body is routed unscored. A multimodal chat keeps its prompt although
    `unscored` says so: an estimate may still be made of it, exact tokens may not."""
    unscored: str = ""
    """Why there is nothing to score, e.g. "path", "multimodal", "token ids out of range"; "" otherwise."""
    tokens: Sequence[bytes] = ()
    """One per prompt: token ids as little-endian uint32; empty until a token producer ran (or if it could not)."""
    priority: int = 0
    fairness_id: str = "default-flow"

    @property
    def prompt_tokens(self) -> int:
        return sum(len(t) for t in self.tokens) // 4
