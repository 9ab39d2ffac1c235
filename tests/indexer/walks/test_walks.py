"""Random walks of engines, publishers, wires and a picker, against the plain truth: see world.py.

Real are the connector's ledger, journal and answers; the stream, the residencies, the index and the matching. The truth
(truth.py) is a few sets and the engines' hit rule. Publishers without our connector, the wire and the clock are in the
walk's hands.

The truth to compare with is what the engine held after the last batch *that the stream has accounted for*. Batches on
their way are nobody's fault. A lost one shows at the next that arrives, or at the latest when promised heartbeats fail
to come. Until then a feed says `live` of a picture that is older than it seems: of a wire that loses silently no more
can be had, and the walks check that it takes no longer. In every state nothing is held that the engine did not hold
then. While live, predictions are equal to the truth, for every prompt and tier. In a store that several share it is
what those of them have announced whose pictures are current, whatever becomes of the others.

Predictions may be too low only where

- an event means less than it says: a stock vLLM's reset of HBM alone is taken as one of all tiers;
- somebody who shares the store has lost messages, so that it was emptied for all; has told that a block is gone, which
  is so for all at once; or is known incompletely;
- the index has forgotten blocks to keep to its budget.

Not walked, because nobody could tell:

- a publisher without a name and without a replay socket, whose new life is first heard at the very number that was due;
  and older messages of a publisher without a name once more: they look like a new life;
- events of one tier in another order than they happened (`links.mixed`);
- two lives of such a publisher that say the same at the same time.

`TIERPICK_WALKS=100000 TIERPICK_SEED=1 pytest tests/indexer/walks` walks longer, and elsewhere.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from functools import partial

import msgspec
import pytest

from indexer.stream import Counters, State

from .shrink import shrink
from .world import Operation, World, run, walk

WALKS = int(os.environ.get("TIERPICK_WALKS", "2000"))
SEED = int(os.environ.get("TIERPICK_SEED", "0"))
PARTS = 10
NUMBERS = [item.name for item in fields(Counters) if item.type == "int" and item.name != "malformed"]


def _failure(seed: int, operations: Sequence[Operation]) -> Exception | None:
    try:
        run(seed, operations)
    except Exception as error:
        return error
    return None


def _fails(seed: int, operations: Sequence[Operation]) -> bool:
    return _failure(seed, operations) is not None


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "indexer")


@pytest.mark.timeout(0 if WALKS > 10_000 else 120)
@pytest.mark.parametrize("part", range(PARTS))
def test_predictions_are_the_truth_while_a_feed_says_live_and_it_does_so_again_when_faults_end(part: int) -> None:
    for seed in range(SEED + part, SEED + WALKS, PARTS):
        if _failure(seed, walk(seed)) is not None:
            short = shrink(walk(seed), partial(_fails, seed))
            pytest.fail(f"TIERPICK_SEED={seed}: {_failure(seed, short)!r}\nrun({seed}, {short!r})")


def test_the_walks_meet_everything() -> None:
    """Whatever can become of a feed does become of some, time and again."""
    met: Counter[str] = Counter()
    for seed in range(100):
        world = World(seed)
        for operation in walk(seed):
            world.do(operation)
            met.update(link.stream.state.value for link in world.links)
            met.update("silent" for link in world.links if link.stream.reason == "silent")
            met.update("pooled" for link in world.links if link.setup.pool and link.stream.residency.held("storage"))
        for link in world.links:
            counters = msgspec.to_builtins(link.stream.counters)
            met.update({name: count for name, count in counters.items() if isinstance(count, int)})
        met["forgotten"] += world.index.forgotten
    expected = {*(state.value for state in State), "silent", "forgotten", "pooled", *NUMBERS}
    assert not {name: met[name] for name in expected if met[name] < 10}
