"""A chat is written exactly as vLLM and transformers would write it, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import pytest

from epp.requests.chat import ChatTemplate, ChatTemplates, Unrenderable
from epp.requests.chat_messages import conversation, tool_schemas
from epp.requests.local import Model
from epp.requests.model import ChatPrompt

from .conftest import CHATML_WITH_TOOLS, DEEPSEEK_TEMPLATE

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Looks outside — “now”",
        "parameters": {"type": "object", "properties": {"where": {"type": "string"}, "depth": {"minimum": 1.50}}},
    },
}
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"where": "Köln", "n": 1.0}'}}
DIALOGUE = [
    {"role": "system", "content": "You are “helpful”."},
    {"role": "user", "content": "What's the weather?\n"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {
        "role": "tool",
        "tool_call_id": "1",
        "content": [{"type": "text", "text": "rain"}, {"type": "text", "text": "8°"}],
    },
    {"role": "assistant", "content": "It rains <|im_end|> ☔", "reasoning_content": "hm"},
    {"role": "user", "content": [{"type": "text", "text": "And"}, {"type": "text", "text": "tomorrow?"}]},
]

# What vLLM hands to transformers for DIALOGUE.
CONVERSATION = [
    {"role": "system", "content": "You are “helpful”."},
    {"role": "user", "content": "What's the weather?\n"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "1", "function": {"arguments": {"where": "Köln", "n": 1.0}, "name": "weather"}, "type": "function"}
        ],
    },
    {"role": "tool", "content": "rain\n8°", "tool_call_id": "1"},
    {"role": "assistant", "content": "It rains <|im_end|> ☔", "reasoning": "hm", "reasoning_content": "hm"},
    {"role": "user", "content": "And\ntomorrow?"},
]


def render(source: str, messages: list[Any], tools: list[Any] | None = None, **fields: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(ChatPrompt(messages, tools, fields))


USER = [{"role": "user", "content": "hi"}]


def test_messages_become_what_vllm_hands_to_the_template() -> None:
    assert conversation(DIALOGUE, "string") == CONVERSATION


def test_content_of_an_openai_template_is_a_list_of_parts_except_for_tools() -> None:
    parts = [message["content"] for message in conversation(DIALOGUE, "openai")]
    assert parts[0] == [{"type": "text", "text": "You are “helpful”."}]
    assert parts[2] == []
    assert parts[3] == "rain\n8°"
    assert parts[5] == [{"type": "text", "text": "And"}, {"type": "text", "text": "tomorrow?"}]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [("", {}), (None, {}), ("{", {}), ("[1]", {}), ('{"a": 1e3}', {"a": 1000.0}), ({"a": 1}, {"a": 1})],
)
def test_arguments_of_tool_calls_become_objects(arguments: Any, expected: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    (message,) = conversation([{"role": "assistant", "tool_calls": [call]}], "string")
    assert message["tool_calls"][0]["function"]["arguments"] == expected


def test_the_client_keeps_its_own_arguments() -> None:
    conversation(DIALOGUE, "string")
    assert CALL["function"] == {"name": "weather", "arguments": '{"where": "Köln", "n": 1.0}'}


def test_the_changing_billing_line_of_coding_agents_is_dropped_from_system_messages_only() -> None:
    text = "x-anthropic-billing-header: cch=1;\nrest"
    messages = [{"role": "system", "content": text}, {"role": "user", "content": text}]
    assert [message["content"] for message in conversation(messages, "string")] == ["rest", text]


def test_tools_are_written_with_known_fields_in_the_order_of_vllm() -> None:
    sent = {"function": {"strict": True, "parameters": {}, "name": "f", "x": 1}, "type": "function", "y": 2}
    assert tool_schemas([sent]) == [
        {"type": "function", "function": {"name": "f", "description": None, "parameters": {}, "strict": True}}
    ]
    schema = tool_schemas([sent])
    assert schema is not None
    assert list(schema[0]["function"]) == ["name", "description", "parameters", "strict"]


CASES: dict[str, tuple[list[Any] | None, dict[str, Any]]] = {
    "plain": (None, {}),
    "tools": ([WEATHER], {}),
    "no generation prompt": (None, {"add_generation_prompt": False}),
    "thinking off": (None, {"enable_thinking": False}),
    "documents": (None, {"documents": [{"title": "T", "text": "x"}]}),
    "effort": (None, {"reasoning_effort": "high"}),
    "continue": (None, {"continue_final_message": True, "add_generation_prompt": False}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["tiny", "deepseek"])
def test_tokens_of_a_chat_equal_those_of_transformers(
    case: str, name: str, request: pytest.FixtureRequest, oracle: Callable[[Path], Any]
) -> None:
    directory = request.getfixturevalue(f"{name}_directory")
    tools, fields = CASES[case]
    sent = {key: value for key, value in fields.items() if key != "enable_thinking"}
    if "enable_thinking" in fields:
        sent["chat_template_kwargs"] = {"enable_thinking": fields["enable_thinking"]}
    model = Model(directory)
    prompt = ChatPrompt(DIALOGUE, tools, sent)
    text = model.written(prompt)
    expected = oracle(directory).apply_chat_template(
        CONVERSATION, tools=tools, **{"add_generation_prompt": True} | fields, tokenize=False
    )
    assert text == expected
    ids = oracle(directory)(expected, add_special_tokens=False)["input_ids"]
    plan = model.plan(prompt, text, None)
    assert model.tokenizer.finish(plan, model.tokenizer.encode_inline(plan.pieces)) == b"".join(
        number.to_bytes(4, "little") for number in ids
    )


def test_reasoning_effort_turns_thinking_on_or_off_unless_the_client_says_so() -> None:
    source = "{{ enable_thinking }} {{ reasoning_effort }}"
    assert render(source, USER, reasoning_effort="low") == "True low"
    assert render(source, USER, reasoning_effort="none") == "False none"
    kwargs = {"enable_thinking": False}
    assert render(source, USER, reasoning_effort="low", chat_template_kwargs=kwargs) == "False low"


def test_a_message_that_a_template_trims_is_continued_without_its_trailing_blanks() -> None:
    messages = [{"role": "assistant", "content": "so far  "}]
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    assert render("<{{ messages[0].content }}>", messages, **fields) == "<so far  "
    assert render("<{{ messages[0].content | trim }}>", messages, **fields) == "<so far"


def test_a_developer_message_becomes_part_of_one_system_message_where_templates_do_not_know_the_role() -> None:
    source = "{% for m in messages %}[{{ m.role }}:{{ m['content'] }}]{% endfor %}"
    messages = [
        {"role": "system", "content": "a"},
        {"role": "user", "content": "u"},
        {"role": "developer", "content": "b"},
    ]
    assert render(source, messages) == "[system:a\n\nb][user:u]"
    assert render("{# 'developer' #}" + source, messages) == "[system:a][user:u][developer:b]"


def test_templates_may_use_what_transformers_offers() -> None:
    source = (
        "{% generation %}{{ bos_token }}{% endgeneration %}"
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{% endfor %}"
        "{{ {'b': 'ü<', 'a': 1} | tojson(indent=1) }}{{ strftime_now('%Y')[:2] }}"
    )
    assert render(source, USER) == '<s>{\n "b": "ü<",\n "a": 1\n}20'


UNRENDERABLE: dict[str, tuple[str, list[Any], list[Any] | None, dict[str, Any]]] = {
    "client's template": ("x", USER, None, {"chat_template": "{{ 1 }}"}),
    "client's template in kwargs": ("x", USER, None, {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}),
    "kwargs of the renderer": ("x", USER, None, {"chat_template_kwargs": {"messages": []}}),
    "kwargs of a wrong type": ("x", USER, None, {"chat_template_kwargs": [1]}),
    "template raises": ("{{ raise_exception('secret canary') }}", USER, None, {}),
    "template fails": ("{{ messages[0].content + 1 }}", USER, None, {}),
    "unsafe template": ("{{ messages.__class__.__mro__ }}", USER, None, {}),
    "both prompts": ("{{ messages[0].content }}", USER, None, {"continue_final_message": True}),
    "generation prompt of a wrong type": ("x", USER, None, {"add_generation_prompt": "yes"}),
    "documents of a wrong type": ("x", USER, None, {"documents": ["text"]}),
    "no tools": ("x", USER, [], {}),
    "tool of a wrong type": ("x", USER, [{"type": "custom", "custom": {}}], {}),
    "tool without a name": ("x", USER, [{"type": "function", "function": {}}], {}),
    "call of a wrong type": ("x", [{"role": "assistant", "tool_calls": [{"type": "custom"}]}], None, {}),
    "calls that are no list": ("x", [{"role": "assistant", "tool_calls": 7}], None, {}),
    "part of unknown type": ("x", [{"role": "user", "content": [{"type": "tool_reference"}]}], None, {}),
    "part without text": ("x", [{"role": "user", "content": [{"type": "text", "text": 5}]}], None, {}),
    "unclear content format": ("{% for a, b in messages %}{% endfor %}", USER, None, {}),
}


@pytest.mark.parametrize("case", UNRENDERABLE)
def test_what_the_engine_would_refuse_or_may_write_differently_is_not_written(case: str) -> None:
    source, messages, tools, fields = UNRENDERABLE[case]
    with pytest.raises(Unrenderable) as refusal:
        render(source, messages, tools, **fields)
    assert "canary" not in str(refusal.value)


def test_a_model_without_a_template_cannot_chat() -> None:
    with pytest.raises(Unrenderable, match="no chat template"):
        ChatTemplates({}, {}).render(ChatPrompt(USER))


def test_requests_with_tools_use_the_template_for_tools() -> None:
    templates = ChatTemplates({"default": "default", "tool_use": "tools"}, {})
    assert templates.render(ChatPrompt(USER)) == "default"
    assert templates.render(ChatPrompt(USER, [WEATHER])) == "tools"


def test_a_template_that_does_not_compile_is_an_error_at_once() -> None:
    with pytest.raises(jinja2.TemplateError):
        ChatTemplates({"default": "{% if %}"}, {})


FORMATS = {
    CHATML_WITH_TOOLS: "string",
    DEEPSEEK_TEMPLATE: "string",
    "{% for m in messages %}{% for c in m.content %}{% endfor %}{% endfor %}": "openai",
    "{% for m in messages[1:] %}{% for c in m['content'] | list %}{% endfor %}{% endfor %}": "openai",
    "{% set ms = messages %}{% for m in ms %}{% for c in m.content %}{% endfor %}{% endfor %}": "openai",
    "{% for m in messages %}{% set content = m.content %}{% for c in content %}{% endfor %}{% endfor %}": "openai",
    "{% macro show(x) %}{% for c in x %}{% endfor %}{% endmacro %}{% for m in messages %}{{ show(m.content) }}"
    "{% endfor %}": "openai",
    "{% macro show(x) %}{% for c in x %}{% endfor %}{% endmacro %}{% for m in messages %}{{ show(x=m.content) }}"
    "{% endfor %}": "openai",
    "{% macro show(content) %}{% for c in content %}{% endfor %}{% endmacro %}"
    "{% for m in messages %}{{ show(m.tools) }}{% endfor %}": "string",
    "{% for m in messages %}{% for t in m.tool_calls %}{% endfor %}{% endfor %}": "string",
    "{% for m in messages %}{% for a, b in m.content %}{% endfor %}{% endfor %}": None,
}


@pytest.mark.parametrize("source", FORMATS, ids=range(len(FORMATS)))
def test_templates_that_loop_over_content_get_lists(source: str) -> None:
    assert ChatTemplate(source, {}).content_format == FORMATS[source]
