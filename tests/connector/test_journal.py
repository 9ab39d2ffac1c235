from __future__ import annotations

import logging
from typing import Any

import msgspec
import pytest

from connector import journal as journal_module
from connector.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Groups,
    Load,
    Lookup,
    Tier,
    TierCleared,
)
from connector.journal import About, Journal
from connector.ledger import PART_BLOCKS


def stored(first: int, blocks: int = 1) -> BlockStored:
    hashes = list(range(first, first + blocks))
    return BlockStored(hashes, None, hashes, 1, None, "GPU", None, extra_keys=[None] * blocks, group_idx=0)


def read(message: tuple[int, bytes] | None) -> tuple[int, list[Any], dict[str, Any]]:
    """Number, events, notes."""
    assert message is not None
    _, events, _, notes = msgspec.msgpack.decode(message[1])
    return message[0], events, notes


@pytest.fixture
def journal() -> Journal:
    return Journal(About("life", heartbeat=0.5, tiers={"GPU": Tier(50), "CPU": Tier(chunk=2, pool="p")}), rank=1)


def test_messages_count_from_zero_and_replay_repeats_the_last_ones() -> None:
    journal = Journal(About(), buffer_steps=3)
    sent = [journal.batch([stored(number)], 1.0) for number in range(4)] + [journal.heartbeat(2.0)]
    assert [message[0] for message in sent if message] == [0, 1, 2, 3, 4]
    assert list(journal.replay(0)) == sent[2:]
    assert list(journal.replay(4)) == sent[4:]
    assert list(journal.replay(5)) == []


def test_a_replay_is_not_disturbed_by_what_is_published_meanwhile() -> None:
    journal = Journal(About(), buffer_steps=2)
    sent = [journal.batch([stored(number)], 1.0) for number in range(2)]
    replay = journal.replay(0)
    journal.batch([stored(9)], 1.0)
    assert list(replay) == sent


def test_every_message_names_the_instance_and_the_load_if_known(journal: Journal) -> None:
    about = About("life")
    journal = Journal(about)
    assert read(journal.batch([stored(1)], 0.0))[2].keys() == {"instance", "tiers", "heartbeat"}
    about.load = Load(1, 2, 0.5)
    for message in (journal.batch([stored(2)], 0.0), journal.heartbeat(0.0), *journal.snapshot(0.0)):
        notes = read(message)[2]
        assert notes["instance"] == "life"
        assert notes["load"] == {"waiting": 1, "running": 2, "kv_usage": 0.5}


def test_groups_are_told_as_soon_as_they_are_known_and_then_with_the_tiers() -> None:
    about = About("life")
    journal = Journal(about)
    journal.heartbeat(5.0)
    about.groups = Groups([Lookup([0], "full_attention", 16), Lookup([1], "mamba", 32, eagle=True)], 32)
    told = {
        "lookups": [
            {"groups": [0], "kind": "full_attention", "block": 16},
            {"groups": [1], "kind": "mamba", "block": 32, "eagle": True},
        ],
        "alignment": 32,
    }
    assert read(journal.batch([stored(1)], 5.1))[2]["groups"] == told
    assert "groups" not in read(journal.batch([stored(2)], 5.2))[2]
    assert read(journal.heartbeat(5.3))[2]["groups"] == told
    assert read(next(journal.snapshot(5.4)))[2]["groups"] == told


def test_tiers_and_the_promise_of_heartbeats_come_first_and_then_once_a_second(journal: Journal) -> None:
    told = [
        "tiers" in read(journal.batch([stored(number)], at))[2]
        for number, at in enumerate([10.0, 10.5, 10.9, 11.0, 11.1, 12.5, 3.0, 3.1])
    ]
    assert told == [True, False, False, True, False, True, True, False]  # the clock was set back
    notes = read(journal.heartbeat(3.2))[2]
    assert notes["heartbeat"] == 0.5
    assert notes["tiers"] == {"GPU": {"capacity": 50, "held": 8}, "CPU": {"held": 0, "chunk": 2, "pool": "p"}}


