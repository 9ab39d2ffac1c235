"""The sequential moves hold every way to find a prefix; on an engine that traffic has filled, both tiers give much."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from itertools import count

import pytest
from tokenizers import Tokenizer

from connector.sim.engine import Engine, EngineConfig
from connector.sim.hashing import Identity
from connector.sim.model import INSTANT
from connector.sim.offload import OffloadConfig
from connector.sim.requests import Request
from epp.toolbox.demo.drive import Call, Client, run_moves
from epp.toolbox.demo.moves import Action, Move, exact_moves
from epp.toolbox.demo.run import EXACT_MOVES
from epp.toolbox.demo.sizes import BLOCK_SIZE, BLOCKS_PER_CHUNK, sizes
from epp.toolbox.demo.traffic import History, Style, distinct_tokens, final_histories, plan

PLAN = plan(1, 10)


def moves(seed: int, number: int = EXACT_MOVES) -> list[Move]:
    return exact_moves(seed, number, PLAN.sessions)


def test_the_same_seed_is_the_same_moves() -> None:
    assert moves(7) == moves(7)
    assert moves(7) != moves(8)


@pytest.mark.parametrize("seed", range(5))
def test_they_hold_every_action_and_every_style(seed: int) -> None:
    chosen = moves(seed)
    assert len(chosen) == EXACT_MOVES
    assert {move.action for move in chosen} == set(Action)
    assert {move.style for move in chosen} == set(Style)
    assert {move.stream for move in chosen} == {True, False}


@pytest.mark.parametrize("seed", range(5))
def test_every_history_is_there_before_it_is_continued(seed: int) -> None:
    known: dict[str, Move] = {}
    sessions = {session.name: session.style for session in PLAN.sessions}
    for move in moves(seed):
        if move.action in (Action.REPEAT, Action.EXTEND):
            assert (move.style, move.salt) == (known[move.history].style, known[move.history].salt)
        else:
            assert move.history not in known
        if move.action is Action.SALT:
            assert move.salt
            assert move.style is known[move.source].style
        if move.action is Action.RETURN:
            assert move.style is sessions[move.source]
        known[move.history] = move


@pytest.mark.parametrize("seed", range(5))
def test_some_go_back_to_what_was_left_alone_for_many_moves(seed: int) -> None:
    last: dict[str, int] = {}
    pauses = []
    for number, move in enumerate(moves(seed)):
        pauses.append(number - last.get(move.history, number))
        last[move.history] = number
    assert sum(pause >= EXACT_MOVES // 5 for pause in pauses) >= 5


class OnEngine(Client):
    """A client whose requests go into an engine of this process, one at a time."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer) -> None:
        self.calls = []
        self.engine = engine
        self.tokenizer = tokenizer
        self._clock = map(float, count())

    async def ask(
        self, name: str, history: History, max_tokens: int, *, stream: bool, salt: str = "", what: str = ""
    ) -> Call:
        request = Request(name, self._tokens(history), max_tokens, Identity(cache_salt=salt))
        self.engine.add(request, next(self._clock))
        while self.engine.has_work:
            now = next(self._clock)
            self.engine.end_step(self.engine.begin_step(now), now)
        text = self.tokenizer.decode(request.tokens[len(request.prompt) :])
        return Call(name, what, history.style, "", stream, cached_tokens=request.cached_tokens, text=text)

    def _tokens(self, history: History) -> Sequence[int]:
        if history.style is Style.TOKENS:
            prompt: list[int] = history.body("", 1)["prompt"]
            return prompt
        return self.tokenizer.encode(history.rendered()).ids


async def test_on_an_engine_full_of_the_concurrent_traffic_both_tiers_give_much(tokenizer: Tokenizer) -> None:
    histories = list(final_histories(PLAN))
    prompts = [encoding.ids for encoding in tokenizer.encode_batch([history.rendered() for history in histories])]
    fleet = sizes(1, distinct_tokens(prompts, BLOCK_SIZE), max(map(len, prompts)))
    offload = OffloadConfig(cpu_chunks=fleet.cpu_chunks, blocks_per_chunk=BLOCKS_PER_CHUNK)
    engine = Engine(EngineConfig(BLOCK_SIZE, fleet.hbm_blocks, offload=offload), INSTANT, range(100, 1000))
    client = OnEngine(engine, tokenizer)
    for history in histories:
        history.say((await client.ask("", history, 8, stream=False)).text)
    before = copy(engine.stats)

    async def settled() -> None: ...

    earlier = {session.name: history for session, history in zip(PLAN.sessions, histories, strict=True)}
    await run_moves(client, moves(1), earlier, "exact", settled)
    hbm = engine.stats.prefix_hits - before.prefix_hits
    lower = engine.stats.external_hits - before.external_hits
    prompt = engine.stats.prompt_tokens - before.prompt_tokens
    assert engine.stats.preemptions == 0
    assert hbm > 0.2 * prompt
    assert lower > 0.15 * (hbm + lower)
    assert hbm + lower < 0.9 * prompt
