"""The engine's side of a prediction decides where a request goes."""

from __future__ import annotations

import random

import pytest

from epp.toolbox.demo.traffic import prose

from .engines import HBM_BLOCKS
from .kinds import CHUNKS_4, LONG, STOCK, STORAGE, fleets
from .tiny_model import BLOCK_SIZE
from .traffic import chat, completion

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.envoy,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(400),
]

CONVERSATIONS = 10 if LONG else 5


@fleets(STORAGE, CHUNKS_4, STOCK)
async def test_a_second_turn_goes_where_it_is_in_cpu_ram_after_hbm_lost_it(fleet, report):
    """And nowhere else was anything of it."""
    rng = random.Random(6)
    right, reloaded, wrong = 0, [], []
    for _ in range(CONVERSATIONS):
        messages = [{"role": "system", "content": prose(rng, 120)}, {"role": "user", "content": prose(rng, 20)}]
        first = await fleet.probe(chat(messages, max_tokens=8))
        await flush_hbm(fleet, first.engine, rng)
        messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": prose(rng, 20)}]
        second = await fleet.probe(chat(messages, max_tokens=8))
        there, twin = holdings(second, first.engine)
        as_meant = there["cpu"] > 0 == there["gpu"] == twin["total"] and second.engine == first.engine and second.exact
        right += as_meant
        wrong += [] if as_meant else [f"first turn at {first.engine}, there {there}, twin {twin}, second: {second}"]
        reloaded.append(second.delivered)
    proof = report.add(
        fleet, "second turns sent where CPU RAM has the first", right, CONVERSATIONS, reloaded_tokens=reloaded,
        last_decision={"there": there, "twin": twin}, wrong=wrong,
    )  # fmt: skip
    assert proof.holds, proof


async def flush_hbm(fleet, address, rng):
    [engine] = (engine for engine in fleet.engines if engine.address == address)
    for _ in range(5):
        await fleet.probe(completion(rng.choices(range(3, 1000), k=HBM_BLOCKS * BLOCK_SIZE // 4)), only=engine)


def holdings(probe, address):
    """Cached tokens by tier as the decision has them: at that engine, and at the other."""
    held = {candidate["endpoint"]: candidate["cached_tokens"] for candidate in probe.decision["candidates"]}
    there = held.pop(address)
    [twin] = held.values()
    return there, twin
