"""CURVE between our publisher and a picker's feeds: who gets in, who does not, and what each is told about it."""

from __future__ import annotations

import asyncio
import functools
import os
import stat
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.auth
from zmq.utils import z85

from connector import curve as engine_side
from connector.events import BlockRemoved, BlockStored
from connector.journal import About
from connector.publisher import Publisher
from indexer import curve as picker_side
from indexer import feed as feed_module
from indexer.feed import Feed, FeedAddress, Hub, SharedFeed
from indexer.index import PrefixIndex
from indexer.stream import State
from tests import waiting

from .test_publisher import address

TOPIC = "kv@10.0.0.1:8000@m"


def stored(first: int, blocks: int = 1) -> BlockStored:
    hashes = list(range(first, first + blocks))
    return BlockStored(hashes, None, hashes, 1, None, "GPU", None, extra_keys=[None] * blocks)


until = functools.partial(waiting.until, seconds=10)


class Keys:
    """Key files of two engines and two pickers; only `picker` is known to engines that let in known pickers."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.clients = directory / "clients"
        self.clients.mkdir()
        for name in ("engine", "other-engine", "stranger"):
            zmq.auth.create_certificates(directory, name)
        zmq.auth.create_certificates(self.clients, "picker")

    def engine(self, name: str = "engine", *, choosy: bool = False) -> engine_side.Curve:
        clients = str(self.clients) if choosy else ""
        keys = engine_side.load_curve(str(self.directory / f"{name}.key_secret"), clients)
        assert keys is not None
        return keys

    def picker(self, name: str = "", engine: str = "engine") -> picker_side.Curve:
        directory = self.clients if name == "picker" else self.directory
        own = str(directory / f"{name}.key_secret") if name else ""
        return picker_side.load_curve(str(self.directory / f"{engine}.key"), own)


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path)


@pytest.fixture
def publish() -> Iterator[Callable[..., Publisher]]:
    started: list[Publisher] = []

    def publish(curve: engine_side.Curve | None = None, **options: Any) -> Publisher:
        options = {"endpoint": "tcp://127.0.0.1:*", "replay_endpoint": "tcp://127.0.0.1:*"} | options
        publisher = Publisher(About(heartbeat=0.05), topic=TOPIC, curve=curve, **options)
        started.append(publisher)
        return publisher

    yield publish
    for publisher in started:
        publisher.close()


class Picker:
    def __init__(self) -> None:
        self.index = PrefixIndex()
        self.hubs: list[Hub] = []
        self.feeds: list[Feed] = []

    def hub(self, curve: picker_side.Curve | None) -> Hub:
        self.hubs.append(Hub(curve))
        return self.hubs[-1]

    def listen(self, curve: picker_side.Curve | None, publisher: Publisher | None) -> Feed:
        """To `publisher`; None: to whoever connects."""
        there = FeedAddress()
        if publisher is not None:
            there = FeedAddress(address(publisher.endpoint), address(publisher.replay_endpoint), "kv@")
        feed = Feed(lambda: self.index.publisher("pod"), there)
        self.feeds.append(feed)
        feed.open(self.hub(curve))
        return feed

    async def close(self) -> None:
        for feed in self.feeds:
            feed.close()
        for hub in self.hubs:
            hub.close()


@pytest.fixture
async def picker(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Picker]:
    monkeypatch.setattr(feed_module, "REDIAL_AFTER", 0.1)
    picker = Picker()
    yield picker
    await picker.close()


def held(feed: Feed) -> int:
    return feed.residency.held("gpu")


# --- who gets in


@pytest.mark.parametrize("choosy", [False, True])
async def test_with_the_right_keys_live_batches_and_snapshots_come(
    keys: Keys, publish: Callable[..., Publisher], picker: Picker, choosy: bool
) -> None:
    publisher = publish(keys.engine(choosy=choosy), buffer_steps=1)
    publisher.publish([stored(0, 3000)])
    publisher.publish([BlockRemoved([2999], "GPU")])
    feed = picker.listen(keys.picker("picker"), publisher)
    await until(lambda: feed.state is State.LIVE)
    assert (feed.counters.snapshots, held(feed)) == (1, 2999)
    publisher.publish([stored(5000)])
    await until(lambda: held(feed) == 3000)


async def test_with_the_right_keys_replays_come(keys: Keys, publish: Callable[..., Publisher], picker: Picker) -> None:
    publisher = publish(keys.engine())
    for number in range(20):
        publisher.publish([stored(number)])
    assert publisher.flush(10)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context, context.socket(zmq.DEALER) as dealer:
        keys.picker().apply(dealer)
        dealer.connect(address(publisher.replay_endpoint))
        dealer.send_multipart([b"", bytes(8)])
        numbers = []
        while not numbers or numbers[-1] < 2**64 - 1:
            assert dealer.poll(10_000)
            numbers.append(int.from_bytes(dealer.recv_multipart()[-2], "big"))
    assert numbers[:20] == list(range(20))


@pytest.mark.parametrize(
    ("who", "reason"),
    [
        ("knows another engine", {"the peer broke off the handshake: has it CURVE, and the key we expect?"}),
        ("is unknown", {"the peer refused our key"}),
        ("has no keys", {"the peer asks for CURVE", "the peer broke off the handshake: does it ask for CURVE?"}),
    ],
)
async def test_a_picker_that_may_not_is_lost_with_a_reason_and_hears_nothing(
    keys: Keys,
    publish: Callable[..., Publisher],
    picker: Picker,
    caplog: pytest.LogCaptureFixture,
    who: str,
    reason: set[str],
) -> None:
    curve = {
        "knows another engine": keys.picker("picker", engine="other-engine"),
        "is unknown": keys.picker("stranger"),
        "has no keys": None,
    }[who]
    publisher = publish(keys.engine(choosy=True))
    publisher.publish([stored(1)])
    feed, friend = picker.listen(curve, publisher), picker.listen(keys.picker("picker"), publisher)
    await until(lambda: feed.state is State.LOST)
    assert feed.stream.reason in reason
    await until(lambda: friend.counters.messages >= 10)  # it was refused more than once by then
    assert (feed.state, feed.counters.messages, held(feed)) == (State.LOST, 0, 0)
    assert feed.stream.reason in reason
    lost = [record for record in caplog.records if record.getMessage().startswith("event stream is lost")]
    assert len(lost) == 1, "told once, however often it is tried"


async def test_an_engine_without_curve_is_not_heard_by_a_picker_with_it(
    keys: Keys, publish: Callable[..., Publisher], picker: Picker
) -> None:
    publisher = publish()
    publisher.publish([stored(1)])
    feed = picker.listen(keys.picker(), publisher)
    await until(lambda: feed.state is State.LOST)
    reasons = {"the peer has no CURVE", "the peer broke off the handshake: has it CURVE, and the key we expect?"}
    assert feed.stream.reason in reasons
    assert feed.counters.messages == 0


async def test_an_engine_that_gets_curve_later_is_heard_then(
    keys: Keys, publish: Callable[..., Publisher], picker: Picker
) -> None:
    plain = publish()
    feed = picker.listen(keys.picker(), plain)
    await until(lambda: feed.state is State.LOST)
    plain.close()
    endpoints = {"endpoint": plain.endpoint, "bind": True, "replay_endpoint": plain.replay_endpoint}
    again = None
    while again is None:  # ZMQ lets go of ports in the background
        try:
            again = publish(keys.engine(), **endpoints)
        except zmq.ZMQError:
            await asyncio.sleep(0.01)
    await until(lambda: feed.state is State.LIVE)


async def test_a_picker_is_let_in_once_its_key_is_there(
    keys: Keys, publish: Callable[..., Publisher], picker: Picker
) -> None:
    feed = picker.listen(keys.picker("stranger"), publish(keys.engine(choosy=True)))
    await until(lambda: feed.state is State.LOST)
    (keys.clients / "stranger.key").write_bytes((keys.directory / "stranger.key").read_bytes())
    await until(lambda: feed.state is State.LIVE)


async def test_if_the_pickers_keys_cannot_be_read_any_more_nobody_is_let_in(
    keys: Keys, publish: Callable[..., Publisher], picker: Picker, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = publish(keys.engine(choosy=True))
    (keys.clients / "odd.key").write_text("no key")
    feed = picker.listen(keys.picker("picker"), publisher)
    await until(lambda: feed.state is State.LOST)
    assert feed.stream.reason == "the peer refused our key"
    assert "odd.key" in caplog.text


@pytest.mark.parametrize("who", ["the engine", "another engine", "no engine"])
async def test_on_a_shared_socket_only_holders_of_the_engines_key_can_speak(
    keys: Keys, publish: Callable[..., Publisher], picker: Picker, who: str
) -> None:
    feed = picker.listen(keys.picker(), None)
    shared = SharedFeed(picker.hub(keys.picker()), "tcp://127.0.0.1:*", "kv@", lambda pod: feed)
    speakers = {"the engine": keys.engine(), "another engine": keys.engine("other-engine"), "no engine": None}
    publisher = publish(speakers[who], endpoint=shared.endpoint, bind=False, replay_endpoint=None)
    friend = publish(keys.engine(), endpoint=shared.endpoint, bind=False, replay_endpoint=None)
    publisher.publish([stored(1)])
    friend_first = feed.counters.messages
    await until(lambda: feed.counters.messages >= friend_first + 10)
    instances = {publisher._about.instance, friend._about.instance}  # type: ignore[union-attr]
    assert feed.stream.instance in instances
    if who != "the engine":
        assert feed.counters.restarts == 0, "only one of the two was ever heard"
        assert feed.stream.instance == friend._about.instance  # type: ignore[union-attr]
    shared.close()


# --- key files


def test_secret_keys_are_the_only_ones_that_make_an_engine(keys: Keys) -> None:
    assert engine_side.load_curve("") is None
    with pytest.raises(ValueError, match=r"engine\.key: there is no secret key in it"):
        engine_side.load_curve(str(keys.directory / "engine.key"))
    with pytest.raises(ValueError, match="clients have keys, but the engine has none"):
        engine_side.load_curve("", str(keys.clients))


def test_without_a_key_file_a_picker_has_a_new_key_each_time(keys: Keys) -> None:
    first, second = keys.picker(), keys.picker()
    assert first.server_key == second.server_key
    assert first.public_key != second.public_key
    assert zmq.curve_public(first.secret_key) == first.public_key


SECRET = "top-secret-top-secret-top-secret-top-sec"  # 40 characters, as a key has


@pytest.mark.parametrize(
    "content",
    [
        None,
        "",
        "curve\n",
        f'public-key = "short"\nsecret-key = "{SECRET}"\n',
        f'public-key = "{"~" * 40}"\nsecret-key = "{SECRET}"\n',
        f'public-key = "{z85.encode(bytes(32)).decode()}"\nsecret-key = "{SECRET}"\n',
        f'public-key = "{z85.encode(bytes(32)).decode()}"\nsecret-key = "{SECRET[:-5]}"\n',
    ],
)
def test_a_bad_key_file_is_named_and_nothing_of_it_is_told(tmp_path: Path, keys: Keys, content: str | None) -> None:
    path = tmp_path / "mine.key_secret"
    if content is not None:
        path.write_text(content)
    for load in (
        lambda: engine_side.load_curve(str(path)),
        lambda: picker_side.load_curve(str(keys.directory / "engine.key"), str(path)),
    ):
        with pytest.raises(ValueError, match=r"mine\.key_secret: ") as error:
            load()
        assert "top-secret" not in str(error.value)


def test_a_bad_directory_of_clients_is_named(tmp_path: Path, keys: Keys) -> None:
    secret, empty = str(keys.directory / "engine.key_secret"), tmp_path / "empty"
    empty.mkdir()
    for directory, why in (
        (tmp_path / "absent", "not a directory of CURVE key files"),
        (empty, "there is no \\*.key file in it"),
    ):
        with pytest.raises(ValueError, match=f"{directory.name}: {why}"):
            engine_side.load_curve(secret, str(directory))
    (empty / "x.key").write_text('public-key = "short"')
    with pytest.raises(ValueError, match="empty: one of its"):
        engine_side.load_curve(secret, str(empty))


def test_a_closed_publisher_leaves_no_thread_behind(keys: Keys) -> None:
    before = {thread.name for thread in threading.enumerate()}
    publisher = Publisher(About(), endpoint="tcp://127.0.0.1:*", curve=keys.engine(choosy=True))
    assert {thread.name for thread in threading.enumerate()} > before
    publisher.close()
    assert {thread.name for thread in threading.enumerate()} == before


def test_what_the_documentation_says_makes_keys_that_others_cannot_read(tmp_path: Path) -> None:
    before = os.umask(0o077)
    zmq.auth.create_certificates(tmp_path, "engine")
    os.umask(before)
    assert stat.S_IMODE((tmp_path / "engine.key_secret").stat().st_mode) == 0o600
    assert engine_side.load_curve(str(tmp_path / "engine.key_secret")) is not None
