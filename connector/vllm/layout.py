"""What a picker must know of the engine's KV-cache groups, read off vLLM's KV-cache manager."""

from __future__ import annotations

from collections.abc import Iterator

from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator, KVCacheCoordinator
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.single_type_kv_cache_manager import (
    ChunkedLocalAttentionManager,
    FullAttentionManager,
    MambaManager,
    SingleTypeKVCacheManager,
    SinkFullAttentionManager,
    SlidingWindowManager,
)
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, get_kv_cache_spec_kind

from connector.events import SCRATCH, Groups, Lookup

MAX_GROUPS = 32
MAX_TOKENS = 1 << 24


def groups_of(kv_cache: KVCacheManager) -> Groups:
    """Without lookups if there is a group whose rule no picker knows."""
    groups = kv_cache.kv_cache_config.kv_cache_groups
    lookups = list(_lookups(kv_cache.coordinator, groups))
    alignment = _alignment(kv_cache.coordinator)
    sizes = [alignment, *(lookup.block for lookup in lookups)]
    known = kv_cache.enable_caching and len(groups) <= MAX_GROUPS and max(sizes) < MAX_TOKENS
    return (
        Groups(lookups, alignment)
        if known and all(map(_is_known, kv_cache.coordinator.single_type_managers))
        else Groups()
    )


def _lookups(coordinator: KVCacheCoordinator, groups: list[KVCacheGroupSpec]) -> Iterator[Lookup]:
    managers = coordinator.single_type_managers
    if isinstance(coordinator, HybridKVCacheCoordinator):
        together = [list(group.group_ids) for group in coordinator.attention_groups]
    else:
        together = [[group] for group, manager in enumerate(managers) if manager.kv_cache_spec.prefix_cacheable]
    for ids in together:
        first = managers[ids[0]]
        yield Lookup(
            ids,
            get_kv_cache_spec_kind(first.kv_cache_spec).value,
            first.block_size,
            _window(first),
            any(managers[group].use_eagle for group in ids),
            [group for group in ids if groups[group].is_eagle_group],
        )
    cached = {group for ids in together for group in ids}
    scratch = [group for group in range(len(groups)) if group not in cached]
    if scratch:
        yield Lookup(scratch, SCRATCH, 1)


def _alignment(coordinator: KVCacheCoordinator) -> int:
    if isinstance(coordinator, HybridKVCacheCoordinator):
        return coordinator._cache_hit_alignment_tokens
    return coordinator.scheduler_block_size


def _window(manager: SingleTypeKVCacheManager) -> int:
    if isinstance(manager, SlidingWindowManager):
        return manager.sliding_window
    return manager.attention_chunk_size if isinstance(manager, ChunkedLocalAttentionManager) else 0


_KNOWN = (
    FullAttentionManager,
    SinkFullAttentionManager,
    SlidingWindowManager,
    ChunkedLocalAttentionManager,
    MambaManager,
)


def _is_known(manager: SingleTypeKVCacheManager) -> bool:
    """Does it look blocks up as these of vLLM's do?"""
    spec = manager.kv_cache_spec
    if not spec.prefix_cacheable:
        return not getattr(spec, "prefix_replay_tokens", 0)
    return type(manager) in _KNOWN and not getattr(manager, "extra_retained_tokens", 0)
