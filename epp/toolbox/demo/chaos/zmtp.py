"""Loses whole messages of a ZMTP byte stream, as a publisher does whose queue for a slow subscriber is full. Pure."""

from __future__ import annotations

from collections.abc import Callable

_GREETING = 64
_MORE, _LONG, _COMMAND = 1, 2, 4


class MessageSieve:
    """One direction of one connection, from its first byte on; `is_lost` is asked at the end of each message."""

    def __init__(self, is_lost: Callable[[], bool]) -> None:
        self._is_lost = is_lost
        self._greeting_left = _GREETING
        self._pending = bytearray()
        self._message = bytearray()

    def feed(self, data: bytes) -> bytes:
        """What is to be passed on. The greeting is as it comes, since each side waits for the beginning of the other's;
        frames are once they are complete."""
        greeting, rest = data[: self._greeting_left], data[self._greeting_left :]
        self._greeting_left -= len(greeting)
        self._pending += rest
        passed = bytearray(greeting)
        while (size := _frame_size(self._pending)) is not None and size <= len(self._pending):
            passed += self._frame(bytes(self._pending[:size]))
            del self._pending[:size]
        return bytes(passed)

    def _frame(self, frame: bytes) -> bytes:
        if frame[0] & _COMMAND:
            return frame
        self._message += frame
        if frame[0] & _MORE:
            return b""
        message = b"" if self._is_lost() else bytes(self._message)
        self._message.clear()
        return message


def _frame_size(data: bytearray) -> int | None:
    """Of the frame that `data` begins with, header included; None = not known yet."""
    if not data:
        return None
    if not data[0] & _LONG:
        return 2 + data[1] if len(data) >= 2 else None
    return 9 + int.from_bytes(data[1:9], "big") if len(data) >= 9 else None
