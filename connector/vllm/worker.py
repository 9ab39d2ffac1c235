"""Copies between HBM pages and host memory where HBM is itself ordinary memory: vLLM on its CPU platform.

vLLM's own worker moves pages with CUDA or XPU streams. This one is what makes the whole offloading path run, scheduler,
evictions, events and all, on a machine without an accelerator. Copies are done when they are submitted.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec, LoadStoreSpec, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion


class CpuTensorWorker(OffloadingWorker):
    """Stores pages in host tensors of `(chunks, blocks in a chunk, page bytes)`, one for each tensor of the KV cache.

    Args:
        kv_caches: the pages of the engine, and which tensors each KV-cache group uses.
        blocks_per_chunk: HBM blocks in a chunk.
        num_chunks: chunks that host memory holds.
        region: shared memory to hold them, so that storage tiers see them; None for memory of our own.
    """

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        blocks_per_chunk: int,
        num_chunks: int,
        region: SharedOffloadRegion | None = None,
    ) -> None:
        self._blocks_per_chunk = blocks_per_chunk
        self._region = region
        self._pages: list[torch.Tensor] = [
            cache.tensor.view(torch.int8).view(-1, cache.page_size_bytes) for cache in kv_caches.tensors
        ]
        self._host = [self._allocate(num_chunks, pages.shape[1]) for pages in self._pages]
        self._tensors_of_group = [sorted({ref.tensor_idx for ref in refs}) for refs in kv_caches.group_data_refs]
        self._finished: list[TransferResult] = []

    def _allocate(self, num_chunks: int, page_bytes: int) -> torch.Tensor:
        chunk_bytes = self._blocks_per_chunk * page_bytes
        chunks: torch.Tensor = (
            torch.zeros((num_chunks, chunk_bytes), dtype=torch.int8)
            if self._region is None
            else self._region.create_next_worker_view(chunk_bytes)
        )
        return chunks.unflatten(1, (self._blocks_per_chunk, page_bytes))

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        def store(pages: torch.Tensor, blocks: torch.Tensor, host: torch.Tensor, place: _Place) -> None:
            host[place] = pages[blocks]

        return self._transfer(job_id, src_spec, dst_spec, store)

    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        # vLLM 0.32 does not know `expedited`
        def load(pages: torch.Tensor, blocks: torch.Tensor, host: torch.Tensor, place: _Place) -> None:
            pages[blocks] = host[place]

        return self._transfer(job_id, dst_spec, src_spec, load)

    def _transfer(self, job_id: int, device: GPULoadStoreSpec, host: LoadStoreSpec, copy: _Copy) -> bool:
        assert isinstance(host, CPULoadStoreSpec)
        started = time.perf_counter()
        blocks = torch.from_numpy(device.block_ids).long()
        chunks = torch.from_numpy(host.block_ids).long()
        copied = first_block = first_chunk = 0
        for tensors, count, index in zip(self._tensors_of_group, device.group_sizes, device.block_indices, strict=True):
            if not count:
                continue
            # the first block may lie inside its chunk
            offsets = torch.arange(count) + index % self._blocks_per_chunk
            place = (chunks[first_chunk + offsets // self._blocks_per_chunk], offsets % self._blocks_per_chunk)
            for tensor in tensors:
                copy(self._pages[tensor], blocks[first_block : first_block + count], self._host[tensor], place)
                copied += count * self._pages[tensor].shape[1]
            first_block += count
            first_chunk += int(offsets[-1]) // self._blocks_per_chunk + 1
        assert first_block == len(blocks)
        assert first_chunk == len(chunks)
        self._finished.append(
            TransferResult(
                job_id=job_id,
                success=True,
                transfer_size=copied,
                transfer_time=max(time.perf_counter() - started, 1e-9),  # a counter of seconds must grow
            )
        )
        return True

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is ever under way."""

    def shutdown(self) -> None:
        self._host.clear()  # views of the region: it can only be closed without them
        self._pages.clear()
        if self._region is not None:
            self._region.cleanup()
            self._region = None


_Place = tuple[torch.Tensor, torch.Tensor]
"""Chunk and place inside it of each block."""

_Copy = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, _Place], None]
