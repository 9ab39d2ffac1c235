from __future__ import annotations

import pytest

from epp.exchange.chunks import MAX_CHUNK, split_body


@pytest.mark.parametrize(
    ("size", "pieces"), [(0, 1), (1, 1), (MAX_CHUNK, 1), (MAX_CHUNK + 1, 2), (2 * MAX_CHUNK, 2), (125_000, 3)]
)
def test_pieces_hold_the_body_in_order_and_only_the_last_ends_it(size, pieces):
    body = bytes(i % 251 for i in range(size))
    cut = list(split_body(body, end_of_stream=True))
    assert len(cut) == pieces
    assert b"".join(data for data, _ in cut) == body
    assert all(len(data) <= MAX_CHUNK for data, _ in cut)
    assert [end for _, end in cut] == [False] * (pieces - 1) + [True]


def test_a_body_that_trailers_end_has_no_final_piece():
    assert list(split_body(b"body", end_of_stream=False)) == [(b"body", False)]
    assert list(split_body(b"", end_of_stream=False)) == []
    assert [end for _, end in split_body(b"x" * (MAX_CHUNK + 1), end_of_stream=False)] == [False, False]


def test_chunks_stay_below_64_kib_with_their_envelope():
    assert MAX_CHUNK < 65_536 - 1024
