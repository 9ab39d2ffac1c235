from __future__ import annotations

import pytest

from indexer.index import PrefixIndex
from indexer.residency import Residency


@pytest.fixture
def index() -> PrefixIndex:
    return PrefixIndex()


@pytest.fixture
def pod(index: PrefixIndex) -> Residency:
    return index.publisher("pod")
