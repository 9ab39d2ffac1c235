"""What the engines counted themselves: prompt tokens and where they were found, from vLLM's `/metrics`. Pure."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

_SAMPLE = re.compile(r"^vllm:(\w+)(?:\{.*\})? ([0-9.eE+-]+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Found:
    """Prompt tokens that did not have to be computed, by where they were."""

    hbm: int = 0
    lower: int = 0
    """In tiers below HBM: CPU RAM in the demo's fleet."""

    @property
    def total(self) -> int:
        return self.hbm + self.lower

    def __add__(self, other: Found) -> Found:
        return Found(self.hbm + other.hbm, self.lower + other.lower)


@dataclass(frozen=True, slots=True)
class EngineCounters:
    """Totals since the engine started; tokens, except `requests`. What a request finds when it has to start over counts
    again, so found tokens can exceed what its answer reports."""

    requests: int = 0
    prompt_tokens: int = 0
    hbm_tokens: int = 0
    lower_tokens: int = 0

    @property
    def found(self) -> Found:
        return Found(self.hbm_tokens, self.lower_tokens)

    @property
    def recomputed_tokens(self) -> int:
        return self.prompt_tokens - self.found.total

    def __add__(self, other: EngineCounters) -> EngineCounters:
        return self._combine(other, 1)

    def __sub__(self, other: EngineCounters) -> EngineCounters:
        return self._combine(other, -1)

    def _combine(self, other: EngineCounters, sign: int) -> EngineCounters:
        return EngineCounters(
            self.requests + sign * other.requests,
            self.prompt_tokens + sign * other.prompt_tokens,
            self.hbm_tokens + sign * other.hbm_tokens,
            self.lower_tokens + sign * other.lower_tokens,
        )


def parse_counters(exposition: str) -> EngineCounters:
    """From a Prometheus text; a family that is absent counts as 0, one with several label sets is summed."""
    totals: Counter[str] = Counter()
    for name, value in _SAMPLE.findall(exposition):
        totals[name] += int(float(value))
    return EngineCounters(
        requests=totals["request_success_total"],
        prompt_tokens=totals["prompt_tokens_total"],
        hbm_tokens=totals["prefix_cache_hits_total"],
        lower_tokens=totals["external_prefix_cache_hits_total"],
    )
