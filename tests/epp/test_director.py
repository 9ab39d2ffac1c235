"""One request through the real parts: fleet, scheduler, account of what is in flight, metrics, decisions."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from epp.config.environment import Environment
from epp.config.loader import load
from epp.decisions import Decisions
from epp.director import MAX_BUFFERED_ANSWER, RequestDirector, Settings
from epp.errors import Code, Refusal
from epp.fleet.endpoint import EndpointSpec
from epp.fleet.fleet import Fleet
from epp.producers.inflight import InFlight
from epp.routing import Answer, Observe, Outcome, RequestHead, ResponseHead, Route, Termination
from epp.scheduling.plugin import Certainty, Scheduling, TierHit
from epp.scheduling.scheduler import Scheduler
from epp.telemetry import Telemetry
from indexer.stream import State

A, B = "10.0.0.1:8000", "10.0.0.2:8000"
CANARY = "my-secret-prompt"

TOKENS = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins: [{type: token-producer}, {type: active-request-scorer}, {type: queue-scorer}]
schedulingProfiles: [{name: default, plugins: [{pluginRef: active-request-scorer}, {pluginRef: queue-scorer}]}]
"""


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Plugin:
    """Base of the plugins below, which stand beside those of the configuration."""

    type = "test"

    def __init__(self) -> None:
        self.name = type(self).__name__


class Knows(Plugin):
    """A producer whose exact prediction is always the same, by slot."""

    def __init__(self, *hits: TierHit | None, feed: State = State.LIVE) -> None:
        super().__init__()
        self._hits = list(hits)
        self._certainty = Certainty([feed] * len(hits), ())

    def produce(self, scheduling: Scheduling) -> None:
        scheduling.hits, scheduling.certainty = list(self._hits), self._certainty
        scheduling.longest_hit = max(hit.cached if hit else 0 for hit in self._hits)


class Waits(Plugin):
    """A producer that waits for `release`, at most `timeout` seconds; `full` is set when `expected` requests wait."""

    def __init__(self, expected: int = 0, timeout: float = 60.0) -> None:
        super().__init__()
        self.produce_timeout = timeout
        self.release = asyncio.Event()
        self.full = asyncio.Event()
        self._missing = expected

    async def produce(self, scheduling: Scheduling) -> None:
        self._missing -= 1
        if not self._missing:
            self.full.set()
        await self.release.wait()
        raise AssertionError("work that nobody waits for any more goes on")


class Parts:
    """The director and what is around it."""

    def __init__(self, *plugins: Any, endpoints: tuple[str, ...] = (A, B), text: str = TOKENS, **settings: Any) -> None:
        self.clock = Clock()
        self.fleet = Fleet()
        self.registry = CollectorRegistry()
        telemetry = Telemetry(self.registry)
        environment = Environment(self.fleet, telemetry, clock=self.clock, rng=random.Random(1))
        configuration = load(text, environment)
        telemetry.watch(self.fleet, "pool", clock=self.clock)
        self.fleet.apply(EndpointSpec(address) for address in endpoints)
        self.in_flight = InFlight.of(environment)
        self.decisions = Decisions(100)
        self.director = RequestDirector(
            fleet=self.fleet,
            scheduler=Scheduler(
                producers=[*configuration.producers, *(p for p in plugins if hasattr(p, "produce"))],
                profiles=configuration.profiles,
                handler=configuration.handler,
                plugins=[*configuration.plugins.values(), *plugins],
                telemetry=telemetry,
                rng=environment.rng,
            ),
            in_flight=self.in_flight,
            telemetry=telemetry,
            decisions=self.decisions,
            settings=Settings(**settings),
            clock=self.clock,
            rng=environment.rng,
        )

    async def route(self, body: Any = None, subset: Any = None, **head_fields: Any) -> tuple[RequestHead, Route]:
        asked = head(self.clock.now, **head_fields)
        picked = self.director.pick(asked, prompt() if body is None else encoded(body), subset)
        return asked, picked if isinstance(picked, Route) else await picked

    async def refusal(self, body: Any = None, subset: Any = None, **head_fields: Any) -> Refusal:
        with pytest.raises(Refusal) as caught:
            await self.route(body, subset, **head_fields)
        return caught.value

    def answered(self, route: Route, status: int = 200, kind: str = "application/json", **more: Any) -> Answer:
        served = more.pop("served", "")
        headers = {"content-type": kind, "content-length": "200", **{k.replace("_", "-"): v for k, v in more.items()}}
        return self.director.answered(route, ResponseHead(status, headers, served, self.clock.now))

    def finish(self, request: RequestHead, route: Route | None, how: Termination = Termination.NATURAL) -> None:
        self.director.finish(request, route, Outcome(how, 200 if route else 0, at=self.clock.now))

    def metric(self, name: str, **labels: str) -> float:
        """Sum over all samples of that name which have these labels."""
        samples = [s for family in self.registry.collect() for s in family.samples if s.name == name]
        return sum(s.value for s in samples if labels.items() <= s.labels.items())

    def in_flight_at(self, address: str) -> tuple[int, int]:
        endpoint = self.fleet.get(address)
        assert endpoint is not None
        return endpoint.inflight_requests, endpoint.inflight_tokens

    def decision(self) -> dict[str, Any]:
        return next(self.decisions.newest()).to_json()

    def assert_nothing_is_left(self) -> None:
        assert len(self.in_flight) == 0
        assert {self.in_flight_at(e.address) for e in self.fleet.endpoints} <= {(0, 0)}
        assert self.metric("llm_d_epp_request_running") == 0


