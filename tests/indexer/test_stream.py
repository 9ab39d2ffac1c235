"""The rules of recovery, without sockets: a publisher, a lossy wire and a replay socket that are all in our hands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from indexer import recovery
from indexer import stream as stream_module
from indexer.frames import SNAPSHOT
from indexer.pool import Standing
from indexer.stream import State, Stream
from indexer.wire import BlockRemoved, BlockStored, Event, Load, Notes, Tier, Tiers


class Held:
    """A residency as a set of hashes."""

    def __init__(self) -> None:
        self.name = "test"
        self._model = ""
        self.closed = False
        self.forgotten = False
        """With what is in stores that others share."""
        self.standing = Standing.CURRENT
        self.skipped: Counter[str] = Counter()
        self.hashes: set[int] = set()
        self.told_tiers: Tiers | None = None

    @property
    def model(self) -> str:
        return self._model

    @model.setter
    def model(self, model: str) -> None:
        self._model = model
        self.hashes.clear()

    def told(self, notes: Notes) -> None:
        self.told_tiers = notes.tiers or self.told_tiers

    def apply(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, BlockStored):
                self.hashes.update(event.hashes)
            elif isinstance(event, BlockRemoved):
                self.hashes.difference_update(event.hashes)

    def clear(self, tiers: object = None) -> None:
        self.hashes.clear()

    restart = clear

    def forget(self) -> None:
        self.clear()
        self.forgotten = True

    def counted(self) -> Counter[str]:
        return Counter(hashes=len(self.hashes))

    def close(self) -> None:
        self.closed = True


def payload(
    stored: Iterable[int] = (), removed: Iterable[int] = (), *, life: int = 0, notes: dict[str, object] | None = None
) -> bytes:
    events: list[dict[str, object]] = []
    if removed := list(removed):
        events.append({"type": "BlockRemoved", "block_hashes": removed, "medium": "GPU"})
    if stored := list(stored):
        fields = {"parent_block_hash": None, "token_ids": [], "block_size": 0, "medium": "GPU"}
        events.append({"type": "BlockStored", "block_hashes": stored, **fields})
    # a timestamp that is none, so that nothing counts as late; but no life repeats another's bytes
    return msgspec.msgpack.encode([-float(life), events, 0, notes])


END = [b"", b"", b"\xff" * 8, b""]
TOPIC = b"kv@pod@model"


@dataclass
class Publisher:
    """Keeps the last `memory` batches, like an engine's replay buffer, and what it really holds after each.

    `part` is how many blocks it puts into a part of a snapshot; 0 = it is a stock one, without snapshots and notes."""

    memory: int = 1000
    part: int = 0
    heartbeat: float = 0.0
    life: int = 0
    batches: list[bytes] = field(default_factory=list)
    truth: list[frozenset[int]] = field(default_factory=list)

    def notes(self, **more: object) -> dict[str, object] | None:
        promise = {"heartbeat": self.heartbeat} if self.heartbeat else {}
        return {"instance": f"life-{self.life}", **promise, **more} if self.part else None

    def publish(self, stored: Iterable[int] = (), removed: Iterable[int] = ()) -> int:
        stored, removed = set(stored), set(removed)
        before = self.truth[-1] if self.truth else frozenset()
        self.truth.append((before - removed) | stored)
        self.batches.append(payload(stored, removed, life=self.life, notes=self.notes()))
        return len(self.batches) - 1

    def restart(self) -> None:
        self.life += 1
        self.batches, self.truth = [], []

    def frames(self, seq: int) -> list[bytes]:
        return [TOPIC, seq.to_bytes(8, "big"), self.batches[seq]]

    def answer(self, start: int) -> list[list[bytes]]:
        """Without the end marker."""
        if start == SNAPSHOT:
            return self.snapshot() if self.part else []
        oldest = max(0, len(self.batches) - self.memory)
        return [[b"", *self.frames(seq)] for seq in range(max(start, oldest), len(self.batches))]

    def snapshot(self) -> list[list[bytes]]:
        if not self.batches:
            return []
        seq, held = len(self.batches) - 1, sorted(self.truth[-1])
        parts = [held[i : i + self.part] for i in range(0, len(held), self.part)] or [[]]
        places = [{"part": n, "parts": len(parts)} for n in range(1, len(parts) + 1)]
        return [
            [b"", TOPIC, seq.to_bytes(8, "big"), payload(part, notes=self.notes(snapshot=place))]
            for part, place in zip(parts, places, strict=True)
        ]


class Wire:
    """A stream with its rim and its publisher."""

    def __init__(
        self, *, replay: bool = True, memory: int = 1000, joined_late: int = 0, part: int = 0, heartbeat: float = 0.0
    ) -> None:
        self.publisher = Publisher(memory, part, heartbeat)
        self.now = 0.0
        self.question: int | None = None
        self.calls = 0
        self.alarm_in: float | None = None
        self.opened: list[Held] = []
        for n in range(joined_late):
            self.publisher.publish([n])
        self.stream = Stream(self.open, self, replayable=replay, clock=lambda: self.now)  # type: ignore[arg-type]

    def open(self) -> Held:
        self.opened.append(Held())
        return self.opened[-1]

    # the rim
    def ask(self, start: int, *, urgent: bool) -> None:
        self.question = start
        self.calls += 1
        self.stream.asked()

    def hang_up(self) -> None:
        self.question = None
        self.calls += 1

    def alarm(self, seconds: float | None) -> None:
        self.alarm_in = seconds

    # what a test does
    def connect(self) -> Wire:
        self.stream.connected()
        return self

    def answer(self, *, topic: bool = True, end: bool = True, limit: int | None = None) -> None:
        """The publisher answers the question; `limit` and no `end`: it stops in the middle. If it has no snapshot, it
        says so, and answers the next one."""
        if self.question == SNAPSHOT and not self.publisher.answer(SNAPSHOT):
            self.stream.replay(END)
        if self.question is None:
            return
        call = self.calls
        for frames in [*self.publisher.answer(self.question)[:limit], *([END] if end else [])]:
            self.stream.replay(frames if topic else [b"", *frames[2:]])
            if self.calls != call:
                return  # what else was on its way is not read any more

    def hear(self, seq: int) -> None:
        self.stream.live(self.publisher.frames(seq))

    def publish(self, stored: Iterable[int] = (), removed: Iterable[int] = (), *, lost: bool = False) -> None:
        seq = self.publisher.publish(stored, removed)
        if not lost:
            self.hear(seq)

    def ring(self) -> None:
        assert self.alarm_in is not None
        self.alarm_in = None
        self.stream.alarm()

    @property
    def held(self) -> set[int]:
        residency = self.stream.residency
        assert isinstance(residency, Held)
        return residency.hashes


def live(**options: Any) -> Wire:
    """Connected, history learned, live."""
    wire = Wire(**options).connect()
    wire.answer()
    assert wire.stream.state is State.LIVE
    return wire


class TestFromTheStart:
    def test_a_silent_publisher_is_live_once_it_has_said_that_there_was_nothing(self) -> None:
        wire = Wire()
        assert wire.stream.state is State.SYNCING
        wire.connect()
        assert (wire.stream.state, wire.question) == (State.SYNCING, SNAPSHOT)
        wire.answer()
        assert wire.stream.state is State.LIVE

    def test_an_empty_memory_does_not_make_up_for_batches_that_could_not_be_read(self) -> None:
        wire = Wire().connect()
        wire.stream.replay(END)
        for seq in range(2):
            wire.stream.live([TOPIC, seq.to_bytes(8, "big"), b"\xc1"])
        wire.stream.replay(END)
        assert (wire.stream.state, wire.stream.last_seq) == (State.UNSURE, 1)

    def test_history_is_learned_and_the_topic_names_the_model(self) -> None:
        wire = Wire(joined_late=5).connect()
        wire.answer()
        assert wire.held == {0, 1, 2, 3, 4}
        assert wire.stream.residency.model == "model"
        assert wire.stream.state is State.LIVE
        assert wire.opened[0].closed

    def test_live_batches_are_visible_at_once_and_history_joins_them(self) -> None:
        wire = Wire(joined_late=3).connect()
        wire.publish([3])
        assert wire.held == {3}
        wire.answer()
        assert wire.held == {0, 1, 2, 3}
        assert wire.stream.state is State.LIVE

    def test_a_rebuild_is_not_seen_half_done(self) -> None:
        wire = Wire(joined_late=4).connect()
        wire.answer(limit=2, end=False)
        assert wire.held == set()
        wire.answer()
        assert wire.held == {0, 1, 2, 3}

    def test_a_live_batch_before_the_end_marker_needs_no_second_replay(self) -> None:
        wire = Wire(joined_late=3).connect()
        wire.answer(end=False)
        wire.publish([3])
        wire.stream.replay(END)
        assert wire.held == {0, 1, 2, 3}
        assert wire.stream.counters.replays == 2, "for a snapshot, and for the history"

    def test_batches_that_the_replay_brought_and_that_then_come_live_count_once(self) -> None:
        wire = Wire(joined_late=4).connect()
        wire.answer()
        wire.hear(2)
        wire.hear(3)
        assert wire.stream.counters.duplicates == 2
        assert wire.stream.counters.restarts == 0

    def test_history_without_topics_waits_for_the_first_live_topic(self) -> None:
        wire = Wire(joined_late=3).connect()
        wire.answer(topic=False)
        wire.publish([3])
        assert wire.stream.residency.model == "model"
        assert wire.held == {3}
        wire.answer(topic=False)
        assert wire.held == {0, 1, 2, 3}
        assert wire.stream.state is State.LIVE

    def test_a_truncated_history_begins_with_its_oldest_batch(self) -> None:
        wire = Wire(joined_late=10, memory=4).connect()
        wire.answer()
        assert wire.held == {6, 7, 8, 9}
        assert wire.stream.state is State.UNSURE
        assert "before batch 6" in wire.stream.reason
        assert wire.stream.counters.truncated == 1

    def test_without_a_replay_socket_a_late_joiner_stays_unsure(self) -> None:
        wire = Wire(replay=False, joined_late=3).connect()
        assert wire.stream.state is State.UNSURE
        wire.publish([3])
        assert wire.held == {3}
        assert (wire.stream.state, wire.stream.reason) == (State.UNSURE, "joined at batch 3")

    def test_without_a_replay_socket_batch_0_makes_the_picture_complete(self) -> None:
        wire = Wire(replay=False).connect()
        wire.publish([0])
        assert wire.stream.state is State.LIVE

    def test_an_interrupted_rebuild_goes_on_where_it_stopped(self) -> None:
        wire = Wire(joined_late=6).connect()
        wire.answer(limit=3, end=False)
        wire.ring()  # there was progress
        wire.ring()
        assert wire.question == 3
        wire.answer()
        assert wire.held == set(range(6))
        assert wire.stream.counters.replayed == 6

    def test_a_dead_replay_socket_is_given_up_and_tried_again_later(self) -> None:
        wire = Wire(joined_late=3).connect()
        wire.publish([3])
        for _ in range(recovery.ATTEMPTS):
            wire.ring()
        assert wire.stream.state is State.UNSURE
        assert wire.held == {3}
        assert wire.alarm_in == stream_module.FIRST_RETRY
        wire.ring()
        assert wire.stream.state is State.UNSURE, "one more silent try is not news"
        wire.answer()
        assert wire.held == {0, 1, 2, 3}
        assert wire.stream.state is State.LIVE

    def test_too_many_batches_during_a_rebuild_end_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(recovery, "HELD_BATCHES", 2)
        wire = Wire(joined_late=3).connect()
        for n in (3, 4, 5):
            wire.publish([n])
        assert wire.held == {3, 4, 5}
        assert wire.alarm_in == stream_module.FIRST_RETRY
        assert wire.opened[1].closed

    def test_it_is_tried_again_soon_at_first_and_then_less_and_less_often(self) -> None:
        wire = Wire(joined_late=3).connect()
        pauses = []
        for _ in range(7):
            for _ in range(recovery.ATTEMPTS):
                wire.ring()
            pauses.append(wire.alarm_in)
            wire.ring()
        assert pauses == [2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
        wire.answer()
        assert wire.stream.state is State.LIVE


class TestGap:
    def test_a_gap_is_repaired_in_order(self) -> None:
        wire = live()
        wire.publish([1, 2, 3])
        wire.publish([4], lost=True)
        wire.publish(removed=[4], lost=True)
        wire.publish([5])
        assert wire.held == {1, 2, 3}, "what came after the gap waits: its stores and removals must not overtake"
        assert wire.stream.state is State.SYNCING
        wire.answer()
        assert wire.held == {1, 2, 3, 5}
        assert wire.stream.state is State.LIVE
        counters = wire.stream.counters
        assert (counters.gaps, counters.missed, counters.lost) == (1, 2, 0)

    def test_a_gap_before_the_very_first_batch_is_repaired(self) -> None:
        wire = live()
        wire.publish([1], lost=True)
        wire.publish([2])
        assert wire.question == 0
        wire.answer()
        assert wire.held == {1, 2}
        assert wire.stream.state is State.LIVE

    def test_old_framing_repairs_too(self) -> None:
        wire = live()
        wire.publish([1])
        wire.publish([2], lost=True)
        wire.publish([3])
        wire.answer(topic=False)
        assert wire.held == {1, 2, 3}

    def test_live_batches_go_on_when_the_replay_socket_is_dead(self) -> None:
        wire = live()
        wire.publish([1])
        wire.publish(removed=[1], lost=True)
        wire.publish([2])
        assert wire.alarm_in == stream_module.REPAIR_PATIENCE
        wire.ring()
        assert wire.held == {2}, "1 may have been removed in the gap, and was"
        wire.publish([3])
        assert wire.held == {2, 3}

    def test_the_picture_is_whole_again_once_the_dead_replay_socket_answers(self) -> None:
        wire = live()
        wire.publish([1])
        wire.publish([2], lost=True)
        wire.publish([3])
        wire.ring()
        assert wire.held == {3}
        assert wire.question == 0
        wire.publish([4])
        wire.answer()
        assert wire.held == {1, 2, 3, 4}
        assert wire.stream.state is State.LIVE

    def test_what_a_repair_keeps_back_is_not_live_whatever_failed_before(self) -> None:
        wire = live()
        wire.stream.disconnected("the connection broke")
        wire.connect()
        for _ in range(1 + recovery.ATTEMPTS):
            wire.ring()
        assert wire.stream.state is State.UNSURE
        wire.publish([1], lost=True)
        wire.publish([2])
        assert (wire.stream.state, wire.stream.lag_batches) == (State.SYNCING, 2)
        wire.answer()
        assert (wire.stream.state, wire.held) == (State.LIVE, {1, 2})

    def test_a_slow_replay_holds_live_batches_only_so_long(self) -> None:
        wire = live()
        for n in range(20):
            wire.publish([n], lost=n > 0)
        wire.publish([20])
        for n in range(stream_module.REPAIR_ALARMS):
            wire.stream.replay([b"", *wire.publisher.frames(n)])
            assert 20 not in wire.held
            wire.ring()
        assert wire.held == {20}

    def test_a_truncated_repair_becomes_a_rebuild_from_the_oldest(self) -> None:
        wire = live(memory=3)
        wire.publish([1])
        for n in range(2, 8):
            wire.publish([n], lost=True)
        wire.publish([8])
        wire.answer()
        assert wire.held == {8}
        assert wire.question == 0, "it was asked for a snapshot before"
        wire.answer()
        assert wire.held == {6, 7, 8}
        assert wire.stream.state is State.UNSURE
        assert "remembers nothing before batch 5" in wire.stream.reason

    def test_a_replay_with_a_hole_is_asked_again_from_the_hole(self) -> None:
        wire = live()
        wire.publish([1])
        for n in (2, 3, 4):
            wire.publish([n], lost=True)
        wire.publish([5])
        replies = wire.publisher.answer(0)
        for reply in (replies[0], replies[1], replies[3]):
            wire.stream.replay(reply)
        assert wire.question == 2
        wire.answer()
        assert wire.held == {1, 2, 3, 4, 5}

    def test_a_replay_that_never_fills_the_hole_is_given_up(self) -> None:
        wire = live()
        wire.publish([0])
        wire.publish([1])
        wire.publish([2], lost=True)
        wire.publish([3])
        for _ in range(recovery.ATTEMPTS):
            assert wire.question in (1, 2)
            wire.stream.replay([b"", *wire.publisher.frames(1)])
            wire.stream.replay(END)
        assert wire.held == {3}

    def test_without_a_replay_socket_a_gap_forgets_what_may_be_gone(self) -> None:
        wire = Wire(replay=False).connect()
        wire.publish([1])
        wire.publish(removed=[1], lost=True)
        wire.publish([2])
        assert wire.held == {2}
        assert wire.stream.state is State.UNSURE
        assert wire.stream.reason == "batches 1 to 1 were lost"
        assert wire.stream.counters.lost == 1

    def test_too_many_held_batches_end_a_repair(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(recovery, "HELD_BYTES", 3 * recovery.MESSAGE_BYTES)
        wire = live()
        wire.publish([1])
        wire.publish([2], lost=True)
        for n in (3, 4, 5):
            wire.publish([n])
        assert wire.held == {3, 4, 5}


class TestRecoveryUnderLoad:
    """The shapes in which other consumers came to grief."""

    def test_a_replay_that_breaks_off_twice_amid_live_batches_applies_each_batch_once(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        applied: Counter[int] = Counter()
        apply = Held.apply

        def counting(held: Held, events: Iterable[Event]) -> None:
            events = list(events)
            applied.update(value for event in events if isinstance(event, BlockStored) for value in event.hashes)
            apply(held, events)

        wire = Wire(joined_late=100).connect()
        monkeypatch.setattr(Held, "apply", counting)
        wire.answer(limit=40, end=False)
        wire.publish([100])
        for reached in (40, 70):
            wire.ring()
            wire.ring()
            assert wire.question == reached, "from where it broke off"
            wire.answer(limit=30, end=False)
            wire.publish([101 if reached == 40 else 102])
        wire.answer()
        for n in range(103, 121):
            wire.publish([n])
        assert (wire.stream.state, wire.held) == (State.LIVE, set(range(121)))
        learned_twice = {100, 101}  # at once in the visible copy, and in the one that was rebuilt
        assert {value for value, times in applied.items() if times > 1} == learned_twice
        assert wire.stream.counters.replayed == 100
        assert wire.stream.counters.replays == 4

    def test_an_answer_of_which_two_batches_arrive_and_no_end_is_not_taken_for_whole(self) -> None:
        wire = Wire(joined_late=1024, memory=2000).connect()
        wire.answer(limit=2, end=False)
        assert wire.stream.state is State.SYNCING
        wire.ring()
        wire.ring()
        assert (wire.question, wire.held) == (2, set())
        wire.answer()
        assert (wire.stream.state, wire.held) == (State.LIVE, set(range(1024)))

    def test_a_life_that_passed_the_old_number_while_we_were_away_leaves_nothing_of_the_old_one(self) -> None:
        wire = live()
        for n in range(51):
            wire.publish([n])
        wire.stream.disconnected("the connection broke")
        wire.publisher.restart()
        for n in range(100, 181):
            wire.publish([n], lost=True)
        wire.connect()
        wire.answer()
        assert wire.held == set()
        wire.answer()
        assert (wire.stream.state, wire.held) == (State.LIVE, set(range(100, 181)))

    def test_fifteen_lost_batches_are_counted_and_nothing_from_before_them_is_trusted(self) -> None:
        wire = Wire(replay=False).connect()
        for n in range(5):
            wire.publish([n])
        for n in range(15):
            wire.publish([], [n], lost=True)
        wire.publish([99])
        assert wire.held == {99}
        assert (wire.stream.counters.missed, wire.stream.counters.lost) == (15, 1)

    @pytest.mark.parametrize("part", [0, 3])
    def test_a_replay_address_that_two_processes_answer_in_turn_never_makes_it_live_with_a_mixture(
        self, part: int
    ) -> None:
        wire, other = Wire(part=part).connect(), Publisher(part=part, life=7)
        for n in range(6):
            wire.publish([n])
            other.publish([100 + n])
        for turn in range(12):
            if wire.question is not None:
                asked, answering = wire.question, (other, wire.publisher)[turn % 2]
                for frames in [*answering.answer(asked), END]:
                    if wire.question == asked:
                        wire.stream.replay(frames)
            if wire.alarm_in is not None and wire.question is None:
                wire.ring()
            assert wire.held <= wire.publisher.truth[-1] or wire.held <= other.truth[-1]
        wire.publish([6])
        assert wire.held <= wire.publisher.truth[-1]
        assert wire.stream.counters.replays < 30

    def test_two_pickers_of_one_publisher_do_not_disturb_each_other(self) -> None:
        first, second = Wire(part=3, joined_late=5).connect(), Wire(part=3)
        second.publisher = first.publisher
        second.connect()
        first.answer(limit=1, end=False)
        second.answer()
        first.publish([5])
        second.hear(5)
        first.ring()
        first.ring()
        first.answer()
        for wire in (first, second):
            assert (wire.stream.state, wire.held) == (State.LIVE, set(range(6)))


class TestRestart:
    def test_a_number_that_goes_back_forgets_the_former_life(self) -> None:
        wire = live()
        for n in range(5):
            wire.publish([n])
        wire.publisher.restart()
        wire.publish([100])
        assert wire.held == {100}
        assert wire.stream.counters.restarts == 1
        assert wire.stream.state is State.LIVE

    def test_the_first_batches_of_the_new_life_are_asked_for(self) -> None:
        wire = live()
        for n in range(5):
            wire.publish([n])
        wire.publisher.restart()
        wire.publish([100], lost=True)
        wire.publish([101])
        assert wire.held == {101}
        wire.answer()
        assert wire.held == {100, 101}
        assert wire.stream.state is State.LIVE

    def test_a_rebuild_does_not_go_on_with_another_life_while_there_is_no_connection(self) -> None:
        """The batches that it kept back are the former life's."""
        wire = Wire(joined_late=2).connect()
        wire.publish([2])
        wire.stream.disconnected("the connection broke")
        wire.publisher.restart()
        for n in (100, 101, 102):
            wire.publish([n], lost=True)
        wire.answer()
        assert (wire.question, wire.held) == (None, {2})
        wire.connect()
        wire.answer()
        wire.answer()
        assert (wire.stream.state, wire.held) == (State.LIVE, {100, 101, 102})

    def test_nobody_is_asked_while_there_is_no_connection(self) -> None:
        wire = Wire(joined_late=3).connect()
        for _ in range(recovery.ATTEMPTS):
            wire.ring()
        assert wire.alarm_in == stream_module.FIRST_RETRY
        wire.stream.disconnected("the connection broke")
        wire.question = None
        wire.ring()
        assert wire.question is None
        wire.connect().answer()
        assert (wire.stream.state, wire.held) == (State.LIVE, {0, 1, 2})

    def test_a_restart_in_the_middle_of_a_repair_ends_the_repair(self) -> None:
        wire = live()
        for n in range(5):
            wire.publish([n], lost=n == 3)
        wire.publisher.restart()
        wire.publish([100])
        assert wire.held == {100}
        assert wire.question is None

    def test_a_new_life_that_has_passed_the_old_number_is_found_out(self) -> None:
        wire = live()
        for n in range(3):
            wire.publish([n])
        wire.publisher.restart()
        for n in range(100, 110):
            wire.publish([n], lost=True)
        wire.publish([110])
        wire.answer()
        assert wire.held == {110}, "nothing of the old life"
        wire.answer()
        assert wire.held == set(range(100, 111))
        assert wire.stream.counters.restarts == 1


