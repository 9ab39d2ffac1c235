"""EndpointPickerConfig text in, working plugins out.

Everything that can be judged without creating a plugin is judged first, and all of it is reported at once. Nothing
depends on the order of the `plugins` list except the order of filters.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from epp.config import strict
from epp.config.data_layer import (
    DataLayer,
    check_flow_control,
    check_request_handler,
    plan_data_layer,
    plan_discovery,
)
from epp.config.document import DEPRECATED_API, Document, PluginEntry, ProfileEntry, ProfilePlugin
from epp.config.environment import Environment
from epp.config.errors import Findings
from epp.config.gates import feature_gates
from epp.config.instances import Assembly
from epp.config.plan import Plan
from epp.config.profiles import PlannedProfile, plan_handler, plan_profiles
from epp.config.text import parse
from epp.scheduling.plugin import Producer, ProfileHandler
from epp.scheduling.profile import Profile

logger = logging.getLogger(__name__)

DEFAULT_SCORERS = {"queue-scorer": 2.0, "kv-cache-utilization-scorer": 2.0, "prefix-cache-scorer": 3.0}
"""What an empty configuration means."""


@dataclass(slots=True, frozen=True)
class Configuration:
    """A complete, consistent set of plugins."""

    plugins: Mapping[str, Any]
    """All instances by name."""
    producers: Sequence[Producer]
    """Each after those it needs."""
    profiles: Sequence[Profile]
    handler: ProfileHandler
    discovery: Any | None
    data_layer: DataLayer
    warnings: Sequence[str]
    """What is probably not meant."""
    notes: Sequence[str]
    """What was filled in, and what is done elsewhere."""

    def log(self) -> None:
        for warning in self.warnings:
            logger.warning("configuration: %s", warning)
        for note in self.notes:
            logger.info("configuration: %s", note)


def load(text: str, environment: Environment) -> Configuration:
    """Raises `ConfigError` with every problem found. Sets `environment.lookup`."""
    findings = Findings()
    document = _document(text, findings)
    feature_gates(document.feature_gates, findings)
    plan = Plan(findings)
    plan.add_entries(document.plugins)
    profiles = plan_profiles(document.scheduling_profiles, plan, findings)
    handler = plan_handler(profiles, plan, findings)
    discovery = plan_discovery(document, plan, findings)
    data_layer = plan_data_layer(document, plan, findings)
    check_request_handler(document, plan, findings)
    check_flow_control(document, plan, findings)
    findings.raise_errors()
    assert handler is not None

    assembly = Assembly(plan, environment, findings)
    environment.lookup = assembly.instances.get
    assembly.create_all()
    return Configuration(
        plugins=assembly.instances,
        producers=assembly.producers(),
        profiles=[_profile(planned, assembly.instances) for planned in profiles],
        handler=assembly.instances[handler.name],
        discovery=assembly.instances[discovery.name] if discovery else None,
        data_layer=data_layer,
        warnings=tuple(findings.warnings),
        notes=tuple(findings.notes),
    )


def _document(text: str, findings: Findings) -> Document:
    value = parse(text)
    if value is None:
        return _default()
    document = strict.convert(value, Document, "", findings)
    findings.raise_errors()
    assert document is not None
    if document.api_version == DEPRECATED_API:
        findings.warn("apiVersion", f"{DEPRECATED_API} is deprecated; use llm-d.ai/v1alpha1")
    return document


def _default() -> Document:
    references = [ProfilePlugin(plugin_ref=name, weight=weight) for name, weight in DEFAULT_SCORERS.items()]
    return Document(
        api_version="llm-d.ai/v1alpha1",
        kind="EndpointPickerConfig",
        plugins=[PluginEntry(type=name) for name in DEFAULT_SCORERS],
        scheduling_profiles=[ProfileEntry(name="default", plugins=references)],
    )


def _profile(planned: PlannedProfile, instances: Mapping[str, Any]) -> Profile:
    return Profile(
        name=planned.name,
        filters=[instances[p.name] for p in planned.filters],
        scorers=[(instances[p.name], weight) for p, weight in planned.scorers],
        picker=instances[planned.pickers[0].name],
    )
