"""`dataLayer`, `requestHandler`, `flowControl`: what tierpick does itself, so there is little to build and much to
check. A reference must still name something of the right kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from epp.config.builtin import (
    BUILT_IN,
    CoreMetricsExtractor,
    CoreMetricsParameters,
    Detector,
    Extractor,
    MetricsDataSource,
    MetricsSourceParameters,
    ModelsDataSource,
    ModelsSourceParameters,
    Parser,
    Source,
)
from epp.config.document import DataLayerSection, Document, PluginRef, SourceEntry
from epp.config.errors import Findings
from epp.config.plan import Plan, Planned
from epp.config.roles import Role, is_discovery


@dataclass(slots=True, frozen=True)
class DataLayer:
    """How engines' metrics and lists of models are read."""

    scrape: bool = True
    """False where `injectDefaults: false` and no metrics source is listed."""
    metrics: MetricsSourceParameters = field(default_factory=MetricsSourceParameters)
    core: CoreMetricsParameters = field(default_factory=CoreMetricsParameters)
    models: ModelsSourceParameters = field(default_factory=ModelsSourceParameters)
    """How engines are asked for their models."""


def plan_data_layer(document: Document, plan: Plan, findings: Findings) -> DataLayer:
    section = document.data_layer or DataLayerSection()
    listed = [_check_source(s, f"dataLayer.sources[{i}]", plan, findings) for i, s in enumerate(section.sources)]
    _check_unavailable(section, findings)
    return DataLayer(
        scrape=section.inject_defaults or any(s is not None and s.kind.cls is MetricsDataSource for s in listed),
        metrics=_only(MetricsDataSource, MetricsSourceParameters(), plan, findings),
        core=_only(CoreMetricsExtractor, CoreMetricsParameters(), plan, findings),
        models=_only(ModelsDataSource, ModelsSourceParameters(), plan, findings),
    )


def plan_discovery(document: Document, plan: Plan, findings: Findings) -> Planned | None:
    reference = document.data_layer.discovery if document.data_layer else None
    if reference is None:
        for idle in plan:
            if is_discovery(idle.kind.cls):
                findings.warn(idle.path, f'"{idle.name}" does nothing: dataLayer.discovery does not name it')
        return None
    path = "dataLayer.discovery.pluginRef"
    planned = plan.resolve(reference.plugin_ref, path)
    if planned is not None and not is_discovery(planned.kind.cls):
        findings.error(path, f'"{planned.name}" is not a discovery plugin')
        return None
    return planned


def check_request_handler(document: Document, plan: Plan, findings: Findings) -> None:
    parsers = document.request_handler.parsers if document.request_handler else []
    for position, reference in enumerate(parsers):
        _check_kind(reference, Parser, f"requestHandler.parsers[{position}]", plan, findings)
    if document.parser is not None:
        _check_kind(document.parser, Parser, "parser", plan, findings)
        _check_twins("parser", [document.parser], "requestHandler.parsers", parsers, findings)


def check_flow_control(document: Document, plan: Plan, findings: Findings) -> None:
    """The section is typed and otherwise unused: its gate is refused."""
    detector = document.flow_control.saturation_detector if document.flow_control else None
    if document.flow_control is not None:
        findings.warn("flowControl", "has no effect: the flowControl feature gate is off")
    if detector is not None:
        _check_kind(detector, Detector, "flowControl.saturationDetector", plan, findings)
    if document.saturation_detector is not None:
        _check_kind(document.saturation_detector, Detector, "saturationDetector", plan, findings)
        twin = [detector] if detector else []
        path = "flowControl.saturationDetector"
        _check_twins("saturationDetector", [document.saturation_detector], path, twin, findings)


def _check_twins(
    old: str, old_value: Sequence[PluginRef], new: str, new_value: Sequence[PluginRef], findings: Findings
) -> None:
    if new_value and old_value != new_value:
        findings.error(old, f"deprecated, and it contradicts {new}; remove it")
    else:
        findings.warn(old, f"deprecated; use {new}")


def _check_kind(reference: PluginRef, kind: type[Any], path: str, plan: Plan, findings: Findings) -> None:
    """A parser or detector need not be listed among the plugins: its type name will do."""
    path, name = f"{path}.pluginRef", reference.plugin_ref
    planned = plan.get(name)
    found = planned.kind if planned else BUILT_IN.get(name)
    if found is None:
        plan.resolve(name, path)
    elif not issubclass(found.cls, kind):
        findings.error(path, f'"{name}" is not a {kind.__name__.lower()}')


def _check_source(entry: SourceEntry, path: str, plan: Plan, findings: Findings) -> Planned | None:
    source = plan.resolve(entry.plugin_ref, f"{path}.pluginRef")
    if source is not None and not issubclass(source.kind.cls, Source):
        findings.error(f"{path}.pluginRef", f'"{source.name}" is not a data source')
    for position, reference in enumerate(entry.extractors):
        where = f"{path}.extractors[{position}].pluginRef"
        extractor = plan.resolve(reference.plugin_ref, where)
        if extractor and not (extractor.has_role(Role.PRODUCER) or issubclass(extractor.kind.cls, Extractor)):
            findings.error(where, f'"{extractor.name}" is not an extractor')
    return source


def _check_unavailable(section: DataLayerSection, findings: Findings) -> None:
    if section.peer_discovery is not None:
        findings.error("dataLayer.peerDiscovery", "not available in tierpick yet")
    if section.cross_replica_syncer_plugin_ref:
        findings.error("dataLayer.crossReplicaSyncerPluginRef", "not available in tierpick yet")


def _only(cls: type[Any], default: Any, plan: Plan, findings: Findings) -> Any:
    planned = plan.of_class(cls)
    if len(planned) > 1:
        findings.error(planned[1].path, f"tierpick has one {planned[1].kind.type}; {planned[0].path} is one already")
    return planned[0].parameters if planned else default
