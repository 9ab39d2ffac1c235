"""YAML or JSON text to plain values, without YAML's surprises.

Duplicate keys, keys that are no strings and several documents are refused; `1e8` is a number, `12:30` and `2024-01-01`
are text, as in the Go parser that llm-d uses. Booleans stay YAML 1.1's (`yes`, `on`), for the same reason.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from epp.config.errors import ConfigError

MAX_BYTES = 1 << 20
"""A Kubernetes ConfigMap, where configurations live, holds no more."""

MAX_DEPTH = 64

_STRING, _MERGE = "tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"


class _Loader(yaml.CSafeLoader):
    yaml_implicit_resolvers = {  # noqa: RUF012 (PyYAML's own attribute, replaced and never changed)
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith((":timestamp", ":float", ":int"))]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_INT = re.compile(r"[-+]?(?:0b[01_]+|0x[0-9a-fA-F_]+|0[0-7_]+|(?:0|[1-9][0-9_]*))$")
# there must be one way only to read a row of digits: with two, a long one that is no number takes its length squared
_FLOAT = re.compile(
    r"(?:[-+]?(?:[0-9]+(?:_+[0-9]+)*(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?[0-9]+\.|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


def parse(text: str) -> Any:
    """Raises `ConfigError`. An empty text is None."""
    if len(text.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        raise ConfigError([f"the configuration is larger than {MAX_BYTES} bytes"])
    try:
        value = _construct(_Loader(text))
    except yaml.YAMLError as error:
        raise ConfigError([f"not valid YAML: {' '.join(str(error).split())}"]) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError([f"not valid YAML: {error}"]) from error
    _bound(value, MAX_DEPTH, [MAX_BYTES])
    return value


def _construct(loader: _Loader) -> Any:
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        problems: list[str] = []
        _check(node, loader, problems, set())
        if problems:
            raise ConfigError(problems)
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _check(node: yaml.Node, loader: _Loader, problems: list[str], visited: set[int]) -> None:
    """Keys, and tags: one that is written out may only say what goes without saying, or that it is text."""
    if id(node) in visited:
        return
    visited.add(id(node))
    if node.tag not in (_STRING, _MERGE, _own_tag(node, loader)):
        problems.append(f"not valid YAML: line {node.start_mark.line + 1}: a value is not what its tag says")
    if isinstance(node, yaml.ScalarNode):
        return
    seen: set[str] = set()
    for item in node.value:
        if not isinstance(node, yaml.MappingNode):
            _check(item, loader, problems, visited)
            continue
        key, value = item
        line = key.start_mark.line + 1
        if key.tag not in (_STRING, _MERGE):
            problems.append(f"line {line}: a key is not a string")
        elif key.value in seen:
            problems.append(f'line {line}: duplicate key "{key.value}"')
        else:
            seen.add(key.value)
        _check(value, loader, problems, visited)


def _own_tag(node: yaml.Node, loader: _Loader) -> object:
    """Of a node like this without a tag."""
    return loader.resolve(type(node), node.value, (True, False))  # type: ignore[no-untyped-call]


def _bound(value: Any, depth: int, left: list[int]) -> None:
    """Anchors let a short text stand for an endless value; what follows walks the value and must end."""
    left[0] -= 1
    if depth < 0 or left[0] < 0:
        raise ConfigError(["the configuration is nested too deeply, or its anchors expand to too much"])
    if isinstance(value, int) and value.bit_length() > 64:
        raise ConfigError(["a number in the configuration has more than 64 bits"])
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for child in children:
        _bound(child, depth - 1, left)
