"""Which form of content a chat template wants, decided as vLLM decides it: by looking at the template's loops."""

from __future__ import annotations

from collections.abc import Iterator

from jinja2 import nodes

from epp.requests.chat_messages import ContentFormat


class _Uncertain(Exception):
    pass


def detect_content_format(template: nodes.Template) -> ContentFormat | None:
    """ "openai" if the template loops over a message's content, else "string"; None if vLLM's own test is unclear."""
    try:
        return "openai" if _loops_over_content(template) else "string"
    except _Uncertain:
        return None


def _loops_over_content(template: nodes.Template) -> bool:
    messages = _message_names(template)
    in_macros: dict[int, set[str]] = {}
    for macro in template.find_all(nodes.Macro):
        parameters = _content_parameters(template, macro, messages)
        in_macros |= {id(loop): parameters for loop in macro.find_all(nodes.For)}
    loops = template.find_all(nodes.For)
    return any(_name(loop.target) for loop in loops if _is_content(loop.iter, messages, in_macros.get(id(loop))))


def _is_content(value: nodes.Node, messages: set[str], macro_parameters: set[str] | None) -> bool:
    if any(_reads(value, name, "content") for name in messages):
        return True
    bare = {"content"} if macro_parameters is None else macro_parameters
    return isinstance(value, nodes.Name) and value.name in bare


def _message_names(template: nodes.Template) -> set[str]:
    """Variables that hold a message: targets of loops over `messages` or over what was assigned from it."""
    lists = {"messages"}
    while found := set(_assigned_from(template, lists)) - lists:
        lists |= found
    loops = template.find_all(nodes.For)
    return {_name(loop.target) for loop in loops if any(_reads(loop.iter, name) for name in lists)}


def _assigned_from(template: nodes.Template, sources: set[str]) -> Iterator[str]:
    for assign in template.find_all(nodes.Assign):
        if any(_reads(assign.node, source) for source in sources):
            yield _name(assign.target)


def _content_parameters(template: nodes.Template, macro: nodes.Macro, messages: set[str]) -> set[str]:
    """Parameters of `macro` that some call passes a message's content to."""
    found = set()
    for call in template.find_all(nodes.Call):
        if not isinstance(call.node, nodes.Name) or call.node.name != macro.name:
            continue
        passed = [
            *zip([parameter.name for parameter in macro.args], call.args, strict=False),
            *((keyword.key, keyword.value) for keyword in call.kwargs),
        ]
        found |= {name for name, value in passed if any(_reads(value, message, "content") for message in messages)}
    return found


def _reads(value: nodes.Node | None, variable: str, key: str | None = None) -> bool:
    """`variable` (or its `key`), also through filters, tests and slices."""
    if isinstance(value, nodes.Filter | nodes.Test):
        return _reads(value.node, variable, key)
    if isinstance(value, nodes.Getitem) and isinstance(value.arg, nodes.Slice):
        return _reads(value.node, variable, key)
    if key is None:
        return isinstance(value, nodes.Name) and value.ctx == "load" and value.name == variable
    if isinstance(value, nodes.Getattr):
        return value.attr == key and _reads_name(value.node, variable)
    return (
        isinstance(value, nodes.Getitem)
        and isinstance(value.arg, nodes.Const)
        and value.arg.value == key
        and _reads_name(value.node, variable)
    )


def _reads_name(value: nodes.Node, variable: str) -> bool:
    return isinstance(value, nodes.Name) and value.ctx == "load" and value.name == variable


def _name(target: nodes.Node) -> str:
    if not isinstance(target, nodes.Name):
        raise _Uncertain
    return target.name
