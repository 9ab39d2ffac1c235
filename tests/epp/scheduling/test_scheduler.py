from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import pytest

from epp.config.environment import Environment
from epp.errors import Code, Refusal
from epp.fleet.endpoint import Endpoint
from epp.routing import Outcome, Termination
from epp.scheduling.plugin import ProfileResult, Scheduling, SchedulingResult
from epp.scheduling.profile import Profile
from epp.scheduling.scheduler import Scheduler
from tests.epp.scheduling.scheduled import schedule

Build = Callable[..., Any]
FleetOf = Callable[..., list[Endpoint]]
SchedulingOf = Callable[..., Scheduling]


class Fake:
    """A plugin of one function."""

    type = "fake"

    def __init__(self, role: str, does: Callable[..., Any], name: str = "fake") -> None:
        self.name = name
        setattr(self, role, does)


def scores(*values: float, name: str = "fake") -> Fake:
    return Fake("score", lambda scheduling, endpoints: list(values), name)


def broken(role: str, name: str = "broken") -> Fake:
    def fail(*arguments: Any) -> Any:
        raise RuntimeError("out of order")

    return Fake(role, fail, name)


@pytest.fixture
def scheduler(environment: Environment, build: Build) -> Callable[..., Scheduler]:
    def make(
        *,
        producers: Sequence[Any] = (),
        filters: Sequence[Any] = (),
        scorers: Sequence[tuple[Any, float]] = (),
        picker: Any = None,
        plugins: Sequence[Any] = (),
        profiles: Sequence[Profile] = (),
        handler: Any = None,
    ) -> Scheduler:
        only = Profile("default", filters, scorers, picker or build("max-score-picker"))
        return Scheduler(
            producers=producers,
            profiles=profiles or [only],
            handler=handler or build("single-profile-handler"),
            plugins=plugins,
            telemetry=environment.telemetry,
            rng=environment.rng,
        )

    return make


def inline(scheduler: Scheduler, scheduling: Scheduling) -> SchedulingResult:
    """Without an event loop."""
    assert scheduler.prepare(scheduling) is None
    return scheduler.decide(scheduling)


def failures(environment: Environment, name: str, point: str) -> float | None:
    labels = {"plugin_name": name, "extension_point": point}
    return environment.telemetry.registry.get_sample_value("tierpick_plugin_failures_total", labels)