class TestInstance:
    def test_another_instance_is_a_restart_even_where_its_number_is_the_next(self) -> None:
        wire = live(part=4)
        wire.publish([1])
        wire.publish([2])
        wire.publisher.restart()
        wire.publish([100], lost=True)
        wire.publish([101], lost=True)
        wire.publish([102])
        assert wire.held == {102}
        assert wire.stream.counters.restarts == 1
        wire.answer()
        assert wire.held == {100, 101, 102}
        assert (wire.stream.state, wire.stream.instance) == (State.LIVE, "life-1")

    def test_another_instance_is_a_restart_without_a_replay_socket_too(self) -> None:
        wire = Wire(replay=False, part=4).connect()
        wire.publish([1])
        wire.stream.disconnected("the connection broke")
        wire.publisher.restart()
        wire.publish([100], lost=True)
        wire.connect()
        wire.publish([101])
        assert wire.held == {101}
        assert "batches before 1 are unknown" in wire.stream.reason

    @pytest.mark.parametrize("replay", [True, False])
    @pytest.mark.parametrize("again", [0, 1, 2])
    def test_a_message_that_the_same_instance_sent_before_changes_nothing(self, replay: bool, again: int) -> None:
        """A number that goes back would be another life, and batch 0 its beginning: live at once."""
        wire = Wire(replay=replay, part=4).connect()
        if replay:
            wire.answer()
        for n in (1, 2, 3):
            wire.publish([n], [n - 1])
        wire.hear(again)
        assert (wire.stream.state, wire.held, wire.stream.last_seq) == (State.LIVE, {3}, 2)
        assert (wire.stream.counters.duplicates, wire.stream.counters.restarts) == (1, 0)

    def test_a_number_that_goes_back_to_what_was_never_heard_makes_all_uncertain(self) -> None:
        """Of the same instance it is no new life, so it says nothing of what shared stores have kept either."""
        wire = Wire(replay=False, part=4, joined_late=5).connect()
        wire.publish([5])
        wire.publish([6])
        wire.hear(3)
        residency = wire.stream.residency
        assert isinstance(residency, Held)
        assert (wire.stream.state, wire.held, residency.forgotten) == (State.UNSURE, {3}, True)

    def test_an_old_message_proves_nothing_after_a_reconnection(self) -> None:
        wire = Wire(replay=False, part=4).connect()
        for n in (1, 2, 3):
            wire.publish([n])
        wire.stream.disconnected("the connection broke")
        wire.publish(removed=[1], lost=True)
        wire.connect()
        wire.hear(1)
        assert wire.stream.reason == "reconnected; nothing heard since"
        assert wire.stream.trust <= 0.5

    def test_an_engine_that_no_longer_names_itself_is_another_one(self) -> None:
        wire = live(part=4)
        wire.publish([1])
        wire.publisher.part = 0
        wire.publish([2])
        assert wire.held == {2}
        assert wire.stream.counters.restarts == 1

    def test_a_repair_that_another_instance_answers_is_none(self) -> None:
        wire = live(part=4)
        wire.publish([1])
        wire.publish([2], lost=True)
        wire.publish([3])
        wire.publisher.restart()
        for n in range(100, 110):
            wire.publish([n], lost=True)
        wire.answer()
        assert wire.held == set(), "neither the old life's batch 0 nor its batch 2, which waited"
        wire.answer()
        assert wire.held == set(range(100, 110))
        assert wire.stream.state is State.LIVE

    def test_what_the_former_instance_told_is_void(self) -> None:
        wire = live(part=4, heartbeat=1.0)
        wire.publish([1])
        assert wire.stream.told.heartbeat == 1.0
        wire.publisher.restart()
        wire.publisher.heartbeat = 0.0
        wire.publish([2])
        assert wire.stream.told.heartbeat == 0.0

    def test_two_instances_that_speak_in_turn_are_not_asked_at_every_turn(self) -> None:
        """As with a replay address that is another engine's."""
        wire, other = live(part=4), Publisher(part=4, life=7)
        wire.publish([1])
        wire.publish([2])
        for n in range(10):
            other.publish([10 + n])
            seq = len(wire.publisher.batches) + n
            wire.stream.live([TOPIC, seq.to_bytes(8, "big"), other.batches[-1]])
            wire.publish([3 + n])
            wire.answer()
        assert wire.stream.counters.restarts == 20
        assert wire.stream.counters.replays < 5
        assert wire.alarm_in == stream_module.RETRY_AFTER


