"""One publisher's stream of batches: keeps a residency right while batches are lost, repeated, or come from a new life.

Sans-IO: frames and alarms come in, the residency changes, and what is wanted of the outside (`Rim`) is asking the
publisher's replay socket, hanging up, and an alarm clock. The rules, in the order of what they protect:

- Never predict too much. A loss that cannot be repaired may have held removals, so everything held is forgotten; a
  restart forgets likewise; a batch that cannot be read counts as lost.
- Live batches never wait for a dead replay socket. A *repair* (the few batches of a gap) holds them back for a moment,
  since a removal must not overtake its store; when the moment has passed, the gap counts as lost and they flow.
  A *rebuild* (all that the publisher remembers) is made beside the visible copy and takes its place when it has caught
  up, so it holds nothing back and is never seen half done.
- A repair starts at the last batch we have, not after it: if the publisher remembers another batch under that number,
  it is a new life whose numbers have already passed the old ones.

What is known beyond the stream (load, capacity) is not used here.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from indexer.frames import Message, ReplayEnd, live_message, replay_message
from indexer.recovery import Copy, Rebuild, Repair
from indexer.residency import Residency
from indexer.sequence import Gap, Verdict
from indexer.wire import BadPayload, decode_batch, parse_topic

logger = logging.getLogger(__name__)

REPAIR_PATIENCE = 0.5
"""Seconds until the first batch of a repair; vLLM answers within about 0.1."""
REPAIR_ALARMS = 4
"""Patiences after which a repair is given up even though it moves: live batches wait for it."""
REBUILD_PATIENCE = 2.0
"""Seconds without a batch after which a rebuild asks again."""
RETRY_AFTER = 30.0
"""Seconds from a failed rebuild to the next."""


class State(Enum):
    SYNCING = "syncing"
    """Connecting, or learning from the publisher's memory."""
    LIVE = "live"
    """All that the publisher ever said is accounted for."""
    UNSURE = "unsure"
    """Only what it said since some batch: it may hold more than we know of."""
    LOST = "lost"
    """No connection: what we know may be outdated."""


class Rim(Protocol):
    """The outside of a stream."""

    def ask(self, start: int, *, urgent: bool) -> None:
        """Ask the replay socket for the batches from `start` on, on a fresh connection, and call `Stream.asked` once
        that is done: at once if `urgent`, else when it is this stream's turn."""

    def hang_up(self) -> None:
        """Nothing more is wanted of the replay socket."""

    def alarm(self, seconds: float | None) -> None:
        """Call `Stream.alarm` in `seconds`, instead of any time set before. None = not at all."""


