"""In-flight accounts: never negative, and nothing left when everything has ended."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.config.environment import Environment
from epp.config.registry import plugin_types
from epp.fleet.endpoint import Endpoint, EndpointSpec
from epp.fleet.fleet import Fleet
from epp.producers.inflight import InFlight, InFlightLoadParameters, InFlightLoadProducer, Ticket, uncached_tokens
from epp.requests.model import InferenceRequest
from epp.scheduling.plugin import PrefixMatch, Scheduling, TierHit
from epp.telemetry import Telemetry


def specs(*numbers: int) -> list[EndpointSpec]:
    return [EndpointSpec(f"10.0.0.{n}:8000", f"pod-{n}") for n in numbers]


@pytest.fixture
def environment() -> Environment:
    fleet = Fleet()
    fleet.apply(specs(1, 2))
    return Environment(fleet, Telemetry())


def figures(endpoint: Endpoint) -> tuple[int, int]:
    return endpoint.inflight_requests, endpoint.inflight_tokens


def scheduling(environment: Environment, tokens: int = 100, **fields: object) -> Scheduling:
    request = InferenceRequest("r", "/v1/completions", {}, b"", tokens=[bytes(4 * tokens)])
    for name, value in fields.items():
        setattr(request, name, value)
    return Scheduling(request, environment.fleet.endpoints, now=0.0)


def test_a_ticket_counts_from_start_releases_its_prompt_at_the_first_byte_and_the_rest_at_the_end(
    environment: Environment,
) -> None:
    endpoint = environment.fleet.endpoints[0]
    ticket = InFlight.of(environment).start(endpoint, 100)
    assert figures(endpoint) == (1, 100)
    ticket.first_byte()
    assert figures(endpoint) == (1, 0)
    ticket.close()
    assert figures(endpoint) == (0, 0)


def test_repeated_and_late_ends_change_nothing(environment: Environment) -> None:
    endpoint = environment.fleet.endpoints[0]
    account = InFlight.of(environment)
    other, ticket = account.start(endpoint, 7), account.start(endpoint, 100)
    ticket.close()
    ticket.close()
    ticket.first_byte()
    assert figures(endpoint) == (1, 7)
    other.close()
    assert figures(endpoint) == (0, 0)
    assert len(account) == 0


def test_a_release_reaches_the_endpoint_it_was_taken_from_not_the_heir_of_its_slot(environment: Environment) -> None:
    fleet, account = environment.fleet, InFlight.of(environment)
    old = fleet.endpoints[0]
    ticket = account.start(old, 100)
    fleet.apply([EndpointSpec(old.address, "replacement"), *specs(2)])
    heir = fleet.get(old.address)
    assert heir is not None
    assert heir.slot == old.slot
    ticket.close()
    assert figures(heir) == (0, 0)
    assert figures(old) == (0, 0)


@given(st.data())
def test_in_any_order_of_events_figures_are_never_negative_and_end_at_zero(data: st.DataObject) -> None:
    environment = Environment(Fleet(), Telemetry())
    fleet, account = environment.fleet, InFlight.of(environment)
    fleet.apply(specs(1, 2))
    everyone, tickets = set(fleet.endpoints), list[Ticket]()
    for step in data.draw(st.lists(st.sampled_from(["start", "first_byte", "close", "fleet"]), max_size=40)):
        if step == "fleet":
            fleet.apply(specs(*data.draw(st.sets(st.integers(1, 3), min_size=1))))
            everyone.update(fleet.endpoints)
        elif step == "start":
            endpoint = data.draw(st.sampled_from(fleet.endpoints))
            tickets.append(account.start(endpoint, data.draw(st.integers(0, 1000))))
        elif tickets:
            getattr(data.draw(st.sampled_from(tickets)), step)()
        assert all(min(figures(endpoint)) >= 0 for endpoint in everyone)
        assert sum(endpoint.inflight_requests for endpoint in everyone) == len(account)
    for ticket in tickets:
        ticket.close()
    assert all(figures(endpoint) == (0, 0) for endpoint in everyone)
    assert len(account) == 0


class TestUncachedTokens:
    def test_without_any_match_the_whole_prompt_is_to_compute(self, environment: Environment) -> None:
        assert uncached_tokens(scheduling(environment), environment.fleet.endpoints[0]) == 100

    def test_an_unknown_prompt_counts_nothing(self, environment: Environment) -> None:
        assert uncached_tokens(scheduling(environment, tokens=0), environment.fleet.endpoints[0]) == 0

    def test_the_best_of_several_producers_counts(self, environment: Environment) -> None:
        run = scheduling(environment)
        run.matches = {"a": PrefixMatch(6, 16, [1, 0], [16, 0]), "b": PrefixMatch(6, 16, [2, 0], [32, 0])}
        assert [uncached_tokens(run, endpoint) for endpoint in run.endpoints] == [68, 100]

    def test_a_named_producer_counts_alone(self, environment: Environment) -> None:
        run = scheduling(environment)
        run.matches = {"a": PrefixMatch(6, 16, [1, 0], [16, 0]), "b": PrefixMatch(6, 16, [2, 0], [32, 0])}
        assert uncached_tokens(run, run.endpoints[0], "a") == 84

    def test_the_exact_prediction_wins_where_there_is_one(self, environment: Environment) -> None:
        run = scheduling(environment)
        run.hits = [TierHit(gpu=16, cpu=32), None]
        run.matches = {"a": PrefixMatch(6, 16, [6, 6], [96, 96])}
        assert [uncached_tokens(run, endpoint) for endpoint in run.endpoints] == [52, 4]

    def test_more_cached_than_prompted_is_nothing_to_compute(self, environment: Environment) -> None:
        run = scheduling(environment)
        run.matches = {"estimate": PrefixMatch(8, 16, [8, 8], [128, 128])}
        assert uncached_tokens(run, run.endpoints[0]) == 0


class TestPlugin:
    def test_it_is_known_by_llm_ds_name_with_llm_ds_defaults(self) -> None:
        kind = plugin_types()["inflight-load-producer"]
        assert kind.cls is InFlightLoadProducer
        assert kind.parameters() == InFlightLoadParameters(
            add_estimated_output_tokens=False,
            output_ratio=1.5,
            max_estimated_output_tokens=None,
            prefix_match_info_producer_name="",
            sync_cross_replica_state=True,
        )

    @pytest.mark.parametrize(
        ("parameters", "client_limit", "expected"),
        [
            ({}, None, 0),
            ({"add_estimated_output_tokens": True}, None, 150),
            ({"add_estimated_output_tokens": True, "output_ratio": 0.25}, None, 25),
            ({"add_estimated_output_tokens": True}, 40, 40),
            ({"add_estimated_output_tokens": True, "max_estimated_output_tokens": 30}, 40, 30),
        ],
    )
    def test_output_is_estimated_only_when_asked_for_and_stays_until_the_end(
        self, environment: Environment, parameters: dict[str, object], client_limit: int | None, expected: int
    ) -> None:
        InFlightLoadProducer("load", InFlightLoadParameters(**parameters), environment)  # type: ignore[arg-type]
        endpoint = environment.fleet.endpoints[0]
        run = scheduling(environment, max_output_tokens=client_limit)
        ticket = InFlight.of(environment).picked(run, endpoint)
        assert endpoint.inflight_tokens == 100 + expected
        ticket.first_byte()
        assert endpoint.inflight_tokens == expected
        ticket.close()
        assert endpoint.inflight_tokens == 0

    def test_its_account_is_the_one_everybody_shares(self, environment: Environment) -> None:
        before = InFlight.of(environment)
        InFlightLoadProducer("load", InFlightLoadParameters(), environment)
        assert InFlight.of(environment) is before


class TestMetrics:
    def series(self, environment: Environment) -> dict[tuple[str, str, str], float | None]:
        value = environment.telemetry.registry.get_sample_value
        return {
            (name, flow, priority): value(
                "llm_d_epp_inflight_requests",
                {
                    "endpoint_name": name,
                    "namespace": "default",
                    "producer_name": "inflight-load-producer",
                    "fairness_id": flow,
                    "priority": priority,
                },
            )
            for name, flow, priority in [
                ("pod-1", "default-flow", "0"),
                ("pod-1", "team", "5"),
                ("pod-2", "default-flow", "0"),
            ]
        }

    def test_each_endpoint_and_flow_has_a_series_and_idle_endpoints_a_zero(self, environment: Environment) -> None:
        run = scheduling(environment, fairness_id="team", priority=5)
        ticket = InFlight.of(environment).picked(run, environment.fleet.endpoints[0])
        assert list(self.series(environment).values()) == [0, 1, 0]
        ticket.close()
        assert list(self.series(environment).values()) == [0, None, 0]

    def test_the_series_of_an_endpoint_vanish_with_it_even_with_requests_in_flight(
        self, environment: Environment
    ) -> None:
        run = scheduling(environment, fairness_id="team", priority=5)
        ticket = InFlight.of(environment).picked(run, environment.fleet.endpoints[0])
        environment.fleet.apply(specs(2))
        assert list(self.series(environment).values()) == [None, None, 0]
        ticket.close()
