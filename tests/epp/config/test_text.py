from __future__ import annotations

from typing import Any

import pytest

from epp.config.errors import ConfigError
from epp.config.text import MAX_BYTES, parse


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e8", 1e8),
        ("1.5e-3", 0.0015),
        ("12:30", "12:30"),
        ("10.0.0.7:8000", "10.0.0.7:8000"),
        ("2024-01-01", "2024-01-01"),
        ("60s", "60s"),
        ("007", 7),
        ("yes", True),
        ("~", None),
        ('"3"', "3"),
    ],
)
def test_scalars_read_as_in_go(text: str, value: Any) -> None:
    assert parse(f"a: {text}") == {"a": value}


def test_json_is_yaml() -> None:
    assert parse('{"a": [1, 2.5, true, null, "x"]}') == {"a": [1, 2.5, True, None, "x"]}


def test_nothing_is_none() -> None:
    assert parse("") is None
    assert parse("# only a comment\n") is None


def test_anchors_and_merges_work() -> None:
    assert parse("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}") == {"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 3}}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("a: 1\na: 2", 'line 2: duplicate key "a"'),
        ("l:\n- {b: 1, b: 2}\n- {c: 1, c: 1}", 'line 2: duplicate key "b"\nline 3: duplicate key "c"'),
        ('{"a": {"b": 1, "b": 1}}', 'line 1: duplicate key "b"'),
        ("1: x", "line 1: a key is not a string"),
        ("a: b: c", "not valid YAML"),
        ("a: 1\n---\nb: 2", "single document"),
        ("a: &a [*a]", "nested too deeply"),
        ("a: !!python/object/apply:os.getcwd []", "not valid YAML"),
        ("a: \ud800", "not valid YAML"),
        ("[" * 3000, "not valid YAML"),
        ("a: " + "x" * MAX_BYTES, "larger than"),
    ],
)
def test_surprises_are_refused(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(text)
    assert complaint in str(error.value)


def test_anchors_that_expand_without_end_are_refused() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 9)]
    with pytest.raises(ConfigError, match="expand to too much"):
        parse("\n".join(lines))
