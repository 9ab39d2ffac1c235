"""What scorers and filters read of a prefix match."""

from __future__ import annotations

from collections.abc import Sequence

from epp.fleet.endpoint import Endpoint
from epp.scheduling.plugin import Scheduling

DEFAULT_PRODUCER = "approx-prefix-cache-producer"
"""Whose match is read where `prefixMatchInfoProducerName` is not set, as in llm-d."""


def matched_shares(scheduling: Scheduling, producer: str, endpoints: Sequence[Endpoint]) -> list[float]:
    """Of each endpoint, the share of the prompt's blocks it holds; zeros where the producer left nothing."""
    match = scheduling.matches.get(producer)
    if match is None or match.total <= 0 or not any(match.blocks):
        return [0.0] * len(endpoints)
    blocks, total = match.blocks, match.total
    return [blocks[endpoint.slot] / total for endpoint in endpoints]
