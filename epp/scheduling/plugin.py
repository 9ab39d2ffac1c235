"""The contracts of plugins. Plugins know no gRPC, no HTTP and no clock but the one they are given.

Per-endpoint figures that producers leave on the `Scheduling` are lists indexed by `Endpoint.slot`; what scorers return
is aligned with the endpoints they were given.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Protocol

from msgspec import Struct

from epp.fleet.endpoint import Endpoint
from epp.requests.model import InferenceRequest
from epp.routing import Outcome
from indexer.stream import State


class PrefixMatch(Struct):
    """How much of the prompt each endpoint already holds, as one producer sees it. Lists are by slot."""

    total: int
    """Blocks of the prompt(s), all prompts together."""
    block_size: int
    """Tokens a block."""
    blocks: list[float]
    """Matched blocks, weighted by tier where the producer weighs, and by what its knowledge is worth."""
    cached_tokens: list[int]
    """Tokens matched, unweighted."""


class TierHit(Struct, gc=False):
    """Prediction for one endpoint: prompt tokens it will find in each tier. Proven only, no speculation."""

    gpu: int = 0
    cpu: int = 0
    storage: int = 0

    @property
    def cached(self) -> int:
        return self.gpu + self.cpu + self.storage


class Certainty(Struct, frozen=True):
    """What exact predictions rest on: the endpoints' event feeds, as they were when the index was asked. By slot."""

    states: Sequence[State | None]
    """None = not a candidate, or without a feed."""
    trust: Sequence[float]
    """0 to 1, what a matched block counts; empty = 1 everywhere."""

    def of(self, slot: int) -> tuple[str, float] | None:
        """State and trust; None = there is nothing to be certain of."""
        state = self.states[slot] if slot < len(self.states) else None
        return None if state is None else (state.value, self.trust[slot] if self.trust else 1.0)


class Scheduling(Struct):
    """One request on its way through the plugins."""

    request: InferenceRequest
    endpoints: Sequence[Endpoint]
    """All candidates, before filters."""
    now: float
    """Monotonic seconds, frozen for the whole decision."""
    matches: dict[str, PrefixMatch] = {}
    """By producer instance name."""
    hits: list[TierHit | None] = []
    """Exact per-tier prediction by slot, where a precise producer ran; empty otherwise."""
    longest_hit: int = 0
    """The most that any of `hits` says, in tokens."""
    certainty: Certainty | None = None
    """Of `hits`."""
    notes: dict[str, Any] = {}
    """Per-request state of plugins, by plugin instance name."""
    skipped: list[str] = []
    """Plugins that failed for this request: `name: error`."""


class ProfileResult(Struct):
    """What one profile run decided."""

    endpoints: Sequence[Endpoint]
    """Candidates after filters."""
    scores: Sequence[float]
    """Weighted sums, aligned with `endpoints`."""
    raw: Mapping[str, Sequence[float]]
    """Scorer instance name → its clamped scores, aligned with `endpoints`."""
    picked: Sequence[Endpoint]
    """Best first; the first is the target, the rest are fallbacks."""


class SchedulingResult(Struct):
    profiles: Mapping[str, ProfileResult | None]
    primary: str

    @property
    def target(self) -> ProfileResult:
        result = self.profiles[self.primary]
        assert result is not None
        return result


class Plugin(Protocol):
    name: str
    type: str


class Producer(Plugin, Protocol):
    """Learns what scorers need to know of a request. May answer at once (None) or later (an awaitable)."""

    def produce(self, scheduling: Scheduling) -> Awaitable[None] | None: ...


class Filter(Plugin, Protocol):
    def filter(self, scheduling: Scheduling, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]: ...


class Scorer(Plugin, Protocol):
    def score(self, scheduling: Scheduling, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        """Scores in [0, 1], aligned with `endpoints`; the scheduler clamps (NaN becomes 0)."""


class Picker(Plugin, Protocol):
    def pick(
        self, scheduling: Scheduling, endpoints: Sequence[Endpoint], scores: Sequence[float]
    ) -> Sequence[Endpoint]:
        """`endpoints` is not empty. Equal scores must be spread, not always the first."""


class ProfileHandler(Plugin, Protocol):
    def next_profiles(
        self, scheduling: Scheduling, profiles: Sequence[str], results: Mapping[str, ProfileResult | None]
    ) -> Sequence[str]:
        """Which profiles to run next; empty = done."""

    def primary(self, results: Mapping[str, ProfileResult | None]) -> str: ...


class Picked(Protocol):
    """A plugin that wants to know the choice (llm-d's PreRequest)."""

    def picked(self, scheduling: Scheduling, result: SchedulingResult) -> None: ...


class FirstByte(Protocol):
    """A plugin that wants to know when the answer to a request begins."""

    def first_byte(self, scheduling: Scheduling, result: SchedulingResult) -> None: ...


class Finished(Protocol):
    """A plugin that wants to know the end of each request that was picked: exactly once, however it ended."""

    def finished(self, scheduling: Scheduling, result: SchedulingResult, outcome: Outcome) -> None: ...