@dataclass(slots=True)
class Counters:
    messages: int = 0
    """Live messages, well formed."""
    replayed: int = 0
    malformed: int = 0
    """Messages of either socket whose frames are wrong."""
    unreadable: int = 0
    """Batches whose payload could not be read as a whole."""
    skipped: Counter[str] = field(default_factory=Counter)
    """Events that could not be read, by reason."""
    not_indexed: Counter[str] = field(default_factory=Counter)
    """Events that former residencies did not index, by reason."""
    former: Counter[str] = field(default_factory=Counter)
    """What former residencies counted besides."""
    duplicates: int = 0
    gaps: int = 0
    missed: int = 0
    """Batches in gaps, repaired or not."""
    lost: int = 0
    """Times that what was held had to be forgotten because of a loss."""
    restarts: int = 0
    replays: int = 0
    """Times the replay socket was asked."""
    replays_failed: int = 0
    truncated: int = 0
    """Replays that began later than asked."""
    reconnections: int = 0


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
        self._recovery: Repair | Rebuild | None = None
        self._topic: bytes | None = None
        self._model = ""
        self.is_connected = False
        self._was_connected = False
        self._why_lost = ""
        self._why_unsure = ""
        self._doubtful = False
        """Reconnected, and not yet known to be talking to the same life of the publisher."""
        self._history_due = False
        self._rebuild_failed = False
        self.counters = Counters()
        self.state = State.SYNCING
        self.reason = "connecting"
        self.since = clock()
        """When `state` began."""
        self.heard_at = 0.0
        """When the last live message came; 0 = never."""

    def __repr__(self) -> str:
        return f"<Stream {self.state.value} {self._copy.numbers!r}>"

    @property
    def last_seq(self) -> int:
        """Number of the last batch that the residency reflects; -1 = none."""
        return self._copy.numbers.last

    # -- the connection ---------------------------------------------------------------------------------------------

    def connected(self) -> None:
        self.is_connected, again = True, self._was_connected
        self._was_connected = True
        self.counters.reconnections += again
        self._end_recovery()
        if self._copy.numbers.since is None:
            self._rebuild()
        else:
            self._copy.numbers.doubt()
            self._doubtful = True
            if self._replayable:
                self._repair()
        self._settle()

    def disconnected(self, why: str) -> None:
        self.is_connected = False
        self._why_lost = why
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
        self.heard_at = self._clock()
        if message.topic != self._topic:
            self._rename(message.topic)
        verdict = self._copy.numbers.receive(message.seq)
        if verdict is Verdict.APPLY and self._recovery is None:
            self._apply(self._copy, message)
        else:
            self._unusual(verdict, message)
        self._doubtful = False
        if self.state is not State.LIVE or self._copy.numbers.since != 0 or self._recovery is not None:
            self._settle()

    def _unusual(self, verdict: Verdict | Gap, message: Message) -> None:
        if verdict is Verdict.RESTART:
            self._restarted(message)
        elif verdict is Verdict.DUPLICATE:
            self.counters.duplicates += 1
        elif isinstance(self._recovery, Repair):
            self._hold(self._recovery, message)
        elif isinstance(verdict, Gap):
            self._gap(verdict, message)
        else:
            self._pass_on(message)

    def _gap(self, gap: Gap, message: Message) -> None:
        self.counters.gaps += 1
        self.counters.missed += gap.batches
        if self._replayable and self._recovery is None:
            self._hold(self._repair(), message)
        else:
            self._pass_on(message)

    def _pass_on(self, message: Message) -> None:
        """Into the visible copy, whatever was lost before; and kept for the one being rebuilt."""
        self._apply_after_loss(message)
        if self._recovery is not None:
            self._hold(self._recovery, message)

    def _hold(self, recovery: Repair | Rebuild, message: Message) -> None:
        if not recovery.hold(message):
            self._failed(recovery, "too many batches came in meanwhile")

    def _restarted(self, message: Message) -> None:
        self.counters.restarts += 1
        self._end_recovery()
        self._copy.residency.clear()
        self._why_unsure = f"the engine restarted; its batches before {message.seq} are unknown"
        self._copy.numbers.begin(message.seq)
        self._apply(self._copy, message)
        if not self._copy.numbers.complete:
            self._rebuild()

    def _rename(self, topic: bytes) -> None:
        """The model's name is part of every key, so what was learned under another name is void."""
        self._topic = topic
        self._model = _model(topic)
        if self._copy.residency.model != self._model:
            self._copy.residency.model = self._model
            if self.last_seq >= 0:
                self._lose("the topic names another model than before")
        rebuilding = self._recovery
        if isinstance(rebuilding, Rebuild) and rebuilding.begun and rebuilding.copy.residency.model != self._model:
            self._end_recovery()
        if self._recovery is None and not self._copy.numbers.complete and self.is_connected:
            self._rebuild()

    # -- into a copy ------------------------------------------------------------------------------------------------

    def _apply(self, copy: Copy, message: Message) -> None:
        copy.numbers.accept(message.seq)
        copy.last_payload = message.payload
        try:
            batch = decode_batch(message.payload)
            copy.residency.apply(batch)
        except BadPayload as error:
            self._unreadable(copy, message, error)
        except Exception as error:
            # a fault of ours: what it left behind must not be trusted, and the other publishers must not notice
            logger.exception("a batch of events could not be applied", extra={"publisher": copy.residency.name})
            self._unreadable(copy, message, error)
        else:
            if batch.skipped:
                self.counters.skipped.update(skipped.reason for skipped in batch.skipped)

    def _unreadable(self, copy: Copy, message: Message, error: Exception) -> None:
        self.counters.unreadable += 1
        copy.forget(message.seq + 1)
        self._why_unsure = f"batch {message.seq} cannot be read: {error}"

    def _apply_after_loss(self, message: Message) -> None:
        verdict = self._copy.numbers.replayed(message.seq)
        if isinstance(verdict, Gap):
            self._lose(f"batches {verdict.first} to {verdict.last} were lost")
        if verdict is not Verdict.DUPLICATE:
            self._apply(self._copy, message)

    def _lose(self, why: str) -> None:
        self.counters.lost += 1
        self._why_unsure = why
        self._history_due = self._replayable
        self._copy.forget(self.last_seq + 1)

    # -- the publisher's memory -------------------------------------------------------------------------------------

    def _repair(self) -> Repair:
        repair = Repair(self._copy)
        self._recovery = repair
        self._ask(repair.first, urgent=True)
        return repair

    def _rebuild(self) -> None:
        if self._replayable:
            self._history_due = True
            self._recovery = Rebuild(Copy(self._publisher()))
            self._ask(0, urgent=False)

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
        elif recovery.begun or self._begins(recovery, message):
            self._replayed(recovery, message)
        self._settle()

    def _begins(self, recovery: Repair | Rebuild, message: Message) -> bool:
        """May the first replayed batch go into the copy?"""
        if isinstance(recovery, Rebuild):
            return self._rebuild_begins(recovery, message)
        if message.seq < recovery.first:
            return False
        if message.seq == self.last_seq and message.payload != recovery.copy.last_payload:
            self.counters.restarts += 1
            self._failed(recovery, "the engine restarted unnoticed")
            return False
        if message.seq > recovery.first:
            self.counters.truncated += 1
            self.counters.lost += 1
            self._why_unsure = f"the publisher remembers nothing before batch {message.seq}"
            recovery.copy.forget(message.seq)
        recovery.begun = True
        return True

    def _rebuild_begins(self, recovery: Rebuild, message: Message) -> bool:
        known = self._copy.numbers.since
        if message.seq > 0:
            self.counters.truncated += 1
            self._why_unsure = f"the publisher remembers nothing before batch {message.seq}"
        if known is not None and known <= message.seq:
            self._history_learned()
            self._end_recovery()
            return False
        recovery.copy.residency.model = _model(message.topic) if message.topic else self._model
        recovery.begun = True
        return True

    def _replayed(self, recovery: Repair | Rebuild, message: Message) -> None:
        verdict = recovery.copy.numbers.replayed(message.seq)
        if isinstance(verdict, Gap):
            self._ask_again(recovery)
            return
        if verdict is Verdict.APPLY:
            self.counters.replayed += 1
            recovery.progress += 1
            self._apply(recovery.copy, message)
        self._catch_up(recovery)

    def _catch_up(self, recovery: Repair | Rebuild) -> None:
        """Held batches follow as soon as nothing is missing before them; with the last one the copy is up to date."""
        held, numbers = recovery.held, recovery.copy.numbers
        if not held or held[0].seq > numbers.last + 1:
            return
        while held and held[0].seq <= numbers.last + 1:
            message = held.popleft()
            if message.seq == numbers.last + 1:
                self._apply(recovery.copy, message)
        if not held:
            self._recovered(recovery)

    def _replay_ended(self, recovery: Repair | Rebuild) -> None:
        if recovery.begun:
            self._all_replayed(recovery)
        elif isinstance(recovery, Repair):
            self._failed(recovery, "the publisher does not remember the last batch we had")
        else:
            self._history_learned()
            self._end_recovery()
            if self._copy.numbers.empty:
                self._copy.numbers.skip_to(0)

    def _all_replayed(self, recovery: Repair | Rebuild) -> None:
        if not recovery.held:
            self._recovered(recovery)
            return
        self._catch_up(recovery)
        if self._recovery is recovery:
            self._ask_again(recovery)

    def _ask_again(self, recovery: Repair | Rebuild) -> None:
        """From where it stopped."""
        if recovery.stalled():
            self._failed(recovery, "the replay is incomplete")
            return
        start = recovery.copy.numbers.last + 1 if recovery.begun else 0
        self._ask(start, urgent=True)

    def _recovered(self, recovery: Repair | Rebuild) -> None:
        self._end_recovery(keep=recovery.copy)
        self._doubtful = False
        if isinstance(recovery, Rebuild):
            self._history_learned()
            old, self._copy = self._copy, recovery.copy
            self.residency = self._copy.residency
            self._copy.numbers.succeed(old.numbers)
            self.counters.not_indexed.update(old.residency.skipped)
            self.counters.former.update(old.residency.counted())
            old.residency.close()
        elif self._history_due and not self._copy.numbers.complete:
            self._rebuild_in_time()

    def _rebuild_in_time(self) -> None:
        if self._rebuild_failed:
            self._rim.alarm(RETRY_AFTER)
        else:
            self._rebuild()

    def _history_learned(self) -> None:
        """All of it that the publisher still remembers."""
        self._history_due = self._rebuild_failed = False

    def _failed(self, recovery: Repair | Rebuild, why: str) -> None:
        self.counters.replays_failed += 1
        self._end_recovery()
        if isinstance(recovery, Rebuild):
            self._rebuild_failed = True
            self._why_unsure = self._why_unsure or why
            self._rim.alarm(RETRY_AFTER)
            return
        self._lose(why)
        for message in recovery.held:
            self._apply_after_loss(message)
        self._rebuild()

    def _end_recovery(self, keep: Copy | None = None) -> None:
        recovery, self._recovery = self._recovery, None
        if recovery is None:
            return
        self._rim.hang_up()
        self._rim.alarm(None)
        if recovery.copy is not self._copy and recovery.copy is not keep:
            recovery.copy.residency.close()

    def alarm(self) -> None:
        recovery = self._recovery
        if recovery is None:
            if not self._copy.numbers.complete:
                self._rebuild()
        elif isinstance(recovery, Repair):
            self._repair_alarm(recovery)
        elif recovery.progress:
            recovery.stalled()
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

    def _settle(self) -> None:
        state, reason = self._judge()
        if state is not self.state:
            self.since = self._clock()
            if state in (State.UNSURE, State.LOST):
                name = self._copy.residency.name
                logger.warning("event stream is %s: %s", state.value, reason, extra={"publisher": name})
        self.state, self.reason = state, reason

    def _judge(self) -> tuple[State, str]:
        numbers = self._copy.numbers
        if not self.is_connected:
            return (State.LOST, self._why_lost) if self._why_lost else (State.SYNCING, "connecting")
        # the tenth try of a replay socket that never answered is no longer "syncing"
        if self._recovery is not None and (self._recovery.begun or not self._rebuild_failed):
            return State.SYNCING, "learning from the publisher's memory"
        if self._doubtful:
            return State.UNSURE, "reconnected; nothing heard since"
        if numbers.complete:
            return State.LIVE, ""
        if numbers.since is None:
            return State.UNSURE, "nothing heard yet"
        return State.UNSURE, self._why_unsure or f"joined at batch {numbers.since}"


def _model(topic: bytes) -> str:
    return parse_topic(topic.decode("utf-8", "replace"))[1]
