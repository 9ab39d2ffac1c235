"""Was a prediction too high while its feed said `live`, and if so, could it have been known? Pure.

The demo's own verdicts (`verdicts`) know what other requests explain. Here it comes to what faults explain:

- the fault *struck in between*: after the pick, or so shortly before that nobody can know, and before the first token,
  a cache was lost;
- it was *not to be noticed yet*: silence and a lost message show only at the next heartbeat that does not come, or that
  comes with too high a number. For longer than that, a feed that says `live` is wrong, and nothing explains it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from epp.toolbox.demo.chaos.faults import HEARTBEAT_S, Kind
from epp.toolbox.demo.drive import Call
from epp.toolbox.demo.verdicts import Judgement, Prediction, Reason, Verdict, judge

LIVE = "live"


@dataclass(frozen=True, slots=True)
class Pick:
    """What the picker knew when it picked an endpoint."""

    prediction: Prediction
    """For the endpoint picked."""
    live: bool
    """Did the feed of the endpoint picked say so?"""
    everywhere: Mapping[str, int]
    """By engine name, the cached tokens predicted; of engines whose feeds said `live`."""


def parse_picks(page: Mapping[str, Any]) -> dict[str, Pick]:
    """By request id, out of the picker's `/debug/decisions`."""
    return {d["id"]: _pick(d) for d in page["decisions"] if d["predicted"] is not None}


def _pick(decision: Mapping[str, Any]) -> Pick:
    candidates = decision["candidates"]
    [chosen] = (c for c in candidates if c["endpoint"] == decision["chosen"])
    known = [c for c in candidates if c["cached_tokens"] is not None]
    tiers = decision["predicted"]
    best = max(c["cached_tokens"]["total"] for c in known)
    return Pick(
        prediction=Prediction(chosen["name"], tiers["gpu"], tiers["cpu"], tiers["storage"], best),
        live=_is_live(chosen),
        everywhere={c["name"]: c["cached_tokens"]["total"] for c in known if _is_live(c)},
    )


def _is_live(candidate: Mapping[str, Any]) -> bool:
    return bool(candidate["feed"] == LIVE)


@dataclass(frozen=True, slots=True)
class Struck:
    """One fault as it happened to one engine. Monotonic seconds; a cache that is lost is lost when it began."""

    kind: Kind
    engine: str
    began: float
    ended: float


class Standing(Enum):
    """What can be said of one request and its prediction."""

    FAILED = "failed"
    UNPICKED = "served without the picker"
    ELSEWHERE = "answered by another engine than the picked"
    UNSURE = "feed not live when picked"
    EXACT = "exact"
    BELOW = "too little"
    EXPLAINED = "too much, explained"
    WRONG = "too much, unexplained"

    @property
    def is_of_live(self) -> bool:
        return self in (Standing.EXACT, Standing.BELOW, Standing.EXPLAINED, Standing.WRONG)


@dataclass(frozen=True, slots=True)
class Finding:
    call: Call
    pick: Pick | None
    standing: Standing
    why: str = ""


def findings(
    calls: Iterable[Call],
    picks: Mapping[str, Pick],
    struck: Sequence[Struck],
    tokens: Callable[[Call], Sequence[int]],
    chunk_tokens: int,
) -> list[Finding]:
    """One a call. `tokens` gives a call's prompt tokens; `chunk_tokens` is the size of a CPU chunk."""
    predictions = {name: pick.prediction for name, pick in picks.items()}
    return [
        _finding(judgement, picks.get(judgement.call.id), struck)
        for judgement in judge(calls, predictions, tokens, chunk_tokens)
    ]


def _finding(judgement: Judgement, pick: Pick | None, struck: Sequence[Struck]) -> Finding:
    call = judgement.call
    if call.failed:
        return Finding(call, pick, Standing.FAILED, call.error)
    if pick is None:
        return Finding(call, pick, Standing.UNPICKED)
    if call.served != pick.prediction.pod:
        return Finding(call, pick, Standing.ELSEWHERE)
    if not pick.live:
        return Finding(call, pick, Standing.UNSURE, judgement.verdict.value)
    if judgement.verdict is Verdict.EXACT:
        return Finding(call, pick, Standing.EXACT)
    by_fault = next((w for s in struck if s.engine == call.served and (w := _explains(s, call))), "")
    why = by_fault or judgement.reason.value
    if judgement.verdict is Verdict.BELOW:
        return Finding(call, pick, Standing.BELOW, why)
    is_explained = by_fault or judgement.reason is not Reason.OTHER
    return Finding(call, pick, Standing.EXPLAINED if is_explained else Standing.WRONG, why)


def _explains(struck: Struck, call: Call) -> str:
    noticeable_at = struck.began + struck.kind.noticeable_after
    if struck.kind.strikes_the_cache:
        return "the fault struck in between" if call.sent_at <= noticeable_at and struck.began <= call.first_at else ""
    until = min(noticeable_at, struck.ended + HEARTBEAT_S)
    return "not to be noticed yet" if struck.began <= call.sent_at <= until else ""


@dataclass(frozen=True, slots=True)
class Probe:
    """One prediction for one engine that nothing else disturbed, and what the engine delivered."""

    id: str
    engine: str
    predicted: int | None
    """None = the picker made no prediction, or its feed was not live."""
    delivered: int | None
    """None = the request failed."""

    @property
    def verdict(self) -> Verdict:
        if self.predicted is None or self.delivered is None:
            return Verdict.UNKNOWN
        if self.predicted == self.delivered:
            return Verdict.EXACT
        return Verdict.ABOVE if self.predicted > self.delivered else Verdict.BELOW
