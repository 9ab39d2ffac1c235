from __future__ import annotations

import time
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


@pytest.mark.parametrize(("text", "value"), [("!!str 5", "5"), ("!!int 5", 5), ("!!null", None), ("!!map {}", {})])
def test_a_tag_may_say_what_goes_without_saying(text: str, value: Any) -> None:
    assert parse(f"a: {text}") == {"a": value}


@pytest.mark.parametrize("char", "1_.-e0")
def test_long_scalars_take_no_longer_than_their_length(char: str) -> None:
    text = char * 100_000 + "x"
    began = time.process_time()
    parse(f"a: {text}")
    assert time.process_time() - began < 1


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
        ("a: !!timestamp", "line 1: a value is not what its tag says"),
        ("a: !!int x", "not what its tag says"),
        ("a:\n  b: [!!bool x]", "line 2: a value is not what its tag says"),
        ("a: !!set {x}", "not what its tag says"),
        ("a: 0x" + "f" * 17, "more than 64 bits"),
        ("a: [0b" + "1" * 20_000 + "]", "more than 64 bits"),
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
