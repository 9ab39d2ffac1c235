"""What is known of a set of endpoints, whatever a request asks: made once, and used until any of it changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from epp.fleet.endpoint import Endpoint
from epp.scheduling.plugin import Certainty, TierHit
from indexer.feed import Feed
from indexer.index import PrefixIndex
from indexer.plan import plan
from indexer.stream import State

T = TypeVar("T")

NOTHING = TierHit()
"""Shared: most endpoints of a large fleet hold nothing of a prompt."""


class Candidates:
    """Endpoints that have a feed, of those given. Columns are aligned with `endpoints`; by slot they cover all
    that were given. Nobody changes them."""

    def __init__(self, given: Sequence[Endpoint], feeds: Mapping[Endpoint, Feed], index: PrefixIndex) -> None:
        self.given = given
        """Or another list of the same."""
        self.changes = index.changes
        """Of the index, until now."""
        self.endpoints = [endpoint for endpoint in given if endpoint in feeds]
        self.positions = {endpoint: i for i, endpoint in enumerate(self.endpoints)}
        self._slots = [endpoint.slot for endpoint in self.endpoints]
        self._size = 1 + max((endpoint.slot for endpoint in given), default=-1)
        self._dense = self._slots == list(range(self._size))

        streams = [feeds[endpoint].stream for endpoint in self.endpoints]
        self.residencies = [stream.residency for stream in streams]
        self.plan = plan(index, self.residencies)
        self.sizes = [residency.block_size for residency in self.residencies]
        """Tokens a block; 0 = unknown."""
        self.block_size = max(set(self.sizes) - {0}, key=self.sizes.count, default=0)
        """That of most."""
        self.shapes = [
            (size, residency.root, residency.alias_root)
            for size, residency in zip(self.sizes, self.residencies, strict=True)
        ]
        """What a prompt's keys depend on: the block size, and the roots for the base model and for unknown names."""
        self.alike: dict[tuple[int, int, int], dict[Endpoint, int]] = {}
        """Shape → endpoints that have it, and their positions."""
        for endpoint, shape in zip(self.endpoints, self.shapes, strict=True):
            self.alike.setdefault(shape, {})[endpoint] = self.positions[endpoint]

        states: list[State | None] = [stream.state for stream in streams]
        trust = [stream.trust for stream in streams]
        self.trust = trust if min(trust, default=1.0) < 1.0 else []
        """What the blocks that are shown are worth; empty = all is worth 1."""
        self.certainty = Certainty(self.by_slot(states, None), self.by_slot(trust, 0.0) if self.trust else ())
        no_hits: list[TierHit | None] = [NOTHING] * len(self.endpoints)
        self.no_hits = self.by_slot(no_hits, None)
        self.no_blocks = [0.0] * self._size
        self.no_tokens = [0] * self._size

    def by_slot(self, column: list[T], absent: T) -> list[T]:
        """The column by slot."""
        if self._dense:
            return column
        result = [absent] * self._size
        for slot, value in zip(self._slots, column, strict=True):
            result[slot] = value
        return result
