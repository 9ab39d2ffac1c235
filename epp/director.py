"""One request from its bytes to a decision, and the decision's life until the exchange ends.

The director joins the parts and owns what must happen exactly once a request: load is counted up when the endpoint is
picked and down when the exchange ends, however it ends; the prediction is compared with what the engine reports.
It knows neither gRPC nor the plugins it runs.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from epp.decisions import Decision, Decisions
from epp.errors import Code, Refusal, no_endpoints
from epp.fleet.endpoint import Endpoint
from epp.fleet.fleet import Fleet
from epp.producers.inflight import InFlight, Ticket
from epp.requests.model import InferenceRequest
from epp.requests.parse import MAX_BODY_BYTES, parse
from epp.requests.usage import UsageReader
from epp.routing import Answer, Observe, Outcome, RequestHead, ResponseHead, Route, Termination
from epp.scheduling.plugin import Scheduling, SchedulingResult, TierHit
from epp.scheduling.scheduler import Scheduler
from epp.telemetry import Telemetry
from epp.telemetry.requests import RequestMetrics

logger = logging.getLogger(__name__)

T = TypeVar("T")

REQUEST_ID = "x-request-id"
SCORES = "x-gateway-destination-endpoint-scores"
FAIRNESS = "x-llm-d-inference-fairness-id"
FORMER_FAIRNESS = "x-gateway-inference-fairness-id"
MAX_BUFFERED_ANSWER = 1 << 20
"""Bytes. Buffering a longer one may exceed the data plane's buffer, which would turn the answer into an error."""


@dataclass(slots=True, frozen=True)
class Settings:
    disable_subset_filter: bool = False
    emit_scores: bool = False
    max_body_bytes: int = MAX_BODY_BYTES
    observe_streams: float = 0.01
    """Share of event-stream answers read for their usage."""


@dataclass(slots=True)
class Active:
    """A routed request until its end."""

    scheduling: Scheduling
    result: SchedulingResult
    decision: Decision
    ticket: Ticket
    metrics: RequestMetrics
    usage: UsageReader | None = None
    answering: float = 0.0
    """Seconds spent on the response so far."""
    served: str = ""
    answered: bool = False
    chunk_at: float = 0.0
    """When the last chunk of a stream passed; 0 = none has."""

    @property
    def request(self) -> InferenceRequest:
        return self.scheduling.request


