"""Bodies cut for the full-duplex stream: some data planes refuse pieces of 64 KiB and more."""

from __future__ import annotations

from collections.abc import Iterator

MAX_CHUNK = 62_000
"""Bytes. Below 64 KiB with room for the envelope; the size that llm-d uses."""


def split_body(body: bytes, end_of_stream: bool) -> Iterator[tuple[bytes, bool]]:
    """Pieces of at most `MAX_CHUNK` bytes with their end flag, which only the last may carry.

    An empty body is one empty final piece, or nothing where trailers are still to come.
    """
    if len(body) <= MAX_CHUNK:
        if body or end_of_stream:
            yield body, end_of_stream
        return
    last = (len(body) - 1) // MAX_CHUNK * MAX_CHUNK
    for start in range(0, last, MAX_CHUNK):
        yield body[start : start + MAX_CHUNK], False
    yield body[last:], end_of_stream
