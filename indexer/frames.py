"""ZMQ frames of a publisher → topic, sequence number, payload. The payload stays packed: see wire.py.

Live messages have exactly three frames. Replay answers come in several forms, since engines differ in whether the topic
is repeated and whether an empty delimiter goes in front; all of them end with sequence and payload, so they are read
from the end. What is malformed is None: the caller counts it and goes on.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

SEQUENCE_BYTES = 8
MAX_TOPIC = 2048
"""Bytes. The model's name in it is kept for as long as the index lives."""
LAST_SEQUENCE = 2**64 - 1
SNAPSHOT = LAST_SEQUENCE
"""Asked for as a first number, it is our connector's word for a snapshot. Other engines have no batch of that number
and answer with the end marker alone."""


class Message(msgspec.Struct, frozen=True, gc=False):
    topic: bytes
    seq: int
    payload: bytes


class ReplayEnd(msgspec.Struct, frozen=True):
    """The publisher has sent all it kept."""


REPLAY_END = ReplayEnd()


def live_message(frames: Sequence[bytes]) -> Message | None:
    """`[topic, sequence, payload]`; a sequence longer than eight bytes counts by its first eight."""
    if len(frames) != 3 or len(frames[1]) < SEQUENCE_BYTES or len(frames[0]) > MAX_TOPIC:
        return None
    return Message(frames[0], int.from_bytes(frames[1][:SEQUENCE_BYTES], "big"), frames[2])


def replay_message(frames: Sequence[bytes]) -> Message | ReplayEnd | None:
    """`["",] [topic,] sequence, payload`; an empty payload is the end. The topic is empty where it was left out."""
    if not 2 <= len(frames) <= 4 or len(frames[-2]) < SEQUENCE_BYTES:
        return None
    if not frames[-1]:
        return REPLAY_END
    topic = frames[-3] if len(frames) > 2 else b""
    if len(topic) > MAX_TOPIC:
        return None
    return Message(topic, int.from_bytes(frames[-2][:SEQUENCE_BYTES], "big"), frames[-1])


def replay_request(start: int) -> list[bytes]:
    """Asks a publisher's ROUTER for everything it kept from `start` on."""
    return [b"", min(start, LAST_SEQUENCE).to_bytes(SEQUENCE_BYTES, "big")]