class TestSnapshot:
    def test_a_late_joiner_learns_what_is_held_though_the_publisher_remembers_little(self) -> None:
        wire = Wire(part=3, memory=2, joined_late=10).connect()
        assert wire.question == SNAPSHOT
        wire.answer()
        assert wire.held == set(range(10))
        assert wire.stream.state is State.LIVE
        assert wire.stream.residency.model == "model"
        assert wire.stream.last_seq == 9
        counters = wire.stream.counters
        assert (counters.snapshots, counters.replays, counters.replayed) == (1, 1, 0)

    def test_it_is_not_seen_half_done(self) -> None:
        wire = Wire(part=3, joined_late=10).connect()
        wire.answer(limit=3, end=False)
        assert wire.held == set()
        assert wire.stream.state is State.SYNCING

    def test_nothing_held_is_one_part_without_events(self) -> None:
        wire = Wire(part=3)
        wire.publish([1], lost=True)
        wire.publish(removed=[1], lost=True)
        wire.connect().answer()
        assert wire.held == set()
        assert (wire.stream.state, wire.stream.last_seq) == (State.LIVE, 1)
        wire.publish([2])
        assert (wire.held, wire.stream.counters.gaps) == ({2}, 0)

    def test_nothing_published_yet_is_no_snapshot_but_one_may_come_later(self) -> None:
        wire = Wire(part=3, memory=1).connect()
        wire.stream.replay(END)
        assert wire.question == 0
        wire.answer()
        assert wire.stream.state is State.LIVE
        wire.publish([0])
        for n in range(1, 5):
            wire.publish([n], lost=True)
        wire.publish([5])
        wire.answer()
        assert wire.question == SNAPSHOT
        wire.answer()
        assert wire.held == set(range(6))

    def test_batches_before_its_first_part_and_after_its_number_follow_it(self) -> None:
        wire = Wire(part=3, joined_late=4).connect()
        wire.publish([4])
        parts = wire.publisher.answer(SNAPSHOT)
        wire.publish([5])
        wire.publish(removed=[0])
        for frames in [*parts, END]:
            wire.stream.replay(frames)
        assert wire.held == {1, 2, 3, 4, 5}
        assert wire.stream.state is State.LIVE
        assert wire.stream.counters.replays == 1

    def test_batches_that_it_reflects_and_that_then_come_live_count_once(self) -> None:
        wire = Wire(part=3, joined_late=4).connect()
        wire.answer()
        wire.hear(2)
        wire.hear(3)
        wire.publish([4])
        assert wire.held == set(range(5))
        assert (wire.stream.counters.duplicates, wire.stream.counters.restarts) == (2, 0)

    def test_batches_lost_behind_it_are_replayed(self) -> None:
        wire = Wire(part=3, joined_late=4).connect()
        parts = wire.publisher.answer(SNAPSHOT)
        wire.publish([4], lost=True)
        wire.publish([5])
        for frames in [*parts, END]:
            wire.stream.replay(frames)
        assert wire.question == 4
        wire.answer()
        assert wire.held == set(range(6))
        assert wire.stream.state is State.LIVE

    def test_a_stock_publisher_is_asked_once_a_connection(self) -> None:
        wire = Wire(joined_late=3).connect()
        assert wire.question == SNAPSHOT
        wire.stream.replay(END)
        assert wire.question == 0
        wire.answer()
        assert wire.held == {0, 1, 2}
        wire.publish([3], lost=True)
        wire.publish([4])
        wire.ring()  # the repair is given up
        assert wire.question == 0

    def test_a_publisher_that_answers_with_batches_has_none(self) -> None:
        wire = Wire(joined_late=3).connect()
        wire.stream.replay([b"", *wire.publisher.frames(0)])
        assert wire.question == 0
        wire.answer()
        assert wire.held == {0, 1, 2}
        assert wire.stream.counters.snapshots_failed == 0

    def test_a_loss_beyond_what_the_publisher_remembers_is_made_good_by_one(self) -> None:
        wire = live(part=3, memory=3)
        wire.publish([0, 1])
        for n in range(2, 9):
            wire.publish([n], lost=True)
        wire.publish(removed=[1], lost=True)
        wire.publish([9])
        wire.answer()
        assert (wire.question, wire.held) == (SNAPSHOT, {9})
        wire.answer()
        assert wire.held == {0, *range(2, 10)}
        assert wire.stream.state is State.LIVE

    @pytest.mark.parametrize("spoilt", ["missing", "twice", "number", "count", "unreadable", "no part"])
    def test_one_that_does_not_come_whole_is_asked_for_again(self, spoilt: str) -> None:
        wire = Wire(part=3, joined_late=10).connect()
        parts, notes = wire.publisher.answer(SNAPSHOT), wire.publisher.notes
        if spoilt == "missing":
            del parts[1]
        elif spoilt == "twice":
            parts.insert(1, parts[0])
        elif spoilt == "number":
            parts[1][2] = (11).to_bytes(8, "big")
        elif spoilt == "count":
            parts[1][3] = payload([3], notes=notes(snapshot={"part": 2, "parts": 9}))
        elif spoilt == "unreadable":
            parts[1][3] = b"\xc1"
        else:
            parts[1][3] = payload([3], notes=notes())
        calls = wire.calls
        for frames in [*parts, END]:
            if wire.calls == calls:
                wire.stream.replay(frames)
        assert wire.question == SNAPSHOT
        assert wire.stream.counters.snapshots_failed == 1
        wire.answer()
        assert wire.held == set(range(10))
        assert all(residency.closed for residency in wire.opened[:-1])

    def test_one_cut_short_is_asked_for_again(self) -> None:
        wire = Wire(part=3, joined_late=10).connect()
        wire.answer(limit=2)
        assert wire.question == SNAPSHOT
        wire.answer()
        assert wire.held == set(range(10))

    def test_one_that_stops_in_the_middle_is_waited_for_and_asked_for_again(self) -> None:
        wire = Wire(part=3, joined_late=10).connect()
        wire.answer(limit=2, end=False)
        calls = wire.calls
        wire.ring()
        assert wire.calls == calls, "parts had come"
        wire.ring()
        assert wire.calls > calls
        wire.answer()
        assert wire.held == set(range(10))

    def test_one_that_never_comes_whole_gives_way_to_the_history(self) -> None:
        wire = Wire(part=3, joined_late=10).connect()
        for _ in range(recovery.ATTEMPTS - 1):
            assert wire.question == SNAPSHOT
            wire.answer(limit=1, end=False)
            wire.ring()
            wire.ring()
        assert wire.question == 0
        wire.answer()
        assert wire.held == set(range(10))
        assert wire.stream.counters.snapshots_failed == recovery.ATTEMPTS - 1

    def test_a_history_that_does_not_suffice_is_not_the_end_of_it(self) -> None:
        wire = Wire(part=3, memory=4, joined_late=10).connect()
        for _ in range(recovery.ATTEMPTS - 1):
            wire.ring()
        wire.answer()
        assert (wire.stream.state, wire.held) == (State.UNSURE, {6, 7, 8, 9})
        assert wire.alarm_in == stream_module.RETRY_AFTER
        wire.ring()
        wire.answer()
        assert (wire.stream.state, wire.held) == (State.LIVE, set(range(10)))

    def test_a_repair_in_between_does_not_cancel_the_next_try(self) -> None:
        wire = Wire(part=3, memory=4, joined_late=10).connect()
        for _ in range(recovery.ATTEMPTS - 1):
            wire.ring()
        wire.answer()
        wire.publish([10], lost=True)
        wire.publish([11])
        wire.answer()
        assert wire.held == set(range(6, 12))
        assert wire.alarm_in == stream_module.RETRY_AFTER

    def test_a_batch_that_cannot_be_read_is_made_good_by_one(self) -> None:
        wire = live(part=3)
        wire.publish([1])
        wire.publisher.publish([2])
        wire.stream.live([TOPIC, (1).to_bytes(8, "big"), b"\xc1"])
        assert (wire.stream.state, wire.alarm_in) == (State.UNSURE, stream_module.RETRY_AFTER)
        wire.ring()
        wire.answer()
        assert (wire.stream.state, wire.held) == (State.LIVE, {1, 2})

    def test_one_may_be_had_of_a_publisher_that_had_nothing_to_tell_before_its_first_batch(self) -> None:
        """Who had published nothing gave no snapshot. That its first batch could not be read must not be the end."""
        wire = live(part=3)
        wire.publisher.publish([1])
        wire.stream.live([TOPIC, bytes(8), b"\xc1"])
        wire.publish([2])
        assert (wire.stream.state, wire.alarm_in) == (State.UNSURE, stream_module.RETRY_AFTER)
        wire.ring()
        wire.answer()
        assert (wire.stream.state, wire.held) == (State.LIVE, {1, 2})

    def test_a_restart_amid_its_parts_ends_it(self) -> None:
        wire = Wire(part=3, joined_late=10).connect()
        wire.answer(limit=2, end=False)
        wire.publisher.restart()
        wire.publish([100])
        assert (wire.question, wire.held) == (None, {100}), "from the first batch on, nothing is missing"
        assert wire.stream.state is State.LIVE

    def test_parts_of_two_lives_are_not_one_snapshot(self) -> None:
        wire = Wire(part=3, joined_late=10).connect()
        wire.answer(limit=2, end=False)
        wire.publisher.restart()
        for n in range(100, 110):
            wire.publish([n], lost=True)
        wire.stream.replay(wire.publisher.answer(SNAPSHOT)[2])
        assert wire.question == SNAPSHOT
        wire.answer()
        assert wire.held == set(range(100, 110))
        assert wire.stream.counters.restarts == 1

    def test_a_reconnection_amid_its_parts_begins_it_anew(self) -> None:
        wire = Wire(part=3, joined_late=10).connect()
        wire.answer(limit=2, end=False)
        wire.stream.disconnected("the connection broke")
        wire.connect()
        assert wire.question == SNAPSHOT
        wire.answer()
        assert (wire.stream.state, wire.held) == (State.LIVE, set(range(10)))

    def test_a_topic_of_another_model_amid_its_parts_begins_it_anew(self) -> None:
        wire = Wire(part=3, joined_late=10).connect()
        wire.stream.replay([b"", b"kv@pod@other", *wire.publisher.answer(SNAPSHOT)[0][2:]])
        wire.publish([10])
        assert wire.question == SNAPSHOT
        wire.answer()
        assert wire.held == set(range(11))
        assert wire.stream.residency.model == "model"

    def test_its_topic_counts_unless_a_later_one_has_been_heard(self) -> None:
        """An answer may have been on its way when the publisher was given another name."""
        wire = Wire(part=30, joined_late=3).connect()
        answer = [[b"", b"kv@pod@other", *frames[2:]] for frames in wire.publisher.answer(SNAPSHOT)]
        wire.stream.replay(answer[0])
        wire.stream.replay(END)
        assert wire.stream.residency.model == "other"
        wire = Wire(part=30, joined_late=3).connect()
        wire.publish([3])
        for frames in [*answer, END]:
            wire.stream.replay(frames)
        assert wire.stream.residency.model == "model"

    def test_after_one_of_another_topic_the_next_message_says_which_it_is(self) -> None:
        wire = live(part=30)
        wire.publish([1])
        wire.stream.disconnected("the connection broke")
        wire.publisher.restart()
        wire.publish([100], lost=True)
        wire.connect()
        wire.answer()  # by another life than the one that was asked about
        assert wire.question == SNAPSHOT
        wire.stream.replay([b"", b"kv@pod@other", *wire.publisher.answer(SNAPSHOT)[0][2:]])
        wire.stream.replay(END)
        assert wire.stream.residency.model == "other"
        wire.publish([101])
        wire.answer()
        assert (wire.stream.residency.model, wire.held, wire.stream.state) == ("model", {100, 101}, State.LIVE)

    def test_what_an_engine_told_of_itself_is_known_of_a_copy_before_its_first_batch(self) -> None:
        wire = Wire(joined_late=2, memory=2).connect()
        wire.answer()
        wire.publisher.publish([2])
        wire.publisher.batches[2] = payload([2], notes={"tiers": {"CPU": {"chunk": 4}}})
        wire.hear(2)
        copies = len(wire.opened)
        wire.publish([3], lost=True)
        wire.publish([4], lost=True)
        wire.publish([5])
        wire.answer()
        assert len(wire.opened) > copies
        assert [held.told_tiers and held.told_tiers.cpu for held in wire.opened[copies:]] == [Tier(chunk=4)]

    def test_tiers_are_known_before_its_blocks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        known: list[Tiers | None] = []
        monkeypatch.setattr(Held, "apply", lambda self, events: known.append(self.told_tiers))
        wire = Wire(part=3, joined_late=2).connect()
        notes = wire.publisher.notes(tiers={"CPU": {"chunk": 4}}, snapshot={"part": 1, "parts": 1})
        wire.stream.replay([b"", TOPIC, bytes(8), payload([1], notes=notes)])
        assert known == [Tiers(cpu=Tier(chunk=4))]

    def test_a_fault_of_ours_in_a_part_is_contained(self, monkeypatch: pytest.MonkeyPatch) -> None:
        wire = Wire(part=3, joined_late=4).connect()
        with monkeypatch.context() as patched:
            patched.setattr(Held, "apply", lambda self, events: 1 / 0)
            wire.answer()
        assert wire.question == SNAPSHOT
        wire.answer()
        assert wire.held == set(range(4))


