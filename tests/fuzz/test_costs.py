"""What somebody could make expensive on purpose takes no longer than its size says: CPU time, at sizes where a square
would show."""

from __future__ import annotations

import json
import random
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from epp.fleet.endpoint import EngineLoad
from epp.fleet.engine_metrics import ENGINES, NotAnEngine, read_load
from epp.requests.parse import parse
from epp.requests.tokenizer import Tokenizer
from indexer.index import PrefixIndex
from indexer.match import Prompt, match
from indexer.wire import BlockRemoved, BlockStored, Groups, Lookup, Notes
from tests.fuzz.targets.requests import model_directory

BLOCKS, SIZE = 4000, 16
TOKENS = struct.pack(f"<{BLOCKS * SIZE}I", *range(BLOCKS * SIZE))


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Of CPU time."""
    began = time.process_time()
    yield
    assert time.process_time() - began < seconds


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    with model_directory() as directory:
        return Tokenizer(directory)


@pytest.mark.parametrize("wide", [1, BLOCKS // 2])
def test_groups_that_never_agree_where_a_hit_ends(wide: int) -> None:
    """One holds every other block, the next the others, and a third is looked at after each of their steps."""
    index = PrefixIndex()
    residency = index.publisher("hostile", "m")
    windows = {1: SIZE + 1, 2: SIZE + 1, 3: wide * SIZE + 1}
    lookups = [
        Lookup([0], "full_attention", SIZE),
        *(Lookup([g], "sliding_window", SIZE, w) for g, w in windows.items()),
    ]
    residency.told(Notes(groups=Groups(lookups, SIZE)))
    for lookup in lookups:
        stored = BlockStored(
            list(range(BLOCKS)),
            None,
            TOKENS,
            SIZE,
            extras={},
            group=lookup.groups[0],
            kind=lookup.kind,
            window=lookup.window,
        )
        residency.apply([stored])
    for group in (1, 2):
        residency.apply([BlockRemoved(list(range(group - 1, BLOCKS, 2)), "gpu", group)])
    with at_most(0.4):
        assert match(index, Prompt(TOKENS, "m"), [residency]).gpu == [0]


@pytest.mark.parametrize(
    "text",
    [
        "a" * 200_000,
        " " * 200_000,
        " \n" * 100_000,
        "a'" * 50_000,
        "<|im_start|>" * 20_000,
        "é" * 50_000,
        "e" + "\u0301" * 50_000,
    ],
    ids=lambda text: repr(text[:3]),
)
def test_texts_without_words(text: str, tokenizer: Tokenizer) -> None:
    with at_most(0.3):
        plan = tokenizer.plan(text, add_special_tokens=True)
    with at_most(3):
        tokenizer.finish(plan, tokenizer.encode_batch(plan.pieces))
    with at_most(0.1):
        tokenizer.encode_inline([text[:20_000]])


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m","prompt":[' + b"[1]," * 500_000 + b"[1]]}",
        b'{"model":"m","prompt":[' + b'"a",' * 500_000 + b'"a"]}',
        b'{"model":"m","prompt":[' + b"1," * 1_000_000 + b"1]}",
        b'{"model":"m","x":' + b"[" * 300_000 + b"]" * 300_000 + b"}",
        b'{"model":' + b"9" * 2_000_000 + b"}",
        json.dumps({"model": "m", "prompt": "\\" * 1_000_000}).encode(),
        b'{"model":"m",' + b'"prompt":"x",' * 200_000 + b'"prompt":"x"}',
    ],
    ids=["lists", "texts", "ids", "nesting", "number", "escapes", "names"],
)
def test_bodies_of_many_small_things(body: bytes) -> None:
    with at_most(1):
        try:
            parse("r", "/v1/completions", {}, body)
        except Exception as error:
            assert "Refusal" in type(error).__name__  # noqa: PT017


@pytest.mark.parametrize(
    "line", [b"vllm:num_requests_waiting_more 1\n", b"vllm:num_requests_waiting{", b"\n", b"9" * 100]
)
def test_pages_of_many_lines(line: bytes) -> None:
    with at_most(1):
        try:
            read_load(line * (2_000_000 // len(line)) + b"\n", ENGINES["vllm"], EngineLoad(), 0, 1.0)
        except NotAnEngine:
            pass


def test_orphans_that_all_wait_for_one_parent() -> None:
    index = PrefixIndex()
    residency = index.publisher("hostile", "m")
    numbers = list(range(2, 10_000))
    random.Random(1).shuffle(numbers)
    block = TOKENS[: SIZE * 4]
    with at_most(3):
        residency.apply([BlockStored([n], 1, block, SIZE, extras={}) for n in numbers])
        residency.apply([BlockStored([1], None, block, SIZE, extras={})])
    assert residency.parked == 0
