"""Was the prediction right, and if not, why: each call's prediction against what its engine delivered. Pure.

A prediction is made when the endpoint is picked; the engine looks into its cache when it schedules the request. Only
what happens on that engine in between can make the two differ, and the calls themselves tell what happened there:

- *below* (more was found than predicted): a sibling, another request that shares at least the delivered prefix, was
  between its own pick and its first token when ours was picked, so its blocks were stored or loaded meanwhile;
- *above* (less was found): other requests, prompts or answers, took blocks on that pod between our pick and our first
  token, so what was predicted was evicted before it was our turn;
- *below* without a sibling: such an eviction can also bring more. An engine does not load from CPU RAM for a gain of
  less than one chunk over its HBM; with fewer blocks left in HBM, the same chunk is worth loading whole.

What neither explains is called "other", and is what a maintainer should look at. A JSON answer hides its first token;
its whole duration stands in, so a sibling that answered in JSON is taken to be in flight a little longer than it was.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from epp.toolbox.demo.counters import Found
from epp.toolbox.demo.drive import Call


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the picker said at pick time, in prompt tokens."""

    pod: str
    """The pod it chose."""
    gpu: int
    cpu: int
    storage: int
    best: int
    """Cached tokens on the pod that held most of this prompt."""

    @property
    def found(self) -> Found:
        return Found(self.gpu, self.cpu + self.storage)

    @property
    def cached(self) -> int:
        return self.found.total


class Verdict(Enum):
    EXACT = "exact"
    BELOW = "below"
    ABOVE = "above"
    UNKNOWN = "not comparable"
    """The request failed, or no prediction is known for it."""


class Reason(Enum):
    NONE = ""
    SIBLING = "sibling in flight"
    EVICTED = "evicted while queued"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Judgement:
    call: Call
    prediction: Prediction | None
    verdict: Verdict
    reason: Reason


def judge(
    calls: Iterable[Call],
    predictions: Mapping[str, Prediction],
    tokens: Callable[[Call], Sequence[int]],
    chunk_tokens: int,
) -> list[Judgement]:
    """One judgement a call. `predictions` is by call id; `tokens` gives a call's prompt tokens; `chunk_tokens` is the
    size of a CPU chunk."""
    calls = list(calls)
    on_pod: dict[str, list[Call]] = defaultdict(list)
    for call in calls:
        if prediction := predictions.get(call.id):
            on_pod[prediction.pod].append(call)
    return [_judge(call, predictions.get(call.id), on_pod, tokens, chunk_tokens) for call in calls]


def _judge(
    call: Call,
    prediction: Prediction | None,
    on_pod: Mapping[str, Sequence[Call]],
    tokens: Callable[[Call], Sequence[int]],
    chunk_tokens: int,
) -> Judgement:
    if prediction is None or call.failed or call.cached_tokens is None:
        return Judgement(call, prediction, Verdict.UNKNOWN, Reason.NONE)
    if call.cached_tokens == prediction.cached:
        return Judgement(call, prediction, Verdict.EXACT, Reason.NONE)
    neighbours = [o for o in on_pod[prediction.pod] if o is not call and _running_together(call, o)]
    if call.cached_tokens < prediction.cached:
        return Judgement(call, prediction, Verdict.ABOVE, Reason.EVICTED if neighbours else Reason.OTHER)
    own = tokens(call)
    siblings = (other for other in neighbours if call.sent_at < other.first_at)
    if any(_shared(own, tokens(other)) >= call.cached_tokens for other in siblings):
        reason = Reason.SIBLING
    elif neighbours and _chunk_became_worth_loading(prediction.cached, call.cached_tokens, chunk_tokens):
        reason = Reason.EVICTED
    else:
        reason = Reason.OTHER
    return Judgement(call, prediction, Verdict.BELOW, reason)


def _chunk_became_worth_loading(predicted: int, delivered: int, chunk_tokens: int) -> bool:
    return delivered % chunk_tokens == 0 and delivered - predicted < chunk_tokens


def _running_together(call: Call, other: Call) -> bool:
    """`other` was under way at some moment between the pick and the first token of `call`."""
    return call.sent_at < other.done_at and other.sent_at < call.first_at


def _shared(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix."""
    return next((i for i, (left, right) in enumerate(zip(a, b, strict=False)) if left != right), min(len(a), len(b)))