class TestSilence:
    def wire(self) -> Wire:
        wire = live(part=3, heartbeat=2.0)
        wire.publish([1])
        return wire

    def wait(self, wire: Wire, seconds: float) -> None:
        wire.now += seconds
        wire.stream.tick()

    def test_heartbeats_that_do_not_come_make_it_unsure_until_one_comes(self) -> None:
        wire = self.wire()
        self.wait(wire, 7.0)
        assert wire.stream.state is State.LIVE
        self.wait(wire, 0.1)
        assert (wire.stream.state, wire.stream.reason) == (State.UNSURE, "silent")
        wire.publish()
        assert (wire.stream.state, wire.held) == (State.LIVE, {1})

    def test_a_heartbeat_shows_what_was_lost_before_it(self) -> None:
        wire = self.wire()
        wire.publish([2], lost=True)
        wire.publish()
        assert wire.stream.state is State.SYNCING
        wire.answer()
        assert (wire.stream.state, wire.held) == (State.LIVE, {1, 2})

    def test_a_heartbeat_resolves_a_reconnection(self) -> None:
        wire = Wire(replay=False, part=3, heartbeat=2.0).connect()
        wire.publish([1])
        wire.stream.disconnected("the connection broke")
        wire.connect()
        assert wire.stream.reason == "reconnected; nothing heard since"
        wire.publish()
        assert (wire.stream.state, wire.held) == (State.LIVE, {1})

    def test_a_new_connection_has_its_time_too(self) -> None:
        wire = self.wire()
        wire.stream.disconnected("the connection broke")
        self.wait(wire, 100.0)
        assert wire.stream.state is State.LOST
        wire.connect().answer()
        self.wait(wire, 7.0)
        assert wire.stream.reason == "waiting for the first heartbeat"
        self.wait(wire, 0.1)
        assert wire.stream.reason == "silent"

    def test_before_the_first_heartbeat_of_a_connection_something_may_be_passing_us_by(self) -> None:
        """The subscription may reach the publisher later than the question for a snapshot did."""
        wire = Wire(part=3, joined_late=4, heartbeat=2.0)
        wire.now = 10.0
        wire.connect().answer()
        assert (wire.stream.state, wire.held) == (State.SYNCING, {0, 1, 2, 3})
        wire.publish(removed=[0], lost=True)
        wire.publish()
        wire.answer()
        assert (wire.stream.state, wire.held) == (State.LIVE, {1, 2, 3})

    def test_a_promise_heard_of_late_is_broken_already(self) -> None:
        wire = Wire(part=3).connect()
        wire.publish([1])
        wire.publisher.heartbeat = 2.0
        wire.now = 100.0
        wire.answer()
        assert (wire.stream.state, wire.stream.reason, wire.held) == (State.UNSURE, "silent", {1})

    def test_who_promised_nothing_may_be_silent(self) -> None:
        wire = live()
        wire.publish([1])
        self.wait(wire, 1e6)
        assert wire.stream.state is State.LIVE


