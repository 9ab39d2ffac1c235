"""What the engine counts; `metrics` shows it under vLLM's names."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

SECONDS_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
"""vLLM's buckets of time_to_first_token_seconds."""


@dataclass(slots=True)
class Histogram:
    """Counts per bucket, the last one unbounded."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(SECONDS_BUCKETS) + 1))
    total: float = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(SECONDS_BUCKETS, seconds)] += 1
        self.total += seconds


@dataclass(slots=True)
class EngineStats:
    """Monotonic counters; queries and hits are in tokens, external ones are about the tiers below HBM."""

    prefix_queries: int = 0
    prefix_hits: int = 0
    external_queries: int = 0
    external_hits: int = 0
    prompt_tokens: int = 0
    prompt_tokens_cached: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    ended: Counter[str] = field(default_factory=lambda: Counter({"length": 0, "abort": 0}))
    ttft: Histogram = field(default_factory=Histogram)

    def count_lookup(self, tokens: int, local: int, external: int, *, offloading: bool) -> None:
        self.prefix_queries += tokens
        self.prefix_hits += local
        if offloading:
            self.external_queries += tokens - local
            self.external_hits += external

    def count_first_token(self, prompt_tokens: int, cached_tokens: int, seconds: float) -> None:
        self.prompt_tokens += prompt_tokens
        self.prompt_tokens_cached += cached_tokens
        self.ttft.observe(seconds)