class TestProfileRun:
    def test_weighted_scores_are_added(
        self, scheduler: Callable[..., Scheduler], fleet_of: FleetOf, scheduling_of: SchedulingOf
    ) -> None:
        run = scheduler(scorers=[(scores(0.5, 1.0, name="a"), 2.0), (scores(1.0, 0.25, name="b"), 4.0)])
        result = inline(run, scheduling_of(fleet_of(2))).target
        assert result.scores == [5.0, 3.0]
        assert result.raw == {"a": [0.5, 1.0], "b": [1.0, 0.25]}
        assert [endpoint.slot for endpoint in result.picked] == [0]

    def test_scores_are_clamped_and_nan_is_nothing(
        self, scheduler: Callable[..., Scheduler], fleet_of: FleetOf, scheduling_of: SchedulingOf
    ) -> None:
        run = scheduler(scorers=[(scores(-1.0, math.nan, math.inf, -math.inf, 7.0, 0.5), 1.0)])
        assert inline(run, scheduling_of(fleet_of(6))).target.scores == [0.0, 0.0, 1.0, 0.0, 1.0, 0.5]

    def test_an_engine_that_reports_nan_harms_only_itself(
        self, scheduler: Callable[..., Scheduler], build: Build, fleet_of: FleetOf, scheduling_of: SchedulingOf
    ) -> None:
        endpoints = fleet_of(3, kv_usage=[math.nan, 0.25, math.inf])
        run = scheduler(scorers=[(build("kv-cache-utilization-scorer"), 1.0)])
        assert inline(run, scheduling_of(endpoints)).target.scores == [0.0, 0.75, 0.0]

    def test_filters_narrow_in_order(
        self, scheduler: Callable[..., Scheduler], fleet_of: FleetOf, scheduling_of: SchedulingOf
    ) -> None:
        drop_first = Fake("filter", lambda scheduling, endpoints: endpoints[1:])
        keep_first = Fake("filter", lambda scheduling, endpoints: endpoints[:1])
        result = inline(scheduler(filters=[drop_first, keep_first]), scheduling_of(fleet_of(3))).target
        assert [endpoint.slot for endpoint in result.endpoints] == [1]

    def test_nobody_left_is_refused_as_saturated(
        self, scheduler: Callable[..., Scheduler], fleet_of: FleetOf, scheduling_of: SchedulingOf
    ) -> None:
        nobody = Fake("filter", lambda scheduling, endpoints: [])
        with pytest.raises(Refusal) as refusal:
            inline(scheduler(filters=[nobody, broken("filter")]), scheduling_of(fleet_of(2)))
        assert refusal.value.code is Code.ResourceExhausted
        assert refusal.value.message == "no endpoints available for the given request"
        assert refusal.value.reason == "rejected-saturated"

    @pytest.mark.parametrize(
        ("role", "point"),
        [("filters", "Filter"), ("scorers", "Scorer"), ("picker", "Picker"), ("producers", "DataProducer")],
    )
    def test_a_plugin_that_raises_is_skipped_and_counted(
        self,
        scheduler: Callable[..., Scheduler],
        environment: Environment,
        fleet_of: FleetOf,
        scheduling_of: SchedulingOf,
        caplog: pytest.LogCaptureFixture,
        role: str,
        point: str,
    ) -> None:
        method = {"filters": "filter", "scorers": "score", "picker": "pick", "producers": "produce"}[role]
        bad: Any = broken(method)
        parts: dict[str, Any] = {"scorers": [(scores(0.0, 1.0), 1.0)]}
        parts[role] = {"picker": bad, "scorers": [(bad, 9.0), *parts["scorers"]]}.get(role, [bad])
        run = scheduler(**parts)
        for _ in range(2):
            scheduling = scheduling_of(fleet_of(2))
            assert [endpoint.slot for endpoint in inline(run, scheduling).target.picked] == [1]
            assert scheduling.skipped == ["broken: RuntimeError"]
        assert failures(environment, "broken", point) == 2
        assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == 1

    def test_misaligned_scores_are_a_failure(
        self, scheduler: Callable[..., Scheduler], fleet_of: FleetOf, scheduling_of: SchedulingOf
    ) -> None:
        scheduling = scheduling_of(fleet_of(2))
        inline(scheduler(scorers=[(scores(1.0), 1.0)]), scheduling)
        assert scheduling.skipped == ["fake: ValueError"]

    def test_a_plugin_may_refuse_the_request(
        self, scheduler: Callable[..., Scheduler], fleet_of: FleetOf, scheduling_of: SchedulingOf
    ) -> None:
        def refuse(*arguments: Any) -> Any:
            raise Refusal(Code.BadRequest, "no")

        run = scheduler(scorers=[(Fake("score", refuse), 1.0)])
        with pytest.raises(Refusal, match="no"):
            inline(run, scheduling_of(fleet_of(2)))

    def test_durations_are_measured_by_plugin(
        self,
        scheduler: Callable[..., Scheduler],
        environment: Environment,
        fleet_of: FleetOf,
        scheduling_of: SchedulingOf,
    ) -> None:
        inline(scheduler(scorers=[(scores(1.0, name="a"), 1.0)]), scheduling_of(fleet_of(1)))
        labels = {"extension_point": "Scorer", "plugin_type": "fake", "plugin_name": "a"}
        sample = environment.telemetry.registry.get_sample_value("llm_d_epp_plugin_duration_seconds_count", labels)
        assert sample == 1


class TestProducers:
    async def test_they_run_in_order_and_may_answer_later(
        self, scheduler: Callable[..., Scheduler], fleet_of: FleetOf, scheduling_of: SchedulingOf
    ) -> None:
        order: list[str] = []

        async def later() -> None:
            await asyncio.sleep(0)
            order.append("later")

        slow = Fake("produce", lambda scheduling: later())
        quick = Fake("produce", lambda scheduling: order.append("at once"))
        await schedule(scheduler(producers=[slow, quick]), scheduling_of(fleet_of(1)))
        assert order == ["later", "at once"]

    async def test_one_that_takes_too_long_is_given_up(
        self,
        scheduler: Callable[..., Scheduler],
        environment: Environment,
        fleet_of: FleetOf,
        scheduling_of: SchedulingOf,
    ) -> None:
        cancelled = asyncio.Event()

        async def never() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        def produce(scheduling: Scheduling) -> Awaitable[None]:
            return never()

        slow = Fake("produce", produce, "slow")
        slow.produce_timeout = 0.01  # type: ignore[attr-defined]
        scheduling = scheduling_of(fleet_of(1))
        await schedule(scheduler(producers=[slow]), scheduling)
        assert cancelled.is_set()
        assert scheduling.skipped == ["slow: TimeoutError"]
        assert failures(environment, "slow", "DataProducer") == 1

    @pytest.mark.parametrize("answers", [True, False])
    async def test_endpoints_that_leave_while_it_works_are_left_out(
        self,
        scheduler: Callable[..., Scheduler],
        fleet_of: FleetOf,
        scheduling_of: SchedulingOf,
        answers: bool,
    ) -> None:
        endpoints = fleet_of(3)

        async def late() -> None:
            endpoints[0].gone = endpoints[2].gone = True
            if not answers:
                raise ValueError

        scheduling = scheduling_of(endpoints)
        result = await schedule(scheduler(producers=[Fake("produce", lambda scheduling: late())]), scheduling)
        assert list(scheduling.endpoints) == [endpoints[1]]
        assert list(result.target.picked) == [endpoints[1]]

    async def test_if_all_have_left_there_is_no_endpoint(
        self, scheduler: Callable[..., Scheduler], fleet_of: FleetOf, scheduling_of: SchedulingOf
    ) -> None:
        [endpoint] = fleet_of(1)

        async def late() -> None:
            endpoint.gone = True

        run = scheduler(producers=[Fake("produce", lambda scheduling: late())])
        with pytest.raises(Refusal) as refused:
            await schedule(run, scheduling_of([endpoint]))
        assert refused.value.status == 503

    async def test_a_client_that_leaves_cancels(
        self, scheduler: Callable[..., Scheduler], fleet_of: FleetOf, scheduling_of: SchedulingOf
    ) -> None:
        started = asyncio.Event()

        async def never() -> None:
            started.set()
            await asyncio.Event().wait()

        run = scheduler(producers=[Fake("produce", lambda scheduling: never())])
        task = asyncio.create_task(schedule(run, scheduling_of(fleet_of(1))))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