class TestStanding:
    """In a store that others share."""

    def standings(self, wire: Wire) -> list[Standing]:
        """Of the picture, and of the copies that are being made."""
        return [residency.standing for residency in wire.opened if not residency.closed]

    def test_a_copy_that_is_being_made_has_none_until_it_has_taken_its_place(self) -> None:
        wire = Wire(part=3, joined_late=10)
        assert self.standings(wire) == [Standing.DOUBTED]
        wire.connect().answer(limit=2, end=False)
        assert self.standings(wire) == [Standing.CURRENT, Standing.DRAFT]
        wire.answer(end=False)
        wire.answer()
        assert self.standings(wire) == [Standing.CURRENT]

    def test_a_copy_that_comes_to_nothing_never_had_any(self) -> None:
        wire = Wire(part=3, joined_late=10).connect()
        wire.answer(limit=2, end=False)
        wire.stream.disconnected("the connection broke")
        assert self.standings(wire) == [Standing.DOUBTED]
        assert wire.opened[-1].standing is Standing.DRAFT

    def test_without_a_connection_and_before_anything_is_heard_over_a_new_one_it_is_doubted(self) -> None:
        wire = Wire(replay=False).connect()
        wire.publish([1])
        assert self.standings(wire) == [Standing.CURRENT]
        wire.stream.disconnected("the connection broke")
        assert self.standings(wire) == [Standing.DOUBTED]
        wire.connect()
        assert self.standings(wire) == [Standing.DOUBTED]
        wire.publish([2])
        assert self.standings(wire) == [Standing.CURRENT]

    def test_while_a_gap_is_repaired_the_picture_is_older_than_what_has_come(self) -> None:
        wire = live()
        wire.publish([1])
        wire.publish([2], lost=True)
        wire.publish([3])
        assert self.standings(wire) == [Standing.DOUBTED]
        wire.answer()
        assert self.standings(wire) == [Standing.CURRENT]

    def test_a_picture_that_is_only_incomplete_is_current(self) -> None:
        wire = Wire(replay=False, joined_late=3).connect()
        wire.publish([3])
        assert (wire.stream.state, self.standings(wire)) == (State.UNSURE, [Standing.CURRENT])

    def test_silence_and_a_connection_that_no_heartbeat_has_come_over_make_it_doubted(self) -> None:
        wire = Wire(part=3, joined_late=4, heartbeat=2.0)
        wire.now = 10.0
        wire.connect().answer()
        assert self.standings(wire) == [Standing.DOUBTED]
        wire.publish()
        assert self.standings(wire) == [Standing.CURRENT]
        wire.now += 7.1
        wire.stream.tick()
        assert self.standings(wire) == [Standing.DOUBTED]

    def test_a_backlog_makes_it_doubted(self) -> None:
        wire = live()
        for took, standing in ((0.25, Standing.CURRENT), (5.0, Standing.DOUBTED), (0.25, Standing.CURRENT)):
            stamp, seq = 1.7e9 + wire.now, wire.stream.last_seq + 1
            wire.now += took
            wire.stream.live([TOPIC, seq.to_bytes(8, "big"), msgspec.msgpack.encode([stamp, [], 0])])
            assert self.standings(wire) == [standing]


