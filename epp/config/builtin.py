"""llm-d plugin types that are no plugins here: work that tierpick does itself, and work it cannot do yet.

A built-in is accepted with llm-d's parameters, so that llm-d's files load unmodified; some of its parameters are read
by the part that does the work (scraping), the others have no effect, and the loader says so. Everything else that
llm-d has is refused by name: a file that silently does less than it says is worse than one that does not load.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from epp.config.registry import Parameters, ParametersClass, PluginType
from epp.config.units import Duration, seconds

if TYPE_CHECKING:
    from epp.config.environment import Environment


class BuiltIn:
    """Stands for a part of tierpick that is always there."""

    name: str
    type: str
    takes: ParametersClass = Parameters
    note = ""
    """Who does the work."""
    without_effect: tuple[str, ...] = ()
    """Parameters that are accepted and then ignored."""

    def __init__(self, name: str, parameters: Parameters, environment: Environment) -> None:
        self.name = name
        self.parameters = parameters


class Source(BuiltIn):
    """May be a `dataLayer.sources[].pluginRef`."""


class Extractor(BuiltIn):
    """May be a `dataLayer.sources[].extractors[].pluginRef`."""


class Parser(BuiltIn):
    """May be a `requestHandler.parsers[].pluginRef`."""


class Detector(BuiltIn):
    """May be a `saturationDetector.pluginRef`."""


class MetricsSourceParameters(Parameters, frozen=True):
    """How engines are scraped."""

    scheme: Literal["http", "https"] = "http"
    path: str = "/metrics"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    """0 = the endpoint's own metrics address."""
    insecure_skip_verify: bool = True
    ca_cert_path: str = ""
    client_cert_path: str = ""
    client_key_path: str = ""
    interval: Duration | None = None
    """None = the flag --refresh-metrics-interval."""

    @property
    def interval_seconds(self) -> float | None:
        return None if self.interval is None else seconds(self.interval)


class ModelsSourceParameters(Parameters, frozen=True):
    """How engines are asked which models they serve."""

    scheme: Literal["http", "https"] = "http"
    path: str = "/v1/models"
    insecure_skip_verify: bool = True


class CustomMetric(Parameters, frozen=True):
    attribute_key: str
    metric_spec: str


class EngineConfig(Parameters, frozen=True):
    """Metric names of one kind of engine; "" = not exported."""

    name: str
    queued_requests_spec: str = ""
    running_requests_spec: str = ""
    kv_usage_spec: str = ""
    lora_spec: str = ""
    cache_info_spec: str = ""
    cache_block_size_label_name: str = ""
    cache_num_blocks_label_name: str = ""
    cache_block_size_spec: str = ""
    cache_num_blocks_spec: str = ""
    custom_metrics: list[CustomMetric] = msgspec.field(default_factory=list)


class CoreMetricsParameters(Parameters, frozen=True):
    engine_label_key: str = "llm-d.ai/engine-type"
    default_engine: str = "vllm"
    engine_configs: list[EngineConfig] = msgspec.field(default_factory=list)


class UtilizationParameters(Parameters, frozen=True):
    queue_depth_threshold: int = 5
    kv_cache_util_threshold: float = 0.8
    metrics_staleness_threshold: Duration = "200ms"
    headroom: float = 0.0


class EndpointNotificationSource(Source):
    type = "endpoint-notification-source"
    note = "producers follow the fleet by themselves"


class MetricsDataSource(Source):
    type = "metrics-data-source"
    takes = MetricsSourceParameters
    note = "engines are scraped by the fleet; port, path, scheme and interval are honoured"
    without_effect = ("caCertPath", "clientCertPath", "clientKeyPath")


class CoreMetricsExtractor(Extractor):
    type = "core-metrics-extractor"
    takes = CoreMetricsParameters
    note = "metrics are read by the fleet"
    without_effect = ("engineLabelKey", "defaultEngine", "engineConfigs")


class ModelsDataSource(Source):
    type = "models-data-source"
    takes = ModelsSourceParameters
    note = "engines are asked for their models where KV events are read"


