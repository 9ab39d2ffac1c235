"""Plain values to typed structs, reporting every problem with its path, not only the first.

msgspec does the typing; walking the annotations first is what finds all problems and the nearest known names. A field
that is null counts as absent, as in Go: templates leave such fields behind.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec

from epp.config.errors import Findings, did_you_mean

S = TypeVar("S", bound=msgspec.Struct)


def convert(value: Any, struct: type[S], path: str, findings: Findings) -> S | None:
    """None where `value` does not fit; why is then among the findings."""
    problems: list[str] = []
    value = _walk(value, struct, path, problems)
    if not problems:
        try:
            return msgspec.convert(value, struct)
        except msgspec.ValidationError as error:  # raised by a struct's own __post_init__
            problems = [_from_msgspec(error, path)]
    findings.errors.extend(problems)
    return None


def _walk(value: Any, annotation: Any, path: str, problems: list[str]) -> Any:
    """`value` without null fields."""
    kind = _section(annotation)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return _walk_struct(value, kind, path, problems)
    if get_origin(kind) is list and isinstance(value, list):
        return [_walk(item, get_args(kind)[0], f"{path}[{i}]", problems) for i, item in enumerate(value)]
    problems.extend(_check_leaf(value, annotation, path))
    return value


def _section(annotation: Any) -> Any:
    """Of an optional struct or list, the struct or list; anything else is judged as a whole."""
    if get_origin(annotation) not in (Union, types.UnionType):
        return annotation
    sections = [kind for kind in get_args(annotation) if get_origin(kind) is list or hasattr(kind, "__struct_fields__")]
    return sections[0] if sections else annotation


def _walk_struct(value: Any, struct: type[msgspec.Struct], path: str, problems: list[str]) -> Any:
    if not isinstance(value, dict):
        problems.append(f"{path or 'the configuration'}: expected a mapping, got {_show(value)}")
        return value
    fields = {field.encode_name: field for field in msgspec.structs.fields(struct)}
    result = {}
    for key, item in value.items():
        if key not in fields:
            free = [name for name in fields if name not in value]
            problems.append(f"{_join(path, key)}: unknown field{did_you_mean(key, free)}")
        elif item is not None:
            result[key] = _walk(item, fields[key].type, _join(path, key), problems)
    missing = [name for name, field in fields.items() if field.required and name not in result]
    problems.extend(f"{_join(path, name)}: required, but missing" for name in missing)
    return result


def _check_leaf(value: Any, annotation: Any, path: str) -> Iterator[str]:
    try:
        msgspec.convert(value, annotation)
    except msgspec.ValidationError as error:
        words = [str(word) for kind in _kinds(annotation) if get_origin(kind) is Literal for word in get_args(kind)]
        described = [text for kind in _kinds(annotation) for text in _descriptions(kind)]
        if words:
            yield f"{path}: expected one of {', '.join(words)}, got {_show(value)}{did_you_mean(value, words)}"
        elif described and isinstance(value, str):
            yield f"{path}: expected {' or '.join(described)}, got {_show(value)}"
        else:
            message = _from_msgspec(error, path)
            yield message if ", got" in message else f"{message}, got {_show(value)}"


def _kinds(annotation: Any) -> list[Any]:
    """The members of a union; a single kind is a union of one."""
    return list(get_args(annotation)) if get_origin(annotation) in (Union, types.UnionType) else [annotation]


def _descriptions(kind: Any) -> list[str]:
    return [meta.description for meta in getattr(kind, "__metadata__", ()) if meta.description]


def _from_msgspec(error: msgspec.ValidationError, path: str) -> str:
    message, _, inner = str(error).partition(" - at `")
    inner = inner.rstrip("`").removeprefix("$")
    return f"{path}{inner}: {message[:1].lower()}{message[1:]}".replace("`", "").replace(" | null", "")


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
