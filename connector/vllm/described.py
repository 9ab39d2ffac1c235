"""What vLLM leaves out of its events, though it has the request at hand: below HBM extra keys and promotions; in HBM
which blocks of a window are held.

Its tracker notes tokens, parent and LoRA adapter of each chunk while the request is alive, but neither cache salt nor
media identifiers; and 0.32 notes a chunk that is promoted from storage too late to describe it. Without its extra keys
a salted block would look like an unsalted one.

Of a group that keeps parts of a prompt only, an event has the tokens of all blocks of a step, and hashes of those kept.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from vllm.distributed.kv_events import BlockStored as StockStored
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    GroupOffloadConfig,
    OffloadingConnectorScheduler,
)
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    KVCacheBlock,
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
)
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, get_offload_group_idx
from vllm.v1.request import Request

from connector.events import GPU, BlockStored

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


def describe_sparse_blocks(kv_cache: KVCacheManager) -> None:
    """Have HBM's events say which blocks they are of, where groups have blocks of several sizes.

    With one size only, every block's hash is that of a block of full attention, which says what it is.
    """
    pool = kv_cache.block_pool
    sizes = {manager.block_size for manager in kv_cache.coordinator.single_type_managers}
    if len(sizes) > 1 or sizes != {pool.hash_block_size}:
        DescribedPool(pool, kv_cache.coordinator.scheduler_block_size, kv_cache.kv_cache_event_metadata)


class DescribedPool:
    """Puts itself before a pool's two methods that tell of stored blocks.

    An event is told anew as one for each run of blocks. It begins where the hash of what is before it is known to
    whoever hears of the groups of full attention: at a multiple of all block sizes.
    """

    def __init__(self, pool: BlockPool, alignment: int, kinds: Sequence[tuple[str, int | None]]) -> None:
        self._pool = pool
        self._alignment = alignment
        self._kinds = kinds
        """Of the groups: what vLLM would add to its own events."""
        self._cache_full, self._cache_partial = pool.cache_full_blocks, pool.cache_partial_block
        pool.cache_full_blocks = self.cache_full_blocks
        pool.cache_partial_block = self.cache_partial_block

    def cache_full_blocks(
        self,
        request: Request,
        blocks: list[KVCacheBlock],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        block_mask: list[bool] | None = None,
    ) -> None:
        told = len(self._pool.kv_event_queue)
        self._cache_full(request, blocks, num_cached_blocks, num_full_blocks, block_size, kv_cache_group_id, block_mask)
        kept = [
            number
            for number in range(num_cached_blocks, num_full_blocks)
            if not blocks[number].is_null and (block_mask is None or block_mask[number - num_cached_blocks])
        ]
        self._tell_anew(told, request, kept, block_size)

    def cache_partial_block(
        self, request: Request, block: KVCacheBlock, num_tokens: int, *arguments: Any, **more: Any
    ) -> Any:
        told = len(self._pool.kv_event_queue)
        cached = self._cache_partial(request, block, num_tokens, *arguments, **more)
        size = self._pool.hash_block_size
        self._tell_anew(told, request, [num_tokens // size - 1], size)
        return cached

    def _tell_anew(self, told: int, request: Request, kept: list[int], block_size: int) -> None:
        """The last event, if there is one after `told` others and it is of these blocks."""
        queue = self._pool.kv_event_queue
        event = queue[-1] if len(queue) > told else None
        if isinstance(event, StockStored) and len(event.block_hashes) == len(kept):
            queue[-1:] = self._runs(event, request, kept, block_size)

    def _runs(self, event: StockStored, request: Request, kept: list[int], block_size: int) -> list[Any]:
        runs: list[Any] = []
        first = 0
        for i in range(1, len(kept) + 1):
            if i == len(kept) or kept[i] != kept[i - 1] + 1:
                runs.append(self._run(event, request, slice(first, i), kept[first], block_size))
                first = i
        return runs

    def _run(self, event: StockStored, request: Request, part: slice, number: int, block_size: int) -> BlockStored:
        begin = number * block_size // self._alignment * self._alignment
        lead = number - begin // block_size
        end = (number + part.stop - part.start) * block_size
        hashes = request.block_hashes
        lead_keys = generate_block_hash_extra_keys(request, begin, number * block_size, 0)[0] if lead else None
        describable = all(key[0] == "lora" for key in lead_keys or ())
        kind, window = self._kinds[event.group_idx or 0]
        return BlockStored(
            block_hashes=event.block_hashes[part],
            parent_block_hash=maybe_convert_block_hash(hashes[begin // self._pool.hash_block_size - 1])
            if begin
            else None,
            token_ids=request.all_token_ids[begin:end] if describable else [],
            block_size=block_size,
            lora_id=event.lora_id,
            medium=GPU,
            lora_name=event.lora_name,
            extra_keys=event.extra_keys[part] if event.extra_keys is not None else None,
            group_idx=event.group_idx,
            kv_cache_spec_kind=kind,
            kv_cache_spec_sliding_window=window,
            session_id=event.session_id,
            lead_blocks=lead if describable else 0,
        )