class ModelsDataExtractor(Extractor):
    type = "models-data-extractor"
    note = "lists of models are read by the fleet"


class OpenAIParser(Parser):
    type = "openai-parser"
    note = "bodies are parsed by path; unknown paths are routed unscored"


class PassthroughParser(Parser):
    type = "passthrough-parser"
    note = "bodies of unknown paths are routed unscored"


class UtilizationDetector(Detector):
    type = "utilization-detector"
    takes = UtilizationParameters
    note = "no request is refused or held back for saturation yet"
    without_effect = ("queueDepthThreshold", "kvCacheUtilThreshold", "metricsStalenessThreshold", "headroom")


BUILT_IN: Mapping[str, PluginType] = MappingProxyType(
    {
        cls.type: PluginType(cls.type, cls, cls.takes)
        for cls in (
            EndpointNotificationSource,
            MetricsDataSource,
            CoreMetricsExtractor,
            ModelsDataSource,
            ModelsDataExtractor,
            OpenAIParser,
            PassthroughParser,
            UtilizationDetector,
        )
    }
)

RENAMED: Mapping[str, str] = MappingProxyType(
    {"tokenizer": "token-producer", "by-label-selector": "label-selector-filter"}
)
"""Deprecated type names whose parameters are those of the new type."""

# fmt: off
KNOWN_IN_LLM_D = frozenset((
    "active-request-scorer", "agent-identity", "always-disagg-multimodal-decider", "always-disagg-pd-decider",
    "anthropic-parser", "approx-prefix-cache-producer", "burst-prefix-cache-producer", "by-label",
    "concurrency-detector", "context-length-aware", "core-metrics-extractor", "data-parallel-profile-handler",
    "dcgm-data-source", "dcgm-extractor", "decode-filter", "destination-endpoint-served-verifier",
    "disagg-headers-handler", "disagg-profile-handler", "disaggregatedset-rollout-screener", "edf-ordering-policy",
    "encode-filter", "endpoint-attribute-filter", "endpoint-attribute-scorer", "endpoint-notification-source",
    "fcfs-ordering-policy", "file-discovery", "global-strict-fairness-policy", "header-based-testing-filter",
    "header-label-affinity-scorer", "header-profile-handler", "inflight-load-producer", "k8s-notification-source",
    "kv-cache-utilization-scorer", "label-selector-filter", "latency-scorer", "latency-slo-admitter",
    "load-aware-scorer", "loose-affinity-filter", "lora-affinity-scorer", "max-score-picker", "metrics-data-source",
    "mm-embeddings-cache-producer", "mm-embeddings-cache-scorer", "models-data-extractor", "models-data-source",
    "multicluster-file-discovery", "multicluster-kv-cache-utilization-scorer", "multicluster-metrics-extractor",
    "multicluster-prefix-cache-scorer", "multicluster-queue-scorer", "no-hit-lru-scorer", "openai-parser",
    "p2p-source-producer", "passthrough-parser", "pd-profile-handler", "precise-prefix-cache-producer",
    "precise-prefix-cache-scorer", "predicted-latency-producer", "prefill-filter", "prefill-header-handler",
    "prefix-based-pd-decider", "prefix-cache-affinity-filter", "prefix-cache-scorer", "priority-holdback-policy",
    "priority-then-time-eviction-order-policy", "probabilistic-admitter", "program-aware-fairness", "queue-scorer",
    "random-picker", "request-attribute-reporter", "round-robin-fairness-policy", "running-requests-size-scorer",
    "session-affinity-filter", "session-affinity-scorer", "session-id-producer", "sglanghttp-parser",
    "sheddable-eviction-filter", "single-profile-handler", "slo-deadline-ordering-policy", "slo-headroom-tier-filter",
    "soft-reflective-ceiling-policy", "static-usage-limit-policy", "strict-affinity-filter", "token-load-scorer",
    "token-producer", "topology-affinity-filter", "topology-affinity-scorer", "topology-extractor",
    "utilization-detector", "utilization-filter", "vertexai-parser", "vllmgrpc-parser", "vllmhttp-parser",
    "weighted-random-picker",
))
# fmt: on
