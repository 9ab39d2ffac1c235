"""Token ids as the index wants them: little-endian uint32, back to back."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence


def to_bytes(ids: Sequence[int]) -> bytes:
    """Raises `OverflowError` for what is no uint32."""
    packed = array("I", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()
