"""What a publisher says: batches numbered, completed, noted and remembered. Sans-IO; publisher.py has the sockets."""

from __future__ import annotations

import logging
import secrets
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from connector.events import (
    AllBlocksCleared,
    Groups,
    Load,
    Notes,
    SnapshotPart,
    Tier,
    TierCleared,
    encode_batch,
    is_encodable,
)
from connector.ledger import Ledger, Picture

logger = logging.getLogger(__name__)

TIERS_EVERY = 1.0
"""Seconds between two messages that speak of tiers, but for those that have to."""

Message = tuple[int, bytes]
"""A message's number and payload."""


@dataclass(slots=True)
class About:
    """An engine as its notes tell it."""

    instance: str = field(default_factory=lambda: secrets.token_hex(16))
    heartbeat: float = 1.0
    """Seconds; 0 = never."""
    tiers: Mapping[str, Tier] = field(default_factory=dict)
    """By medium: capacity, chunk and pool; set before the publisher starts. In the media below HBM that are in here, a
    chunk exists once: announced again, it is no further copy."""
    load: Load | None = None
    """Replaced whole, by whichever thread knows."""
    groups: Groups | None = None
    """Told as soon as it is set."""


class Journal:
    """One publisher's messages.

    Args:
        about: None publishes as vLLM itself does: no notes, nothing completed, no snapshots.
        rank: the data-parallel rank, in every message.
        buffer_steps: how many messages `replay` can repeat.
    """

    def __init__(self, about: About | None, *, rank: int = 0, buffer_steps: int = 10_000) -> None:
        self.faults = 0
        """Batches published as they came, and events left out, for a fault of ours or theirs."""
        self._about = about
        self._rank = rank
        self._next = 0
        self._buffer: deque[Message] = deque(maxlen=buffer_steps)
        self._tiers_told: float | None = None
        self._groups_told: Groups | None = None
        self._ledger = None if about is None else _ledger(about)

    def batch(self, events: Sequence[object], at: float) -> Message | None:
        """One step's events; `at` is the Unix time in seconds. None where that leaves nothing to publish."""
        told = self._completed(events)
        return self._message(told, at, with_tiers=self._tiers_due(at)) if told else None

    def heartbeat(self, at: float) -> Message:
        return self._message([], at, with_tiers=True)

    def start_over(self, at: float) -> Message:
        """Batches were lost before they came here, and with them removals, perhaps. So all that was told is taken back,
        by the one event that every consumer takes for that; what comes from now on is told and recorded as ever."""
        if self._about is not None and self._ledger is not None:
            self._ledger = _ledger(self._about)
        return self._message([AllBlocksCleared()], at, with_tiers=True)

    def replay(self, start: int) -> Iterator[Message]:
        """The remembered messages from number `start` on, as of now."""
        return iter([message for message in self._buffer if message[0] >= start])

    def snapshot(self, at: float) -> Iterator[Message]:
        """What is held, as messages with the number of the last one published; none if there is no such number, or no
        ledger to trust. The picture is taken at once, its parts are made one by one."""
        if self._ledger is None or not self._next:
            return iter(())
        return self._parts(self._next - 1, self._ledger.freeze(), at)

    def _parts(self, seq: int, picture: Picture, at: float) -> Iterator[Message]:
        for number, events in enumerate(picture.parts(), 1):
            notes = self._notes(with_tiers=number == 1, snapshot=SnapshotPart(number, picture.part_count))
            yield seq, encode_batch(events, at, self._rank, notes)

    def _completed(self, events: Sequence[object]) -> Sequence[object]:
        if self._ledger is not None:
            try:
                return self._ledger.apply(events)
            except Exception:
                self._distrust("events could not be recorded")
        return [_as_it_came(event) for event in events]

    def _distrust(self, why: str) -> None:
        """What the ledger says may be wrong from now on, so nobody is to have a snapshot of it."""
        self._ledger = None
        self.faults += 1
        if self.faults == 1:
            logger.exception("%s; from now on batches are published as they come, without snapshots", why)

    def _message(self, events: Sequence[object], at: float, *, with_tiers: bool) -> Message:
        notes = self._notes(with_tiers=with_tiers)
        if with_tiers:
            self._tiers_told = at
        try:
            payload = encode_batch(events, at, self._rank, notes)
        except (TypeError, ValueError, OverflowError):
            self._distrust("an event cannot be encoded and is left out")
            payload = encode_batch(list(filter(is_encodable, events)), at, self._rank, notes)
        message = self._next, payload
        self._next += 1
        self._buffer.append(message)
        return message

    def _tiers_due(self, at: float) -> bool:
        told = self._tiers_told
        if told is None or (self._about is not None and self._about.groups is not self._groups_told):
            return True
        return not told <= at < told + TIERS_EVERY  # the clock may have been set back

    def _notes(self, *, with_tiers: bool, snapshot: SnapshotPart | None = None) -> Notes | None:
        about = self._about
        if about is None:
            return None
        if not with_tiers:
            return Notes(about.instance, about.load, snapshot=snapshot)
        self._groups_told = groups = about.groups
        return Notes(about.instance, about.load, self._tiers(about), about.heartbeat, snapshot, groups)

    def _tiers(self, about: About) -> dict[str, Tier]:
        if self._ledger is None:
            return dict(about.tiers)
        media = {**dict.fromkeys(about.tiers), **dict.fromkeys(self._ledger.media())}
        return {
            medium: msgspec.structs.replace(about.tiers.get(medium, _UNKNOWN), held=self._ledger.held(medium))
            for medium in media
        }


_UNKNOWN = Tier()


def _ledger(about: About) -> Ledger:
    return Ledger({name: tier.chunk for name, tier in about.tiers.items()})


def _as_it_came(event: object) -> object:
    """Without a ledger nobody can say what was in a tier; a consumer that knows no tiers clears all, which is safe."""
    return AllBlocksCleared([event.medium]) if isinstance(event, TierCleared) else event
