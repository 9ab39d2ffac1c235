"""The connector in a real engine, whose HBM and CPU tiers are so small that both evict all the time."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm", reason="runs in the vLLM venv: make test-vllm")

from .engine import BLOCK, BLOCKS_PER_CHUNK, CPU_CHUNKS, HBM_BLOCKS, Copies, tokens

if TYPE_CHECKING:
    from .engine import Engine

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]  # vLLM and torch warn a lot


def fill(engine: Engine, seed: int, prompts: int = 9) -> None:
    """Enough traffic to evict all that was in HBM and in the CPU tier."""
    for index in range(prompts):
        engine.complete(tokens(6 * BLOCK, seed * 1000 + index))


def run_until(engine: Engine, running: int) -> None:
    while engine.scheduler.get_request_counts()[0] < running:
        assert engine.inner.has_unfinished_requests(), "so many never ran at once"
        engine.inner.step()


def medium(held: Copies, name: str) -> int:
    return sum(1 for key in held if key[0] == name)


def notes(engine: Engine) -> dict[str, Any]:
    engine.read()
    return engine.messages[-1][1][3]


def test_a_prompt_reloaded_from_any_tier_gets_the_same_answer(engine: Engine) -> None:
    prompt = tokens(6 * BLOCK + 5, seed=1)
    computed = engine.complete(prompt, 8)
    from_hbm = engine.complete(prompt, 8)
    fill(engine, 1, prompts=4)
    from_cpu = engine.complete(prompt, 8)
    fill(engine, 2)
    from_storage = engine.complete(prompt, 8)

    assert computed[1] == 0
    assert from_hbm == from_cpu == from_storage == (computed[0], 6 * BLOCK)


def test_every_event_describes_its_blocks_with_their_salt(engine: Engine) -> None:
    start = engine.next_number()
    prompt = tokens(6 * BLOCK, seed=2)
    for salt in ("pepper", None):
        engine.complete(prompt, **({"cache_salt": salt} if salt else {}))
    fill(engine, 3)
    engine.complete(prompt, cache_salt="pepper")  # from storage
    end = engine.next_number()

    stored = [event for event in engine.events(start) if event["type"] == "BlockStored"]
    first_blocks = [event for event in stored if event["token_ids"][:BLOCK] == prompt[:BLOCK]]
    assert {event["medium"] for event in stored} == {"GPU", "CPU", "STORAGE"}
    assert all(len(event["token_ids"]) == BLOCK * len(event["block_hashes"]) for event in stored)
    assert all(len(event["extra_keys"]) == len(event["block_hashes"]) for event in stored)
    salts = {(event["block_hashes"][0], (event["extra_keys"][0] or [None])[0]) for event in first_blocks}
    assert Counter(salt for _, salt in salts) == {"pepper": 1, None: 1}
    assert end > start


def test_a_snapshot_is_what_a_subscriber_to_everything_holds(engine: Engine) -> None:
    for round_ in range(3):
        for index in range(4):
            engine.add(tokens(4 * BLOCK + 7, seed=index + round_), 24)
        steps = 0

        def compare() -> None:
            nonlocal steps
            steps += 1
            if steps % 10 == 0:
                number, held = engine.snapshot()
                assert held == engine.heard(number)

        engine.run(compare)
        number, held = engine.snapshot()
        assert held == engine.heard(number)
        assert all(medium(held, name) for name in ("GPU", "CPU", "STORAGE"))


def test_tiers_are_told_with_what_they_hold_and_can_hold(engine: Engine) -> None:
    fill(engine, 4)
    number, held = engine.snapshot()
    tiers = engine.wait_for(lambda: engine.messages[-1][0] > number and notes(engine).get("tiers"))

    assert tiers["GPU"] == {"capacity": HBM_BLOCKS - 1, "held": medium(held, "GPU")}
    assert tiers["CPU"] == {
        "capacity": CPU_CHUNKS * BLOCKS_PER_CHUNK,
        "held": medium(held, "CPU"),
        "chunk": BLOCKS_PER_CHUNK,
    }
    assert tiers["STORAGE"]["held"] == medium(held, "STORAGE")
    assert len(tiers["STORAGE"]["pool"]) == 32


def test_an_idle_engine_says_that_it_is_there(engine: Engine) -> None:
    start = engine.next_number()
    engine.wait_for(lambda: engine.messages[-1][0] >= start + 2)

    beats = [batch for number, batch in engine.messages if number >= start]
    assert all(batch[1] == [] for batch in beats)
    assert len({batch[3]["instance"] for _, batch in engine.messages}) == 1
    assert beats[0][3]["heartbeat"] == 0.2


def test_the_load_told_is_the_schedulers(engine: Engine) -> None:
    start = engine.next_number()
    seen = []

    def compare() -> None:
        load = engine.connector._about.load
        running, waiting = engine.scheduler.get_request_counts()
        assert (load.running, load.waiting) == (running, waiting)
        assert load.kv_usage == engine.scheduler.get_kv_cache_usage()
        seen.append((running, waiting))

    for index in range(9):
        engine.add(tokens(5 * BLOCK, seed=100 + index % 2), 36)  # more than HBM has room for: some are preempted
    engine.run(compare)

    assert max(running for running, _ in seen) == 4
    assert max(waiting for _, waiting in seen) >= 5
    assert seen[-1] == (0, 0)
    engine.read()
    told = [batch[3]["load"] for number, batch in engine.messages if number >= start]
    assert any(load["waiting"] and load["running"] for load in told)
    engine.wait_for(lambda: notes(engine)["load"] == {"waiting": 0, "running": 0, "kv_usage": 0})


def test_aborted_requests_no_longer_count(engine: Engine) -> None:
    requests = [engine.add(tokens(3 * BLOCK, seed=200 + index), 60) for index in range(6)]
    run_until(engine, running=4)
    engine.inner.abort_request([requests[0], requests[-1]], internal=False)
    engine.inner.step()
    load = engine.connector._about.load

    assert (load.running, load.waiting) == engine.scheduler.get_request_counts() == (4, 0)
    engine.run()


def test_a_reset_of_hbm_is_told_while_the_engine_is_idle(engine: Engine) -> None:
    fill(engine, 5, prompts=2)
    number, before = engine.snapshot()
    start = engine.next_number()
    assert engine.scheduler.reset_prefix_cache()

    cleared = engine.wait_for(lambda: engine.events(start))
    assert cleared == [{"type": "AllBlocksCleared", "tiers": ["GPU"]}]
    number, after = engine.snapshot()
    assert medium(after, "GPU") == 0
    assert medium(after, "CPU") == medium(before, "CPU") > 0
    assert after == engine.heard(number)


def test_a_reset_of_hbm_that_fails_tells_nothing(engine: Engine) -> None:
    engine.add(tokens(3 * BLOCK, seed=300), 4)
    run_until(engine, running=1)
    start = engine.next_number()
    assert not engine.scheduler.reset_prefix_cache()
    engine.run()

    assert "AllBlocksCleared" not in {event["type"] for event in engine.events(start)}


def test_a_reset_of_the_cpu_tier_is_told_as_removals_and_leaves_storage(engine: Engine) -> None:
    prompt = tokens(6 * BLOCK, seed=301)
    engine.complete(prompt)
    fill(engine, 6, prompts=1)
    _, before = engine.snapshot()
    start = engine.next_number()
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)

    engine.wait_for(lambda: any(event["type"] == "BlockRemoved" for event in engine.events(start)))
    number, after = engine.snapshot()
    assert medium(after, "GPU") == medium(after, "CPU") == 0
    assert medium(after, "STORAGE") == medium(before, "STORAGE") > 0
    assert after == engine.heard(number)
    assert engine.complete(prompt)[1] == 6 * BLOCK  # vLLM agrees


def test_after_a_reset_amid_stores_the_account_is_right(engine: Engine) -> None:
    for index in range(4):
        engine.add(tokens(4 * BLOCK, seed=400 + index), 30)
    run_until(engine, running=2)
    engine.connector.reset_cache()
    engine.run()

    number, held = engine.snapshot()
    assert held == engine.heard(number)


def test_files_deleted_by_others_are_told_while_the_engine_is_idle(engine: Engine) -> None:
    prompt = tokens(8 * BLOCK, seed=500)
    engine.complete(prompt)
    fill(engine, 7)  # only storage has it now
    number, before = engine.snapshot()
    files = list(engine.storage.rglob("*.bin"))
    assert len(files) * BLOCKS_PER_CHUNK == medium(before, "STORAGE")
    for file in files:
        file.unlink()

    def told() -> bool:
        return medium(engine.snapshot()[1], "STORAGE") == 0

    engine.wait_for(told)
    number, after = engine.snapshot()
    assert after == engine.heard(number)
    assert engine.complete(prompt)[1] == 0