def head(at: float, method: str = "POST", path: str = "/v1/completions", end: bool = False, **more: str) -> RequestHead:
    headers = {":method": method, ":path": path, **{name.replace("_", "-"): value for name, value in more.items()}}
    return RequestHead(headers, at, end)


def prompt(text: str = "x" * 400, **fields: Any) -> bytes:
    return msgspec.json.encode({"model": "m", "prompt": text, **fields})


def encoded(body: Any) -> bytes:
    return body if isinstance(body, bytes) else msgspec.json.encode(body)


def usage(cached: int) -> bytes:
    details = {"prompt_tokens": 100, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": cached}}
    return msgspec.json.encode({"usage": details})


class TestRouting:
    async def test_a_request_goes_to_one_endpoint_and_keeps_its_body(self) -> None:
        _, route = await Parts().route()
        assert route.destination in (A, B)
        assert route.body is None

    async def test_it_goes_where_there_is_less_to_do(self) -> None:
        parts = Parts()
        first, second = (await parts.route())[1], (await parts.route())[1]
        assert {first.destination, second.destination} == {A, B}

    @pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "DELETE"])
    async def test_without_a_body_it_is_routed_by_its_headers(self, method: str) -> None:
        parts = Parts()
        asked, route = await parts.route(b"", method=method, path="/v1/models", end=True)
        assert route.destination
        parts.answered(route)
        parts.finish(asked, route)
        parts.assert_nothing_is_left()
        assert parts.metric("tierpick_unscored_requests_total", reason="no body") == 1

    async def test_a_body_that_is_not_shown_to_us_does_not_matter(self) -> None:
        """Header-only processing modes and upgrades: what cannot be read cannot be wrong."""
        _, route = await Parts().route(b"", path="/v1/chat/completions")
        assert route.destination

    async def test_a_path_we_do_not_read_is_routed_unscored(self) -> None:
        parts = Parts()
        await parts.route(b"\x00not json", path="/v1/audio/transcriptions")
        assert parts.decision()["unscored"] == "path"
        assert parts.metric("tierpick_unscored_requests_total", reason="path") == 1

    async def test_a_missing_request_id_is_made_up_and_sent_on(self) -> None:
        parts = Parts()
        for given in ({}, {"x_request_id": ""}):
            _, route = await parts.route(**given)
            ((name, value),) = route.set_headers
            assert name == "x-request-id"
            assert parts.decision()["id"] == value

    async def test_a_request_id_stays(self) -> None:
        parts = Parts()
        _, route = await parts.route(x_request_id="mine")
        assert route.set_headers == ()
        assert parts.decision()["id"] == "mine"

    @pytest.mark.parametrize(
        ("headers", "expected"),
        [
            ({}, "default-flow"),
            ({"x_llm_d_inference_fairness_id": "new"}, "new"),
            ({"x_gateway_inference_fairness_id": "old"}, "old"),
            ({"x_gateway_inference_fairness_id": "old", "x_llm_d_inference_fairness_id": "new"}, "new"),
            ({"x_gateway_inference_fairness_id": "old", "x_llm_d_inference_fairness_id": ""}, "old"),
        ],
    )
    async def test_the_fairness_id_by_either_name(self, headers: dict[str, str], expected: str) -> None:
        parts = Parts()
        await parts.route(**headers)
        assert parts.metric("llm_d_epp_request_total", fairness_id=expected) == 1

    async def test_scores_are_emitted_only_where_wanted(self) -> None:
        assert (await Parts().route())[1].metadata == {}
        _, route = await Parts(emit_scores=True).route()
        assert route.metadata == {"x-gateway-destination-endpoint-scores": {A: 2.0, B: 2.0}}


