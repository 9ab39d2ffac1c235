"""OpenAI completions and chat bodies → prompts.

Only what routing needs is decoded, into typed structs; fields nobody reads are skipped by the decoder. What the engine
will refuse for certain is refused here with a 400 that names the field; what it may accept although it cannot be
scored (images, embeddings, odd token ids) is routed with `unscored` set. Messages carry field names and positions,
never values: prompt text must not reach logs.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

import msgspec
from msgspec import UNSET, Raw

from epp.errors import Refusal, bad_request
from epp.requests.ids import to_bytes
from epp.requests.model import ChatPrompt, InferenceRequest, Prompt

NO_MODEL: Final = "model not found in request body"
NO_PROMPT: Final = "invalid completions request: must have prompt field"
MAX_PROMPTS = 4096
MAX_PIECES = 1 << 15
"""Of a chat: messages and all that templates may loop over besides."""
NO_MESSAGES: Final = "invalid chat completions request: must have valid messages field"

_ABSENT = Raw(b"")
_NULL = b"null"


class _Common(msgspec.Struct, gc=False):
    model: Any = None
    stream: Any = None
    cache_salt: Any = None
    max_tokens: Any = None
    add_special_tokens: Any = None
    truncate_prompt_tokens: Any = None
    prompt_logprobs: Any = None
    echo: Any = None
    lora_path: Any = None
    extra_key: Any = None
    kv_transfer_params: Raw = _ABSENT


class _AnyCompletion(_Common, gc=False):
    prompt_embeds: Raw = _ABSENT
    logprobs: Any = None


class _Completion(_AnyCompletion, gc=False):
    prompt: Raw = _ABSENT


class _OneText(_AnyCompletion, gc=False):
    """What nearly all are: read in one go."""

    prompt: str = ""


class _Chat(_Common, gc=False):
    messages: Any = None
    max_completion_tokens: Any = None
    tools: Any = None
    chat_template_kwargs: Any = UNSET
    add_generation_prompt: Any = UNSET
    continue_final_message: Any = UNSET
    documents: Any = UNSET
    chat_template: Any = UNSET
    reasoning_effort: Any = UNSET


_TEMPLATE_FIELDS = (
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "documents",
    "chat_template",
    "reasoning_effort",
)

_one_text_decoder = msgspec.json.Decoder(_OneText)
_completion_decoder = msgspec.json.Decoder(_Completion)
_chat_decoder = msgspec.json.Decoder(_Chat)
_text_decoder = msgspec.json.Decoder(str)
_array_decoder = msgspec.json.Decoder(list[Raw])
_texts_decoder = msgspec.json.Decoder(list[str])
_ids_decoder = msgspec.json.Decoder(list[int])


def parse_completion(request: InferenceRequest) -> None:
    body = _one_text_body(request.body) or _decode(_completion_decoder, request.body)
    _common(request, body, (body.max_tokens,))
    if _present(body.prompt_embeds):
        request.unscored = request.unscored or "prompt_embeds"
        return
    prompts, unscored = ((body.prompt,), "") if isinstance(body, _OneText) else _prompts(body.prompt)
    request.unscored = request.unscored or unscored
    if not request.unscored:
        request.prompts = prompts


def _one_text_body(body: bytes) -> _OneText | None:
    """None for every other body, wrong ones included."""
    try:
        found = _one_text_decoder.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return None
    return found if found.prompt else None


def parse_chat(request: InferenceRequest) -> None:
    body = _decode(_chat_decoder, request.body)
    _common(request, body, (body.max_completion_tokens, body.max_tokens))
    unscored = _check_messages(body.messages)
    if body.tools is not None and not isinstance(body.tools, list):
        raise bad_request("invalid chat completions request: tools must be an array")
    pieces = _pieces(body)
    if pieces > MAX_PIECES:
        unscored = "too many messages"
    request.unscored = request.unscored or unscored
    if request.unscored in ("", MULTIMODAL):
        fields = {name: value for name in _TEMPLATE_FIELDS if (value := getattr(body, name)) is not UNSET}
        request.prompts = (ChatPrompt(body.messages, body.tools, fields, pieces),)


def _pieces(body: _Chat) -> int:
    """Once the messages are checked."""
    lists = [body.messages, body.tools, body.documents]
    for message in body.messages:
        lists += (message.get("content"), message.get("tool_calls"))
    return sum(len(values) for values in lists if isinstance(values, list))


def _decode(decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:
    try:
        return decoder.decode(body)
    except msgspec.DecodeError as error:
        reason = _surrogate_reason(body) or str(error)
    except RecursionError:
        reason = "nested too deeply"
    raise bad_request(f"error unmarshaling request bodyMap: {reason}")


_FIELDS = frozenset(_Completion.__struct_fields__ + _Chat.__struct_fields__)
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
_EXPLAIN_BYTES = 1 << 20


def _surrogate_reason(body: bytes) -> str:
    """A lone surrogate is what clients stumble over most, and the decoder's own words do not name it."""
    if len(body) > _EXPLAIN_BYTES or not _SURROGATE_ESCAPE.search(body):
        return ""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    for name, value in fields.items() if isinstance(fields, dict) else ():
        try:
            json.dumps((name, value), ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return f"lone surrogate in {name}" if name in _FIELDS else "lone surrogate"
    return ""


def _common(request: InferenceRequest, body: _Common, limits: tuple[Any, ...]) -> None:
    if not isinstance(body.model, str) or not body.model:
        raise bad_request(NO_MODEL)
    request.model = body.model
    request.stream = body.stream is True
    if body.cache_salt is not None:
        if not isinstance(body.cache_salt, str):
            raise bad_request("cache_salt must be a string")
        request.cache_salt = body.cache_salt
    for limit in limits:
        if (count := _token_count(limit)) is not None:
            request.max_output_tokens = count
            break
    if body.add_special_tokens is not None:
        _special_tokens(request, body.add_special_tokens)
    if body.truncate_prompt_tokens is not None:
        request.unscored = "truncate_prompt_tokens"
    elif body.kv_transfer_params is not _ABSENT and b"prompt_token_ids" in bytes(body.kv_transfer_params):
        request.unscored = "kv_transfer_params"
    elif _wants_prompt_logprobs(body):
        request.unscored = "prompt_logprobs"
    elif body.lora_path is not None:  # SGLang's ways to ask for a cache of its own, of which its events do not tell
        request.unscored = "lora_path"
    elif body.extra_key is not None:
        request.unscored = "extra_key"


def _wants_prompt_logprobs(body: _Common) -> bool:
    """To have them the engine computes every token, whatever its cache holds."""
    if body.prompt_logprobs is not None:
        return True
    if body.echo in (None, False):
        return False
    return isinstance(body, _Chat) or (isinstance(body, _AnyCompletion) and body.logprobs is not None)


def _special_tokens(request: InferenceRequest, value: Any) -> None:
    if not isinstance(value, bool):
        raise bad_request("add_special_tokens must be a boolean")
    request.add_special_tokens = value


def _token_count(value: Any) -> int | None:
    """Negative and fractional limits count as absent, as in llm-d."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != int(value):
        return None
    return int(value)


def _present(raw: Raw) -> bool:
    return raw is not _ABSENT and bytes(memoryview(raw)[:5]) != _NULL


def _prompts(raw: Raw) -> tuple[tuple[Prompt, ...], str]:
    """The prompts of a completions body, and why they cannot be scored ("" if they can)."""
    if not _present(raw):
        raise bad_request(NO_PROMPT)
    first = _first(raw)
    if first == b'"':
        return _one_text(raw)
    if first == b"[":
        return _prompt_list(raw)
    raise _bad_prompt()


def _one_text(raw: Raw) -> tuple[tuple[Prompt, ...], str]:
    text = _decode_prompt(_text_decoder, raw)
    if not text:
        raise bad_request(NO_PROMPT)
    return (text,), ""


def _prompt_list(raw: Raw) -> tuple[tuple[Prompt, ...], str]:
    first = _first(memoryview(raw)[1:])
    if first == b"]":
        raise bad_request(NO_PROMPT)
    prompts: tuple[Prompt | None, ...]
    if first == b'"':
        prompts = tuple(_decode_prompt(_texts_decoder, raw))
    elif first == b"[":
        lists = _decode_prompt(_array_decoder, raw)
        prompts = tuple(_token_ids(item) for item in lists[: MAX_PROMPTS + 1])
    else:
        prompts = (_token_ids(raw),)
    if len(prompts) > MAX_PROMPTS:
        return (), "too many prompts"
    known = tuple(prompt for prompt in prompts if prompt is not None)
    if len(known) < len(prompts):
        return (), "token ids out of range"
    return known, "" if all(known) else "empty prompt"


def _token_ids(raw: Raw) -> bytes | None:
    """Little-endian uint32; None for numbers no tokenizer has (negative, fractional, too large, booleans)."""
    try:
        return to_bytes(_ids_decoder.decode(raw))
    except OverflowError:
        return None
    except msgspec.ValidationError:
        if _first(raw) == b"[" and all(_first(item) in _NUMBER_STARTS for item in _array_decoder.decode(raw)):
            return None
        raise _bad_prompt() from None


_NUMBER_STARTS = frozenset(bytes([c]) for c in b"-0123456789tf")


def _decode_prompt(decoder: msgspec.json.Decoder[Any], raw: Raw) -> Any:
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError:
        raise _bad_prompt() from None
    except msgspec.DecodeError as error:
        raise bad_request(f"invalid completions request: prompt: {error}") from None


def _first(raw: Raw | memoryview) -> bytes:
    """First byte that is not JSON whitespace."""
    view = memoryview(raw)
    head = bytes(view[:64]).lstrip()
    return (head or bytes(view).lstrip())[:1]


def _bad_prompt() -> Refusal:
    return bad_request(
        "invalid completions request: prompt must be a string, an array of strings, "
        "an array of token ids or an array of such arrays"
    )


MULTIMODAL: Final = "multimodal"
_TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal", "thinking"})
_MEDIA_KEYS = frozenset(
    {
        "image_url",
        "input_image",
        "image_pil",
        "image_embeds",
        "audio_url",
        "input_audio",
        "audio_embeds",
        "video_url",
        "video_embeds",
        "prompt_embeds",
    }
)


def _check_messages(messages: Any) -> str:
    """Refuse what no engine renders; otherwise why the chat cannot be scored exactly, or ""."""
    if not isinstance(messages, list) or not messages:
        raise bad_request(NO_MESSAGES)
    unscored = ""
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise bad_request(f"invalid chat completions request: messages[{index}] must be an object")
        if not isinstance(message.get("role"), str):
            raise bad_request(f"invalid chat completions request: messages[{index}].role must be a string")
        content = message.get("content")
        if content is not None and not isinstance(content, str):
            reason = _check_parts(content, f"messages[{index}].content")
            unscored = unscored or reason
    return unscored


def _check_parts(parts: Any, where: str) -> str:
    if not isinstance(parts, list):
        raise bad_request(f"invalid chat completions request: {where} must be a string, an array of parts or null")
    unscored = ""
    for index, part in enumerate(parts):
        if isinstance(part, str):
            continue
        if not isinstance(part, dict):
            raise bad_request(f"invalid chat completions request: {where}[{index}] must be an object")
        unscored = unscored or _part_kind(part)
    return unscored


def _part_kind(part: dict[str, Any]) -> str:
    kind = part.get("type")
    if not isinstance(kind, str):
        kind = ""
    if kind in _TEXT_PARTS:
        return ""
    return MULTIMODAL if kind in _MEDIA_KEYS or not _MEDIA_KEYS.isdisjoint(part) else "content part"
