"""Clamping: quick where a scorer does not tell its candidates apart, and the same as one by one."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.scheduling.profile import _clamped

ODD = st.sampled_from([math.nan, math.inf, -math.inf, -0.0, 0.0, 1.0, 1.5, -2.0, 5e-324])
SCORES = ODD | st.floats()


@given(st.lists(SCORES, min_size=1, max_size=6) | st.tuples(SCORES, st.integers(1, 6)).map(lambda c: [c[0]] * c[1]))
def test_scores_are_clamped_one_by_one(scores: list[float]) -> None:
    expected = [0.0 if math.isnan(score) else min(max(score, 0.0), 1.0) for score in scores]
    assert list(_clamped(scores, len(scores))) == expected


def test_a_column_of_the_wrong_length_is_an_error() -> None:
    with pytest.raises(ValueError, match="2 scores for 3 endpoints"):
        _clamped([0.5, 0.5], 3)
