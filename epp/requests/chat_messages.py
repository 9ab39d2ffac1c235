"""OpenAI chat messages and tools as vLLM hands them to the template: plainer, and in an order of its own.

What vLLM would refuse, or what its versions treat differently, is `Unrenderable`. Pictures and sound do not come this
far. The client's own objects are not changed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NoReturn

ContentFormat = Literal["string", "openai"]
"""Whether a template wants a message's content as text or as a list of parts."""
Message = dict[str, Any]


class Unrenderable(Exception):
    """No text, or none that is certain to be the engine's; the message says why without quoting the chat."""


_PART_TEXT = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}
_BILLING_LINE = "x-anthropic-billing-header"
"""vLLM drops this line of coding agents from system messages: it changes with every request."""


def conversation(messages: Sequence[Mapping[str, Any]], content_format: ContentFormat) -> list[Message]:
    return [_message(message, content_format) for message in messages]


def _message(message: Mapping[str, Any], content_format: ContentFormat) -> Message:
    role = message["role"]
    texts = _texts(message.get("content"))
    if role == "system":
        texts = [kept for text in texts if (kept := _without_billing_line(text))]
    out: Message = {"role": role, "content": "\n".join(text for text in texts if text)}
    if content_format == "openai" and role != "tool":
        out["content"] = [{"type": "text", "text": text} for text in texts]
    elif content_format == "openai":
        out["content"] = "\n".join(texts)
    if role == "assistant":
        _assistant_fields(out, message)
    elif role == "tool" and "tool_call_id" in message:
        out["tool_call_id"] = message["tool_call_id"]
    out |= {name: message[name] for name in ("name", "task") if isinstance(message.get(name), str)}
    if role == "developer" and message.get("tools") is not None:
        raise Unrenderable("tools in a developer message")
    return out


def _texts(content: Any) -> list[str]:
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    return [text for part in content if (text := _part_text(part)) is not None]


def _part_text(part: Any) -> str | None:
    if isinstance(part, str):
        return part
    kind = part.get("type")
    text = part.get(_PART_TEXT[kind]) if kind in _PART_TEXT else _unsupported("content part")
    if text is None and kind in ("text", "refusal"):
        return None
    return text if isinstance(text, str) else _unsupported("content part without text")


def _unsupported(what: str) -> NoReturn:
    raise Unrenderable(what)


def _without_billing_line(text: str) -> str:
    return text.partition("\n")[2] if text.startswith(_BILLING_LINE) else text


def _assistant_fields(out: Message, message: Mapping[str, Any]) -> None:
    calls = message.get("tool_calls")
    if calls:
        if not isinstance(calls, list):
            raise Unrenderable("tool call")
        out["tool_calls"] = [_tool_call(call) for call in calls]
    reasoning = message.get("reasoning")
    if reasoning is None:
        reasoning = message.get("reasoning_content")
    if reasoning is not None:
        out["reasoning"] = out["reasoning_content"] = reasoning


def _tool_call(call: Any) -> Message:
    """In the key order of vLLM's request model, which templates that dump a call as JSON make visible."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        raise Unrenderable("tool call")
    parsed = {"arguments": _arguments(function.get("arguments")), "name": function.get("name")}
    return {"id": call.get("id"), "function": parsed, "type": "function"}


def _arguments(arguments: Any) -> Mapping[str, Any]:
    """Templates want an object; the API carries JSON text, and clients send back what models wrote."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments else {}
        except ValueError:
            return {}
        except RecursionError:
            raise Unrenderable("tool call nested too deeply") from None
    return arguments if isinstance(arguments, dict) else {}


def tool_schemas(tools: Sequence[Any] | None) -> list[Message] | None:
    """Tools as vLLM's request model writes them out again: known fields only, in its order, null where unset."""
    if tools is None:
        return None
    if not tools:
        raise Unrenderable("empty tools")
    return [_tool_schema(tool) for tool in tools]


def _tool_schema(tool: Any) -> Message:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type", "function") != "function" or "defer_loading" in tool:
        raise Unrenderable("tool")
    name, description, parameters = (function.get(key) for key in ("name", "description", "parameters"))
    if not isinstance(name, str) or not isinstance(description, str | None) or not isinstance(parameters, dict | None):
        raise Unrenderable("tool")
    schema = {"name": name, "description": description, "parameters": parameters}
    for key in ("strict", "defer_loading"):
        if function.get(key) is not None:
            schema[key] = function[key]
    return {"type": "function", "function": schema}


def developer_as_system(messages: list[Message]) -> list[Message]:
    """For templates that do not know the role: as system messages, all of which become one, at the front."""
    messages = [message | {"role": "system"} if message["role"] == "developer" else message for message in messages]
    system = [message for message in messages if message["role"] == "system"]
    if len(system) == 1 and messages[0] is system[0]:
        return messages
    texts = [text for message in system if (text := _joined(message["content"]))]
    return [
        {"role": "system", "content": "\n\n".join(texts)},
        *(message for message in messages if message["role"] != "system"),
    ]


def _joined(content: str | list[Message]) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)
