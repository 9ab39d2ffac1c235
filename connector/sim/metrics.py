"""`/metrics` under vLLM's names and labels, read from the engine when scraped."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from connector.sim.engine import Engine
from connector.sim.stats import SECONDS_BUCKETS

LABELS = ("engine", "model_name")


def engine_registry(engine: Engine, model: str, bytes_per_token: int) -> CollectorRegistry:
    """A registry that shows one engine and nothing of the process around it."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(EngineCollector(engine, model, bytes_per_token))
    return registry


class EngineCollector(Collector):
    def __init__(self, engine: Engine, model: str, bytes_per_token: int) -> None:
        self._engine = engine
        self._labels = ("0", model)
        self._bytes_per_token = bytes_per_token

    def collect(self) -> Iterator[Metric]:
        engine, stats = self._engine, self._engine.stats
        yield self._gauge("num_requests_running", "Requests in the running batch", engine.running_count)
        yield self._gauge("num_requests_waiting", "Requests waiting to be scheduled", engine.waiting_count)
        yield self._gauge("kv_cache_usage_perc", "Share of HBM blocks held by requests, 0 to 1", engine.usage)
        yield self._counter("prefix_cache_queries", "Tokens looked up in HBM", stats.prefix_queries)
        yield self._counter("prefix_cache_hits", "Tokens found in HBM", stats.prefix_hits)
        yield self._counter("external_prefix_cache_queries", "Tokens looked up below HBM", stats.external_queries)
        yield self._counter("external_prefix_cache_hits", "Tokens loaded from below HBM", stats.external_hits)
        yield self._counter("prompt_tokens", "Prompt tokens processed", stats.prompt_tokens)
        yield self._counter("prompt_tokens_cached", "Prompt tokens not computed", stats.prompt_tokens_cached)
        yield self._counter("generation_tokens", "Tokens generated", stats.generation_tokens)
        yield self._counter("num_preemptions", "Requests that had to start over", stats.preemptions)
        yield self._ended()
        yield self._time_to_first_token()
        yield self._cache_config()
        if engine.config.offload.cpu_chunks:
            yield self._offload_config()

    def _gauge(self, name: str, help_text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", help_text, labels=LABELS)
        family.add_metric(self._labels, value)
        return family

    def _counter(self, name: str, help_text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", help_text, labels=LABELS)
        family.add_metric(self._labels, value)
        return family

    def _ended(self) -> Metric:
        family = CounterMetricFamily("vllm:request_success", "Requests ended", labels=(*LABELS, "finished_reason"))
        for reason, count in self._engine.stats.ended.items():
            family.add_metric((*self._labels, reason), count)
        return family

    def _time_to_first_token(self) -> Metric:
        histogram = self._engine.stats.ttft
        bounds = [str(bound) for bound in SECONDS_BUCKETS] + ["+Inf"]
        total, buckets = 0, []
        for bound, count in zip(bounds, histogram.counts, strict=True):
            total += count
            buckets.append((bound, total))
        family = HistogramMetricFamily("vllm:time_to_first_token_seconds", "Time to first token", labels=LABELS)
        family.add_metric(self._labels, buckets, histogram.total)
        return family

    def _cache_config(self) -> Metric:
        config = self._engine.config
        return self._info(
            "cache_config_info",
            "Information of the LLMEngine CacheConfig",
            {
                "block_size": str(config.block_size),
                "num_gpu_blocks": str(config.hbm_blocks),
                "kv_cache_size_tokens": str(config.hbm_blocks * config.block_size),
                "enable_prefix_caching": "True",
                "prefix_caching_hash_algo": "sha256",
            },
        )

    def _offload_config(self) -> Metric:
        engine = self._engine.config
        offload = engine.offload
        tokens = offload.cpu_chunks * offload.blocks_per_chunk * engine.block_size
        labels = {
            "cpu_num_chunks": str(offload.cpu_chunks),
            "cpu_blocks_per_chunk": str(offload.blocks_per_chunk),
            "cpu_kv_cache_size_tokens": str(tokens),
            "cpu_kv_cache_size_bytes": str(tokens * self._bytes_per_token),
        }
        if offload.storage_chunks:
            labels["tier"] = "0:primary"
        return self._info("kv_offload_config_info", "Static configuration of the KV offload managers", labels)

    def _info(self, name: str, help_text: str, labels: dict[str, str]) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", help_text, labels=(*LABELS, *labels))
        family.add_metric((*self._labels, *labels.values()), 1)
        return family
