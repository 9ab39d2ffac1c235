"""How large the demo's fleet is, derived from its traffic. Pure.

The fleet's HBM is smaller than what the prompts come to, unless many engines share little traffic, and its CPU RAM is
larger, so both tiers matter. The fleet's total compute is fixed and divided among the engines, so more engines means
slower ones, and two cores can simulate any number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

BLOCK_SIZE = 16
BLOCKS_PER_CHUNK = 4
HBM_SHARE = 0.4
"""Of the working set, over the fleet."""
CPU_TO_HBM = 5
"""The CPU tier is so many times as large as HBM, and so holds the working set twice."""
RUNNING_PROMPTS = 3
"""Prompts of the largest size that an engine's HBM holds at least: fewer would only measure queueing."""
FLEET_PREFILL_TOKENS_PER_S = 24_000
CPU_TIER_SPEEDUP = 10
"""Loading a token's KV from CPU RAM against computing it."""
BYTES_PER_TOKEN = 131_072
"""KV of one token: an 8-billion-parameter model with grouped-query attention, 16 bit."""
DECODE_MS = 8.0


@dataclass(frozen=True, slots=True)
class Sizes:
    engines: int
    working_set_tokens: int
    hbm_blocks: int
    """Of one engine."""
    cpu_chunks: int
    """Of one engine."""

    @property
    def fleet_hbm_tokens(self) -> int:
        return self.engines * self.hbm_blocks * BLOCK_SIZE

    @property
    def fleet_cpu_tokens(self) -> int:
        return self.engines * self.cpu_chunks * BLOCKS_PER_CHUNK * BLOCK_SIZE

    @property
    def prefill_tokens_per_s(self) -> float:
        return FLEET_PREFILL_TOKENS_PER_S / self.engines

    @property
    def cpu_gbps(self) -> float:
        return self.prefill_tokens_per_s * CPU_TIER_SPEEDUP * BYTES_PER_TOKEN / 1e9


def sizes(engines: int, working_set_tokens: int, largest_prompt_tokens: int) -> Sizes:
    share = working_set_tokens / BLOCK_SIZE / engines
    least = RUNNING_PROMPTS * math.ceil(largest_prompt_tokens / BLOCK_SIZE)
    hbm_blocks = max(math.ceil(HBM_SHARE * share), least)
    return Sizes(
        engines=engines,
        working_set_tokens=working_set_tokens,
        hbm_blocks=hbm_blocks,
        cpu_chunks=math.ceil(CPU_TO_HBM * hbm_blocks / BLOCKS_PER_CHUNK),
    )
