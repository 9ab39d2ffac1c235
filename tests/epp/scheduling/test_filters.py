from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from epp.config.registry import plugin_types
from epp.fleet.endpoint import Endpoint
from epp.scheduling.plugin import Scheduling

Build = Callable[..., Any]
FleetOf = Callable[..., list[Endpoint]]
SchedulingOf = Callable[..., Scheduling]

ROLES = ["decode", "prefill", "encode", "both", "prefill-decode", "encode-prefill", "encode-prefill-decode", None]


def labeled(endpoints: list[Endpoint], label: str, values: list[Any]) -> list[Endpoint]:
    for endpoint, value in zip(endpoints, values, strict=True):
        endpoint.spec = replace(endpoint.spec, labels={} if value is None else {label: value})
    return endpoints


@pytest.mark.parametrize(
    ("kind", "kept"),
    [
        ("decode-filter", {"decode", "both", "prefill-decode", "encode-prefill-decode", None}),
        ("prefill-filter", {"prefill", "both", "prefill-decode", "encode-prefill", "encode-prefill-decode"}),
        ("encode-filter", {"encode", "encode-prefill", "encode-prefill-decode"}),
    ],
)
def test_roles(build: Build, fleet_of: FleetOf, scheduling_of: SchedulingOf, kind: str, kept: set[str | None]) -> None:
    endpoints = labeled(fleet_of(len(ROLES)), "llm-d.ai/role", ROLES)
    remaining = build(kind).filter(scheduling_of(endpoints), endpoints)
    assert {ROLES[endpoint.slot] for endpoint in remaining} == kept


@pytest.mark.parametrize(("unlabeled", "kept"), [(False, [0, 1]), (True, [0, 1, 3])])
def test_by_label(
    build: Build, fleet_of: FleetOf, scheduling_of: SchedulingOf, unlabeled: bool, kept: list[int]
) -> None:
    endpoints = labeled(fleet_of(4), "zone", ["a", "b", "c", None])
    keep = build("by-label", label="zone", valid_values=["a", "b"], allows_no_label=unlabeled)
    assert [endpoint.slot for endpoint in keep.filter(scheduling_of(endpoints), endpoints)] == kept


@pytest.mark.parametrize(
    ("selector", "kept"),
    [
        ({}, [0, 1, 2]),
        ({"matchLabels": {"zone": "a"}}, [0]),
        ({"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a", "b"]}]}, [0, 1]),
        ({"matchExpressions": [{"key": "zone", "operator": "NotIn", "values": ["a"]}]}, [1, 2]),
        ({"matchExpressions": [{"key": "zone", "operator": "Exists"}]}, [0, 1]),
        ({"matchExpressions": [{"key": "zone", "operator": "DoesNotExist"}]}, [2]),
        ({"matchLabels": {"zone": "a"}, "matchExpressions": [{"key": "zone", "operator": "DoesNotExist"}]}, []),
    ],
)
def test_label_selectors(
    build: Build, fleet_of: FleetOf, scheduling_of: SchedulingOf, selector: dict[str, Any], kept: list[int]
) -> None:
    endpoints = labeled(fleet_of(3), "zone", ["a", "b", None])
    parameters = msgspec.convert(selector, plugin_types()["label-selector-filter"].parameters)
    keep = build("label-selector-filter", **msgspec.structs.asdict(parameters))
    assert [endpoint.slot for endpoint in keep.filter(scheduling_of(endpoints), endpoints)] == kept


@pytest.mark.parametrize("expression", [{"operator": "In"}, {"operator": "Exists", "values": ["a"]}])
def test_a_label_expression_needs_values_exactly_where_they_mean_something(expression: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError, match="In and NotIn need values"):
        msgspec.convert(
            {"matchExpressions": [{"key": "zone", **expression}]}, plugin_types()["label-selector-filter"].parameters
        )


class TestPrefixAffinity:
    """Peak throughput of 1 000 tokens a second, penalty of at most 2 s: 2 000 tokens more in flight are too many."""

    PARAMETERS = {"peak_prefill_throughput": 1000.0, "max_ttft_penalty_ms": 2000.0}  # noqa: RUF012

    def keep(
        self,
        build: Build,
        fleet_of: FleetOf,
        scheduling_of: SchedulingOf,
        blocks: list[float],
        in_flight: list[int],
        **parameters: Any,
    ) -> list[int]:
        endpoints = fleet_of(len(blocks), inflight_tokens=in_flight)
        scheduling = scheduling_of(endpoints, approx_prefix_cache_producer=blocks)
        affinity = build("prefix-cache-affinity-filter", **(self.PARAMETERS | parameters))
        return [endpoint.slot for endpoint in affinity.filter(scheduling, endpoints)]

    @pytest.mark.parametrize(
        ("blocks", "in_flight", "parameters", "kept"),
        [
            ([9, 2, 8], [0, 0, 0], {}, [0, 2]),
            ([7, 2, 7], [0, 0, 0], {}, [0, 1, 2]),
            ([9, 2, 8], [2000, 0, 9000], {}, [0, 2]),
            ([9, 2, 8], [2001, 0, 9000], {}, [0, 1, 2]),
            ([9, 2, 8], [9000, 500, 2400], {}, [0, 2]),
            ([9, 2, 8], [10**9, 0, 10**9], {"max_ttft_penalty_ms": 0.0}, [0, 2]),
            ([9, 9], [9000, 0], {}, [0, 1]),
            ([9, 2], [0, 0], {"affinity_threshold": 0.0}, [0, 1]),
            ([9, 2], [0, 0], {"exploration_probability": 1.0}, [0, 1]),
            ([0], [0], {}, [0]),
        ],
    )
    def test_sticky_endpoints_are_kept_unless_they_are_too_busy(
        self,
        build: Build,
        fleet_of: FleetOf,
        scheduling_of: SchedulingOf,
        blocks: list[float],
        in_flight: list[int],
        parameters: dict[str, Any],
        kept: list[int],
    ) -> None:
        assert self.keep(build, fleet_of, scheduling_of, blocks, in_flight, **parameters) == kept
