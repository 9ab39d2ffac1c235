"""One publisher's stream of batches: keeps a residency right while batches are lost, repeated, or come from a new life.

Sans-IO: frames and alarms come in, the residency changes, and what is wanted of the outside (`Rim`) is asking the
publisher's replay socket, hanging up, and an alarm clock. The rules, in the order of what they protect:

- Never predict too much. A loss that cannot be repaired may have held removals, so everything held is forgotten; a
  restart forgets likewise; a batch that cannot be read counts as lost.
- Live batches never wait for a dead replay socket. A *repair* (the few batches of a gap) holds them back for a moment,
  since a removal must not overtake its store; when the moment has passed, the gap counts as lost and they flow.
  A *rebuild* is made beside the visible copy and takes its place when it has caught up, so it holds nothing back and is
  never seen half done. It begins with a snapshot of what the publisher holds; a publisher that gives none is asked for
  all the batches that it remembers. Either way it goes on like a repair.
- A new life of the publisher is certain where batches name the instance they come from. Where they do not, numbers that
  go back tell, and a repair starts at the last batch we have, not after it: if the publisher remembers another batch
  under that number, it is a new life whose numbers have already passed the old ones.
- Silence says nothing only of a publisher that promised no heartbeats. Where they do not come, the picture is unsure;
  and until the first has come over a new connection, what is published may be passing us by. While messages come late,
  there is a backlog of them, and the picture is unsure until it is read. As long as it may be outdated, what it shows
  of stores that others share counts for nobody (`Residency.standing`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from indexer.counters import Counters
from indexer.doubts import Delay, Doubts, State
from indexer.frames import SNAPSHOT, Message, ReplayEnd, live_message, replay_message
from indexer.pool import Standing
from indexer.recovery import Allowance, Copy, Parts, Rebuild, Repair
from indexer.residency import Residency
from indexer.sequence import Gap, SequenceTracker, Verdict
from indexer.told import Told
from indexer.wire import BadPayload, Batch, decode_batch, parse_topic

__all__ = ["Counters", "Rim", "State", "Stream"]

logger = logging.getLogger(__name__)

REPAIR_PATIENCE = 0.5
"""Seconds until the first batch of a repair; vLLM answers within about 0.1."""
REPAIR_ALARMS = 4
"""Patiences after which a repair is given up even though it moves: live batches wait for it."""
REBUILD_PATIENCE = 2.0
"""Seconds without an answer after which a rebuild asks again."""
FIRST_RETRY = 2.0
"""Seconds from a failed rebuild to the next; twice as many after each more that fails."""
RETRY_AFTER = 30.0
"""Seconds to the next, at most."""
MANY = 5
"""Failures after which it is that long."""
_STEADY = (State.LIVE, State.UNSURE)


class Rim(Protocol):
    """The outside of a stream."""

    def ask(self, start: int, *, urgent: bool) -> None:
        """Ask the replay socket for the batches from `start` on (or for a `SNAPSHOT`), on a fresh connection, and call
        `Stream.asked` once that is done: at once if `urgent`, else when it is this stream's turn."""

    def hang_up(self) -> None:
        """Nothing more is wanted of the replay socket."""

    def alarm(self, seconds: float | None) -> None:
        """Call `Stream.alarm` in `seconds`, instead of any time set before. None = not at all."""