class TwoStages:
    """Runs prefill, then decode; decode is the answer."""

    name = type = "two-stages"

    def next_profiles(
        self, scheduling: Scheduling, profiles: Sequence[str], results: Mapping[str, ProfileResult | None]
    ) -> Sequence[str]:
        return ["prefill"] if not results else ["decode"]

    def primary(self, results: Mapping[str, ProfileResult | None]) -> str:
        return "decode"


class TestProfiles:
    def profiles(self, build: Build, empty: str = "") -> list[Profile]:
        nobody: Any = Fake("filter", lambda scheduling, endpoints: [])
        return [
            Profile(name, [nobody] if name == empty else [], [], build("max-score-picker"))
            for name in ("prefill", "decode", "unused")
        ]

    def test_the_handler_says_which_run_and_a_profile_runs_once(
        self, scheduler: Callable[..., Scheduler], build: Build, fleet_of: FleetOf, scheduling_of: SchedulingOf
    ) -> None:
        run = scheduler(profiles=self.profiles(build), handler=TwoStages())
        result = inline(run, scheduling_of(fleet_of(1)))
        assert list(result.profiles) == ["prefill", "decode"]
        assert result.primary == "decode"

    def test_a_secondary_profile_may_fail(
        self, scheduler: Callable[..., Scheduler], build: Build, fleet_of: FleetOf, scheduling_of: SchedulingOf
    ) -> None:
        run = scheduler(profiles=self.profiles(build, empty="prefill"), handler=TwoStages())
        assert inline(run, scheduling_of(fleet_of(1))).profiles["prefill"] is None

    def test_the_primary_profile_may_not(
        self, scheduler: Callable[..., Scheduler], build: Build, fleet_of: FleetOf, scheduling_of: SchedulingOf
    ) -> None:
        run = scheduler(profiles=self.profiles(build, empty="decode"), handler=TwoStages())
        with pytest.raises(Refusal, match="no endpoints available"):
            inline(run, scheduling_of(fleet_of(1)))


def test_plugins_hear_of_a_requests_life_and_cannot_disturb_it(
    scheduler: Callable[..., Scheduler], environment: Environment, fleet_of: FleetOf, scheduling_of: SchedulingOf
) -> None:
    heard: list[str] = []

    class Listener:
        name = type = "listener"

        def picked(self, scheduling: Scheduling, result: SchedulingResult) -> None:
            heard.append("picked")

        def first_byte(self, scheduling: Scheduling, result: SchedulingResult) -> None:
            heard.append("first byte")

        def finished(self, scheduling: Scheduling, result: SchedulingResult, outcome: Outcome) -> None:
            heard.append(outcome.termination.value)

    run = scheduler(plugins=[broken("picked"), broken("finished"), Listener(), scores(1.0)])
    scheduling = scheduling_of(fleet_of(1))
    result = inline(run, scheduling)
    run.picked(scheduling, result)
    run.first_byte(scheduling, result)
    run.finished(scheduling, result, Outcome(Termination.CLIENT))
    assert heard == ["picked", "first byte", "client disconnect"]
    assert failures(environment, "broken", "PreRequest") == 1
    assert failures(environment, "broken", "ResponseComplete") == 1
