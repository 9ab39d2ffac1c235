"""The fleets that are tried."""

from __future__ import annotations

import os

import pytest

from .engines import Kind

SHARED = Kind("tierpick-chunks-of-1-and-shared-fs", connector="ours", blocks_per_chunk=1, storage="shared")
STORAGE = Kind("tierpick-chunks-of-2-and-fs", connector="ours", blocks_per_chunk=2, storage="own")
CHUNKS_4 = Kind("tierpick-chunks-of-4", connector="ours", blocks_per_chunk=4)
STOCK = Kind("stock-chunks-of-2", connector="stock", blocks_per_chunk=2)
NEXT = Kind("tierpick-on-newer-vllm", connector="ours", blocks_per_chunk=2, pythonpath=os.environ.get("VLLM_NEXT", ""))
"""Where `VLLM_NEXT` names a directory made by overlay.py."""

LONG = bool(os.environ.get("VLLM_LONG"))
"""`make test-vllm` asks for more of everything than the test suite has time for."""

OURS = (SHARED, STORAGE, CHUNKS_4)


def fleets(*kinds: Kind) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("fleet", kinds, indirect=True, ids=str)


def with_newer(*kinds: Kind) -> pytest.MarkDecorator:
    return fleets(*kinds, *([NEXT] if NEXT.pythonpath else []))
