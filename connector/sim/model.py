"""How long things take: a stated formula instead of a GPU.

    step  = (overhead + prefill tokens / prefill rate + decode time, if any request decodes) / speed
    copy  = tokens x bytes per token / tier bandwidth / speed

A step computes all requests scheduled in it together: prefill cost adds up over their tokens, decoding costs one
`decode` however many requests decode. Copies to and from a tier run beside the steps and do not slow each other.
Attention's growth with the context is left out, so prefill is linear in the tokens that no tier held.
"""

from __future__ import annotations

from dataclasses import dataclass

GIGA = 1e9


@dataclass(frozen=True, slots=True)
class ServiceModel:
    """Rates of one engine; the defaults are those of an 8B model on one mid-size GPU.

    Attributes:
        prefill_tokens_per_s: prompt tokens computed a second.
        decode_s: seconds of a step in which at least one request decodes.
        overhead_s: fixed seconds of every step that computes something.
        cpu_gbps: GB/s between HBM and CPU memory.
        storage_gbps: GB/s between CPU memory and storage.
        bytes_per_token: KV bytes of one token.
        speed: divides all times.
    """

    prefill_tokens_per_s: float = 10_000
    decode_s: float = 0.010
    overhead_s: float = 0.001
    cpu_gbps: float = 20
    storage_gbps: float = 2
    bytes_per_token: int = 131_072
    speed: float = 1

    def step_seconds(self, prefill_tokens: int, decoding: int) -> float:
        decode = self.decode_s if decoding else 0.0
        return (self.overhead_s + prefill_tokens / self.prefill_tokens_per_s + decode) / self.speed

    def cpu_copy_seconds(self, tokens: int) -> float:
        return self._copy_seconds(tokens, self.cpu_gbps)

    def storage_copy_seconds(self, tokens: int) -> float:
        return self._copy_seconds(tokens, self.storage_gbps)

    def _copy_seconds(self, tokens: int, gbps: float) -> float:
        return tokens * self.bytes_per_token / (gbps * GIGA) / self.speed


INSTANT = ServiceModel(
    prefill_tokens_per_s=float("inf"),
    decode_s=0,
    overhead_s=0,
    cpu_gbps=float("inf"),
    storage_gbps=float("inf"),
)
"""Nothing takes time: a copy is done in the step that starts it, as with the recorded engine's CPU tensors."""