class TestSubset:
    async def test_only_what_it_allows(self) -> None:
        parts = Parts()
        assert {(await parts.route(subset=[B]))[1].destination for _ in range(4)} == {B}

    async def test_what_we_do_not_know_is_never_routed_to(self) -> None:
        assert (await Parts().refusal(subset=["10.9.9.9:8000"])).status == 503

    async def test_an_empty_one_allows_nothing(self) -> None:
        assert (await Parts().refusal(subset=[])).status == 503

    async def test_it_can_be_ignored(self) -> None:
        _, route = await Parts(disable_subset_filter=True).route(subset=[])
        assert route.destination


class TestRefusals:
    @pytest.mark.parametrize(
        ("body", "field"),
        [
            (b"{", "body"),
            (b"[]", "object"),
            ({"prompt": "x"}, "model"),
            ({"model": 7, "prompt": "x"}, "model"),
            ({"model": "m", "prompt": {"a": 1}}, "prompt"),
            ({"model": "m", "prompt": []}, "prompt"),
        ],
    )
    async def test_a_bad_body_is_answered_400_and_counted(self, body: Any, field: str) -> None:
        parts = Parts()
        refusal = await parts.refusal(body)
        assert (refusal.status, field in refusal.message) == (400, True), refusal.message
        assert parts.metric("llm_d_epp_request_error_total", error_code="BadRequest") == 1
        parts.assert_nothing_is_left()

    async def test_no_endpoint_is_503_with_a_reason_and_counted(self) -> None:
        parts = Parts(endpoints=())
        refusal = await parts.refusal()
        assert refusal.status == 503
        assert ("x-llm-d-request-dropped-reason", "rejected-no-endpoints") in refusal.headers
        labels = {"error_code": "ServiceUnavailable", "model_name": "m"}
        assert parts.metric("llm_d_epp_request_error_total", **labels) == 1
        parts.assert_nothing_is_left()

    async def test_the_size_limit_is_the_one_configured(self) -> None:
        assert (await Parts(max_body_bytes=100).refusal(prompt("x" * 100))).status == 413
        await Parts(max_body_bytes=1000).route(prompt("x" * 100))

    async def test_a_fault_of_ours_is_counted_as_internal(self) -> None:
        parts = Parts()

        def broken(scheduling: Scheduling, endpoint: Any) -> Any:
            raise LookupError

        parts.in_flight.estimate = broken
        with pytest.raises(LookupError):
            await parts.route()
        assert parts.metric("llm_d_epp_request_error_total", error_code=Code.Internal.name) == 1
        parts.assert_nothing_is_left()

    async def test_a_refused_request_has_nothing_to_finish(self) -> None:
        parts = Parts(endpoints=())
        await parts.refusal()
        parts.finish(head(0.0), None, Termination.REFUSED)
        assert parts.metric("llm_d_epp_request_total") == 1