class TestWhatIsTold:
    def test_load_is_the_last_told_and_tiers_add_up(self) -> None:
        wire = live(part=3)

        def hear(seq: int, **notes: object) -> None:
            wire.now += 1
            wire.stream.live([TOPIC, seq.to_bytes(8, "big"), payload(notes=wire.publisher.notes(**notes))])

        hear(0, load={"waiting": 1, "running": 2, "kv_usage": 0.5}, tiers={"GPU": {"capacity": 9, "held": 1}})
        hear(1, load={"waiting": 3, "running": 4, "kv_usage": 0.25})
        hear(2, tiers={"CPU": {"held": 5, "chunk": 2}})
        told = wire.stream.told
        assert (told.load, told.load_at) == (Load(3, 4, 0.25), 2.0)
        assert told.tiers == Tiers(Tier(9, 1), Tier(held=5, chunk=2))
        residency = wire.stream.residency
        assert isinstance(residency, Held)
        assert residency.told_tiers == Tiers(cpu=Tier(held=5, chunk=2))

    def test_a_replayed_batch_tells_nothing_of_the_load_by_now(self) -> None:
        wire = Wire(joined_late=2).connect()
        wire.publisher.batches[0] = payload(notes={"load": {"waiting": 1, "running": 2, "kv_usage": 0.5}})
        wire.answer()
        assert wire.stream.told.load is None

    def test_notes_that_cannot_be_read_are_counted_and_the_batch_counts(self) -> None:
        wire = live(part=3)
        wire.publish([1])
        odd = wire.publisher.notes(load={"waiting": -1, "running": 0, "kv_usage": 0.0})
        wire.stream.live([TOPIC, (1).to_bytes(8, "big"), payload([2], notes=odd)])
        assert (wire.stream.state, wire.held) == (State.LIVE, {1, 2})
        assert wire.stream.counters.skipped == {"bad_notes": 1}


class TestConnection:
    def test_a_broken_connection_is_lost_and_keeps_what_is_known(self) -> None:
        wire = live()
        wire.publish([1])
        wire.stream.disconnected("the connection broke")
        assert (wire.stream.state, wire.stream.reason) == (State.LOST, "the connection broke")
        assert wire.held == {1}

    def test_after_a_reconnection_missed_batches_are_fetched_unasked(self) -> None:
        wire = live()
        wire.publish([1])
        wire.stream.disconnected("the connection broke")
        wire.publish([2], lost=True)
        wire.connect()
        wire.answer()
        assert wire.held == {1, 2}
        assert wire.stream.state is State.LIVE
        assert wire.stream.counters.reconnections == 1

    def test_a_restart_is_found_out_at_the_reconnection(self) -> None:
        wire = live()
        wire.publish([1])
        wire.stream.disconnected("the connection broke")
        wire.publisher.restart()
        wire.connect()
        wire.answer()
        assert wire.held == set()

    def test_without_a_replay_socket_the_next_number_proves_that_nothing_was_missed(self) -> None:
        wire = Wire(replay=False).connect()
        wire.publish([1])
        wire.stream.disconnected("the connection broke")
        wire.connect()
        assert (wire.stream.state, wire.held) == (State.UNSURE, {1})
        wire.publish([2])
        assert (wire.stream.state, wire.held) == (State.LIVE, {1, 2})

    def test_without_a_replay_socket_the_last_number_again_is_a_restart(self) -> None:
        wire = Wire(replay=False).connect()
        wire.publish([1])
        wire.stream.disconnected("the connection broke")
        wire.publisher.restart()
        wire.connect()
        wire.publish([2])
        assert wire.held == {2}