class RequestDirector:
    def __init__(
        self,
        *,
        fleet: Fleet,
        scheduler: Scheduler,
        in_flight: InFlight,
        telemetry: Telemetry,
        decisions: Decisions,
        weights: Mapping[str, Mapping[str, float]] | None = None,
        settings: Settings | None = None,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._fleet = fleet
        self._scheduler = scheduler
        self._in_flight = in_flight
        self._telemetry = telemetry
        self._decisions = decisions
        self._weights = weights or {}
        self._settings = settings or Settings()
        self._clock = clock
        self._rng = rng or random.Random()

    # request

    def pick(self, head: RequestHead, body: bytes, subset: Sequence[str] | None) -> Route | Awaitable[Route]:
        request = None
        try:
            request = self._parse(head, body)
            scheduling = Scheduling(request, self._candidates(subset), self._clock())
            waiting = self._scheduled(scheduling, self._scheduler.prepare)
            if waiting is None:
                return self._route(head, scheduling)
            return self._route_later(head, scheduling, waiting)
        except Exception as error:
            self._not_routed(head, request, len(body), error)
            raise

    async def _route_later(self, head: RequestHead, scheduling: Scheduling, waiting: Awaitable[None]) -> Route:
        request = scheduling.request
        try:
            try:
                await waiting
            except Exception:
                self._attempted(scheduling, None)
                raise
            return self._route(head, scheduling)
        except BaseException as error:  # being cancelled is an end, too: the client has left
            self._not_routed(head, request, len(request.body), error)
            raise

    def _parse(self, head: RequestHead, body: bytes) -> InferenceRequest:
        headers = head.headers
        request_id = headers.get(REQUEST_ID) or str(uuid.uuid4())
        if body:
            request = parse(request_id, head.path, headers, body, max_body_bytes=self._settings.max_body_bytes)
        else:  # there is none, or the data plane does not show it
            request = InferenceRequest(request_id, head.path, headers, b"", unscored="no body")
        request.fairness_id = headers.get(FAIRNESS) or headers.get(FORMER_FAIRNESS) or request.fairness_id
        return request

    def _candidates(self, subset: Sequence[str] | None) -> Sequence[Endpoint]:
        endpoints = self._fleet.subset(None if self._settings.disable_subset_filter else subset)
        if not endpoints:
            raise no_endpoints()
        return endpoints

    def _scheduled(self, scheduling: Scheduling, step: Callable[[Scheduling], T]) -> T:
        try:
            return step(scheduling)
        except Exception:
            self._attempted(scheduling, None)
            raise

    def _attempted(self, scheduling: Scheduling, endpoint: Endpoint | None) -> None:
        self._telemetry.scheduled(scheduling.request.target_model, endpoint, self._clock() - scheduling.now)

    def _route(self, head: RequestHead, scheduling: Scheduling) -> Route:
        result = self._scheduled(scheduling, self._scheduler.decide)
        request, picked = scheduling.request, result.target.picked
        self._attempted(scheduling, picked[0])
        decision = self._decisions.record(
            scheduling, result, arrived=head.received_at, weights=self._weights.get(result.primary)
        )
        self._note_prediction(scheduling, decision)
        route = Route(
            destination=",".join(endpoint.address for endpoint in picked),
            set_headers=() if head.headers.get(REQUEST_ID) else ((REQUEST_ID, request.id),),
            metadata=self._scores(result) if self._settings.emit_scores else {},
        )
        metrics = self._metrics(request)
        ticket = self._in_flight.picked(scheduling, picked[0])
        # from here on nothing may fail: what is counted up is counted down by the exchange's end
        metrics.started(len(request.body))
        route.decision = Active(scheduling, result, decision, ticket, metrics)
        self._scheduler.picked(scheduling, result)
        self._telemetry.request_processed(self._clock() - head.received_at)
        return route

    def _note_prediction(self, scheduling: Scheduling, decision: Decision) -> None:
        if scheduling.request.unscored:
            self._telemetry.unscored(scheduling.request.unscored)
        if scheduling.hits:
            self._telemetry.predicted(decision.predicted or TierHit(), scheduling.longest_hit, decision.prompt_tokens)

    def _scores(self, result: SchedulingResult) -> dict[str, object]:
        target = result.target
        return {SCORES: {e.address: score for e, score in zip(target.endpoints, target.scores, strict=True)}}

    def _not_routed(self, head: RequestHead, request: InferenceRequest | None, size: int, error: BaseException) -> None:
        metrics = self._metrics(request) if request else self._telemetry.requests("", "", "default-flow", 0)
        metrics.started(size)
        metrics.finished(self._clock() - head.received_at, error=_pick_error(error))

    def _metrics(self, request: InferenceRequest) -> RequestMetrics:
        return self._telemetry.requests(request.model, request.target_model, request.fairness_id, request.priority)

    # response

    def answered(self, route: Route, response: ResponseHead) -> Answer:
        active, began = _active(route), self._clock()
        self._first_byte(active)
        active.served = response.served
        observe = self._observe(active.request, response)
        if observe is not Observe.NOTHING:
            active.usage = UsageReader(streaming=_is_event_stream(response))
        active.answering += self._clock() - began
        return Answer(observe)

    def _observe(self, request: InferenceRequest, response: ResponseHead) -> Observe:
        readable = response.headers.get("content-encoding", "identity") == "identity"
        if response.status != 200 or not request.model or not readable:
            return Observe.NOTHING
        if _content_type(response).startswith("application/json"):
            return _observe_json(response.headers.get("content-length", ""))
        sampled = _is_event_stream(response) and self._rng.random() < self._settings.observe_streams
        return Observe.CHUNKS if sampled else Observe.NOTHING

    def observe(self, route: Route, data: bytes, end_of_stream: bool) -> None:
        active = _active(route)
        if active.usage is not None:
            began = self._clock()
            if active.request.stream:
                if active.chunk_at:
                    active.metrics.chunk_gap(began - active.chunk_at)
                active.chunk_at = began
            active.usage.feed(data, end_of_stream)
            active.answering += self._clock() - began

    def finish(self, head: RequestHead | None, route: Route | None, outcome: Outcome) -> None:
        if route is None:
            return
        try:
            self._finish(_active(route), outcome, head.received_at if head else outcome.at)
        except Exception:
            logger.exception("a request's end could not be recorded")

    def _finish(self, active: Active, outcome: Outcome, received_at: float) -> None:
        active.ticket.close()
        self._scheduler.finished(active.scheduling, active.result, outcome)
        usage = active.usage
        delivered = usage.cached_tokens if usage is not None else None
        ttft = max(0.0, outcome.first_byte_at - received_at) if outcome.first_byte_at else 0.0
        active.metrics.finished(
            outcome.at - received_at,
            error=_error(outcome),
            ttft=ttft,
            streaming=active.request.stream,
            response_bytes=outcome.response_bytes,
            input_tokens=(usage.prompt_tokens or 0) if usage is not None else 0,
            output_tokens=(usage.completion_tokens or 0) if usage is not None else 0,
            cached_tokens=delivered,
        )
        active.decision.finish(outcome, delivered=delivered, served=active.served)
        self._compare(active, delivered)
        if active.answered:
            self._telemetry.response_processed(active.answering)

    def _compare(self, active: Active, delivered: int | None) -> None:
        """Unless a fallback has answered: the prediction is for the endpoint that was chosen."""
        predicted, chosen = active.decision.predicted, active.decision.chosen
        if delivered is not None and predicted is not None and active.served in ("", chosen):
            self._telemetry.delivered(predicted.cached, delivered, active.decision.feed)

    def _first_byte(self, active: Active) -> None:
        if not active.answered:
            active.answered = True
            active.ticket.first_byte()
            self._scheduler.first_byte(active.scheduling, active.result)


def _active(route: Route) -> Active:
    assert isinstance(route.decision, Active)
    return route.decision


def _content_type(response: ResponseHead) -> str:
    return response.headers.get("content-type", "").lower()


def _is_event_stream(response: ResponseHead) -> bool:
    return _content_type(response).startswith("text/event-stream")


def _observe_json(length: str) -> Observe:
    """An answer whose length is not known beforehand is read as it passes."""
    if not (length.isascii() and length.isdigit()):
        return Observe.CHUNKS
    digits = length.lstrip("0")
    return Observe.WHOLE if len(digits) < 10 and int(digits or 0) <= MAX_BUFFERED_ANSWER else Observe.NOTHING


def _pick_error(error: BaseException) -> str:
    """llm-d's error code of a request that was not routed; "" where only its client has left."""
    if isinstance(error, Refusal):
        return error.code.name
    return "" if isinstance(error, asyncio.CancelledError) else Code.Internal.name


def _error(outcome: Outcome) -> str:
    """llm-d's error code of a request that was routed, "" for success."""
    if outcome.termination is Termination.ERROR:
        return Code.Internal.name
    return "ModelServerError" if outcome.status >= 500 else ""
