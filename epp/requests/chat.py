"""A chat becomes the text the engine will encode: templates rendered as transformers renders them.

vLLM first turns OpenAI messages into the plainer form templates know (`chat_messages`); transformers then renders the
model's Jinja template over it. Both are followed step by step, as one different character means different tokens.
Where the engine would refuse, or the two are not certain to agree, `Unrenderable` says so and the request is routed
unscored. Templates come from the operator's model directory and run sandboxed; a template sent by a client is never
run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from epp.requests.chat_format import detect_content_format
from epp.requests.chat_messages import Message, Unrenderable, conversation, developer_as_system, tool_schemas
from epp.requests.model import ChatPrompt

__all__ = ["ChatTemplate", "ChatTemplates", "Unrenderable"]

_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
_RESERVED = frozenset(
    {
        "messages",
        "conversation",
        "tools",
        "chat_template",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
        "sanitize_control_tokens",
    }
)
"""Names in `chat_template_kwargs` that steer the engine's rendering rather than the template."""


class ChatTemplates:
    """A model's templates by name: "tool_use" where there is one and the request has tools, else "default"."""

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """Raises `jinja2.TemplateError` for a template that does not compile."""
        self._templates = {name: ChatTemplate(source, special_tokens) for name, source in templates.items()}

    def render(self, chat: ChatPrompt) -> str:
        """Raises `Unrenderable`."""
        name = "tool_use" if chat.tools is not None and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise Unrenderable("no chat template")
        return self._templates[name].render(chat)


class ChatTemplate:
    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = _environment()
        self._template = environment.from_string(source)
        self._source = source
        self._special_tokens = dict(special_tokens)
        self.content_format = detect_content_format(environment.parse(source))
        """None = not certain to be what vLLM detects."""
        self._knows_developer = '"developer"' in source or "'developer'" in source

    def render(self, chat: ChatPrompt) -> str:
        """Raises `Unrenderable`."""
        if self.content_format is None:
            raise Unrenderable("content format of the chat template")
        messages = conversation(chat.messages, self.content_format)
        if not self._knows_developer and any(message["role"] == "developer" for message in messages):
            messages = developer_as_system(messages)
        messages = [_as_transformers(message) for message in messages]
        variables = _variables(chat.template_fields)
        tag_field = self._tag_final_message(messages, variables)
        try:
            text = self._template.render(
                {**self._special_tokens, **variables, "messages": messages, "tools": tool_schemas(chat.tools)}
            )
        except Unrenderable:
            raise
        except Exception as error:  # whatever a template runs into with this chat, the engine's would too
            raise Unrenderable(f"chat template: {type(error).__name__}") from None
        return text if tag_field is None else _without_tag(text, tag_field)

    def _tag_final_message(self, messages: list[Message], variables: dict[str, Any]) -> str | None:
        """Mark the end of the message to be continued; its text, or None where none is."""
        if not variables.pop("continue_final_message", False):
            return None
        if variables["add_generation_prompt"] or "content" not in self._source:
            raise Unrenderable("continue_final_message")
        final = messages[-1].get("content")
        if isinstance(final, str):
            messages[-1]["content"] = final + _CONTINUE_TAG
            return final
        if not final:
            raise Unrenderable("continue_final_message")
        part, text = final[-1], final[-1]["text"]
        part["text"] = text + _CONTINUE_TAG
        return str(text)


def _as_transformers(message: Message) -> Message:
    """Without nulls, and with reasoning under every name templates know it by."""
    message = {name: value for name, value in message.items() if value is not None}
    if (reasoning := message.get("reasoning_content")) is not None:
        return {"thinking": reasoning, **message}
    return message


def _variables(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What the template sees beside messages and tools: explicit fields over `chat_template_kwargs`."""
    kwargs = fields.get("chat_template_kwargs") or {}
    if fields.get("chat_template") is not None or not isinstance(kwargs, dict) or not _RESERVED.isdisjoint(kwargs):
        raise Unrenderable("chat_template")
    explicit = {
        "add_generation_prompt": fields.get("add_generation_prompt", True),
        "continue_final_message": fields.get("continue_final_message", False),
        "documents": fields.get("documents"),
        "reasoning_effort": fields.get("reasoning_effort"),
    }
    for name in ("add_generation_prompt", "continue_final_message"):
        if not isinstance(explicit[name], bool):
            raise Unrenderable(name)
    if explicit["reasoning_effort"] is not None and "enable_thinking" not in kwargs:
        explicit["enable_thinking"] = explicit["reasoning_effort"] != "none"
    variables = {"documents": None} | kwargs | {name: value for name, value in explicit.items() if value is not None}
    _check_documents(variables["documents"])
    return variables


def _check_documents(documents: Any) -> None:
    if documents is None:
        return
    if not isinstance(documents, list) or not all(isinstance(document, dict) for document in documents):
        raise Unrenderable("documents")


def _without_tag(text: str, final: str) -> str:
    tag = _CONTINUE_TAG.strip()
    if final.strip() not in text or tag not in text:
        raise Unrenderable("continue_final_message")
    end = text.rindex(tag)
    whole = text.startswith(_CONTINUE_TAG, end)  # else the template trimmed the message, and so must we
    return text[:end] if whole else text[:end].rstrip()


class _Generation(Extension):
    """`{% generation %}` marks what the assistant wrote, for training; it renders as its body."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own declaration)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)  # the engine's local time, taken to be ours
