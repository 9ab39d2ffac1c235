"""The shape of an EndpointPickerConfig, field by field as llm-d has it.

Sections whose function is not available yet are still typed here, so that llm-d's files load and misspellings in them
are found; the loader says what has no effect.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from epp.config.units import Duration, Quantity

DEPRECATED_API = "inference.networking.x-k8s.io/v1alpha1"

Weight = Annotated[float, msgspec.Meta(ge=0, le=1_000_000)]


class Section(msgspec.Struct, forbid_unknown_fields=True, rename="camel", frozen=True):
    """Strict: an unknown field is an error."""


class PluginEntry(Section, frozen=True):
    type: str = ""
    name: str = ""
    """"" = the type."""
    parameters: dict[str, Any] | None = None


class PluginRef(Section, frozen=True):
    plugin_ref: str


class ProfilePlugin(Section, frozen=True):
    plugin_ref: str
    weight: Weight | None = None
    """Scorers only; None = 1."""


class ProfileEntry(Section, frozen=True):
    name: str = ""
    plugins: list[ProfilePlugin] = []


class SourceEntry(Section, frozen=True):
    plugin_ref: str
    extractors: list[PluginRef] = []


class DataLayerSection(Section, frozen=True):
    inject_defaults: bool = True
    sources: list[SourceEntry] = []
    discovery: PluginRef | None = None
    peer_discovery: PluginRef | None = None
    cross_replica_syncer_plugin_ref: str = ""
    cross_replica_sync_interval: Duration = "200ms"


class PriorityBandDefaults(Section, frozen=True):
    max_bytes: Quantity | None = None
    max_requests: Quantity | None = None
    fairness_policy_ref: str = ""
    ordering_policy_ref: str = ""


class PriorityBand(PriorityBandDefaults, kw_only=True, frozen=True):
    priority: int


class FlowControlSection(Section, frozen=True):
    max_bytes: Quantity | None = None
    max_requests: Quantity | None = None
    default_request_ttl: Duration | None = msgspec.field(name="defaultRequestTTL", default=None)
    no_endpoint_request_ttl: Duration | None = msgspec.field(name="noEndpointRequestTTL", default=None)
    default_priority_band: PriorityBandDefaults | None = None
    default_negative_priority_band: PriorityBandDefaults | None = None
    priority_bands: list[PriorityBand] = []
    usage_limit_policy_plugin_ref: str = ""
    saturation_detector: PluginRef | None = None
    enable_eviction: bool = False


class RequestHandlerSection(Section, frozen=True):
    parsers: list[PluginRef] = []


class Document(Section, frozen=True):
    api_version: Literal["llm-d.ai/v1alpha1", "llm-d.ai/v1", "inference.networking.x-k8s.io/v1alpha1"]
    kind: Literal["EndpointPickerConfig"]
    feature_gates: list[str] = []
    plugins: list[PluginEntry] = []
    scheduling_profiles: list[ProfileEntry] = []
    data_layer: DataLayerSection | None = None
    flow_control: FlowControlSection | None = None
    request_handler: RequestHandlerSection | None = None
    saturation_detector: PluginRef | None = None
    """Deprecated: now in flowControl."""
    parser: PluginRef | None = None
    """Deprecated: now requestHandler.parsers."""
