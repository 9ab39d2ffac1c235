"""prefix-cache-scorer: the share of the prompt an endpoint holds, by one producer's account.

score = w · min(1, matched tokens / scale)² + (1 − w) · matched blocks / all blocks, with w = `matchLengthWeight`. No
account of the prompt: 0 for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from epp.config.environment import Environment
from epp.config.registry import Parameters, plugin
from epp.fleet.endpoint import Endpoint
from epp.scheduling.plugin import Scheduling
from epp.scheduling.prefix import DEFAULT_PRODUCER, matched_shares


class PrefixCacheParameters(Parameters, frozen=True):
    prefix_match_info_producer_name: str = ""
    match_length_weight: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    """How much the absolute length counts beside the share."""
    match_length_scale_tokens: int = 8192
    """Matched tokens beyond which length adds nothing."""

    def __post_init__(self) -> None:
        if self.match_length_weight > 0 and self.match_length_scale_tokens <= 0:
            raise ValueError("matchLengthScaleTokens must be positive where matchLengthWeight is set")


@plugin("prefix-cache-scorer", PrefixCacheParameters)
class PrefixCacheScorer:
    name: str
    type: str

    def __init__(self, name: str, parameters: PrefixCacheParameters, environment: Environment) -> None:
        self._producer = parameters.prefix_match_info_producer_name or DEFAULT_PRODUCER
        self._weight = parameters.match_length_weight
        self._scale = parameters.match_length_scale_tokens

    def requires(self) -> Sequence[str]:
        return (self._producer,)

    def score(self, scheduling: Scheduling, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        shares = matched_shares(scheduling, self._producer, endpoints)
        match = scheduling.matches.get(self._producer)
        if not self._weight or match is None:
            return shares
        longest = match.total * match.block_size / self._scale
        w = self._weight
        return [w * min(1.0, share * longest) ** 2 + (1.0 - w) * share for share in shares]
