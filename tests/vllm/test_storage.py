"""The fs tier below CPU RAM: what its files bring back is predicted, and what somebody deleted is not."""

from __future__ import annotations

import random

import pytest

from ..envoy.chain import until
from .kinds import LONG, SHARED, STORAGE, fleets
from .traffic import completion

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.envoy,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(400),
]

PROMPTS = 20
"""Of 4 blocks each: more than CPU RAM holds, so that in turns each has to come from a file."""
ROUNDS = 5 if LONG else 3


@pytest.fixture(scope="session")
def asks():
    rng = random.Random(12)
    return [completion(rng.choices(range(3, 1000), k=150), kind="stored") for _ in range(PROMPTS)]


@fleets(SHARED, STORAGE)
async def test_what_files_bring_back_is_predicted(fleet, report, asks):
    [engine, _] = fleet.engines
    probes = [await fleet.probe(ask, only=engine, state=True) for ask in asks * ROUNDS]
    proof = report.exact(fleet, "prompts that only files still hold", probes)
    assert proof.holds, proof
    assert proof.figures["hits_storage"] > PROMPTS


@fleets(SHARED)
async def test_what_one_engine_stored_the_other_can_load(fleet, report, asks):
    """And the picker says so of a pod that never saw the prompt."""
    [_, other] = fleet.engines
    probes = [await fleet.probe(ask, only=other, state=True) for ask in asks]
    proof = report.exact(fleet, "prompts that only the other engine has had", probes)
    assert proof.holds, proof
    assert proof.figures["hits_storage"] == PROMPTS


@fleets(SHARED, STORAGE)
async def test_what_somebody_deleted_is_not_predicted_once_that_is_seen(fleet, report, asks):
    [engine, _] = fleet.engines
    files = delete_all(fleet)

    async def seen() -> bool | None:
        delete_all(fleet)  # what was still being written
        held = [(await fleet.feed(engine))["held"].get("storage") for engine in fleet.engines]
        return not any(held) or None

    await until(seen, 30)
    probes = [await fleet.probe(ask, only=engine, state=True) for ask in asks * 2]
    proof = report.exact(fleet, "after all files were deleted", probes, files=files)
    assert proof.holds, proof
    assert not any(probe.hits("storage") for probe in probes[:PROMPTS])


def delete_all(fleet):
    """How many."""
    files = [file for root in {engine.storage for engine in fleet.engines} for file in root.rglob("*.bin")]
    for file in files:
        file.unlink()
    return len(files)
