"""`TieredOffloadingConnector`: vLLM's OffloadingConnector, whose events let a picker know every tier exactly.

Offloading itself is vLLM's, untouched. What is added is about telling: events that describe themselves, removals from
storage, resets told at once and tier by tier, load, capacities, an instance id, heartbeats and snapshots. In the worker
role nothing is added.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Sequence
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_events import KVCacheEvent, KVEventBatch
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.base import Medium
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager
from vllm.v1.request import Request

from connector.events import CPU, GPU, STORAGE, Tier, TierCleared
from connector.journal import About
from connector.vllm.described import describe_extra_keys, describe_promotion, describe_sparse_blocks
from connector.vllm.layout import groups_of
from connector.vllm.load import RequestCounts
from connector.vllm.options import completed, own_options
from connector.vllm.publishing import TieredEventPublisher, take_over
from connector.vllm.storage import ToldFileSystemTier, ToldTier, Watch

logger = logging.getLogger("vllm.tierpick")

FLUSH_PATIENCE = 0.5
"""Seconds that a reset waits at most until it has been told."""


class TieredOffloadingConnector(OffloadingConnector):
    """Loaded by `kv_connector` and `kv_connector_module_path`; options: see options.py."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None
        self._options = own_options(transfer.kv_connector_extra_config)
        transfer.kv_connector_extra_config = completed(transfer.kv_connector_extra_config)
        super().__init__(vllm_config, role, kv_cache_config)
        self._counts = RequestCounts() if self._options.load else None
        self._about = About(heartbeat=self._options.heartbeat_s)
        self._publisher: TieredEventPublisher | None = None
        self._watched: list[ToldTier] = []
        if role == KVConnectorRole.SCHEDULER:
            self._prepare_publisher()

    def _prepare_publisher(self) -> None:
        events = self._vllm_config.kv_events_config
        if events is None or not events.enable_kv_cache_events or events.publisher != "zmq":
            logger.warning(
                "KV events are off, or do not go to ZMQ: no picker will know what this engine holds. Set "
                '--kv-events-config \'{"enable_kv_cache_events": true, "publisher": "zmq", ...}\''
            )
            return
        describe_extra_keys(self.scheduler)
        self._about.tiers = self._tiers()
        take_over(events, self._about, self._publish_through, self._options.curve())

    def _tiers(self) -> dict[str, Tier]:
        manager = self.scheduler.manager
        chunk = self.scheduler.config.blocks_per_chunk
        chunks = getattr(getattr(manager, "primary_tier", manager), "_num_chunks", None)
        null_block = 1
        tiers = {
            GPU: Tier(capacity=self._kv_cache_config.num_blocks - null_block),
            CPU: Tier(capacity=None if chunks is None else chunks * chunk, chunk=chunk),
        }
        storage = [tier for tier in self._secondary_tiers() if tier.medium is Medium.STORAGE]
        if storage:
            # of several stores nobody can tell which one a chunk is in
            alone = storage[0] if len(storage) == 1 else None
            pool = self._pool(alone) if isinstance(alone, ToldFileSystemTier) else None
            tiers[STORAGE] = Tier(chunk=chunk, pool=pool)
        return tiers

    def _secondary_tiers(self) -> Sequence[SecondaryTierManager]:
        return getattr(self.scheduler.manager, "secondary_tiers", ())

    def _pool(self, tier: ToldFileSystemTier) -> str | None:
        """Files are named by block hashes, so only engines that hash alike find each other's."""
        algorithm = self._vllm_config.cache_config.prefix_caching_hash_algo
        seed = os.getenv("PYTHONHASHSEED")
        if seed is None and not algorithm.startswith("sha256"):
            return None  # vLLM seeds the others at random
        return tier.pool(f"{algorithm} {seed}")

    def _publish_through(self, publisher: TieredEventPublisher) -> None:
        self._publisher = publisher
        for tier in self._secondary_tiers():
            if isinstance(tier, ToldTier) and tier.events is not None:
                tier.watch = Watch(publisher.say, self._options.storage_chunks, tier.path_of, tier.locality)
                tier.watch.start(self._options.removal_scan_per_s)
                publisher.on_published.append(tier.watch.published)
                self._watched.append(tier)

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """vLLM publishes a reset of HBM with the next step, after the next request was routed: have it told at once."""
        super().bind_kv_cache_manager(kv_cache_manager)
        self._note_load()
        if self._publisher is None:
            return
        describe_sparse_blocks(kv_cache_manager)
        self._about.groups = groups_of(kv_cache_manager)
        reset = kv_cache_manager.reset_prefix_cache

        def reset_and_tell() -> bool:
            self._publish_pending()  # while it is known what these blocks are
            done: bool = reset()
            self._publish_pending()
            self._flush()
            return done

        kv_cache_manager.reset_prefix_cache = reset_and_tell

    def reset_cache(self) -> bool | None:
        """Stores that end while the CPU tier is being emptied are told before the tier is told to be empty."""
        self._publish_pending()
        done = super().reset_cache()
        self._publish_pending(TierCleared(CPU))
        self._flush()
        return done

    def _publish_pending(self, *more: object) -> None:
        if self._publisher is None or self._kv_cache_manager is None:
            return
        events = [*self._kv_cache_manager.take_events(), *self.take_events(), *more]
        if events:
            self._publisher.publish(KVEventBatch(ts=time.time(), events=events))

    def _flush(self) -> None:
        """Before whoever asked for a reset learns that it is done, and sends the next request."""
        if self._publisher is not None and not self._publisher.flush(FLUSH_PATIENCE):
            logger.warning("the news of a reset is still waiting to be sent")

    def take_events(self) -> Iterable[KVCacheEvent]:
        self._note_load()
        return super().take_events()

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        matched = super().get_num_new_matched_tokens(request, num_computed_tokens)
        for tier in self._watched:
            for key, context in tier.take_hits():
                if context.req_id == request.request_id:
                    describe_promotion(self.scheduler, request, key, context)
        return matched

    def on_new_request(self, request: Request) -> None:
        super().on_new_request(request)
        if self._counts is not None:
            self._counts.arrived(request)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        if self._counts is not None:
            self._counts.scheduled(scheduler_output)
            self._note_load()
        return super().build_connector_meta(scheduler_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._forget(request)
        return super().request_finished(request, block_ids)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._forget(request)
        return super().request_finished_all_groups(request, block_ids)

    def _forget(self, request: Request) -> None:
        if self._counts is not None:
            self._counts.finished(request)

    def _note_load(self) -> None:
        if self._counts is not None and self._kv_cache_manager is not None:
            self._about.load = self._counts.load(self._kv_cache_manager)