class TestTrust:
    """What a scorer is to make of what is held."""

    def wait(self, wire: Wire, seconds: float) -> None:
        wire.now += seconds
        wire.stream.tick()

    def test_a_live_picture_is_worth_all(self) -> None:
        wire = Wire()
        assert wire.stream.trust == 1.0, "nothing is held, so nothing is doubtful"
        wire.connect().answer()
        wire.publish([1])
        self.wait(wire, 1e6)
        assert wire.stream.trust == 1.0

    def test_a_repair_costs_none_of_it(self) -> None:
        wire = live()
        wire.publish([1])
        wire.publish([2], lost=True)
        wire.publish([3])
        assert (wire.stream.state, wire.stream.trust) == (State.SYNCING, 1.0)

    def test_there_may_be_more_than_what_was_learned_since_a_loss_but_less_of_it_with_time(self) -> None:
        wire = Wire(replay=False).connect()
        wire.publish([1])
        wire.now = 100.0
        wire.publish([2], lost=True)
        wire.publish([3])
        assert (wire.stream.state, wire.stream.trust) == (State.UNSURE, 0.5)
        self.wait(wire, 60.0)
        assert wire.stream.trust == 0.75
        wire.publish([4])
        assert wire.stream.trust == 0.75, "more of the same is no news"
        self.wait(wire, 60.0)
        assert wire.stream.trust == 0.875
        wire.publish([5], lost=True)
        wire.publish([6])
        assert wire.stream.trust == 0.5, "lost again"

    def test_one_who_joined_late_is_incomplete_while_it_learns(self) -> None:
        wire = Wire(joined_late=3).connect()
        wire.publish([3])
        assert (wire.stream.state, wire.stream.trust) == (State.SYNCING, 0.5)
        wire.answer()
        assert (wire.stream.state, wire.stream.trust) == (State.LIVE, 1.0)

    def test_a_silent_publishers_picture_loses_its_worth(self) -> None:
        wire = live(part=3, heartbeat=2.0)
        wire.publish([1])
        self.wait(wire, 7.1)
        assert (wire.stream.reason, wire.stream.trust) == ("silent", 0.5)
        self.wait(wire, 10.0)
        assert wire.stream.trust == pytest.approx(0.25)
        wire.publish()
        assert (wire.stream.state, wire.stream.trust) == (State.LIVE, 1.0)

    def test_a_lost_one_is_worth_nothing_and_after_a_reconnection_little_until_something_is_heard(self) -> None:
        wire = Wire(replay=False).connect()
        wire.publish([1])
        wire.stream.disconnected("the connection broke")
        self.wait(wire, 10.0)
        assert (wire.stream.state, wire.stream.trust) == (State.LOST, 0.0)
        wire.connect()
        assert (wire.stream.state, wire.stream.trust) == (State.UNSURE, pytest.approx(0.25)), (
            "outdated since the connection broke"
        )
        wire.stream.disconnected("the connection broke")
        wire.now += 10.0
        wire.connect()
        assert wire.stream.trust == pytest.approx(0.125), "and more so with every second"
        wire.publish([2])
        assert (wire.stream.state, wire.stream.trust) == (State.LIVE, 1.0)

    def test_what_the_publishers_memory_confirms_is_worth_all_again(self) -> None:
        wire = live()
        wire.publish([1])
        wire.stream.disconnected("the connection broke")
        wire.connect()
        assert (wire.stream.state, wire.stream.trust) == (State.SYNCING, 0.5)
        wire.answer()
        assert (wire.stream.state, wire.stream.trust) == (State.LIVE, 1.0)

    def test_one_that_never_connected_is_worth_nothing(self) -> None:
        wire = Wire()
        wire.stream.disconnected("cannot connect")
        assert wire.stream.trust == 0.0
        wire.connect()
        assert wire.stream.trust == 1.0


class TestLag:
    def test_batches_behind_a_gap_lag_until_it_is_repaired(self) -> None:
        wire = live()
        wire.publish([1])
        assert wire.stream.lag_batches == 0
        for n in (2, 3):
            wire.publish([n], lost=True)
        wire.publish([4])
        assert wire.stream.lag_batches == 3
        wire.publish([5])
        assert wire.stream.lag_batches == 4
        wire.answer()
        assert wire.stream.lag_batches == 0

    def test_what_a_rebuild_has_learned_is_visible_only_at_its_end(self) -> None:
        wire = Wire(joined_late=5).connect()
        wire.answer(limit=3, end=False)
        assert wire.stream.lag_batches == 3
        wire.answer()
        assert wire.stream.lag_batches == 0

    def test_live_batches_do_not_lag_during_a_rebuild(self) -> None:
        wire = Wire(joined_late=5).connect()
        wire.publish([5])
        assert wire.stream.lag_batches == 0

    def test_a_gap_that_was_given_up_is_no_lag(self) -> None:
        wire = Wire(replay=False).connect()
        wire.publish([1])
        wire.publish([2], lost=True)
        wire.publish([3])
        assert wire.stream.lag_batches == 0


class TestDelay:
    def hear(self, wire: Wire, stamp: float, took: float) -> float:
        wire.now += took
        seq = wire.stream.last_seq + 1
        wire.stream.live([TOPIC, seq.to_bytes(8, "big"), msgspec.msgpack.encode([stamp, [], 0])])
        return wire.stream.delay

    def test_it_is_what_a_message_took_more_than_the_fastest(self) -> None:
        wire = live()
        clocks = 1.7e9
        assert [self.hear(wire, clocks + wire.now, took) for took in (0.25, 2.0, 0.25, 0.5)] == [0.0, 1.75, 0.0, 0.25]

    def test_the_picture_is_unsure_while_a_backlog_comes_in(self) -> None:
        """A link that stood still delivers what was sent long ago: what came after it may have removed all that."""
        wire = live()
        self.hear(wire, 1.7e9 + wire.now, 0.25)
        assert wire.stream.state is State.LIVE
        self.hear(wire, 1.7e9 + wire.now, 5.0)
        assert (wire.stream.state, wire.stream.reason) == (State.UNSURE, "events come late")
        assert wire.stream.trust < 1
        self.hear(wire, 1.7e9 + wire.now, 0.25)
        assert (wire.stream.state, wire.stream.trust) == (State.LIVE, 1.0)

    def test_a_backlog_is_over_when_nothing_more_comes(self) -> None:
        wire = live()
        self.hear(wire, 1.7e9 + wire.now, 0.25)
        self.hear(wire, 1.7e9 + wire.now, 5.0)
        wire.now += 0.5
        wire.stream.tick()
        assert wire.stream.state is State.UNSURE
        wire.now += 0.5
        wire.stream.tick()
        assert wire.stream.state is State.LIVE

    def test_a_new_connection_may_be_to_another_clock(self) -> None:
        wire = live()
        self.hear(wire, 1.7e9 + wire.now, 0.25)
        wire.stream.disconnected("the connection broke")
        wire.connect()
        assert self.hear(wire, 5.0, 1.0) == 0.0

    def test_clocks_that_drift_apart_do_not_add_up_to_a_delay(self) -> None:
        wire = live()
        for _ in range(1000):
            delay = self.hear(wire, 1.7e9 + wire.now * 0.999, 10.0)
        assert delay < 1.0

    def test_a_clock_that_is_set_counts_as_delay_for_some_minutes_only(self) -> None:
        wire = live()
        self.hear(wire, 1.7e9 + wire.now, 0.25)
        assert self.hear(wire, 1.7e9 - 3600 + wire.now, 0.25) == 3600
        for _ in range(20):
            delay = self.hear(wire, 1.7e9 - 3600 + wire.now, 60.0)
        assert delay == 0.0

    def test_minutes_without_messages_leave_nothing_to_compare_with(self) -> None:
        wire = live()
        self.hear(wire, 1.7e9 + wire.now, 0.25)
        wire.now += 10_000.0
        assert self.hear(wire, 1.7e9 + wire.now - 7.0, 0.25) == 0.0

    @pytest.mark.parametrize("stamp", [float("nan"), float("inf"), float("-inf"), -1.7e9, 0.0, 1e300, 2.0**40])
    def test_a_timestamp_that_is_none_says_nothing(self, stamp: float) -> None:
        wire = live()
        clocks = 1.7e9
        self.hear(wire, clocks + wire.now, 0.25)
        self.hear(wire, clocks + wire.now, 2.25)
        assert self.hear(wire, stamp, 1.0) == 2.0, "as before"
        assert self.hear(wire, clocks + wire.now, 0.75) == 0.5
        assert wire.stream.state is State.LIVE


