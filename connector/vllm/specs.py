"""vLLM's offloading specs, which also run where there is no accelerator; with one, they are vLLM's own.

All keys of CPUOffloadingSpec and TieringOffloadingSpec mean what they mean there.
"""

from __future__ import annotations

from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from connector.vllm.worker import CpuTensorWorker


def _has_native_worker() -> bool:
    """Whether vLLM's own worker can move pages here (ROCm counts as CUDA-alike)."""
    return bool(current_platform.is_cuda_alike() or current_platform.is_xpu())


class TieredCPUOffloadingSpec(CPUOffloadingSpec):
    """A CPU tier below HBM."""

    _worker: OffloadingWorker | None

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if _has_native_worker():
            return super().get_worker(kv_caches)
        if self._worker is None:
            self._worker = CpuTensorWorker(kv_caches, self.blocks_per_chunk, self.num_chunks)
        return self._worker


class TieredStorageOffloadingSpec(TieringOffloadingSpec):
    """A CPU tier below HBM, and storage tiers below that, which read and write the CPU tier's shared memory."""

    _worker: OffloadingWorker | None

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if _has_native_worker():
            return super().get_worker(kv_caches)
        if self._worker is None:
            if self.config.canonical_layout:
                raise ValueError("canonical_layout needs vLLM's native worker, which this platform has not")
            self._worker = CpuTensorWorker(kv_caches, self.blocks_per_chunk, self.num_chunks, self._shared_region())
        return self._worker

    def _shared_region(self) -> SharedOffloadRegion:
        return SharedOffloadRegion(
            engine_id=self.config.engine_id,
            num_chunks=self.num_chunks,
            rank=0 if self.replicated_layout else self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
