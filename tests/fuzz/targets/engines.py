"""What engines publish, and what those publish who pretend to be one: batches, frames, whole streams of them."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from indexer.feed import Feed, FeedAddress, Topics
from indexer.index import PrefixIndex
from indexer.match import Prompt, match
from indexer.names import MAX_MODELS
from indexer.parking import CLAIM, MAX_BLOCKS, MAX_BYTES
from indexer.residency import Residency
from indexer.stream import State, Stream
from indexer.wire import BadPayload, BlockStored, decode_batch
from tests.fuzz.source import Source
from tests.fuzz.target import Script, Target, refused
from tests.fuzz.trial import CANARY_TOKEN

RECORDINGS = Path(__file__).parents[2] / "recordings"
TOPICS = (b"kv@pod@model", b"kv@pod@model", b"kv@pod@other", b"", b"kv", b"kv@\xff\xfe@\x00", b"t" * 5000, b"@@@@")
BLOCK = 4
PROMPT = struct.pack("<64I", *range(60), *[CANARY_TOKEN] * 4)
"""What most hostile events speak of: so what they claim is looked for."""

_pack = msgspec.msgpack.Encoder().encode
_Raw = msgspec.Raw


@cache
def recorded() -> Sequence[bytes]:
    """Payloads of a real vLLM."""
    lines = [line for path in sorted(RECORDINGS.glob("?-*[a-z].jsonl")) if ".requests" not in path.name
             for line in path.read_text().splitlines()[:40]]  # fmt: skip
    return [bytes.fromhex(json.loads(line)["frames"][-1]) for line in lines]


# --- one event, one batch


def batch(source: Source) -> bytes:
    """A payload: as recorded, as written by hand, or as nobody should."""
    if source.chance(0.05):
        return source.noise(60, 5000)
    if source.chance(0.1):
        return source.packed()
    if source.chance(0.25):
        payload = source.pick(recorded())
        return source.mutate(payload) if source.chance(0.7) else payload
    payload = _pack(_batch(source))
    return source.mutate(payload) if source.chance(0.2) else payload


def _batch(source: Source) -> Any:
    events = [_event(source) for _ in range(source.size(3, 200))]
    timestamp = 1.0 if source.chance(0.8) else _Raw(source.packed(4))
    if source.chance(0.05):
        return {"ts": timestamp, "events": events}
    fields = [timestamp, events if source.chance(0.97) else _Raw(source.packed(3)), 0]
    if source.chance(0.4):
        fields.append(_notes(source))
    return fields


def _event(source: Source) -> Any:
    kind = source.below(10)
    fields = _stored(source) if kind < 6 else _removed(source) if kind < 8 else _cleared(source)
    for _ in range(source.pick((0, 0, 0, 1, 1, 3))):
        name = source.pick(list(fields))
        fields[name] = _Raw(source.packed(2))
    if source.chance(0.1):
        array = [fields["type"], *list(fields.values())[1:]]
        return _Raw(_pack(_pack(array))) if source.chance(0.2) else array
    return fields if source.chance(0.98) else _Raw(source.packed(2))


def _stored(source: Source) -> dict[str, Any]:
    """Mostly a stretch of `PROMPT`, under hashes that are block numbers."""
    first = source.below(16)
    count = source.pick((1, 1, 2, 4, 16 - first))
    size = BLOCK if source.chance(0.9) else source.pick((0, 1, 2, 8, 65536))
    tokens = list(struct.unpack_from(f"<{len(PROMPT) // 4 - first * BLOCK}I", PROMPT, first * BLOCK * 4))
    fields: dict[str, Any] = {
        "type": "BlockStored",
        "block_hashes": [first + n for n in range(count)],
        "parent_block_hash": first - 1 if first else None,
        "token_ids": tokens[: count * size] if source.chance(0.7) else [],
        "block_size": size,
        "lora_id": None,
        "medium": source.pick(("GPU", "GPU", "CPU", "STORAGE", "tape", None)),
        "lora_name": source.pick((None, None, None, "sql")),
        "extra_keys": source.pick((None, [None] * count, [["salt"]] + [None] * (count - 1))),
    }
    if source.chance(0.3):
        fields["group_idx"] = source.pick((0, 0, 1, 2, source.integer()))
        fields["kv_cache_spec_kind"] = source.pick(("full_attention", "sliding_window", "mamba", "", "x"))
        fields["kv_cache_spec_sliding_window"] = source.pick((None, 8, 16, source.integer()))
    if source.chance(0.1):
        fields["session_id"] = "s"
    return fields


def _removed(source: Source) -> dict[str, Any]:
    hashes = [
        source.below(17) if source.chance(0.9) else source.pick((b"\xff" * 32, b"", 2**64 - 1))
        for _ in range(source.size(4, 300))
    ]
    fields = {"type": "BlockRemoved", "block_hashes": hashes, "medium": source.pick(("GPU", "CPU", "STORAGE", "tape"))}
    return fields | ({"group_idx": source.below(4)} if source.chance(0.3) else {})


def _cleared(source: Source) -> dict[str, Any]:
    return {
        "type": source.pick(("AllBlocksCleared", "AllBlocksCleared", "Unheard")),
        "tiers": source.pick((None, ["GPU"], ["CPU", "tape"])),
    }


def _notes(source: Source) -> Any:
    notes: dict[str, Any] = {
        "instance": source.pick(("a", "a", "b", "")),
        "load": {"waiting": 1, "running": 2, "kv_usage": 0.5},
        "tiers": {"CPU": {"capacity": 10, "chunk": source.pick((1, 2, 4)), "pool": source.pick((None, None, "nfs"))}},
        "heartbeat": 1.0,
    }
    if source.chance(0.2):
        notes["groups"] = _groups(source)
    if source.chance(0.3):
        parts = source.pick((1, 2, 3))
        notes["snapshot"] = {"part": source.below(parts) + 1, "parts": parts}
    if source.chance(0.4):
        notes[source.pick(list(notes))] = _Raw(source.packed(2))
    return notes if source.chance(0.95) else _Raw(source.packed(3))


def _groups(source: Source) -> Any:
    kinds = ("full_attention", "full_attention", "sliding_window", "mamba", "chunked_local_attention", "scratch", "x")
    lookups = [
        {
            "groups": [n],
            "kind": source.pick(kinds),
            "block": source.pick((BLOCK, BLOCK, 2 * BLOCK, 1)),
            "window": source.pick((0, 8, 16)),
        }
        for n in range(source.below(4))
    ]
    for lookup in lookups:
        if source.chance(0.1):
            lookup[source.pick(list(lookup))] = _Raw(source.packed(3))
    return {"lookups": lookups, "alignment": source.pick((BLOCK, BLOCK, 1, 2 * BLOCK, source.integer()))}


# --- what must hold, whatever came


class Fleet:
    """An index, and in it an engine that nobody lies about: what it holds must stay as it is."""

    def __init__(self) -> None:
        self.index = PrefixIndex()
        self._honest = self.index.publisher("honest", "model")
        held = BlockStored(list(range(1000, 1012)), None, PROMPT[: 12 * BLOCK * 4], BLOCK, extras={})
        self._honest.apply([held])
        self._prompts = [Prompt(PROMPT, "model"), Prompt(PROMPT, "sql", "salt")]

    def check(self, residency: Residency) -> None:
        for prompt in self._prompts:
            found = match(self.index, prompt, [residency, self._honest])
            assert 0 <= found.blocks(0) * max(1, residency.block_size) <= len(prompt)
        assert found.blocks(1) == 0
        assert match(self.index, self._prompts[0], [self._honest]).gpu == [12]
        self._check_lanes(residency)
        self._check_bounds(residency)

    def _check_lanes(self, residency: Residency) -> None:
        masks = self.index.masks
        for lane in residency._lanes.values():
            assert lane.held == sum(bool(mask & lane.bit) for mask in masks.values())
            assert all(count > 0 and masks.get(key, 0) & lane.bit for key, count in lane.surplus.items())
        assert all(masks.values())

    def _check_bounds(self, residency: Residency) -> None:
        parkings = [residency.parking, *(pool.parking for pool in residency._pools.values())]
        assert all(len(parking) <= MAX_BLOCKS for parking in parkings)
        assert all(0 <= parking.bytes <= MAX_BYTES + MAX_BLOCKS * CLAIM for parking in parkings)
        assert len(self.index.roots) <= MAX_MODELS
        assert all(residency.held(tier) >= 0 for tier in residency.tiers())

    def check_nothing_is_left(self) -> None:
        """Once a publisher is closed and the sweeper has been."""
        while self.index.sweep():
            pass
        assert len(self.index.masks) == 12
        assert not self.index.pools
        assert self.index.publishers == {self._honest}


class Events(Target):
    """Payloads into the decoder, events into a residency."""

    share = 6

    def __init__(self) -> None:
        self._fleet = Fleet()

    def script(self, source: Source) -> Script:
        return tuple(batch(source) for _ in range(source.pick((1, 1, 2, 5))))

    def run(self, script: Script) -> bool:
        residency = self._fleet.index.publisher("hostile", "model")
        accepted = [self._apply(residency, payload) for payload in script]
        self._fleet.check(residency)
        residency.close()
        self._fleet.check_nothing_is_left()
        return any(accepted)

    def _apply(self, residency: Residency, payload: bytes) -> bool:
        try:
            read = decode_batch(payload)
        except BadPayload as error:
            return refused(error)
        assert read.timestamp - read.timestamp == 0, "not finite"
        if read.notes is not None:
            residency.told(read.notes)
        residency.apply(read)
        return bool(read.events)


# --- a stream


class Rim:
    """The outside of a stream, where nothing happens."""

    def ask(self, start: int, *, urgent: bool) -> None:
        assert 0 <= start < 2**64

    def hang_up(self) -> None: ...

    def alarm(self, seconds: float | None) -> None:
        assert seconds is None or seconds >= 0


LIVE, REPLAY, STEP = b"l", b"r", b"s"
_STEPS: Sequence[Callable[[Stream], None]] = (
    Stream.connected,
    Stream.asked,
    Stream.alarm,
    Stream.tick,
    lambda stream: stream.disconnected("cut"),
)
_decode_frames = msgspec.msgpack.Decoder(list[bytes]).decode


def frames(piece: bytes) -> list[bytes]:
    try:
        return _decode_frames(piece[1:])
    except (msgspec.DecodeError, RecursionError):
        return [piece[1:]]


class Streams(Target):
    """Messages of both sockets, alarms and broken connections into a stream, in any order."""

    share = 5

    def __init__(self) -> None:
        self._fleet = Fleet()
        self._now = 1000.0

    def script(self, source: Source) -> Script:
        return tuple(self._pieces(source))

    def _pieces(self, source: Source) -> Iterator[bytes]:
        if source.chance(0.9):
            yield STEP + b"\0\0"
        if source.chance(0.7):
            yield STEP + b"\1\0"
        numbers = {LIVE: 0, REPLAY: 0}
        payloads: list[bytes] = []
        for _ in range(source.pick((2, 4, 8, 8, 20))):
            if source.chance(0.2):
                yield STEP + bytes([source.below(len(_STEPS)), source.pick((0, 1, 4, 40))])
                continue
            way = source.pick((LIVE, LIVE, REPLAY))
            payloads.append(batch(source))
            payload = payloads[-1] if source.chance(0.9) else source.pick(payloads)
            number = numbers[way] if source.chance(0.85) else source.integer() % 2**64
            numbers[way] = source.pick((0, number, number + 1, number + 1, number + 1, number + 3)) % 2**64
            piece = way + _pack(self._message(source, way, number, payload))
            yield source.mutate(piece) if source.chance(0.03) else piece

    @staticmethod
    def _message(source: Source, way: bytes, number: int, payload: bytes) -> list[bytes]:
        topic = source.pick(TOPICS) if source.chance(0.1) else TOPICS[0]
        sequence = number.to_bytes(8, "big")
        if source.chance(0.05):
            return [source.noise(12, 100) for _ in range(source.below(6))]
        if way == LIVE:
            return [topic, sequence, payload]
        if source.chance(0.15):
            return [b"", b"", b"\xff" * 8, b""]
        return source.pick(([b"", topic, sequence, payload], [b"", sequence, payload], [sequence, payload]))

    def run(self, script: Script) -> bool:
        stream = Stream(lambda: self._fleet.index.publisher("hostile"), Rim(), replayable=True, clock=lambda: self._now)
        for piece in script:
            self._step(stream, piece)
        self._fleet.check(stream.residency)
        accepted = stream.counters.messages + stream.counters.replayed > stream.counters.unreadable
        self._check(stream)
        stream.close()
        self._fleet.check_nothing_is_left()
        return accepted

    def _step(self, stream: Stream, piece: bytes) -> None:
        way = piece[:1]
        if way == LIVE:
            stream.live(frames(piece))
        elif way == REPLAY:
            stream.replay(frames(piece))
        else:
            what, seconds = (*piece[1:3], 0, 0)[:2]
            self._now += seconds
            _STEPS[what % len(_STEPS)](stream)

    def _check(self, stream: Stream) -> None:
        assert 0.0 <= stream.trust <= 1.0
        assert stream.lag_batches >= 0
        assert stream.delay >= 0
        assert (stream.state is State.LIVE) <= (stream.trust == 1.0)
        assert len(stream.counters.skipped) < 10
        assert len(str(stream.reason)) < 1000
        assert str(CANARY_TOKEN) not in str(stream.reason)


# --- a socket that all engines share


class SharedSocket(Target):
    """Messages of which only the topic says whose they are."""

    share = 2

    def __init__(self) -> None:
        self._fleet = Fleet()

    def script(self, source: Source) -> Script:
        return tuple(self._piece(source, number) for number in range(source.pick((1, 2, 4, 8))))

    @staticmethod
    def _piece(source: Source, number: int) -> bytes:
        topic = source.pick(TOPICS)
        message = [source.mutate(topic) if source.chance(0.2) else topic, number.to_bytes(8, "big"), batch(source)]
        if source.chance(0.1):
            message = message[: source.below(3)]
        return LIVE + _pack(message)

    def run(self, script: Script) -> bool:
        feed = Feed(lambda: self._fleet.index.publisher("hostile"), FeedAddress(), clock=lambda: 1.0)
        topics = Topics(lambda pod: feed if pod == "pod" else None)
        messages = [frames(piece) or [b""] for piece in script]
        for message in messages:
            topics.receive(message)
        named = sum(_names_pod(message[0]) for message in messages)
        assert (feed.counters.messages + feed.counters.malformed, topics.unknown) == (named, len(messages) - named)
        assert named or not feed.stream.is_connected
        self._fleet.check(feed.residency)
        feed.close()
        self._fleet.check_nothing_is_left()
        return feed.counters.messages > feed.counters.unreadable


def _names_pod(topic: bytes) -> bool:
    return topic == b"pod" or topic.partition(b"@")[2].startswith(b"pod@")
