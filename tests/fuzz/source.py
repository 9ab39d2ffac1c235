"""Where inputs come from: chance, applied to real bytes and to what decoders fear.

Everything is drawn from one `random.Random`, so an input is a function of its seed; hypothesis may stand in for it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

T = TypeVar("T")

INTEGERS = (0, 1, 2, 7, 8, 15, 16, 127, 128, 255, 256, 1 << 15, 1 << 16, (1 << 31) - 1, 1 << 31, 1 << 32, 1 << 40)
EDGES = (
    *(edge for n in INTEGERS for edge in (n, -n)),
    (1 << 63) - 1,
    1 << 63,
    -(1 << 63),
    (1 << 64) - 2,
    (1 << 64) - 1,
)
FLOATS = (0.0, -0.0, 1.5, -1.0, 1e308, -1e308, 5e-324, float("inf"), float("-inf"), float("nan"))
WORDS = ("", "a", "GPU", "cpu", "STORAGE", "tape", "\x00", "\u202e", "é" * 40, "𝕊", "x" * 600, "--", "null", "a\nb")

BOMBS = (
    b"\xc6\xff\xff\xff\xff",  # bin of 4 GB
    b"\xc6\x80\x00\x00\x00",
    b"\xdb\x7f\xff\xff\xff",  # str of 2 GB
    b"\xdd\xff\xff\xff\xff",  # array of 4 G elements
    b"\xdd\x00\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",  # map
    b"\xc9\xff\xff\xff\xff\x01",  # ext
    b"\xdc\xff\xff",
    b"\xde\xff\xff",
    b"\xc1",  # never used
)
"""Msgpack headers that promise what does not follow."""

_pack = msgspec.msgpack.Encoder().encode


class Source:
    def __init__(self, random: random.Random) -> None:
        self.random = random

    # --- plain chance

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def below(self, limit: int) -> int:
        return self.random.randrange(limit)

    def pick(self, options: Sequence[T]) -> T:
        return options[self.random.randrange(len(options))]

    def size(self, usual: int, largest: int) -> int:
        """Mostly up to `usual`, seldom up to `largest`."""
        return self.random.randint(0, largest if self.chance(0.01) else usual)

    def noise(self, usual: int = 40, largest: int = 20_000) -> bytes:
        return self.random.randbytes(self.size(usual, largest))

    def integer(self) -> int:
        return self.pick(EDGES) if self.chance(0.6) else self.random.getrandbits(self.pick((3, 8, 16, 32, 62)))

    def text(self) -> str:
        if self.chance(0.5):
            return self.pick(WORDS)
        alphabet = self.pick(("ab", "az 09\n\t", "é€😀\u0301ﬁ", "'\"\\{}[]<|>%:,;"))
        return "".join(self.random.choices(alphabet, k=self.size(20, 3000)))

    # --- bytes that were something

    def mutate(self, data: bytes, times: int = 0) -> bytes:
        """A few times over, or `times`: change, cut, repeat, insert."""
        for _ in range(times or 1 + self.below(3)):
            data = self.pick(_MUTATIONS)(self, data)
        return data

    def place(self, data: bytes) -> int:
        return self.below(len(data) + 1)

    # --- msgpack

    def packed(self, depth: int = 0) -> bytes:
        """Any value, often none that was meant."""
        kind = self.below(13 if depth < 4 else 9)
        if kind < 3:
            return _pack(self.integer())
        if kind < 5:
            return _pack(self.text())
        if kind == 5:
            return _pack(self.pick(FLOATS))
        if kind == 6:
            return self.pick((b"\xc0", b"\xc2", b"\xc3", b"\x90", b"\x80", b"\xa0", b"\xc4\x00"))
        if kind == 7:
            return self.pick(BOMBS) + self.noise(6)
        if kind == 8:
            return _pack(self.noise(20, 2000))
        if kind == 9:
            return b"\xc7" + bytes([self.below(20)]) + self.noise(20)
        if kind == 10:
            return self.pick((b"\x91", b"\x81\x01", b"\x81\xa1a", b"\x92\xc0")) * self.size(30, 100_000) + b"\xc0"
        count = self.below(6)
        if kind == 11:
            return _counted(0x90, b"\xdc", count + self.below(2)) + b"".join(
                self.packed(depth + 1) for _ in range(count)
            )
        return bytes([0x80 | count]) + b"".join(
            (_pack(self.pick(WORDS)) if self.chance(0.8) else self.packed(depth + 1)) + self.packed(depth + 1)
            for _ in range(count)
        )

    # --- JSON

    def json(self, depth: int = 0) -> bytes:
        """Any value; one in ten is none at all."""
        if depth < 3 and self.chance(0.1):
            return self._broken_json()
        kind = self.below(10 if depth < 4 else 6)
        if kind < 2:
            return str(self.integer()).encode()
        if kind < 4:
            return msgspec.json.encode(self.text())
        if kind == 4:
            return self.pick(_JSON_NUMBERS)
        if kind == 5:
            return self.pick((b"null", b"true", b"false", b"[]", b"{}", b'""', *_JSON_STRINGS))
        count = self.below(5)
        if kind < 8:
            return b"[" + b",".join(self.json(depth + 1) for _ in range(count)) + b"]"
        return b"{" + b",".join(self._member(depth) for _ in range(count)) + b"}"

    def _member(self, depth: int) -> bytes:
        name = self.pick((b'"type"', b'"text"', b'"role"', b'"a"', b'""'))
        return name + b":" + self.json(depth + 1)

    def _broken_json(self) -> bytes:
        kind = self.below(4)
        if kind == 0:
            return self.pick((b"[", b'{"a":', b"[[],")) * self.size(20, 30_000)
        return self.noise(8) if kind == 1 else self.pick(_NO_JSON)


_JSON_NUMBERS = (
    b"-0",
    b"1e308",
    b"0.1",
    b"1" * 30,
    b"-" + b"9" * 400,
    b"1e-400",
    b"18446744073709551616",
    b"1.0",
    b"-1",
    b"1e15",
)
_JSON_STRINGS = (
    b'"\\u0000"',
    b'"<|im_start|>"',
    b'"{{ 1 / 0 }}{% for %}"',
    b'"CONTINUE_FINAL_MESSAGE_TAG "',
    b'"\\ud83d\\ude00"',
)
_NO_JSON = (
    b"NaN", b"Infinity", b"undefined", b"1e309", b"-1e309", b"9" * 5000, b"01", b"+1", b"1.", b".5", b"1e", b"0x10",
    b'"\\ud800"', b'"\\udc00\\ud800"', b'"\xff\xfe"', b'"\xed\xa0\x80"', b'"\\x"', b'"\n"', b'"unended',
    b'{"\\ud800": 1}', b"[1,]",
)  # fmt: skip


def _counted(short: int, long: bytes, count: int) -> bytes:
    return bytes([short | count]) if count < 16 else long + count.to_bytes(2, "big")


def _flip(source: Source, data: bytes) -> bytes:
    if not data:
        return data
    at = source.below(len(data))
    return data[:at] + bytes([data[at] ^ 1 << source.below(8)]) + data[at + 1 :]


def _set(source: Source, data: bytes) -> bytes:
    at = source.place(data)
    return data[:at] + bytes([source.pick((0, 0x7F, 0x80, 0xFF, source.below(256)))]) + data[at + 1 :]


def _cut(source: Source, data: bytes) -> bytes:
    return data[: source.place(data)]


def _remove(source: Source, data: bytes) -> bytes:
    at = source.place(data)
    return data[:at] + data[at + source.size(8, 1000) :]


def _insert(source: Source, data: bytes) -> bytes:
    at = source.place(data)
    return data[:at] + source.noise(8, 500) + data[at:]


def _replace(source: Source, data: bytes) -> bytes:
    at, new = source.place(data), source.packed(3)
    return data[:at] + new + data[at + (len(new) if source.chance(0.5) else source.below(10)) :]


def _bomb(source: Source, data: bytes) -> bytes:
    at = source.place(data)
    return data[:at] + source.pick(BOMBS) + data[at + source.pick((0, 1, 5)) :]


def _number(source: Source, data: bytes) -> bytes:
    width = source.pick((1, 2, 4, 8))
    at = source.place(data)
    return data[:at] + (source.integer() % (1 << 8 * width)).to_bytes(width, "big") + data[at + width :]


def _repeat(source: Source, data: bytes) -> bytes:
    at = source.place(data)
    piece = data[at : at + source.size(10, 300)]
    return data[:at] + piece * source.size(5, max(1, 50_000 // (len(piece) + 1))) + data[at:]


def _shuffle(source: Source, data: bytes) -> bytes:
    first, second = sorted((source.place(data), source.place(data)))
    return data[second:] + data[first:second] + data[:first]


_MUTATIONS: Sequence[Callable[[Source, bytes], bytes]] = (
    _flip, _flip, _set, _cut, _remove, _insert, _replace, _bomb, _number, _repeat, _shuffle,
)  # fmt: skip