class TestLoad:
    @pytest.mark.parametrize("how", [Termination.NATURAL, Termination.CLIENT, Termination.ERROR])
    @pytest.mark.parametrize("response_came", [True, False])
    async def test_what_was_counted_up_is_counted_down(self, how: Termination, response_came: bool) -> None:
        parts = Parts()
        asked, route = await parts.route()
        assert parts.in_flight_at(route.destination) == (1, 100)
        assert parts.metric("llm_d_epp_request_running", model_name="m") == 1
        if response_came:
            parts.answered(route)
        parts.finish(asked, route, how)
        parts.assert_nothing_is_left()

    async def test_the_first_byte_releases_the_prompt_tokens(self) -> None:
        parts = Parts()
        _, route = await parts.route()
        parts.answered(route)
        assert parts.in_flight_at(route.destination) == (1, 0)

    async def test_only_tokens_that_must_be_computed_count(self) -> None:
        parts = Parts(Knows(TierHit(gpu=60, cpu=30)), endpoints=(A,))
        await parts.route()
        assert parts.in_flight_at(A) == (1, 10)

    async def test_an_endpoint_that_left_does_not_matter(self) -> None:
        parts = Parts(endpoints=(A,))
        asked, route = await parts.route()
        parts.fleet.apply([])
        parts.fleet.apply([EndpointSpec(A)])
        parts.finish(asked, route)
        parts.assert_nothing_is_left()

    @pytest.mark.parametrize("how", [Termination.NATURAL, Termination.CLIENT, Termination.ERROR])
    async def test_an_error_code_only_for_errors(self, how: Termination) -> None:
        parts = Parts()
        asked, route = await parts.route()
        parts.finish(asked, route, how)
        errors = parts.metric("llm_d_epp_request_error_total", error_code="Internal")
        assert errors == (how is Termination.ERROR)
        assert parts.metric("llm_d_epp_request_error_total") == errors

    async def test_an_error_of_the_engine_is_told_apart(self) -> None:
        parts = Parts()
        asked, route = await parts.route()
        parts.director.finish(asked, route, Outcome(Termination.NATURAL, 502, at=parts.clock.now))
        assert parts.metric("llm_d_epp_request_error_total", error_code="ModelServerError") == 1


class TestCancelledPicks:
    async def test_hundreds_leave_nothing_behind(self) -> None:
        slow = Waits(expected=500)
        parts = Parts(slow)
        picks = [asyncio.ensure_future(parts.route()) for _ in range(500)]
        await slow.full.wait()
        for pick in picks:
            pick.cancel()
        ended = await asyncio.gather(*picks, return_exceptions=True)
        assert {type(end) for end in ended} == {asyncio.CancelledError}
        for _ in ended:
            parts.finish(head(0.0), None, Termination.CLIENT)
        slow.release.set()
        await asyncio.sleep(0)
        parts.assert_nothing_is_left()
        assert len(parts.decisions) == 0
        assert parts.metric("llm_d_epp_request_total") == 500
        assert parts.metric("llm_d_epp_request_error_total") == 0
        assert parts.metric("llm_d_epp_scheduler_attempts_total", status="failure") == 0

    async def test_a_deadline_routes_without_the_late_result(self) -> None:
        slow = Waits(timeout=0.05)
        parts = Parts(slow)
        routed = await asyncio.gather(*(parts.route() for _ in range(500)))
        assert len(parts.in_flight) == 500
        slow.release.set()
        for asked, route in routed:
            parts.finish(asked, route, Termination.CLIENT)
        parts.assert_nothing_is_left()
        assert parts.decision()["skipped_plugins"] == ["Waits: TimeoutError"]


