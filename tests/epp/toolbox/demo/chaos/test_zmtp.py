"""Frames here are libzmq's own: what a PUB socket writes to a plain TCP connection."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable

import pytest

from epp.toolbox.demo.chaos.zmtp import MessageSieve

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(48)
READY = b"\x04\x06\x05READY"


def message(*frames: bytes) -> bytes:
    return b"".join(_frame(part, more=number < len(frames)) for number, part in enumerate(frames, 1))


def _frame(part: bytes, *, more: bool) -> bytes:
    if len(part) < 256:
        return bytes([more, len(part)]) + part
    return bytes([more | 2]) + len(part).to_bytes(8, "big") + part


FIRST, SECOND, THIRD = message(b"kv@", b"1", b"x" * 300), message(b"kv@", b"2", b""), message(b"kv@", b"3", b"y")


def losing(*numbers: int) -> Callable[[], bool]:
    """Of the messages counted from 1, those."""
    count = iter(range(1, 1000))
    return lambda: next(count) in numbers


def passed(sieve: MessageSieve, pieces: Iterable[bytes]) -> bytes:
    return b"".join(map(sieve.feed, pieces))


def test_without_a_loss_everything_passes_as_it_came() -> None:
    stream = GREETING + READY + FIRST + SECOND + THIRD
    assert passed(MessageSieve(losing()), [stream]) == stream


def test_a_lost_message_is_missing_as_a_whole() -> None:
    stream = GREETING + READY + FIRST + SECOND + THIRD
    assert passed(MessageSieve(losing(1, 2)), [stream]) == GREETING + READY + THIRD


@pytest.mark.parametrize("seed", range(20))
def test_where_the_network_cuts_the_stream_makes_no_difference(seed: int) -> None:
    rng, stream = random.Random(seed), GREETING + READY + FIRST + SECOND + THIRD
    cuts = [0, *sorted(rng.choices(range(len(stream)), k=rng.randint(1, 30))), len(stream)]
    pieces = [stream[a:b] for a, b in itertools.pairwise(cuts)]
    assert passed(MessageSieve(losing(2)), pieces) == GREETING + READY + FIRST + THIRD


def test_the_greeting_does_not_wait_for_its_end() -> None:
    """Each side sends the rest of its own only when it has seen the beginning of the other's."""
    assert MessageSieve(losing()).feed(GREETING[:10]) == GREETING[:10]


def test_commands_are_never_lost() -> None:
    assert passed(MessageSieve(losing(1)), [GREETING + FIRST + READY]) == GREETING + READY
