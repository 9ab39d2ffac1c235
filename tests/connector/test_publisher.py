"""The publisher over real sockets, as consumers and strangers meet it."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import zmq
from msgspec.structs import replace

from connector import publisher as publisher_module
from connector.answers import END, SNAPSHOT
from connector.events import BlockRemoved, Load, Tier
from connector.journal import About
from connector.ledger import PART_BLOCKS
from connector.publisher import Publisher, of_rank

from .conftest import Sockets
from .test_journal import stored

NEVER = 0.0


@pytest.fixture
def start() -> Iterator[Callable[..., Publisher]]:
    started: list[Publisher] = []

    def start(about: About | None, **options: Any) -> Publisher:
        options = {"endpoint": "tcp://*:0", "replay_endpoint": "tcp://*:0", "topic": "kv@a@m"} | options
        started.append(Publisher(about, **options))
        return started[-1]

    yield start
    for publisher in started:
        publisher.close()


def address(endpoint: str | None) -> str:
    assert endpoint is not None
    return endpoint.replace("0.0.0.0", "127.0.0.1")


class Peer:
    """One consumer; every wait is bounded."""

    def __init__(self, sockets: Sockets, publisher: Publisher) -> None:
        self.subscription = sockets.socket(zmq.SUB)
        self.dealer = sockets.socket(zmq.DEALER)
        for peer in (self.subscription, self.dealer):
            peer.setsockopt(zmq.RCVTIMEO, 10_000)
            peer.setsockopt(zmq.RCVHWM, 0)
        self.subscription.subscribe(b"kv@")
        self.subscription.connect(address(publisher.endpoint))
        if publisher.replay_endpoint:
            self.dealer.connect(address(publisher.replay_endpoint))

    def hear(self) -> tuple[int, list[Any], dict[str, Any]]:
        topic, number, payload = self.subscription.recv_multipart()
        assert topic == b"kv@a@m"
        _, events, _, notes = msgspec.msgpack.decode(payload)
        return int.from_bytes(number, "big"), events, notes

    def ask(self, start: int) -> list[list[bytes]]:
        """All replies but the end marker."""
        self.dealer.send_multipart([b"", start.to_bytes(8, "big")])
        replies = []
        while END not in (reply := self.dealer.recv_multipart()):
            replies.append(reply)
        assert reply in ([b"", b"", END, b""], [b"", END, b""])
        return replies

    def numbers(self, start: int = 0) -> list[int]:
        return [int.from_bytes(reply[-2], "big") for reply in self.ask(start)]

    def until_published(self, count: int) -> None:
        deadline = time.monotonic() + 10
        while len(self.numbers()) < count:
            assert time.monotonic() < deadline, f"fewer than {count} messages"


# --- what goes out


def test_messages_have_three_frames_and_count_from_zero(sockets: Sockets, start: Callable[..., Publisher]) -> None:
    publisher = start(About(heartbeat=0.02))
    peer = Peer(sockets, publisher)
    joined = peer.hear()[0]
    for number in range(100):
        publisher.publish([stored(number)])
    heard = [peer.hear() for _ in range(100)]
    assert [number for number, *_ in heard] == list(range(joined + 1, joined + 101))
    assert peer.numbers()[: joined + 101] == list(range(joined + 101))
    hashes = [block_hash for _, events, _ in heard for event in events for block_hash in event["block_hashes"]]
    assert hashes == sorted(hashes)
    assert len(hashes) >= 90  # a heartbeat may have come between


class Slow(list[Any]):
    """Events that cannot be read before `ready`."""

    def __init__(self) -> None:
        super().__init__([stored(1)])
        self.begun, self.ready = threading.Event(), threading.Event()

    def __iter__(self) -> Iterator[Any]:
        self.begun.set()
        self.ready.wait(10)
        return super().__iter__()


def test_flush_waits_until_all_is_sent_but_not_for_ever(sockets: Sockets, start: Callable[..., Publisher]) -> None:
    publisher = start(About(heartbeat=NEVER))
    assert publisher.flush(0)
    slow = Slow()
    publisher.publish(slow)
    assert not publisher.flush(0.05)
    slow.ready.set()
    assert publisher.flush(10)
    assert Peer(sockets, publisher).numbers() == [0]


def test_while_idle_it_is_heard_at_least_as_often_as_promised(
    sockets: Sockets, start: Callable[..., Publisher]
) -> None:
    about = About("life", heartbeat=0.02, tiers={"GPU": Tier(9)})
    peer = Peer(sockets, start(about))
    first, events, notes = peer.hear()
    assert (events, notes["heartbeat"], notes["tiers"]) == ([], 0.02, {"GPU": {"capacity": 9, "held": 0}})
    about.load = Load(3, 4, 0.5)
    loads = [peer.hear() for _ in range(5)]
    assert [number for number, *_ in loads] == list(range(first + 1, first + 6))
    assert loads[-1][2]["load"] == {"waiting": 3, "running": 4, "kv_usage": 0.5}


@pytest.mark.parametrize("about", [None, About(heartbeat=NEVER)], ids=["plain", "never"])
def test_without_a_promise_it_is_silent(sockets: Sockets, start: Callable[..., Publisher], about: About | None) -> None:
    peer = Peer(sockets, start(about))
    assert peer.numbers() == []
    assert not peer.subscription.poll(100)


def test_events_have_their_own_time_or_the_present(sockets: Sockets, start: Callable[..., Publisher]) -> None:
    publisher = start(About(heartbeat=NEVER), rank=2)
    publisher.publish([stored(1)], at=5.5)
    begin = time.time()
    publisher.publish([stored(2)])
    peer = Peer(sockets, publisher)
    peer.until_published(2)
    told, present = (msgspec.msgpack.decode(reply[3]) for reply in peer.ask(0))
    assert (told[0], told[2]) == (5.5, 2)
    assert begin <= present[0] <= time.time()


def test_all_threads_may_publish(sockets: Sockets, start: Callable[..., Publisher]) -> None:
    publisher = start(About(heartbeat=NEVER))
    threads = [
        threading.Thread(target=lambda: [publisher.publish([stored(number)]) for number in range(300)])
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    peer = Peer(sockets, publisher)
    peer.until_published(900)
    assert peer.numbers() == list(range(900))


# --- what is asked


def test_replay_begins_where_it_is_asked_to_and_only_the_last_steps_are_kept(
    sockets: Sockets, start: Callable[..., Publisher]
) -> None:
    publisher = start(About(heartbeat=NEVER), buffer_steps=3)
    peer = Peer(sockets, publisher)
    for number in range(5):
        publisher.publish([stored(number)])
    deadline = time.monotonic() + 10
    while peer.numbers() != [2, 3, 4]:
        assert time.monotonic() < deadline
    assert peer.numbers(4) == [4]
    assert peer.numbers(9) == []
    assert [reply[:2] for reply in peer.ask(0)] == [[b"", b"kv@a@m"]] * 3


def test_the_old_form_leaves_the_topic_out(sockets: Sockets, start: Callable[..., Publisher]) -> None:
    publisher = start(None, old_replay_form=True)
    publisher.publish([stored(1)])
    peer = Peer(sockets, publisher)
    peer.until_published(1)
    [reply] = peer.ask(0)
    assert reply[:2] == [b"", bytes(8)]
    assert len(reply) == 3


def test_a_snapshot_tells_what_all_messages_so_far_would_have_told(
    sockets: Sockets, start: Callable[..., Publisher]
) -> None:
    publisher = start(About(heartbeat=NEVER), buffer_steps=1)
    blocks = 10 * PART_BLOCKS
    publisher.publish([stored(0, blocks)])
    publisher.publish([BlockRemoved([7], "GPU", 0)])
    peer = Peer(sockets, publisher)
    deadline = time.monotonic() + 10
    while peer.numbers() != [1]:
        assert time.monotonic() < deadline
    replies = peer.ask(SNAPSHOT)
    assert {tuple(reply[:3]) for reply in replies} == {(b"", b"kv@a@m", (1).to_bytes(8, "big"))}
    batches = [msgspec.msgpack.decode(reply[3]) for reply in replies]
    held = [block_hash for batch in batches for event in batch[1] for block_hash in event["block_hashes"]]
    assert sorted(held) == [number for number in range(blocks) if number != 7]
    assert [batch[3]["snapshot"]["part"] for batch in batches] == list(range(1, len(batches) + 1))
    assert {batch[3]["snapshot"]["parts"] for batch in batches} == {len(batches)}


def test_who_has_no_snapshot_answers_with_the_end_alone(sockets: Sockets, start: Callable[..., Publisher]) -> None:
    plain, fresh = start(None), start(About(heartbeat=NEVER))
    plain.publish([stored(1)])
    Peer(sockets, plain).until_published(1)
    assert Peer(sockets, plain).ask(SNAPSHOT) == []
    assert Peer(sockets, fresh).ask(SNAPSHOT) == []


def test_live_messages_go_out_while_a_large_snapshot_is_sent(sockets: Sockets, start: Callable[..., Publisher]) -> None:
    publisher = start(About(heartbeat=0.02))
    peer = Peer(sockets, publisher)
    peer.hear()
    publisher.publish([stored(0, 300 * PART_BLOCKS)])
    while not peer.hear()[1]:
        pass
    peer.dealer.send_multipart([b"", SNAPSHOT.to_bytes(8, "big")])
    parts = 0
    live: list[int] = []
    while END not in (reply := peer.dealer.recv_multipart()):
        parts += 1
        if parts in (10, 20):  # what is published now is heard long before the last part is made
            publisher.publish([stored(10**6 + parts)])
            while not (heard := peer.hear())[1]:
                pass
            live.append(heard[0])
            assert msgspec.msgpack.decode(reply[3])[3]["snapshot"]["parts"] == 300
    assert parts == 300
    assert len(live) == 2


# --- strangers


def test_strangers_and_nonsense_change_nothing(sockets: Sockets, start: Callable[..., Publisher]) -> None:
    publisher = start(About(heartbeat=NEVER))
    publisher.publish([stored(1)])
    assert publisher.flush(10)  # so that the peer hears of what follows only
    peer = Peer(sockets, publisher)
    for endpoint in (publisher.endpoint, publisher.replay_endpoint):
        host, port = address(endpoint).removeprefix("tcp://").split(":")
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(100_000))
    for frames in ([b"", b"x" * 2_000_000], [b"short"], [b"", b"", b"", bytes(8)]):
        nonsense = sockets.socket(zmq.DEALER)
        nonsense.connect(address(publisher.replay_endpoint))
        nonsense.send_multipart(frames)
    wide = sockets.socket(zmq.SUB)
    wide.connect(address(publisher.endpoint))
    wide.subscribe(b"x" * 10_000)
    assert peer.numbers() == [0]
    publisher.publish([stored(2)])
    assert peer.hear()[0] == 1


def test_a_peer_that_asks_and_never_reads_delays_nobody(sockets: Sockets, start: Callable[..., Publisher]) -> None:
    publisher = start(About(heartbeat=NEVER))
    for number in range(3000):
        publisher.publish([stored(number * 300, 300)])
    peer = Peer(sockets, publisher)
    peer.until_published(3000)
    for number in range(10):
        idle = sockets.socket(zmq.DEALER)
        idle.setsockopt(zmq.RCVHWM, 1)
        idle.connect(address(publisher.replay_endpoint))
        idle.send_multipart([b"", number.to_bytes(8, "big")])
    assert peer.numbers(2990) == list(range(2990, 3000))
    publisher.publish([stored(1)])
    while peer.hear()[0] < 3000:
        pass


WAYS = {"events": b"SUB", "replay": b"DEALER"}
"""Socket types of those who connect."""


class Stranger:
    """Speaks ZMTP by hand over one TCP connection, and reads only what it must."""

    def __init__(self, endpoint: str | None, kind: bytes) -> None:
        host, port = address(endpoint).removeprefix("tcp://").split(":")
        self.connection = socket.socket()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        self.connection.connect((host, int(port)))
        self.connection.sendall(b"\xff" + bytes(8) + b"\x7f\3\0" + b"NULL".ljust(20, b"\0") + bytes(32))
        ready = b"\x05READY\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind
        self.connection.sendall(bytes([4, len(ready)]) + ready)
        greeting = b""
        while len(greeting) < 64:
            greeting += self.connection.recv(64 - len(greeting))

    def frame(self, data: bytes, *, more: bool = False) -> None:
        self.connection.sendall(bytes([more, len(data)]) + data)

    def is_cut_off(self) -> bool:
        try:
            return self.connection.recv(65536, socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except ConnectionError:
            return True


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("way", WAYS)
def test_who_connects_and_never_reads_is_cut_off_with_what_waits_for_it(
    start: Callable[..., Publisher], monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr(publisher_module, "DEAD_AFTER_MS", 100)
    publisher = start(About(heartbeat=NEVER))
    before = open_files()
    stranger = Stranger(publisher.endpoint if way == "events" else publisher.replay_endpoint, WAYS[way])
    if way == "events":
        stranger.frame(b"\1")
    for number in range(2000):  # more than fits between two processes
        publisher.publish([stored(number * 300, 300)])
    assert publisher.flush(10)
    if way == "replay":
        stranger.frame(b"", more=True)
        stranger.frame(bytes(8))
    deadline = time.monotonic() + 10
    while open_files() > before + 1:  # the stranger's own end stays open
        assert time.monotonic() < deadline, "the connection is still there"
        publisher.publish([stored(1, 300)])
        time.sleep(0.01)
    stranger.connection.close()


@pytest.mark.parametrize("way", WAYS)
def test_a_stranger_that_sends_large_frames_is_cut_off(start: Callable[..., Publisher], way: str) -> None:
    publisher = start(About(heartbeat=NEVER))
    stranger = Stranger(publisher.endpoint if way == "events" else publisher.replay_endpoint, WAYS[way])
    stranger.connection.sendall(b"\2" + (1 << 40).to_bytes(8, "big"))
    deadline = time.monotonic() + 10
    while not stranger.is_cut_off():
        assert time.monotonic() < deadline, "it is still listened to"
        time.sleep(0.005)
    stranger.connection.close()


def test_a_flood_of_requests_takes_little_of_the_engines_time(
    sockets: Sockets, start: Callable[..., Publisher]
) -> None:
    publisher = start(About(heartbeat=NEVER))
    publisher.publish([stored(1)])
    peer = Peer(sockets, publisher)
    peer.until_published(1)
    requests, over = 0, threading.Event()

    def flood() -> None:
        nonlocal requests
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        with context, context.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            dealer.connect(address(publisher.replay_endpoint))
            while not over.is_set():
                if dealer.poll(5, zmq.POLLOUT):
                    dealer.send_multipart([b"", (1 << 40).to_bytes(8, "big")])
                    requests += 1

    flooding = threading.Thread(target=flood)
    flooding.start()
    while requests < 1000:
        time.sleep(0.001)
    clock = time.pthread_getcpuclockid(publisher._thread.ident)  # type: ignore[arg-type]
    begin, spent = time.monotonic(), time.clock_gettime(clock)
    for number in range(10):
        publisher.publish([stored(number)])
        while peer.hear()[0] < number + 1:
            pass
        time.sleep(0.02)
    share = (time.clock_gettime(clock) - spent) / (time.monotonic() - begin)
    over.set()
    flooding.join(10)
    assert share < 0.2
    assert peer.numbers(11) == []


TOKEN = 1234567
SALT = "a-salt-that-is-secret"


def test_neither_tokens_nor_salts_are_logged(
    sockets: Sockets, start: Callable[..., Publisher], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.NOTSET)
    good = replace(stored(1), token_ids=[TOKEN], extra_keys=[[SALT]])
    odd = [
        good,
        replace(good, extra_keys=[{SALT: object()}]),
        replace(good, token_ids=[TOKEN, SALT]),
        replace(good, token_ids=SALT),
        replace(good, token_ids=[TOKEN << 70]),
        replace(good, block_hashes=[[SALT]]),
        replace(good, block_hashes=[TOKEN << 70]),
        replace(good, medium="CPU", token_ids=[], block_hashes=[{SALT: TOKEN}]),
        [SALT, TOKEN],
    ]
    for event in odd:
        publisher = start(About(heartbeat=NEVER))
        publisher.publish([event, good])
        assert publisher.flush(10)
        Peer(sockets, publisher).ask(SNAPSHOT)
    assert "batches are published as they come" in caplog.text
    assert str(TOKEN) not in caplog.text
    assert SALT not in caplog.text


# --- faster than it can be told


def test_without_room_nothing_waits_and_everything_is_told_as_cleared(
    sockets: Sockets, start: Callable[..., Publisher]
) -> None:
    publisher = start(About(heartbeat=NEVER), max_queue_size=4)
    publisher.publish([stored(1)])
    assert publisher.flush(10)
    slow = Slow()
    publisher.publish(slow)
    assert slow.begun.wait(10)
    begin = time.monotonic()
    for number in range(10, 30):
        publisher.publish([stored(number)])
    publisher.publish([BlockRemoved([1], "GPU", 0)])
    assert time.monotonic() - begin < 1
    slow.ready.set()
    assert publisher.flush(10)
    publisher.publish([stored(99)])
    assert publisher.flush(10)
    peer = Peer(sockets, publisher)
    told = [msgspec.msgpack.decode(reply[3])[1] for reply in peer.ask(0)]
    assert [event["type"] for [event] in told] == ["BlockStored", "BlockStored", "AllBlocksCleared", "BlockStored"]
    assert told[2] == [{"type": "AllBlocksCleared"}], "of all tiers"
    assert peer.numbers() == [0, 1, 2, 3], "no consumer need wonder what it missed"
    [picture] = [msgspec.msgpack.decode(reply[3])[1] for reply in peer.ask(SNAPSHOT)]
    assert [event["block_hashes"] for event in picture] == [[99]]
    assert publisher.overflows == 1


# --- load


def test_a_change_of_the_load_is_told_within_a_tenth_of_a_second_and_nothing_is_told_twice(
    sockets: Sockets, start: Callable[..., Publisher]
) -> None:
    about = About(heartbeat=100, load=Load(0, 1, 0.5))
    publisher = start(about)
    peer = Peer(sockets, publisher)
    publisher.publish([stored(1)])
    peer.until_published(1)
    about.load = Load(0, 0, 0.0)
    begin = time.monotonic()
    while (heard := peer.hear())[2]["load"]["running"]:
        pass
    assert heard[1] == []
    assert time.monotonic() - begin < 1
    about.load = Load(0, 0, 0.7)
    assert not peer.subscription.poll(300), "the use of the cache alone is no news"


# --- begin and end


def test_what_is_queued_is_sent_before_it_ends_and_what_comes_later_is_dropped(
    sockets: Sockets, start: Callable[..., Publisher]
) -> None:
    publisher = start(About(heartbeat=0.02))
    peer = Peer(sockets, publisher)
    peer.hear()
    publisher.publish([stored(number) for number in range(2000)])
    publisher.publish([stored(9999)])
    publisher.close()
    publisher.publish([stored(1)])
    publisher.close()
    while not (heard := peer.hear())[1] or heard[1][0]["block_hashes"] != [9999]:
        pass


def test_it_ends_in_bounded_time_however_busy(sockets: Sockets, start: Callable[..., Publisher]) -> None:
    before = [thread.name for thread in threading.enumerate()]
    publisher = start(About(heartbeat=NEVER), max_queue_size=2)
    publisher.publish([stored(0, 50_000)])
    peer = Peer(sockets, publisher)
    peer.until_published(1)
    peer.dealer.send_multipart([b"", SNAPSHOT.to_bytes(8, "big")])
    ended = threading.Event()

    def publish() -> None:
        while not ended.is_set():
            publisher.publish([stored(1)])

    busy = threading.Thread(target=publish)
    busy.start()
    publisher.close()
    ended.set()
    busy.join(10)
    assert not busy.is_alive()
    assert [thread.name for thread in threading.enumerate()] == before


def test_an_endpoint_that_is_taken_is_an_error_that_leaves_nothing_behind(start: Callable[..., Publisher]) -> None:
    first = start(None)
    assert first.replay_endpoint is not None
    for taken in ({"endpoint": first.endpoint, "bind": True}, {"replay_endpoint": first.replay_endpoint}):
        with pytest.raises(zmq.ZMQError, match="in use"):
            start(None, **taken)
    first.close()
    again = None
    deadline = time.monotonic() + 10
    while again is None:  # ZMQ lets go of ports in the background
        try:
            again = start(None, endpoint=first.endpoint, bind=True)
        except zmq.ZMQError:
            assert time.monotonic() < deadline
    assert again.endpoint == first.endpoint


def test_an_endpoint_without_a_wildcard_is_connected_to(sockets: Sockets, start: Callable[..., Publisher]) -> None:
    subscriber = sockets.socket(zmq.SUB)
    subscriber.setsockopt(zmq.RCVTIMEO, 10_000)
    subscriber.subscribe(b"")
    subscriber.bind("tcp://127.0.0.1:*")
    endpoint = subscriber.getsockopt_string(zmq.LAST_ENDPOINT)
    publisher = start(About(heartbeat=0.02), endpoint=endpoint, replay_endpoint=None)
    assert (publisher.endpoint, publisher.replay_endpoint) == (endpoint, None)
    assert subscriber.recv_multipart()[0] == b"kv@a@m"


@pytest.mark.parametrize(
    ("endpoint", "rank", "moved"),
    [
        ("tcp://*:5557", 0, "tcp://*:5557"),
        ("tcp://*:5557", 3, "tcp://*:5560"),
        ("tcp://[::]:5557", 1, "tcp://[::]:5558"),
        ("tcp://*:0", 2, "tcp://*:0"),
        ("inproc://cache", 2, "inproc://cache_dp2"),
        ("ipc:///tmp/events", 0, "ipc:///tmp/events"),
        (None, 4, None),
    ],
)
def test_each_rank_has_endpoints_of_its_own(endpoint: str | None, rank: int, moved: str | None) -> None:
    assert of_rank(endpoint, rank) == moved


def test_ranks_cannot_share_what_cannot_be_told_apart() -> None:
    with pytest.raises(ValueError, match="rank"):
        of_rank("ipc:///tmp/events", 1)
