"""The OpenAI bodies that the engine reads, and what it writes back; no sockets here."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

DEFAULT_MAX_TOKENS = 16
MAX_TOKEN_ID = 2**31

BodyType = TypeVar("BodyType", bound=msgspec.Struct)


class ApiError(Exception):
    """Answered with this status and OpenAI's error object."""

    def __init__(self, status: int, kind: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": status}})


def bad_request(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, "BadRequestError", message, param)


class StreamOptions(msgspec.Struct):
    include_usage: bool = False


class Body(msgspec.Struct, kw_only=True):
    """What completions and chat completions share; other fields are accepted and ignored."""

    model: str | None = None
    max_tokens: int | None = None
    n: int | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    vllm_xargs: dict[str, Any] | None = None

    @property
    def token_limit(self) -> int:
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def wants_usage_chunk(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def report_reused(self) -> bool:
        return (self.vllm_xargs or {}).get("kv_cache_report_mode") == "full"


class CompletionBody(Body, kw_only=True):
    prompt: str | list[Any]
    add_special_tokens: bool = True

    def prompts(self) -> list[str | list[int]]:
        """The prompts in order: a string, token ids, or a list of either."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise bad_request("prompt must not be empty", "prompt")
        if isinstance(self.prompt[0], int):
            return [_token_ids(self.prompt)]
        return [entry if isinstance(entry, str) else _token_ids(entry) for entry in self.prompt]


class ChatBody(Body, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def token_limit(self) -> int:
        return super().token_limit if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def template_options(self) -> dict[str, Any]:
        options = {"tools": self.tools, "add_generation_prompt": self.add_generation_prompt}
        return {**options, **(self.chat_template_kwargs or {})}


class TokenizeBody(msgspec.Struct, kw_only=True):
    """Either of the two prompts."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True


def decode_body(data: bytes, kind: type[BodyType]) -> BodyType:
    """Raises ApiError (400) naming the field."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_request(f"invalid request body: {error}") from error


def _token_ids(entry: object) -> list[int]:
    """`entry` as token ids, checked at C speed: prompts can be long; `True` is no token."""
    if isinstance(entry, list) and set(map(type, entry)) == {int} and min(entry) >= 0 and max(entry) < MAX_TOKEN_ID:
        return entry
    raise bad_request("prompt must be a string, token ids, or a list of either", "prompt")


@dataclass(slots=True)
class Usage:
    """Token counts of one HTTP request, over all its prompts."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def as_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "completion_tokens": self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(slots=True)
class Answer:
    """Writes one HTTP answer: chunks as tokens come, or all of it at the end."""

    model: str
    chat: bool
    answer_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, texts: list[str], usage: Usage) -> bytes:
        choices = [self._choice(index, text, "length", streamed=False) for index, text in enumerate(texts)]
        return msgspec.json.encode({**self._head(streamed=False), "choices": choices, "usage": usage.as_json()})

    def opening(self, index: int) -> bytes:
        """The first chunk of a chat choice: its role."""
        delta = {"role": "assistant", "content": ""}
        return self._chunk([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])

    def piece(self, index: int, text: str, finished: bool) -> bytes:
        return self._chunk([self._choice(index, text, "length" if finished else None, streamed=True)])

    def usage_chunk(self, usage: Usage) -> bytes:
        return self._chunk([], usage=usage.as_json())

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return b"data: " + msgspec.json.encode({**self._head(streamed=True), "choices": choices, **more}) + b"\n\n"

    def _head(self, *, streamed: bool) -> dict[str, Any]:
        if self.chat:
            kind, prefix = ("chat.completion.chunk" if streamed else "chat.completion"), "chatcmpl"
        else:
            kind, prefix = "text_completion", "cmpl"
        return {"id": f"{prefix}-{self.answer_id}", "object": kind, "created": self.created, "model": self.model}

    def _choice(self, index: int, text: str, finish_reason: str | None, *, streamed: bool) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": finish_reason}
        if not self.chat:
            return {**choice, "text": text}
        if streamed:
            return {**choice, "delta": {"content": text}}
        return {**choice, "message": {"role": "assistant", "content": text}}


END_OF_STREAM = b"data: [DONE]\n\n"