class TestPrediction:
    @staticmethod
    async def ended(delivered: int, served: str = "", feed: State = State.LIVE) -> Parts:
        parts = Parts(Knows(TierHit(gpu=32, cpu=32), feed=feed), endpoints=(A,))
        asked, route = await parts.route()
        assert parts.answered(route, served=served).observe is Observe.WHOLE
        parts.director.observe(route, usage(delivered), True)
        parts.finish(asked, route)
        return parts

    @pytest.mark.parametrize(("delivered", "result"), [(64, "exact"), (32, "below"), (80, "above")])
    async def test_it_is_compared_with_what_the_engine_delivered(self, delivered: int, result: str) -> None:
        parts = await self.ended(delivered)
        assert parts.metric("tierpick_prediction_total", result=result) == 1
        assert parts.metric("tierpick_prediction_total") == 1
        assert parts.metric("tierpick_delivered_cached_tokens_total") == delivered
        decision = parts.decision()
        assert decision["predicted"] == {"gpu": 32, "cpu": 32, "storage": 0, "total": 64}
        assert (decision["delivered_cached_tokens"], decision["prediction"]) == (delivered, result)
        assert parts.metric("llm_d_epp_request_input_tokens_sum") == 100
        assert parts.metric("llm_d_epp_request_output_tokens_sum") == 7
        assert parts.metric("llm_d_epp_request_cached_tokens_sum") == delivered

    @pytest.mark.parametrize("feed", list(State))
    async def test_it_is_counted_by_the_state_that_the_feed_was_in(self, feed: State) -> None:
        parts = await self.ended(32, feed=feed)
        assert parts.metric("tierpick_prediction_total", result="below", feed=feed.value) == 1
        assert parts.metric("tierpick_prediction_total") == 1
        assert parts.decision()["feed"] == feed.value

    async def test_who_served_is_recorded(self) -> None:
        assert (await self.ended(64, served=A)).decision()["served"] == A

    async def test_a_fallback_that_served_says_nothing_of_the_chosen(self) -> None:
        assert (await self.ended(64, served=B)).metric("tierpick_prediction_total") == 0

    async def test_the_best_candidate_is_counted_beside_the_chosen(self) -> None:
        parts = Parts(Knows(None, TierHit(gpu=48)))
        await parts.route(subset=[A])
        assert parts.metric("tierpick_predicted_tokens_total") == 0
        assert parts.metric("tierpick_best_available_tokens_total") == 48
        assert parts.metric("tierpick_prompt_tokens_total") == 100

    async def test_without_one_nothing_is_compared(self) -> None:
        parts = Parts()
        asked, route = await parts.route()
        parts.answered(route)
        parts.director.observe(route, usage(64), True)
        parts.finish(asked, route)
        assert parts.metric("tierpick_prediction_total") == 0
        assert parts.decision()["delivered_cached_tokens"] == 64


async def test_our_own_time_for_the_response_is_measured_once_a_request() -> None:
    parts = Parts()
    refused, never_answered, answered = head(parts.clock.now), await parts.route(), await parts.route()
    parts.finish(refused, None)
    parts.finish(*never_answered, Termination.CLIENT)
    parts.answered(answered[1])
    parts.director.observe(answered[1], usage(0), True)
    parts.finish(*answered)
    assert parts.metric("llm_d_epp_response_processing_duration_seconds_count") == 1


class TestObserving:
    @staticmethod
    async def observe(status: int = 200, **headers: str) -> Observe:
        parts = Parts()
        return parts.answered((await parts.route())[1], status, **headers).observe

    async def test_a_json_answer_is_read_whole(self) -> None:
        assert await self.observe(kind="Application/JSON; charset=utf-8") is Observe.WHOLE

    async def test_one_that_might_outgrow_a_buffer_never_is(self) -> None:
        assert await self.observe(content_length=str(MAX_BUFFERED_ANSWER + 1)) is Observe.NOTHING
        assert await self.observe(content_length="") is Observe.CHUNKS
        assert await self.observe(content_length="9" * 5000) is Observe.NOTHING
        assert await self.observe(content_length="²") is Observe.CHUNKS

    async def test_one_of_unknown_length_is_read_as_it_passes(self) -> None:
        parts = Parts()
        asked, route = await parts.route()
        parts.answered(route, content_length="")
        for piece in (usage(64)[:20], usage(64)[20:]):
            parts.director.observe(route, piece, False)
        parts.director.observe(route, b"", True)
        parts.finish(asked, route)
        assert parts.decision()["delivered_cached_tokens"] == 64

    async def test_what_cannot_hold_usage_is_not_read(self) -> None:
        assert await self.observe(404) is Observe.NOTHING
        assert await self.observe(kind="image/png") is Observe.NOTHING
        assert await self.observe(content_encoding="gzip") is Observe.NOTHING

    @pytest.mark.parametrize(("share", "expected"), [(0.0, Observe.NOTHING), (1.0, Observe.CHUNKS)])
    async def test_of_event_streams_a_share(self, share: float, expected: Observe) -> None:
        parts = Parts(observe_streams=share)
        asked, route = await parts.route(prompt(stream=True))
        assert parts.answered(route, kind="text/event-stream").observe is expected
        parts.director.observe(route, b"data: " + usage(64) + b"\n\ndata: [DONE]\n\n", True)
        parts.finish(asked, route)
        assert parts.decision()["delivered_cached_tokens"] == (64 if share else None)

    async def test_the_gaps_between_the_chunks_of_an_observed_stream_are_counted(self) -> None:
        parts = Parts(observe_streams=1.0)
        _, route = await parts.route(prompt(stream=True))
        parts.answered(route, kind="text/event-stream")
        for pause in (1.0, 0.02, 0.03):
            parts.clock.now += pause
            parts.director.observe(route, b"data: {}\n\n", False)
        assert parts.metric("llm_d_epp_request_streaming_itl_seconds_count") == 2
        assert parts.metric("llm_d_epp_request_streaming_itl_seconds_sum") == pytest.approx(0.05)

    async def test_nothing_of_a_request_without_a_model(self) -> None:
        parts = Parts()
        _, route = await parts.route(b"", method="GET", end=True)
        assert parts.answered(route).observe is Observe.NOTHING