def test_a_tier_of_which_nothing_was_said_before_is_told_too() -> None:
    journal = Journal(About())
    event = msgspec.structs.replace(stored(1), medium="STORAGE")
    assert read(journal.batch([event], 0.0))[2]["tiers"] == {"STORAGE": {"held": 1}}


def test_a_heartbeat_is_an_ordinary_message_without_events(journal: Journal) -> None:
    journal.batch([stored(1)], 1.0)
    heartbeat = journal.heartbeat(1.1)
    assert read(heartbeat)[:2] == (1, [])
    assert list(journal.replay(1)) == [heartbeat]


def test_what_says_nothing_is_no_message(journal: Journal) -> None:
    assert journal.batch([], 1.0) is None
    assert journal.batch([TierCleared("CPU")], 1.0) is None
    assert read(journal.heartbeat(1.0))[0] == 0


def test_a_plain_journal_says_only_what_vllm_would_say() -> None:
    journal = Journal(None, rank=2)
    placeholder = BlockStored([1], None, [], 0, None, "CPU", None)
    messages = [journal.batch([event], 1.0) for event in (stored(1), placeholder, AllBlocksCleared())]
    batches = [msgspec.msgpack.decode(message[1]) for message in messages if message]
    assert [len(batch) for batch in batches] == [3, 3, 3]
    assert batches[1] == [1.0, [msgspec.to_builtins(placeholder)], 2]
    assert batches[2] == [1.0, [{"type": "AllBlocksCleared"}], 2]
    assert list(journal.snapshot(1.0)) == []


# --- snapshots


def test_a_snapshot_has_the_number_of_the_last_message_on_all_its_parts(journal: Journal) -> None:
    journal.batch([stored(0, PART_BLOCKS + 1)], 1.0)
    journal.batch([stored(5000)], 1.0)
    snapshot = journal.snapshot(2.0)
    journal.batch([BlockRemoved([5000], "GPU", 0), stored(6000)], 2.0)
    numbers, events, notes = zip(*map(read, snapshot), strict=True)
    assert numbers == (1, 1)
    assert [note["snapshot"] for note in notes] == [{"part": 1, "parts": 2}, {"part": 2, "parts": 2}]
    assert ["tiers" in note for note in notes] == [True, False]
    held = [block_hash for part in events for event in part for block_hash in event["block_hashes"]]
    assert held == [*range(PART_BLOCKS + 1), 5000]


def test_before_the_first_message_there_is_no_snapshot_and_without_blocks_an_empty_one(journal: Journal) -> None:
    assert list(journal.snapshot(1.0)) == []
    journal.heartbeat(1.0)
    [part] = journal.snapshot(1.0)
    assert read(part)[:2] == (0, [])
    assert read(part)[2]["snapshot"] == {"part": 1, "parts": 1}


# --- faults


def test_if_the_ledger_fails_batches_go_out_as_they_came_and_snapshots_end(
    journal: Journal, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a fault of ours")

    placeholder = BlockStored([1], None, [], 0, None, "CPU", None)
    journal.batch([stored(1)], 1.0)
    with monkeypatch.context() as patch:
        patch.setattr(journal_module.Ledger, "apply", fail)
        assert read(journal.batch([placeholder], 1.0))[1] == [msgspec.to_builtins(placeholder)]
    assert read(journal.batch([placeholder, TierCleared("CPU")], 1.0))[:2] == (
        2,
        [msgspec.to_builtins(placeholder), {"type": "AllBlocksCleared", "tiers": ["CPU"]}],
    )
    assert list(journal.snapshot(1.0)) == []
    assert read(journal.heartbeat(2.0))[2]["tiers"]["GPU"] == {"capacity": 50}
    assert journal.faults == 1
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


def test_an_event_that_cannot_be_encoded_is_left_out_alone(journal: Journal, caplog: pytest.LogCaptureFixture) -> None:
    bad = msgspec.structs.replace(stored(2), session_id=object())
    for _ in range(2):
        assert [event["block_hashes"] for event in read(journal.batch([stored(1), bad, stored(3)], 1.0))[1]] == [
            [1],
            [3],
        ]
    assert list(journal.snapshot(1.0)) == []
    assert (journal.faults, len(caplog.records)) == (2, 1)
