"""Filters by endpoint label: the roles of disaggregated serving, and Kubernetes label selectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from epp.config.environment import Environment
from epp.config.registry import Parameters, plugin
from epp.fleet.endpoint import Endpoint
from epp.scheduling.plugin import Scheduling

ROLE = "llm-d.ai/role"


class _ByLabel:
    """Keeps endpoints whose label has one of some values."""

    name: str
    type: str
    label = ROLE
    values: frozenset[str] = frozenset()
    unlabeled = False
    """Whether endpoints without the label are kept."""

    def __init__(self, name: str, parameters: Parameters, environment: Environment) -> None: ...

    def filter(self, scheduling: Scheduling, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        return [endpoint for endpoint in endpoints if self._keeps(endpoint.spec.labels.get(self.label))]

    def _keeps(self, value: str | None) -> bool:
        return self.unlabeled if value is None else value in self.values


@plugin("decode-filter")
class DecodeFilter(_ByLabel):
    values = frozenset({"decode", "prefill-decode", "both", "encode-prefill-decode"})
    unlabeled = True


@plugin("prefill-filter")
class PrefillFilter(_ByLabel):
    values = frozenset({"prefill", "encode-prefill", "prefill-decode", "both", "encode-prefill-decode"})


@plugin("encode-filter")
class EncodeFilter(_ByLabel):
    values = frozenset({"encode", "encode-prefill", "encode-prefill-decode"})


class ByLabelParameters(Parameters, kw_only=True, frozen=True):
    label: str
    valid_values: list[str] = msgspec.field(default_factory=list)
    allows_no_label: bool = False


@plugin("by-label", ByLabelParameters)
class ByLabel(_ByLabel):
    """Deprecated in llm-d, where label-selector-filter replaces it."""

    def __init__(self, name: str, parameters: ByLabelParameters, environment: Environment) -> None:
        self.label = parameters.label
        self.values = frozenset(parameters.valid_values)
        self.unlabeled = parameters.allows_no_label


class MatchExpression(Parameters, kw_only=True, frozen=True):
    key: str
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    values: list[str] = msgspec.field(default_factory=list)

    def __post_init__(self) -> None:
        if (self.operator in ("In", "NotIn")) != bool(self.values):
            raise ValueError(f"{self.key}: In and NotIn need values, Exists and DoesNotExist take none")

    def matches(self, labels: Mapping[str, str]) -> bool:
        present = self.key in labels
        if self.operator == "Exists":
            return present
        if self.operator == "DoesNotExist":
            return not present
        listed = present and labels[self.key] in self.values
        return listed if self.operator == "In" else not listed


class LabelSelector(Parameters, kw_only=True, frozen=True):
    match_labels: dict[str, str] = msgspec.field(default_factory=dict)
    match_expressions: list[MatchExpression] = msgspec.field(default_factory=list)


@plugin("label-selector-filter", LabelSelector)
class LabelSelectorFilter:
    """Keeps endpoints that satisfy every requirement of a Kubernetes LabelSelector; an empty one keeps all."""

    name: str
    type: str

    def __init__(self, name: str, parameters: LabelSelector, environment: Environment) -> None:
        equal = [MatchExpression(key=k, operator="In", values=[v]) for k, v in parameters.match_labels.items()]
        self._requirements = (*equal, *parameters.match_expressions)

    def filter(self, scheduling: Scheduling, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        return [e for e in endpoints if all(r.matches(e.spec.labels) for r in self._requirements)]
