"""A publisher, the wire to the picker, and the picker's stream at its end; everything that can happen to them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from connector.events import GPU
from indexer.residency import Residency
from indexer.stream import State, Stream

from .publishers import Ours, Publisher, Stock
from .truth import Block, Engine, Held


@dataclass(frozen=True)
class Setup:
    """What a link is like all the time."""

    ours: bool
    """The connector's publisher; else one like vLLM's."""
    watched: bool
    """Does the picker notice that connections are made and broken? Not where all engines share one socket of its."""
    replayable: bool
    memory: int
    """Batches."""
    old_form: bool
    heartbeat: float
    chunk: int
    describes: bool
    pool: str | None
    seed: int


NOTHING = Held()


class Link:
    """Is the stream's `Rim`."""

    def __init__(
        self, name: str, setup: Setup, publisher: Callable[[], Residency], now: Callable[[], float], storage: set[Block]
    ) -> None:
        self.name = name
        self.setup = setup
        self._open = publisher
        self._now = now
        self._storage = storage
        self.lives: list[list[Held]] = []
        """For each life of the engine, what it held after each of its batches."""
        self.life_heard = 0
        """The one of which something came last."""
        self.rename("model")
        self.begin_life()
        self.flight: deque[list[bytes]] = deque()
        """Sent and not yet there. What is not in it was delivered or is lost."""
        self.is_connected = self.is_subscribed = False
        self.connects = 0
        self.connected_at = 0.0
        self.has_heard = False
        """Of the publisher, since the connection was made."""
        self.is_stalled = False
        """The connection is dead and nobody has noticed."""
        self.replay_dead = False
        self.waits_for_turn = False
        self.turns_are_taken = False
        self.question: int | None = None
        self.frames: Iterator[list[bytes]] | None = None
        """The answer, once the question has reached the publisher."""
        self.calls = 0
        self.alarm_at: float | None = None
        self.open_stream()

    def open_stream(self) -> None:
        self.stream = Stream(self._open, self, replayable=self.setup.replayable, clock=self._now)
        self.live_calls = 0

    # --- the stream's rim

    def ask(self, start: int, *, urgent: bool) -> None:
        self.calls += 1
        self.question, self.frames = start, None
        self.waits_for_turn = self.turns_are_taken and not urgent
        if not self.waits_for_turn:
            self.stream.asked()

    def hang_up(self) -> None:
        self.calls += 1
        self.question = self.frames = None
        self.waits_for_turn = False

    def alarm(self, seconds: float | None) -> None:
        self.alarm_at = None if seconds is None else self._now() + seconds

    # --- the engine

    def begin_life(self) -> None:
        setup = self.setup
        self.instance = f"{self.name} {len(self.lives)}" if setup.ours else ""
        self.engine = Engine(setup.chunk, setup.seed, setup.describes, names_tiers=setup.ours, storage=self._storage)
        self.publisher: Publisher
        if setup.ours:
            self.publisher = Ours(
                setup.memory,
                old_form=setup.old_form,
                instance=self.instance,
                heartbeat=setup.heartbeat,
                chunk=setup.chunk,
                pool=setup.pool,
                clock=self._now,
            )
        else:
            self.publisher = Stock(setup.memory, old_form=setup.old_form)
        self.truths: list[Held] = []
        self.lives.append(self.truths)
        self.delivered = -1
        """Highest number of this life that has come over this wire."""
        self.heard_of = False
        self.is_garbled = False
        """A batch could not be read, and never will be."""
        self.is_blurred = False
        """An event meant less than it said, so that less is known than is held."""
        self.sent_at = self._now()

    def step(self, order: int) -> None:
        """The end of one: what happened is told. `order` picks how the tiers' events are mixed."""
        events, self.engine.events = self.engine.events, []
        self._publish(self.publisher.journal.batch(mixed(events, order), self._now()))

    def heartbeat(self) -> None:
        self._publish(self.publisher.journal.heartbeat(self._now()), is_step=False)

    def _publish(self, message: tuple[int, bytes] | None, *, is_step: bool = True) -> None:
        told = self.truths[-1] if self.truths else NOTHING
        if message is None:
            assert self.engine.held == told, "what happened was kept secret"
            return
        number, payload = message
        assert number == len(self.truths)
        self.truths.append(self.engine.held if is_step else told)
        self.sent_at = self._now()
        if self.is_subscribed and not self.is_stalled:
            self.flight.append([self.topic, number.to_bytes(8, "big"), payload])

    def restart(self) -> None:
        self.disconnect()
        self.begin_life()
        self.frames = iter(()) if self.frames is not None else None

    # --- the wire

    def connect(self) -> None:
        if not self.is_connected:
            self.is_connected = True
            if self.setup.watched:
                self._connected()

    def _connected(self) -> None:
        self.connected_at = self._now()
        self.has_heard = False
        self.connects += 1
        self.stream.connected()

    def subscribe(self) -> None:
        """Takes effect at the publisher some time after the connection."""
        self.is_subscribed = self.is_connected

    def disconnect(self) -> None:
        self.flight.clear()
        self.is_subscribed = self.is_stalled = False
        self.delivered = -1
        if self.is_connected:
            self.is_connected = False
            if self.setup.watched:
                self.stream.disconnected("cut")

    def stall(self) -> None:
        self.is_stalled = self.is_subscribed
        if self.is_stalled:
            self.flight.clear()

    def deliver(self) -> None:
        if not self.flight:
            return
        frames = self.flight.popleft()
        number = int.from_bytes(frames[1], "big")
        if not self.heard_of and self._looks_continued(number):
            return  # numbers alone cannot tell this from the former life: it is lost
        self.delivered = max(self.delivered, number)
        self._hear(frames)
        if self.stream.state is State.LIVE:
            model = frames[0].decode().rpartition("@")[2]
            assert self.stream.residency.model == model, (self.name, "is of another model than the topic says")

    def _looks_continued(self, number: int) -> bool:
        setup, last = self.setup, self.stream.last_seq
        if setup.ours or setup.replayable or len(self.lives) == 1:
            return False
        return number == last + 1 or (number == last and not setup.watched)

    def deliver_all(self) -> None:
        while self.flight:
            self.deliver()

    def repeat(self, number: int) -> None:
        """One that was delivered comes once more."""
        if self.is_subscribed and not self.flight and 0 <= number <= self.delivered:
            for old, payload in self.publisher.journal.replay(number):
                if old == number:
                    self._hear([self.topic, number.to_bytes(8, "big"), payload])
                    break

    def garble(self) -> None:
        """The next message arrives with a payload that cannot be read."""
        if self.flight:
            self.is_garbled = True
            self.flight[0] = [*self.flight[0][:2], b"\xc1"]
            self.deliver()

    def _hear(self, frames: list[bytes]) -> None:
        self.live_calls += 1
        self.heard_of = self.has_heard = True
        self.life_heard = len(self.lives) - 1
        if not self.setup.watched and self.stream.state is State.SYNCING:
            self._connected()  # as a SharedFeed does
            self.has_heard = True
        self.stream.live(frames)

    # --- the replay socket

    def answer(self, count: int) -> None:
        """Some more frames of the answer."""
        if self.question is None or self.waits_for_turn or self.replay_dead:
            return
        if self.frames is None:
            self.frames = self.publisher.answer(self.question, self.topic)
        for _ in range(count):
            frames = next(self.frames, None)
            if not frames:
                return
            calls = self.calls
            self.life_heard = len(self.lives) - 1
            self.has_heard = True
            self.stream.replay(frames)
            if self.calls != calls:
                return

    def drop_frames(self, count: int) -> None:
        """A stock publisher drops what its peer is slow to take."""
        if self.frames is not None and not self.setup.ours:
            for _ in range(count):
                next(self.frames, None)

    def break_off(self) -> None:
        if self.frames is not None:
            self.frames = iter(())

    def have_turn(self) -> None:
        self.turns_are_taken = False
        if self.waits_for_turn:
            self.waits_for_turn = False
            self.stream.asked()

    def rename(self, model: str) -> None:
        self.topic = f"kv@{self.name}@{model}".encode()

    # --- the endpoint

    def remove(self) -> None:
        """From the fleet, and added again: another stream."""
        self.flight.clear()
        self.is_connected = self.is_subscribed = self.is_stalled = False
        self.delivered = -1
        self.connects = 0
        self.stream.close()
        assert self.question is None
        assert self.alarm_at is None
        self.open_stream()


def mixed(events: Sequence[tuple[str, Any]], order: int) -> list[Any]:
    """As engines tell what happened in a step: in that order; or HBM's events first, then those of the tiers below, in
    any order of tiers.

    Within a tier no engine mixes events up, and nobody could put them right: a block stored and removed is not one
    removed and stored. An event of all tiers ("") separates what was before it from what came after it.
    """
    order, in_order = divmod(order, 2)
    if in_order:
        return [event for _, event in events]
    mix: list[Any] = []
    queues: dict[str, deque[Any]] = {}

    def join(order: int) -> int:
        mix.extend(queues.pop(GPU, ()))
        while queues:
            names = list(queues)
            order, pick = divmod(order, len(names))
            mix.append(queues[names[pick]].popleft())
            if not queues[names[pick]]:
                del queues[names[pick]]
        return order

    for tier, event in events:
        if tier:
            queues.setdefault(tier, deque()).append(event)
        else:
            order = join(order)
            mix.append(event)
    join(order)
    return mix