class TestAllowance:
    """What waits for missing batches takes memory, of all streams together only so much."""

    def wires(self, blocks: int, count: int = 2) -> list[Wire]:
        shared = recovery.Allowance(blocks * recovery.MESSAGE_BYTES)
        wires = [Wire().connect() for _ in range(count)]
        for wire in wires:
            wire.stream.allowance = shared
            wire.answer()
            wire.publish([1])
        return wires

    def test_a_stream_is_refused_what_others_have_taken(self) -> None:
        first, second = self.wires(6)
        for n in range(2, 6):
            first.publish([n], lost=n == 2)
        assert first.stream.allowance.taken > 0
        for n in range(2, 6):
            second.publish([n], lost=n == 2)
        assert (first.held, first.stream.state) == ({1}, State.SYNCING), "it goes on waiting"
        assert second.held == {3, 4, 5}, "given up: live batches flow"
        first.answer()
        assert first.held == {1, 2, 3, 4, 5}

    def test_all_of_it_is_given_back_however_a_recovery_ends(self) -> None:
        wires = self.wires(1000, count=5)
        allowance = wires[0].stream.allowance
        repaired, given_up, restarted, reconnected, closed = wires
        for wire in wires:
            wire.publish([2], lost=True)
            wire.publish([3])
        assert allowance.taken > 5 * recovery.MESSAGE_BYTES
        repaired.answer()
        given_up.ring()
        given_up.answer()
        restarted.publisher.restart()
        restarted.publish([100])
        reconnected.connect()
        closed.stream.close()
        assert given_up.held == {1, 2, 3}
        assert allowance.taken == 0

    def test_small_batches_count_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        (wire,) = self.wires(10, count=1)
        for n in range(2, 30):
            wire.publish([n], lost=n == 2)
        assert wire.stream.allowance.taken <= 10 * recovery.MESSAGE_BYTES


class TestBadInput:
    def test_malformed_messages_are_counted_and_skipped_alone(self) -> None:
        wire = live()
        wire.publish([1])
        for frames in ([], [b"t"], [b"t", b"\0\0\1", b"p"], [b"t", b"\0" * 8, b"p", b"x"]):
            wire.stream.live(frames)
        wire.publish([2])
        assert wire.stream.counters.malformed == 4
        assert wire.held == {1, 2}
        assert wire.stream.state is State.LIVE

    def test_a_batch_that_cannot_be_read_may_have_removed_anything(self) -> None:
        wire = live()
        wire.publish([1])
        wire.stream.live([b"kv@pod@model", (1).to_bytes(8, "big"), b"\xc1"])
        assert wire.held == set()
        assert wire.stream.state is State.UNSURE
        assert "batch 1 cannot be read" in wire.stream.reason
        assert wire.stream.counters.unreadable == 1

    def test_a_bad_event_is_named_and_the_rest_of_its_batch_counts(self) -> None:
        wire = live()
        good = {"type": "BlockRemoved", "block_hashes": [1]}
        wire.publish([1, 2])
        odd = msgspec.msgpack.encode([0.0, [{"type": "NewThing"}, good], 0])
        wire.stream.live([b"kv@pod@model", (1).to_bytes(8, "big"), odd])
        assert wire.held == {2}
        assert wire.stream.counters.skipped == {"unknown_type": 1}

    def test_a_fault_of_ours_is_contained(self, monkeypatch: pytest.MonkeyPatch) -> None:
        wire = live()
        wire.publish([1])
        monkeypatch.setattr(Held, "apply", lambda self, events: 1 / 0)
        wire.publish([2])
        assert wire.held == set()
        assert wire.stream.state is State.UNSURE

    @pytest.mark.parametrize("replay", [True, False])
    @pytest.mark.parametrize("part", [0, 4])
    @pytest.mark.parametrize("number", [2**40, 2**63, 2**64 - 1])
    def test_a_number_that_is_far_too_high_is_got_over(self, replay: bool, part: int, number: int) -> None:
        wire = Wire(replay=replay, part=part).connect()
        if replay:
            wire.answer()
        wire.publish([1])
        wire.publish([2])
        wire.stream.live([TOPIC, number.to_bytes(8, "big"), payload([7], notes=wire.publisher.notes())])
        assert wire.stream.state is not State.LIVE
        for n in range(3, 9):
            wire.publish([n], [n - 2])
            if wire.question is not None:
                wire.answer()
            if wire.alarm_in is not None:
                wire.ring()
            assert wire.stream.state is not State.LIVE or wire.held == wire.publisher.truth[-1]
            assert wire.held - {7} <= wire.publisher.truth[-1]
        if replay:
            wire.answer()
            assert wire.stream.state is State.LIVE
        assert wire.held == wire.publisher.truth[-1]

    def test_junk_from_the_replay_socket_is_counted_and_the_answer_goes_on(self) -> None:
        wire = Wire(joined_late=3).connect()
        wire.stream.replay(END)  # no snapshot
        for junk in ([], [b""], [b"", b"x"], [b"", b"t", b"\0\0", b"p"], [b"", b"a", b"b", b"c", bytes(8), b"p"]):
            wire.stream.replay(junk)
        wire.answer()
        assert (wire.stream.state, wire.held, wire.stream.counters.malformed) == (State.LIVE, {0, 1, 2}, 5)

    def test_extreme_numbers_neither_raise_nor_last(self) -> None:
        wire = live()
        wire.publish([1])
        wire.stream.live([b"kv@pod@model", b"\xff" * 8, payload([2])])
        wire.stream.replay([b"", b"", b"\xff" * 8, payload([3])])
        wire.publish([4])
        wire.answer()
        assert wire.held == {1, 4}

    def test_late_replies_and_alarms_are_ignored(self) -> None:
        wire = live()
        wire.publish([1])
        wire.stream.replay([b"", *wire.publisher.frames(0)])
        wire.stream.alarm()
        assert wire.held == {1}


def test_closing_ends_a_recovery_and_closes_every_residency() -> None:
    wire = Wire(joined_late=3).connect()
    wire.stream.close()
    assert wire.question is None
    assert wire.alarm_in is None
    assert all(residency.closed for residency in wire.opened)


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), st.booleans(), st.integers(0, 7), st.booleans()),
        st.tuples(st.just("restart"), st.booleans(), st.integers(0, 0), st.booleans()),
        st.tuples(st.just("reconnect"), st.booleans(), st.integers(0, 0), st.booleans()),
        st.tuples(st.just("answer"), st.booleans(), st.integers(0, 6), st.booleans()),
        st.tuples(st.just("ring"), st.booleans(), st.integers(0, 0), st.booleans()),
        st.tuples(st.just("wait"), st.booleans(), st.integers(0, 7), st.booleans()),
    ),
    max_size=60,
)


@pytest.mark.parametrize(
    ("replay", "part", "heartbeat"), [(True, 0, 0), (False, 0, 0), (True, 2, 0), (True, 2, 1), (False, 2, 1)]
)
@given(operations=OPERATIONS, memory=st.sampled_from([1, 3, 10, 10_000]), joined_late=st.integers(0, 5))
@settings(max_examples=100, deadline=None)
def test_never_more_than_the_engine_held_and_in_the_end_all_of_it(
    replay: bool,
    part: int,
    heartbeat: float,
    operations: list[tuple[str, bool, int, bool]],
    memory: int,
    joined_late: int,
) -> None:
    """After any history: what is held is part of what the engine held at the batch it rests on, and all of it while the
    state is live; and where the publisher gives snapshots or remembers everything, a working replay socket makes it so
    in the end."""
    wire = Wire(replay=replay, memory=memory, joined_late=joined_late, part=part, heartbeat=heartbeat).connect()
    truth = {0: wire.publisher.truth}
    last_of_old_life = None

    def check() -> None:
        last = wire.stream.last_seq
        once = [life[last] for life in truth.values() if 0 <= last < len(life)]
        assert not wire.held or any(wire.held <= held for held in once)
        if wire.stream.state is State.LIVE:
            assert wire.held in once or (not wire.held and last < 0)

    for operation, flag, number, other in operations:
        if operation == "publish":
            if not replay and not part and not flag and last_of_old_life is not None:
                # without a replay socket a new life first heard at the very next number cannot be told apart, unless
                # it names itself
                assume(len(wire.publisher.batches) != last_of_old_life + 1)
                last_of_old_life = None
            wire.publish(*(([number], []) if other else ([], [number])), lost=flag)
        elif operation == "answer":
            wire.answer(topic=flag, end=other, limit=number if number else None)
        elif operation == "ring" and wire.alarm_in is not None:
            wire.ring()
        elif operation == "wait":
            wire.now += number
            wire.stream.tick()
        elif operation in ("restart", "reconnect"):
            wire.stream.disconnected("the connection broke")
            if operation == "restart":
                last_of_old_life = wire.stream.last_seq
                wire.publisher.restart()
                truth[wire.publisher.life] = wire.publisher.truth
            wire.question = None
            wire.connect()
        check()

    if replay and (part or memory == 10_000):
        wire.publish([8])
        for _ in range(12):
            wire.answer()
            check()
            if wire.alarm_in is not None:
                wire.ring()
        wire.publish([9])
        assert wire.held == wire.publisher.truth[-1]
        assert wire.stream.state is State.LIVE
