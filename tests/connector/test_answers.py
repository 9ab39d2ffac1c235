"""Answers over a real ROUTER, with the thread's part played by the test."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import zmq

from connector import answers as answers_module
from connector.answers import END, MAX_ASKERS, PATIENCE, REQUESTS_AT_ONCE, SNAPSHOT, Answers
from connector.journal import About, Journal

from .conftest import Sockets
from .test_journal import stored

TOPIC = b"kv@a@m"
MANY = 5000
"""Messages, of 200 blocks each: more than ZMQ and the kernel take in for a peer that does not read."""


class Desk:
    def __init__(self, sockets: Sockets) -> None:
        self.sockets = sockets
        self.now = 0.0
        self.journal = Journal(About("life"), buffer_steps=10_000)
        self.router = sockets.socket(zmq.ROUTER)
        self.answers = Answers(self.router, self.journal, TOPIC.decode(), clock=lambda: self.now)
        self.router.bind("tcp://127.0.0.1:*")
        self.endpoint = self.router.getsockopt_string(zmq.LAST_ENDPOINT)

    def peer(self, queue: int = 0) -> zmq.Socket[bytes]:
        """Takes `queue` messages without reading; 0 = any number."""
        dealer = self.sockets.socket(zmq.DEALER)
        dealer.setsockopt(zmq.RCVHWM, queue)
        if queue:
            dealer.setsockopt(zmq.RCVBUF, 1024)
        dealer.connect(self.endpoint)
        return dealer

    def ask(self, dealer: zmq.Socket[bytes], *starts: int) -> None:
        """Returns once the requests are taken in."""
        for start in starts:
            dealer.send_multipart([b"", start.to_bytes(8, "big")])
        self.until_known(len(self.answers) + len(starts))

    def until_known(self, askers: int) -> None:
        def are_known() -> bool:
            self.answers.receive()
            return len(self.answers) >= askers

        self.until(are_known)

    def send(self) -> bool:
        return self.answers.send(lambda: True)

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < deadline, "it never comes true"
            time.sleep(0.001)

    def take(self, dealer: zmq.Socket[bytes]) -> list[list[bytes]]:
        """A whole answer, without the end."""
        taken: list[list[bytes]] = []
        deadline = time.monotonic() + 10
        while not taken or END not in taken[-1]:
            assert time.monotonic() < deadline, f"no end after {len(taken)} messages"
            self.send()
            if dealer.poll(5):
                taken.append(dealer.recv_multipart())
        assert taken[-1] == [b"", b"", END, b""]
        return taken[:-1]


@pytest.fixture
def desk(sockets: Sockets) -> Desk:
    return Desk(sockets)


def test_answers_take_turns_message_by_message(desk: Desk) -> None:
    for number in range(2):
        desk.journal.batch([stored(number)], 0.0)
    first, second = desk.peer(), desk.peer()
    desk.ask(first, 0)
    desk.ask(second, 0)
    for _ in range(2):
        assert desk.answers.send(lambda: False)
    assert (first.poll(5000), second.poll(5000)) == (zmq.POLLIN, zmq.POLLIN)
    assert len(desk.answers) == 2
    assert [reply[2:] for reply in desk.take(first)] == [reply[2:] for reply in desk.take(second)]
    assert len(desk.answers) == 0


def test_live_messages_wait_for_one_message_of_an_answer_at_most(desk: Desk) -> None:
    desk.journal.batch([stored(0, 5000)], 0.0)
    dealer = desk.peer()
    desk.ask(dealer, SNAPSHOT)
    assert desk.answers.send(lambda: False)
    assert dealer.poll(5000)
    dealer.recv_multipart()
    assert not dealer.poll(50)
    assert len(desk.answers) == 1


def test_the_same_question_of_the_same_peer_is_answered_once(desk: Desk) -> None:
    desk.journal.batch([stored(0)], 0.0)
    dealer = desk.peer()
    for start in (0, 0, SNAPSHOT, SNAPSHOT, 0, 1):
        dealer.send_multipart([b"", start.to_bytes(8, "big")])
    desk.until_known(3)
    replies = [desk.take(dealer) for _ in range(3)]
    assert sorted(map(len, replies)) == [0, 1, 1]
    assert not dealer.poll(50)


def test_a_flood_of_requests_is_read_in_portions(desk: Desk) -> None:
    dealer = desk.peer()
    for start in range(3 * REQUESTS_AT_ONCE):
        dealer.send_multipart([b"", start.to_bytes(8, "big")])
    portions = []
    while len(desk.answers) < 3 * REQUESTS_AT_ONCE:
        before = len(desk.answers)
        more = desk.answers.receive()
        portions.append(len(desk.answers) - before)
        assert more or portions[-1] < REQUESTS_AT_ONCE
    assert max(portions) <= REQUESTS_AT_ONCE


def test_a_message_of_many_frames_is_ignored_like_any_nonsense(desk: Desk) -> None:
    dealer = desk.peer()
    dealer.send_multipart([b"", bytes(8), *[b"x"] * 10_000])
    desk.ask(dealer, 0)
    assert desk.take(dealer) == []


def test_all_answers_together_are_limited_to_a_rate_after_a_burst(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(100):
        desk.journal.batch([stored(number * 100, 100)], 0.0)
    size = len(next(desk.journal.replay(50))[1])
    monkeypatch.setattr(answers_module, "BURST_BYTES", 10 * size)
    monkeypatch.setattr(answers_module, "BYTES_PER_S", 20 * size)
    first, second = desk.peer(), desk.peer()
    desk.ask(first, 0)
    desk.ask(second, 50)

    assert not desk.send()
    got = 0

    def drain() -> int:
        nonlocal got
        for dealer in (first, second):
            while dealer.poll(50):
                dealer.recv_multipart()
                got += 1
        return got

    assert 9 <= drain() <= 12
    assert not desk.send()
    assert drain() <= 12
    desk.now += 0.25
    assert not desk.send()
    assert 14 <= drain() <= 17


def test_only_so_many_askers_are_known(desk: Desk) -> None:
    dealer = desk.peer()
    for start in range(MAX_ASKERS + 50):
        dealer.send_multipart([b"", start.to_bytes(8, "big")])
    desk.until_known(MAX_ASKERS)
    for _ in range(50):
        desk.answers.receive()
    assert len(desk.answers) == MAX_ASKERS


@pytest.mark.parametrize(
    "frames", [[b""], [b"", b"short"], [b"", bytes(9)], [b"x", b"", bytes(8)], [b"", b"", b"", b""], [b"only"]]
)
def test_what_is_no_request_is_ignored(desk: Desk, frames: list[bytes]) -> None:
    dealer = desk.peer()
    dealer.send_multipart(frames)
    desk.ask(dealer, 0)
    assert desk.take(dealer) == []
    assert len(desk.answers) == 0


def test_a_peer_slow_to_read_gets_everything_in_the_end_and_holds_up_nobody(desk: Desk) -> None:
    for number in range(MANY):
        desk.journal.batch([stored(number * 200, 200)], 0.0)
    slow, quick = desk.peer(queue=1), desk.peer()
    desk.ask(slow, 0)
    desk.until(lambda: not desk.send())
    desk.ask(quick, MANY - 1)
    assert len(desk.take(quick)) == 1
    assert len(desk.take(slow)) == MANY


def test_a_peer_that_takes_nothing_for_long_loses_its_answer(desk: Desk) -> None:
    for number in range(MANY):
        desk.journal.batch([stored(number * 200, 200)], 0.0)
    slow = desk.peer(queue=1)
    desk.ask(slow, 0)
    desk.until(lambda: not desk.send())
    desk.now += PATIENCE - 0.1
    desk.send()
    assert len(desk.answers) == 1
    desk.now += 0.2
    desk.send()
    assert len(desk.answers) == 0


def test_one_snapshot_is_made_at_a_time_and_the_next_one_is_newer(desk: Desk) -> None:
    desk.journal.batch([stored(0, 5000)], 0.0)
    first, second = desk.peer(), desk.peer()
    desk.ask(first, SNAPSHOT)
    desk.answers.send(lambda: False)
    desk.ask(second, SNAPSHOT)
    desk.journal.batch([stored(9000)], 0.0)
    desk.answers.send(lambda: False)
    assert not second.poll(50)
    assert {int.from_bytes(reply[2], "big") for reply in desk.take(first)} == {0}
    assert {int.from_bytes(reply[2], "big") for reply in desk.take(second)} == {1}


def test_a_peer_that_is_gone_is_forgotten_and_with_it_its_snapshot(desk: Desk) -> None:
    desk.journal.batch([stored(0, 5000)], 0.0)
    gone, present = desk.peer(), desk.peer()
    desk.ask(gone, SNAPSHOT)
    desk.answers.send(lambda: False)
    gone.close(linger=0)
    desk.ask(present, SNAPSHOT)
    assert len(desk.take(present)) == 5
    desk.until(lambda: not desk.send() or not len(desk.answers))
    assert len(desk.answers) == 0


def test_an_answer_that_cannot_be_made_costs_only_who_asked(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(at: float) -> Iterator[tuple[int, bytes]]:
        raise RuntimeError("a fault of ours")

    desk.journal.batch([stored(0)], 0.0)
    monkeypatch.setattr(desk.journal, "snapshot", fail)
    dealer = desk.peer()
    desk.ask(dealer, SNAPSHOT, 0)
    assert len(desk.take(dealer)) == 1
    assert len(desk.answers) == 0
    assert len(caplog.records) == 1