class Faulty(Plugin):
    """Raises in one hook."""

    def __init__(self, hook: str) -> None:
        super().__init__()
        setattr(self, hook, self._fail)

    def _fail(self, *_: Any) -> None:
        raise ZeroDivisionError


class TestFaultyPlugins:
    @pytest.mark.parametrize("hook", ["produce", "picked", "first_byte", "finished"])
    async def test_a_request_lives_and_ends_all_the_same(self, hook: str) -> None:
        parts = Parts(Faulty(hook))
        asked, route = await parts.route()
        parts.answered(route)
        parts.finish(asked, route)
        parts.assert_nothing_is_left()
        assert parts.decision()["skipped_plugins"] == ["Faulty: ZeroDivisionError"]
        assert parts.decision()["outcome"]["status"] == 200
        assert parts.metric("tierpick_plugin_failures_total", plugin_name="Faulty") == 1

    async def test_finish_never_raises(self, caplog: pytest.LogCaptureFixture) -> None:
        Parts().finish(head(0.0), Route(A))
        assert "end could not be recorded" in caplog.text

    async def test_a_fault_in_the_metrics_leaks_no_load(self, monkeypatch: pytest.MonkeyPatch) -> None:
        parts = Parts()
        asked, route = await parts.route()
        monkeypatch.setattr("epp.telemetry.requests.RequestMetrics.finished", Faulty("x")._fail)
        parts.finish(asked, route)
        assert len(parts.in_flight) == 0


class TestPrivacy:
    """What clients ask never shows in logs, metrics or decisions."""

    @pytest.mark.parametrize(
        ("path", "body"),
        [
            ("/v1/completions", {"model": "m", "prompt": CANARY}),
            ("/v1/completions", {"model": "m", "prompt": [CANARY, CANARY]}),
            ("/v1/completions", {"model": "m", "prompt": [CANARY, 3]}),
            ("/v1/completions", {"model": "m", "prompt": {CANARY: CANARY}}),
            ("/v1/completions", b'{"model": "m", "prompt": "' + CANARY.encode()),
            ("/v1/completions", b'{"model": "m", "prompt": "' + CANARY.encode() + b'\\ud800"}'),
            ("/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": CANARY}]}),
            ("/v1/chat/completions", {"model": "m", "messages": [{"role": CANARY, "content": {CANARY: 1}}]}),
            ("/v1/chat/completions", {"model": "m", "messages": CANARY}),
            ("/v1/embeddings", {"model": "m", "input": CANARY}),
            (f"/v1/audio?text={CANARY}", CANARY.encode()),
        ],
    )
    async def test_no_trace_of_the_prompt(self, caplog: pytest.LogCaptureFixture, path: str, body: Any) -> None:
        caplog.set_level(logging.DEBUG)
        parts = Parts()
        told = ""
        try:
            asked, route = await parts.route(body, path=path, authorization=f"Bearer {CANARY}")
        except Refusal as refusal:
            told = refusal.message
        else:
            parts.answered(route)
            parts.finish(asked, route, Termination.ERROR)
            told = json.dumps(parts.decision())
        page = "".join(str(family) for family in parts.registry.collect())
        assert CANARY not in told + caplog.text + page
