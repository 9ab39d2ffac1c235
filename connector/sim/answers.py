"""What the simulated model says: a fixed function of the prompt and of what was said so far.

The same prompt gets the same answer whether its prefix was cached or not, so a test can tell that a cache hit changed
nothing but the time. There is no end-of-sequence token: an answer is as long as the request allows.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

_MASK = 2**64 - 1


def first_state(prompt: Sequence[int]) -> int:
    return int.from_bytes(blake2b(array("I", prompt).tobytes(), digest_size=8).digest(), "big")


def next_state(state: int, token: int) -> int:
    """Knuth's 64-bit linear congruence, with the token mixed into the increment."""
    return (state * 6364136223846793005 + 1442695040888963407 + token) & _MASK


def pick_token(state: int, vocabulary: Sequence[int]) -> int:
    return vocabulary[(state >> 33) % len(vocabulary)]
