"""What vLLM leaves out of its events of lower tiers, though it has the request at hand: extra keys, and promotions.

Its tracker notes tokens, parent and LoRA adapter of each chunk while the request is alive, but neither cache salt nor
media identifiers; and 0.32 notes a chunk that is promoted from storage too late to describe it. Without its extra keys
a salted block would look like an unsalted one.
"""

from __future__ import annotations

import logging
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    GroupOffloadConfig,
    OffloadingConnectorScheduler,
)
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, get_offload_group_idx
from vllm.v1.request import Request

logger = logging.getLogger("vllm.tierpick")


class ExtraKeysTracker:
    """vLLM's tracker, with the extra keys in its notes: they have a field for them, which it leaves empty."""

    def __init__(self, tracker: Any) -> None:
        self._tracker = tracker
        self._notes: dict[OffloadKey, Any] = tracker._pending_event_metadata

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tracker, name)

    def record_store(
        self, req: Request, group_config: GroupOffloadConfig, chunk_idx: int, offload_key: OffloadKey
    ) -> None:
        self._tracker.record_store(req, group_config, chunk_idx, offload_key)
        self._complete(req, group_config, chunk_idx, offload_key)

    def record_lookup(
        self, req: Request, group_config: GroupOffloadConfig, chunk_idx: int, offload_key: OffloadKey
    ) -> None:
        self._tracker.record_lookup(req, group_config, chunk_idx, offload_key)
        self._complete(req, group_config, chunk_idx, offload_key)

    def _complete(self, req: Request, group: GroupOffloadConfig, chunk_idx: int, key: OffloadKey) -> None:
        note = self._notes.get(key)
        if note is None or note.extra_keys is not None:
            return
        first = chunk_idx * group.tokens_per_chunk
        size = note.block_size
        note.extra_keys = tuple(
            generate_block_hash_extra_keys(req, start, start + size, 0)[0]
            for start in range(first, first + size * len(note.block_hashes), size)
        )


def describe_extra_keys(scheduler: OffloadingConnectorScheduler) -> None:
    """Put ourselves between the connector's scheduler side and its tracker."""
    try:
        scheduler._events_tracker = ExtraKeysTracker(scheduler._events_tracker)
    except AttributeError as error:
        logger.warning("this vLLM notes offloaded chunks in another way, events may lack salts: %s", error)


def describe_promotion(
    scheduler: OffloadingConnectorScheduler, request: Request, key: OffloadKey, context: ReqContext
) -> None:
    """Note a chunk found in storage, if it is being promoted; vLLM 0.32 would only when the CPU tier has it.

    To be called during `schedule()`, where 0.33 holds the manager's lock.
    """
    primary = getattr(scheduler.manager, "primary_tier", None)
    end = context.get_offload_key_position(key)
    if primary is None or end is None or primary.lookup(key, context) is LookupResult.MISS:
        return
    index = get_offload_group_idx(key)
    group = next(group for group in scheduler.config.kv_group_configs if group.group_idx == index)
    if end % group.tokens_per_chunk == 0:  # else a partial tail, noted in another way
        scheduler._events_tracker.record_lookup(request, group, end // group.tokens_per_chunk - 1, key)
