"""The traffic is the same for the same seed, and is what the demo says it is."""

from __future__ import annotations

from collections import Counter

import pytest
from tokenizers import Tokenizer

from epp.toolbox.demo.sizes import BLOCK_SIZE, sizes
from epp.toolbox.demo.traffic import (
    History,
    Style,
    distinct_tokens,
    final_histories,
    plan,
)

SECONDS = 20


def test_the_same_seed_is_the_same_traffic() -> None:
    assert plan(7, SECONDS) == plan(7, SECONDS)
    assert plan(7, SECONDS) != plan(8, SECONDS)


@pytest.mark.parametrize("seed", range(5))
def test_about_24_requests_a_second(seed: int) -> None:
    assert 20 < plan(seed, SECONDS).requests / SECONDS < 28


@pytest.mark.parametrize("seed", range(5))
def test_no_turn_is_planned_to_begin_after_the_end(seed: int) -> None:
    for session in plan(seed, SECONDS).sessions:
        assert session.start_s + sum(turn.think_s for turn in session.turns) < SECONDS


def test_conversations_grow_share_system_prompts_and_come_with_bursts_on_shared_documents() -> None:
    sessions = plan(1, SECONDS).sessions
    chats = [s for s in sessions if s.style is Style.CHAT]
    assert len({s.opening for s in chats}) < len(chats) / 5
    assert min(len(s.turns) for s in chats) >= 3
    at_once = Counter((s.opening, s.start_s) for s in sessions if s.style is Style.TEXT)
    assert max(at_once.values()) == 4
    streamed = Counter(turn.stream for s in sessions for turn in s.turns)
    assert streamed[True] > streamed[False] > 0


@pytest.mark.parametrize("seconds", [5, 10, SECONDS])
@pytest.mark.parametrize("engines", [1, 4, 8])
def test_the_working_set_exceeds_the_fleets_hbm_and_fits_its_cpu_ram(
    seconds: int, engines: int, tokenizer: Tokenizer
) -> None:
    texts = [history.rendered() for history in final_histories(plan(1, seconds))]
    prompts = [encoding.ids for encoding in tokenizer.encode_batch(texts)]
    fleet = sizes(engines, distinct_tokens(prompts, BLOCK_SIZE), max(map(len, prompts)))
    assert fleet.fleet_hbm_tokens < fleet.working_set_tokens < fleet.fleet_cpu_tokens


def test_distinct_tokens_counts_a_shared_prefix_once() -> None:
    shared = list(range(32))
    assert distinct_tokens([shared + [1] * 16, shared + [2] * 16], 16) == 64


def test_distinct_tokens_tells_equal_blocks_with_different_prefixes_apart() -> None:
    assert distinct_tokens([[1] * 16 + [9] * 16, [2] * 16 + [9] * 16], 16) == 64


def test_distinct_tokens_leaves_out_incomplete_blocks() -> None:
    assert distinct_tokens([[1] * 31], 16) == 16


def test_a_chat_history_alternates_roles_after_its_system_prompt() -> None:
    history = History(Style.CHAT, "Be brief.", ["question", "answer", "more"])
    assert history.body("m", 5)["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "question"},
        {"role": "assistant", "content": "answer"},
        {"role": "user", "content": "more"},
    ]


def test_an_answer_continues_a_completion_without_a_gap() -> None:
    history = History(Style.TEXT, "A document.", ["question"])
    before = history.body("m", 5)["prompt"]
    history.say(" answer")
    history.say("more")
    assert history.body("m", 5)["prompt"] == before + " answer\n\nmore"


def test_a_copy_of_a_history_goes_its_own_way() -> None:
    history = History(Style.TEXT, "x", ["question"])
    copy = history.copy()
    copy.say("answer")
    assert (copy.style, copy.opening, history.said) == (Style.TEXT, "x", ["question"])


def test_a_token_history_is_token_ids() -> None:
    body = History(Style.TOKENS, "ab", ["c"]).body("m", 5)
    assert body["prompt"] == [97, 98, 10, 10, 99]


def test_streaming_and_salt_are_asked_for_in_the_body() -> None:
    history = History(Style.TEXT, "x")
    assert history.body("m", 5, stream=True, salt="t") == {
        "model": "m", "max_tokens": 5, "temperature": 0, "prompt": "x", "cache_salt": "t",
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
