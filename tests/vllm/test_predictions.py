"""Predicted cached tokens are the cached tokens that the engine then reports."""

from __future__ import annotations

import random
import time

import pytest

from ..envoy.chain import until
from .fleet import POLL_S
from .kinds import LONG, NEXT, OURS, STOCK, fleets, with_newer
from .traffic import SALTS, Traffic, completion

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.envoy,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(400),
]

SEQUENTIAL = 600 if LONG else 250
SEQUENTIAL_ON_NEWER = 200
BURSTS, BURST, AFTER_BURST = 5 if LONG else 2, 40, 80
SALTED = 200 if LONG else 80
RESETS = 20 if LONG else 8
COMPARED = 150


@with_newer(*OURS, STOCK)
async def test_of_every_sequential_request(fleet, report):
    probes = await fleet.run(Traffic(1), SEQUENTIAL if fleet.kind is not NEXT else SEQUENTIAL_ON_NEWER)
    proof = report.exact(fleet, "sequential requests", probes)
    assert proof.holds, proof
    assert proof.figures["hits_gpu"] > len(probes) / 10
    assert proof.figures["hits_cpu"] > len(probes) / 50


@fleets(*OURS, STOCK)
async def test_of_every_request_after_concurrent_bursts(fleet, report):
    traffic, probes = Traffic(2), []
    for _ in range(BURSTS):
        await fleet.burst(traffic, BURST)
        probes += await fleet.run(traffic, AFTER_BURST)
    proof = report.exact(fleet, f"after bursts of {BURST} concurrent requests", probes)
    assert proof.holds, proof


@fleets(*OURS, STOCK)
async def test_of_requests_with_a_cache_salt(fleet, report):
    probes = await fleet.run(Traffic(3, salted=True), SALTED)
    proof = report.exact(fleet, "with cache_salt", probes)
    assert proof.holds, proof


@fleets(*OURS, STOCK)
async def test_of_a_prompt_under_another_salt_than_before(fleet, report):
    prompt = random.Random(4).choices(range(3, 1000), k=200)
    [engine, _] = fleet.engines
    first, second = [
        [await fleet.probe(completion(prompt, kind="salted", salt=salt), only=engine) for salt in SALTS]
        for _ in range(2)
    ]
    proof = report.exact(fleet, "one prompt under three salts, twice", first + second)
    assert proof.holds, proof
    assert [probe.delivered for probe in first] == [0, 0, 0]
    assert [probe.delivered for probe in second] == [192, 192, 192]


@pytest.mark.parametrize("external", [False, True], ids=["of-hbm", "of-hbm-and-cpu"])
@with_newer(*OURS, STOCK)
async def test_of_the_very_next_request_after_a_reset(fleet, report, external):
    [engine, _] = fleet.engines
    prompts = [random.Random(f"{external} {number}").choices(range(3, 1000), k=150) for number in range(3)]
    for prompt in prompts:
        await fleet.probe(completion(prompt), only=engine)
    probes, seen_after_s = [], []
    for number in range(RESETS):
        await engine.reset(fleet.http, external=external)
        if fleet.kind.ours:  # vLLM itself tells of a reset with the next step only, and not of which tiers
            seen_after_s.append(await until_seen(fleet, engine, {"gpu", "cpu"} if external else {"gpu"}))
        probes += [
            await fleet.probe(completion(prompt, kind="after a reset"), only=engine, state=True)
            for prompt in (prompts[number % 3], prompts[(number + 1) % 3])
        ]
    name = f"right after {RESETS} resets of HBM" + (" and CPU RAM" if external else "")
    proof = report.exact(fleet, name, probes, seen_within_s=round(max(seen_after_s, default=0), 3))
    if fleet.kind.ours:
        assert proof.holds, proof
        assert any(probe.delivered for probe in probes) is not (external and not fleet.kind.storage)


async def until_seen(fleet, engine, tiers):
    """Seconds until the picker knows that the engine, which is idle, holds nothing in these tiers."""
    started = time.monotonic()

    async def empty() -> bool | None:
        held = (await fleet.feed(engine))["held"]
        return not any(held.get(tier) for tier in tiers) or None

    await until(empty, 2, poll_s=POLL_S)
    return time.monotonic() - started


@fleets(*OURS, STOCK)
async def test_outputs_are_those_of_an_engine_that_does_not_offload(fleet, report, plainly_answered):
    heard = random.Random(5).sample(fleet.heard, COMPARED)
    same = [await plainly_answered(ask) == text for ask, text in heard]
    proof = report.add(fleet, "outputs as without offloading", sum(same), len(same))
    assert proof.holds, proof