class Stream:
    """`residency` is the visible one; a rebuild replaces it by another, so ask for it anew each time."""

    def __init__(
        self, publisher: Callable[[], Residency], rim: Rim, *, replayable: bool, clock: Callable[[], float]
    ) -> None:
        self._publisher = publisher
        self._rim = rim
        self._replayable = replayable
        self._clock = clock
        self._copy = Copy(publisher())
        self.residency = self._copy.residency
        self.residency.standing = Standing.DOUBTED
        self._recovery: Repair | Rebuild | None = None
        self._topic: bytes | None = None
        self._model = ""
        self._history_due = False
        self._failures = 0
        """Rebuilds in a row that failed."""
        self._late = False
        """Messages of a backlog are coming in."""
        self._settled_on: object = None
        """`_grounds` of the present state."""
        self._snapshots = True
        """May the publisher give snapshots? Until it has answered that it does not."""
        self.instance: str | None = None
        """Id of the engine process all copies are pictures of. "" = it does not name itself; None = nothing heard."""
        self._former_instance: str | None = None
        self.told = Told()
        self.allowance = Allowance()
        """For held batches; to be shared with the other streams of the process, before anything happens."""
        self.counters = Counters()
        self._delay = Delay()
        self._doubts = Doubts()
        self.state = State.SYNCING
        self.reason = "connecting"
        self.since = clock()
        """When `state` began."""
        self.trust = 1.0
        """What the picture is worth, compared with a live one: 0 to 1."""
        self.judged: Callable[[], None] = lambda: None
        """Called when `state` or `trust` have changed; for who keeps what follows from them."""

    def __repr__(self) -> str:
        return f"<Stream {self.state.value} {self._copy.numbers!r}>"

    @property
    def last_seq(self) -> int:
        """Number of the last batch that the residency reflects; -1 = none."""
        return self._copy.numbers.last

    @property
    def is_connected(self) -> bool:
        return self._doubts.is_connected

    @property
    def heard_at(self) -> float:
        """When the last live message came; 0 = never."""
        return self._doubts.heard_at

    @property
    def lag_batches(self) -> int:
        """Batches behind `last_seq` that are known to exist: missing ones, and those that wait for them."""
        return max(0, self._recovery.newest - self.last_seq) if self._recovery is not None else 0

    @property
    def delay(self) -> float:
        """Seconds that the last live message took, more than the fastest one of the last minutes (`Delay`)."""
        return self._delay.seconds

    # -- the connection ---------------------------------------------------------------------------------------------

    def connected(self) -> None:
        self.counters.reconnections += self._doubts.has_been_connected
        knows_something = self._copy.numbers.since is not None
        self._doubts.connected(self._clock(), knows_something=knows_something)
        self._delay = Delay()
        self._snapshots = True
        self._end_recovery()
        if not knows_something:
            self._rebuild()
        else:
            self._copy.numbers.doubt()
            if self._replayable:
                self._repair()
        self._settle()

    def disconnected(self, why: str) -> None:
        """Whoever answers from now on may be in another life than what was heard. A new connection begins anew."""
        self._doubts.disconnected(why, self._clock())
        self._end_recovery()
        self._settle()

    def close(self) -> None:
        self._end_recovery()
        self._rim.alarm(None)
        self._copy.residency.close()

    # -- live messages ----------------------------------------------------------------------------------------------

    def live(self, frames: Sequence[bytes]) -> None:
        message = live_message(frames)
        if message is None:
            self.counters.malformed += 1
            return
        self.counters.messages += 1
        batch, now = self._read(message), self._clock()
        if message.seq != self._copy.numbers.last + 1 and self._is_old(message, batch):
            self.counters.duplicates += 1
            return
        if message.topic != self._topic:
            self._rename(message.topic)
        if isinstance(batch, Batch) and batch.instance != self.instance and self._is_of_another_life(batch):
            self._restarted(message, batch.instance)
        else:
            self._receive(message, batch)
        if isinstance(batch, Batch):
            self._delay.hear(batch.timestamp, now)
            if batch.notes is not None:
                self.told.hear(batch.notes, now)
        if (
            self._doubts.heard(now)
            or self._recovery is not None
            or self.state not in _STEADY
            or self._delay.is_late(now) != self._late
            or self._grounds() != self._settled_on
        ):
            self._settle()

    def _receive(self, message: Message, batch: Batch | Exception) -> None:
        verdict = self._copy.numbers.receive(message.seq)
        if verdict is Verdict.APPLY and self._recovery is None:
            self._apply(self._copy, message, batch)
        elif verdict is Verdict.RESTART:
            self._restarted(message, self.instance)
        elif verdict is Verdict.DUPLICATE:
            self.counters.duplicates += 1
        elif isinstance(self._recovery, Repair):
            self._count_missed(message.seq - self._recovery.newest - 1)
            self._hold(self._recovery, message)
        elif isinstance(verdict, Gap):
            self._gap(verdict, message)
        else:
            self._pass_on(message)

    def _gap(self, gap: Gap, message: Message) -> None:
        self._count_missed(gap.batches)
        if self._replayable and self._recovery is None:
            self._hold(self._repair(), message)
        else:
            self._pass_on(message)

    def _count_missed(self, batches: int) -> None:
        """Between the live message before and this one."""
        if batches > 0:
            self.counters.gaps += 1
            self.counters.missed += batches

    def _pass_on(self, message: Message) -> None:
        """Into the visible copy, whatever was lost before; and kept for the one being rebuilt."""
        self._apply_after_loss(message)
        if self._recovery is not None:
            self._hold(self._recovery, message)

    def _hold(self, recovery: Repair | Rebuild, message: Message) -> None:
        if not recovery.hold(message):
            self._failed(recovery, "too many batches came in meanwhile")

    # -- the publisher's lives --------------------------------------------------------------------------------------

    def _is_of_another_life(self, batch: Batch) -> bool:
        """Than what we hold. The first batch of all says whose picture this will be."""
        if batch.instance == self.instance:
            return False
        if self.instance is not None:
            return True
        self.instance = batch.instance
        if batch.instance and not self._snapshots:
            # it may have answered that it has no snapshot only because it had published nothing yet
            self._snapshots = True
            if self._recovery is None:
                self._rebuild_later()
        return False

    def _is_old(self, message: Message, batch: Batch | Exception) -> bool:
        """Of the life that we know, which has gone on since: so it proves nothing by now."""
        numbers = self._copy.numbers
        if not isinstance(batch, Batch) or not batch.instance:
            return False
        known = batch.instance == self.instance and numbers.goes_back(message.seq)
        # but after a number that was far too high those that follow are lower, and true; they never begin with 0
        return known and (message.seq == 0 or message.seq >= (numbers.since or 0))

    def _restarted(self, message: Message, instance: str | None) -> None:
        self._begin_life(instance, f"the engine restarted; its batches before {message.seq} are unknown")
        self._copy.numbers.receive(message.seq)
        self._apply(self._copy, message)
        if not self._copy.numbers.complete:
            self._rebuild_in_time()

    def _begin_life(self, instance: str | None, why: str) -> None:
        self.counters.restarts += 1
        self._end_recovery()
        if instance and instance == self.instance:  # no life begins, but nothing is certain any more
            self._copy.residency.forget()
        else:
            self._copy.residency.restart()
        self._copy.numbers = SequenceTracker()
        self._doubts.why_incomplete = why
        self.told = Told()
        self._snapshots = True
        # two processes that answer in turn (say, a replay address of another engine) are not asked at every turn
        self._failures = MANY if instance and instance == self._former_instance else 0
        self._former_instance, self.instance = self.instance, instance

    def _rename(self, topic: bytes) -> None:
        """The model's name is part of every key, so what was learned under another name is void."""
        self._topic = topic
        self._model = _model(topic)
        rebuilding = self._recovery
        if isinstance(rebuilding, Rebuild) and rebuilding.used and rebuilding.copy.residency.model != self._model:
            self._end_recovery()
        if self._copy.residency.model != self._model:
            self._copy.residency.model = self._model
            if self.last_seq >= 0:
                self._lose("the topic names another model than before")
        elif rebuilding is self._recovery:
            return
        if self._recovery is None and not self._copy.numbers.complete and self.is_connected:
            self._rebuild()

    # -- into a copy ------------------------------------------------------------------------------------------------

    def _read(self, message: Message) -> Batch | Exception:
        try:
            return decode_batch(message.payload)
        except BadPayload as error:
            return error
        except Exception as error:
            self._log_fault("read")
            return error

    def _apply(self, copy: Copy, message: Message, batch: Batch | Exception | None = None) -> None:
        """`batch`: the message's, if it has been read already."""
        copy.numbers.accept(message.seq)
        copy.last_payload = message.payload
        if batch is None:
            batch = self._read(message)
        problem = self._put(copy, batch) if isinstance(batch, Batch) else batch
        if problem is not None:
            self._unreadable(copy, message, problem)

    def _new_copy(self) -> Copy:
        """Empty, but of an engine of which is known what it said of itself: not every batch says it again."""
        copy = Copy(self._publisher())
        copy.residency.standing = Standing.DRAFT
        copy.residency.told(self.told.notes())
        return copy

    def _put(self, copy: Copy, batch: Batch) -> Exception | None:
        """The batch's events into the copy; the error if that fails."""
        try:
            if batch.notes is not None:
                copy.residency.told(batch.notes)
            copy.residency.apply(batch.events)
        except Exception as error:
            self._log_fault("applied")
            return error
        if batch.skipped:
            self.counters.skipped.update(skipped.reason for skipped in batch.skipped)
        return None

    def _log_fault(self, what: str) -> None:
        # a fault of ours: what it left behind must not be trusted, and the other publishers must not notice
        logger.exception("a batch of events could not be %s", what, extra={"publisher": self._copy.residency.name})

    def _unreadable(self, copy: Copy, message: Message, error: Exception) -> None:
        self.counters.unreadable += 1
        copy.forget(message.seq + 1)
        self._doubts.why_incomplete = f"batch {message.seq} cannot be read: {error}"
        if self._recovery is None:
            self._rebuild_later()

    def _apply_after_loss(self, message: Message) -> None:
        verdict = self._copy.numbers.replayed(message.seq)
        if isinstance(verdict, Gap):
            self._lose(f"batches {verdict.first} to {verdict.last} were lost")
        if verdict is not Verdict.DUPLICATE:
            self._apply(self._copy, message)

    def _lose(self, why: str) -> None:
        self.counters.lost += 1
        self._doubts.why_incomplete = why
        self._history_due = self._replayable
        self._copy.forget(self.last_seq + 1)

    # -- the publisher's memory -------------------------------------------------------------------------------------

    def _repair(self) -> Repair:
        repair = Repair(self._copy, self.allowance)
        self._recovery = repair
        self._ask(repair.first, urgent=True)
        return repair

    def _rebuild(self) -> None:
        if self._replayable:
            self._history_due = True
            self._recovery = Rebuild(self._new_copy(), self.allowance, snapshot=Parts() if self._snapshots else None)
            self._ask_for(self._recovery, urgent=False)

    def _rebuild_in_time(self) -> None:
        if self._failures:
            self._retry()
        else:
            self._rebuild()

    def _rebuild_later(self) -> None:
        """Where what a publisher remembers does not suffice, a snapshot still may."""
        if self._replayable and self._snapshots and not self._copy.numbers.complete:
            self._failures = MANY
            self._retry()

    def _retry(self) -> None:
        self._rim.alarm(min(FIRST_RETRY * 2.0 ** (self._failures - 1), RETRY_AFTER))

    def _ask_for(self, rebuild: Rebuild, *, urgent: bool) -> None:
        if rebuild.snapshot is not None:
            self._ask(SNAPSHOT, urgent=urgent)
        else:
            self._ask(rebuild.copy.numbers.last + 1 if rebuild.begun else 0, urgent=urgent)

    def _ask(self, start: int, *, urgent: bool) -> None:
        self.counters.replays += 1
        self._rim.alarm(None)
        self._rim.ask(start, urgent=urgent)

    def asked(self) -> None:
        """The request is on its way."""
        self._rim.alarm(REPAIR_PATIENCE if isinstance(self._recovery, Repair) else REBUILD_PATIENCE)

    def replay(self, frames: Sequence[bytes]) -> None:
        recovery = self._recovery
        if recovery is None:
            return
        message = replay_message(frames)
        if message is None:
            self.counters.malformed += 1
        elif isinstance(message, ReplayEnd):
            self._replay_ended(recovery)
        else:
            self._answered(recovery, message)
        self._settle()

    def _answered(self, recovery: Repair | Rebuild, message: Message) -> None:
        batch = self._read(message)
        if isinstance(batch, Batch) and self._is_of_another_life(batch):
            self._begin_life(batch.instance, "the engine restarted unnoticed")
            self._rebuild_in_time()
        elif isinstance(recovery, Rebuild) and recovery.snapshot is not None:
            self._part(recovery, recovery.snapshot, message, batch)
        elif isinstance(batch, Batch) and batch.part is not None:
            self.counters.malformed += 1  # of a snapshot that nobody asked for
        elif recovery.begun or self._begins(recovery, message):
            self._replayed(recovery, message, batch)

    # -- a snapshot -------------------------------------------------------------------------------------------------

    def _part(self, rebuild: Rebuild, parts: Parts, message: Message, batch: Batch | Exception) -> None:
        notes = batch.notes if isinstance(batch, Batch) else None
        if not isinstance(batch, Batch) or notes is None or notes.snapshot is None:
            self._no_part(rebuild, parts)
            return
        if not parts.taken:
            rebuild.copy.residency.model = self._model_of(rebuild, message)
        if not parts.take(message.seq, notes.snapshot) or self._put(rebuild.copy, batch) is not None:
            self._ask_again(rebuild)
            return
        self.told.hear(notes, self._clock())
        rebuild.moving = True
        if parts.whole:
            self.counters.snapshots += 1
            rebuild.begin(message.seq)

    def _no_part(self, rebuild: Rebuild, parts: Parts) -> None:
        """Something else has come: instead of a snapshot, or in the middle of it."""
        if parts.taken:
            self._ask_again(rebuild)
        else:
            self._snapshots = False
            rebuild.snapshot = None
            self._ask_for(rebuild, urgent=True)

    # -- batches replayed -------------------------------------------------------------------------------------------

    def _begins(self, recovery: Repair | Rebuild, message: Message) -> bool:
        """May the first replayed batch go into the copy?"""
        if isinstance(recovery, Rebuild):
            return self._rebuild_begins(recovery, message)
        if message.seq < recovery.first:
            return False
        last_payload = recovery.copy.last_payload
        if message.seq == self.last_seq and last_payload and message.payload != last_payload:
            self.counters.restarts += 1
            self._failed(recovery, "the engine restarted unnoticed")
            return False
        if message.seq > recovery.first:
            self.counters.truncated += 1
            self._failed(recovery, f"the publisher remembers nothing before batch {message.seq}")
            return False
        recovery.begun = True
        return True

    def _rebuild_begins(self, recovery: Rebuild, message: Message) -> bool:
        known = self._copy.numbers.since
        if message.seq > 0:
            self.counters.truncated += 1
            self._doubts.why_incomplete = f"the publisher remembers nothing before batch {message.seq}"
        if known is not None and known <= message.seq:
            self._end_recovery()
            self._history_learned()
            return False
        recovery.copy.residency.model = self._model_of(recovery, message)
        recovery.begun = True
        return True

    def _replayed(self, recovery: Repair | Rebuild, message: Message, batch: Batch | Exception) -> None:
        verdict = recovery.copy.numbers.replayed(message.seq)
        if isinstance(verdict, Gap):
            self._ask_again(recovery)
            return
        if verdict is Verdict.APPLY:
            self.counters.replayed += 1
            recovery.advanced()
            self._apply(recovery.copy, message, batch)
        self._catch_up(recovery)

    def _catch_up(self, recovery: Repair | Rebuild) -> None:
        """Held batches follow as soon as nothing is missing before them; with the last one the copy is up to date."""
        held, numbers = recovery.held, recovery.copy.numbers
        if not held or held[0].seq > numbers.last + 1:
            return
        while held and held[0].seq <= numbers.last + 1:
            message = recovery.release()
            if message.seq == numbers.last + 1:
                self._apply(recovery.copy, message)
        if not held:
            self._recovered(recovery)

    def _replay_ended(self, recovery: Repair | Rebuild) -> None:
        if recovery.begun:
            self._all_replayed(recovery)
        elif isinstance(recovery, Repair):
            self._failed(recovery, "the publisher does not remember the last batch we had")
        elif recovery.snapshot is None:
            self._end_recovery()
            if self._copy.numbers.since is None:
                self._copy.numbers.skip_to(0)
            self._history_learned()
        else:
            self._no_part(recovery, recovery.snapshot)

    def _all_replayed(self, recovery: Repair | Rebuild) -> None:
        if not recovery.held:
            self._recovered(recovery)
            return
        self._catch_up(recovery)
        if self._recovery is recovery:
            self._ask_again(recovery)

    def _ask_again(self, recovery: Repair | Rebuild) -> None:
        """From where it stopped. In a snapshot there is no such place."""
        if isinstance(recovery, Rebuild) and recovery.snapshot is not None:
            self.counters.snapshots_failed += 1
        if recovery.stalled():
            self._failed(recovery, "the replay is incomplete")
        elif isinstance(recovery, Repair):
            self._ask(recovery.copy.numbers.last + 1, urgent=True)
        else:
            if not recovery.begun:
                recovery.copy.residency.close()
                recovery.start_over(self._new_copy(), snapshot=self._snapshots)
            self._ask_for(recovery, urgent=True)

    def _recovered(self, recovery: Repair | Rebuild) -> None:
        self._end_recovery(keep=recovery.copy)
        self._doubts.recovered()
        if isinstance(recovery, Rebuild):
            self._replace_by(recovery.copy)
            self._history_learned()
        elif self._history_due and not self._copy.numbers.complete:
            self._rebuild_in_time()
        else:
            self._rebuild_later()

    def _replace_by(self, rebuilt: Copy) -> None:
        old, self._copy = self._copy, rebuilt
        self.residency = rebuilt.residency
        rebuilt.numbers.succeed(old.numbers)
        if rebuilt.residency.model != self._model:
            self._topic = None  # the next live message will say which of the two it is
        self.counters.not_indexed.update(old.residency.skipped)
        self.counters.former.update(old.residency.counted())
        old.residency.close()

    def _history_learned(self) -> None:
        """All of it that the publisher tells."""
        self._history_due, self._failures = False, 0
        self._rebuild_later()

    def _failed(self, recovery: Repair | Rebuild, why: str) -> None:
        self.counters.replays_failed += 1
        self._end_recovery()
        if isinstance(recovery, Rebuild):
            self._failures = min(self._failures + 1, MANY)
            self._doubts.why_incomplete = self._doubts.why_incomplete or why
            self._retry()
            return
        self._lose(why)
        for message in recovery.held:
            self._apply_after_loss(message)
        self._rebuild()

    def _end_recovery(self, keep: Copy | None = None) -> None:
        recovery, self._recovery = self._recovery, None
        if recovery is None:
            return
        recovery.end()
        self._rim.hang_up()
        self._rim.alarm(None)
        if isinstance(recovery, Rebuild) and recovery.copy is not keep:
            recovery.copy.residency.close()

    def alarm(self) -> None:
        recovery = self._recovery
        if recovery is None:
            if not self._copy.numbers.complete and self.is_connected:
                self._rebuild()
        elif isinstance(recovery, Repair):
            self._repair_alarm(recovery)
        elif recovery.moved():
            self._rim.alarm(REBUILD_PATIENCE)
        else:
            self._ask_again(recovery)
        self._settle()

    def _repair_alarm(self, repair: Repair) -> None:
        repair.alarms += 1
        if not repair.begun or repair.alarms >= REPAIR_ALARMS:
            self._failed(repair, "the replay socket does not answer")
        else:
            self._rim.alarm(REPAIR_PATIENCE)

    # -- how sure we are --------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """To be called several times a second: notices silence, the end of a backlog, and keeps `trust` current."""
        now = self._clock()
        if self._doubts.notice_silence(self.told, now) or self._late != self._delay.is_late(now):
            self._settle()
        elif self.state is not State.LIVE:
            self._judge(self.state, self._doubts.trust(self._copy.numbers, now, late=self._late))

    def _settle(self) -> None:
        now = self._clock()
        self._doubts.notice_silence(self.told, now)
        self._late = self._delay.is_late(now)
        state, reason = self._doubts.judge(self._copy.numbers, self.told, learning=self._is_learning, late=self._late)
        if state is not self.state:
            self.since = now
            if state in (State.UNSURE, State.LOST):
                name = self._copy.residency.name
                logger.warning("event stream is %s: %s", state.value, reason, extra={"publisher": name})
        self.reason = reason
        self._judge(state, self._doubts.trust(self._copy.numbers, now, late=self._late))
        self._settled_on = self._grounds()
        # a repair keeps batches back
        is_current = self._doubts.is_current(self.told, late=self._late) and not isinstance(self._recovery, Repair)
        self._copy.residency.standing = Standing.CURRENT if is_current else Standing.DOUBTED

    def _grounds(self) -> tuple[SequenceTracker, int | None, str]:
        """Of how complete the picture is. While they stay, one more message mostly changes nothing."""
        numbers = self._copy.numbers
        return numbers, numbers.since, self._doubts.why_incomplete

    def _judge(self, state: State, trust: float) -> None:
        if state is not self.state or trust != self.trust:
            self.state, self.trust = state, trust
            self.judged()

    @property
    def _is_learning(self) -> bool:
        """The tenth try of a replay socket that never answered no longer counts; but a repair keeps batches back."""
        recovery = self._recovery
        return recovery is not None and (isinstance(recovery, Repair) or recovery.begun or not self._failures)

    def _model_of(self, rebuild: Rebuild, message: Message) -> str:
        """Of a replayed message, whose topic may have been left out, or be older than that of the batches that wait."""
        return _model(message.topic) if message.topic and not rebuild.held else self._model


def _model(topic: bytes) -> str:
    return parse_topic(topic.decode("utf-8", "replace"))[1]
