"""The fleet: equal to what discovery said last, whatever came before."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.fleet.endpoint import Endpoint, EndpointSpec
from epp.fleet.fleet import Fleet


def spec(n: int, **fields: object) -> EndpointSpec:
    return EndpointSpec(f"10.0.0.{n}:8000", **{"name": f"pod-{n}", **fields})  # type: ignore[arg-type]


def fleet_of(*specs: EndpointSpec) -> Fleet:
    fleet = Fleet()
    fleet.apply(specs)
    return fleet


class Diary:
    def __init__(self) -> None:
        self.entries: list[tuple[str, str]] = []
        self.live: list[Endpoint] = []

    def endpoint_added(self, endpoint: Endpoint) -> None:
        self.entries.append(("added", endpoint.address))
        self.live.append(endpoint)

    def endpoint_removed(self, endpoint: Endpoint) -> None:
        self.entries.append(("removed", endpoint.address))
        self.live.remove(endpoint)

    def endpoint_updated(self, endpoint: Endpoint) -> None:
        self.entries.append(("updated", endpoint.address))


def addresses(fleet: Fleet) -> list[str]:
    return [endpoint.address for endpoint in fleet.endpoints]


def test_a_fleet_is_synced_once_discovery_has_spoken_even_of_nobody() -> None:
    fleet = Fleet()
    assert not fleet.synced
    fleet.apply([])
    assert fleet.synced


def test_endpoints_take_dense_slots_and_a_freed_slot_is_reused_lowest_first() -> None:
    fleet = fleet_of(spec(1), spec(2), spec(3))
    assert [endpoint.slot for endpoint in fleet.endpoints] == [0, 1, 2]
    fleet.apply([spec(3)])
    fleet.apply([spec(3), spec(4), spec(5), spec(6)])
    assert {endpoint.address: endpoint.slot for endpoint in fleet.endpoints} == {
        "10.0.0.4:8000": 0,
        "10.0.0.5:8000": 1,
        "10.0.0.3:8000": 2,
        "10.0.0.6:8000": 3,
    }
    assert [endpoint.slot for endpoint in fleet.endpoints] == [0, 1, 2, 3]


def test_the_endpoints_object_stays_the_same_until_something_changes() -> None:
    fleet = fleet_of(spec(1), spec(2))
    before = fleet.endpoints
    fleet.apply([spec(2), spec(1)])
    assert fleet.endpoints is before
    fleet.apply([spec(1), spec(2, labels={"role": "decode"})])
    assert fleet.endpoints is not before


def test_an_update_keeps_the_endpoint_and_what_is_known_of_it() -> None:
    fleet = fleet_of(spec(1))
    endpoint = fleet.endpoints[0]
    endpoint.inflight_requests = 7
    fleet.apply([spec(1, labels={"a": "b"})])
    assert fleet.endpoints[0] is endpoint
    assert endpoint.spec.labels == {"a": "b"}
    assert endpoint.inflight_requests == 7


@pytest.mark.parametrize("change", [{"name": "another"}, {"uid": "another"}, {"namespace": "another"}])
def test_a_new_pod_behind_an_old_address_is_a_new_endpoint(change: dict[str, str]) -> None:
    fleet, diary = fleet_of(spec(1, uid="u1")), Diary()
    fleet.subscribe(diary)
    old = fleet.endpoints[0]
    old.inflight_requests = 3
    fleet.apply([spec(1, **{"uid": "u1", **change})])
    new = fleet.endpoints[0]
    assert new is not old
    assert (new.slot, new.inflight_requests) == (old.slot, 0)
    assert diary.entries[1:] == [("removed", old.address), ("added", old.address)]


def test_a_listener_hears_of_what_is_there_then_of_each_change_removals_first() -> None:
    fleet, diary = fleet_of(spec(1), spec(2)), Diary()
    fleet.subscribe(diary)
    assert diary.entries == [("added", "10.0.0.1:8000"), ("added", "10.0.0.2:8000")]
    fleet.apply([spec(2, rank=1), spec(3)])
    assert diary.entries[2:] == [
        ("removed", "10.0.0.1:8000"),
        ("updated", "10.0.0.2:8000"),
        ("added", "10.0.0.3:8000"),
    ]


def test_a_failing_listener_harms_nobody_else(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Diary):
        def endpoint_added(self, endpoint: Endpoint) -> None:
            raise RuntimeError("out of order")

    fleet, diary = Fleet(), Diary()
    fleet.subscribe(Broken())
    fleet.subscribe(diary)
    with caplog.at_level(logging.ERROR):
        fleet.apply([spec(1), spec(2)])
    assert len(diary.entries) == 2
    assert "a fleet listener failed" in caplog.text


@given(st.lists(st.dictionaries(st.integers(0, 19), st.sampled_from(["u1", "u2"])), max_size=30))
def test_after_any_history_fleet_and_listeners_equal_the_last_word(history: list[dict[int, str]]) -> None:
    fleet, diary = Fleet(), Diary()
    fleet.subscribe(diary)
    for state in history:
        fleet.apply([spec(n, uid=uid) for n, uid in state.items()])
        assert sorted(addresses(fleet)) == sorted(spec(n).address for n in state)
        assert {e.address: e.spec.uid for e in fleet.endpoints} == {spec(n).address: uid for n, uid in state.items()}
        assert set(diary.live) == set(fleet.endpoints)
        assert len({e.slot for e in fleet.endpoints}) == len(state)
        assert all(fleet.get(e.address) is e for e in fleet.endpoints)


class TestSubset:
    fleet = fleet_of(
        EndpointSpec("10.0.0.1:8000", "a"),
        EndpointSpec("10.0.0.1:8001", "b"),
        EndpointSpec("10.0.0.2:8000", "c"),
        EndpointSpec("[fd00::1]:8000", "d"),
    )

    def allowed(self, *hint: str) -> set[str]:
        return {endpoint.address for endpoint in self.fleet.subset(hint)}

    def test_without_a_hint_everybody_is_allowed_at_no_cost(self) -> None:
        assert self.fleet.subset(None) is self.fleet.endpoints

    def test_a_hint_of_everybody_is_the_same_object_too(self) -> None:
        assert self.fleet.subset(addresses(self.fleet)[::-1]) is self.fleet.endpoints

    def test_ip_and_port_match_exactly(self) -> None:
        assert self.allowed("10.0.0.1:8001") == {"10.0.0.1:8001"}

    def test_a_bare_ip_matches_any_port(self) -> None:
        assert self.allowed("10.0.0.1") == {"10.0.0.1:8000", "10.0.0.1:8001"}

    @pytest.mark.parametrize("hint", ["[fd00::1]:8000", "[fd00::1]", "fd00::1"])
    def test_ipv6_with_and_without_port(self, hint: str) -> None:
        assert self.allowed(hint) == {"[fd00::1]:8000"}

    @pytest.mark.parametrize("hint", [(), ("10.0.0.9:8000",), ("10.0.0.1:9",), ("[fd00::1]:9",), ("",), ("pod-a",)])
    def test_a_hint_that_matches_nobody_never_widens(self, hint: tuple[str, ...]) -> None:
        assert self.allowed(*hint) == set()

    def test_an_endpoint_named_twice_is_there_once(self) -> None:
        assert len(self.fleet.subset(["10.0.0.2:8000", "10.0.0.2", "10.0.0.2:8000"])) == 1


def test_a_subset_hint_of_an_empty_fleet_is_empty() -> None:
    assert list(fleet_of().subset(["10.0.0.1:8000"])) == []


class TestReachability:
    def test_an_endpoint_that_refuses_connections_is_left_out_until_it_answers(self) -> None:
        fleet = Fleet()
        fleet.apply([EndpointSpec("10.0.0.1:8000"), EndpointSpec("10.0.0.2:8000")])
        first, second = fleet.endpoints
        fleet.reached(first, False)
        assert fleet.subset(None) == (second,)
        assert fleet.subset(["10.0.0.1:8000", "10.0.0.2:8000"]) == (second,)
        assert fleet.endpoints == (first, second)
        fleet.reached(first, True)
        assert fleet.subset(None) == (first, second)

    def test_where_there_is_no_other_it_is_tried(self) -> None:
        fleet = Fleet()
        fleet.apply([EndpointSpec("10.0.0.1:8000"), EndpointSpec("10.0.0.2:8000")])
        for endpoint in fleet.endpoints:
            fleet.reached(endpoint, False)
        assert fleet.subset(None) == fleet.endpoints
        assert fleet.subset(["10.0.0.1"]) == (fleet.endpoints[0],)

    def test_it_survives_changes_of_the_fleet(self) -> None:
        fleet = Fleet()
        fleet.apply([EndpointSpec("10.0.0.1:8000"), EndpointSpec("10.0.0.2:8000")])
        fleet.reached(fleet.endpoints[0], False)
        fleet.apply([EndpointSpec(f"10.0.0.{i}:8000") for i in (1, 2, 3)])
        assert [e.address for e in fleet.subset(None)] == ["10.0.0.2:8000", "10.0.0.3:8000"]


def test_an_endpoint_that_left_says_so_to_those_who_still_hold_it() -> None:
    fleet = Fleet()
    fleet.apply([EndpointSpec("10.0.0.1:8000"), EndpointSpec("10.0.0.2:8000")])
    first, second = fleet.endpoints
    fleet.apply([second.spec])
    assert (first.gone, second.gone) == (True, False)
