"""For the fleets without tierpick in the engine: vLLM's own CPU offloading, where "GPU" memory is CPU memory too.

vLLM's spec refuses to make a worker without a GPU. Everything else of it (manager, eviction, events, metrics) stays
vLLM's; only the copies are made here. Loaded by the engine: `"spec_module_path": "stock_spec"`.
"""

from __future__ import annotations

import time

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec, LoadStoreSpec, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class CpuTensorWorker(OffloadingWorker):
    """Copies at once, on the calling thread."""

    def __init__(self, kv_caches: CanonicalKVCaches, blocks_per_chunk: int, chunks: int) -> None:
        self._blocks_per_chunk = blocks_per_chunk
        self._pages = [t.tensor.view(torch.int8) for t in kv_caches.tensors]
        self._chunks = [
            torch.zeros((chunks, blocks_per_chunk, pages.shape[1]), dtype=torch.int8) for pages in self._pages
        ]
        self._tensors_of_group = [sorted({ref.tensor_idx for ref in refs}) for refs in kv_caches.group_data_refs]
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        return self._copy(job_id, src_spec, dst_spec, to_host=True)

    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        return self._copy(job_id, dst_spec, src_spec, to_host=False)

    def _copy(self, job_id: int, device: GPULoadStoreSpec, host: LoadStoreSpec, *, to_host: bool) -> bool:
        started = time.perf_counter()
        copied = 0
        blocks, chunks = iter(device.block_ids.tolist()), iter(host.block_ids.tolist())
        for group, size in enumerate(device.group_sizes):
            chunk, place = -1, int(device.block_indices[group]) % self._blocks_per_chunk
            for number in range(size):
                if number == 0 or place == self._blocks_per_chunk:
                    chunk, place = next(chunks), place % self._blocks_per_chunk
                block = next(blocks)
                for tensor in self._tensors_of_group[group]:
                    page, copy = self._pages[tensor][block], self._chunks[tensor][chunk, place]
                    _ = copy.copy_(page) if to_host else page.copy_(copy)
                    copied += page.numel()
                place += 1
        taken = max(time.perf_counter() - started, 1e-9)
        self._finished.append(TransferResult(job_id=job_id, success=True, transfer_size=copied, transfer_time=taken))
        return True

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is ever under way."""


class StockOffloadingSpec(CPUOffloadingSpec):
    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            self._worker = CpuTensorWorker(kv_caches, self.blocks_per_chunk, self.num_chunks)
        return self._worker
