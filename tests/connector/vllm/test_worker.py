from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="runs in the vLLM venv: make test-vllm")

import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

from connector.vllm.worker import CpuTensorWorker

pytestmark = pytest.mark.vllm

BLOCKS = 12
PAGE = 64
CHUNK = 3
CHUNKS = 4


def kv_caches(groups: tuple[tuple[int, ...], ...]) -> CanonicalKVCaches:
    """Pages of random bytes in as many tensors as the groups name; each group uses those that it names."""
    generator = torch.Generator().manual_seed(1)
    count = max(max(group) for group in groups) + 1
    return CanonicalKVCaches(
        [
            CanonicalKVCacheTensor(
                torch.randint(-128, 128, (BLOCKS, PAGE), dtype=torch.int8, generator=generator), PAGE
            )
            for _ in range(count)
        ],
        [[CanonicalKVCacheRef(index, PAGE) for index in group] for group in groups],
    )


def device(*groups: tuple[list[int], int]) -> GPULoadStoreSpec:
    """For each group its blocks, and the place of the first in the request."""
    return GPULoadStoreSpec(
        [block for blocks, _ in groups for block in blocks],
        group_sizes=[len(blocks) for blocks, _ in groups],
        block_indices=[index for _, index in groups],
    )


def pages(caches: CanonicalKVCaches, blocks: list[int]) -> list[torch.Tensor]:
    return [cache.tensor[blocks].clone() for cache in caches.tensors]


def test_what_was_stored_is_loaded_into_other_blocks() -> None:
    caches = kv_caches(((0, 1),))
    worker = CpuTensorWorker(caches, CHUNK, CHUNKS)
    stored = pages(caches, [0, 1, 2, 3, 4, 5])
    worker.submit_store(7, device(([0, 1, 2, 3, 4, 5], 0)), CPULoadStoreSpec([3, 1]))
    for cache in caches.tensors:
        cache.tensor.zero_()
    worker.submit_load(8, CPULoadStoreSpec([3, 1]), device(([11, 9, 7, 5, 3, 1], 0)), expedited=True)

    for before, after in zip(stored, pages(caches, [11, 9, 7, 5, 3, 1]), strict=True):
        assert torch.equal(before, after)
    results = worker.get_finished()
    assert [(result.job_id, result.success, result.transfer_size) for result in results] == [
        (7, True, 6 * PAGE * 2),
        (8, True, 6 * PAGE * 2),
    ]
    assert worker.get_finished() == []


def test_a_load_can_begin_and_end_inside_a_chunk() -> None:
    caches = kv_caches(((0,),))
    worker = CpuTensorWorker(caches, CHUNK, CHUNKS)
    stored = pages(caches, [0, 1, 2, 3, 4, 5])[0]
    worker.submit_store(1, device(([0, 1, 2, 3, 4, 5], 0)), CPULoadStoreSpec([2, 0]))
    caches.tensors[0].tensor.zero_()
    worker.submit_load(2, CPULoadStoreSpec([2, 0]), device(([8, 9, 10], 2)))  # the request's blocks 2, 3 and 4

    assert torch.equal(caches.tensors[0].tensor[[8, 9, 10]], stored[2:5])
    assert not caches.tensors[0].tensor[[0, 1, 2, 3, 4, 5, 6, 7, 11]].any()


def test_each_group_moves_in_its_own_tensors_and_chunks() -> None:
    caches = kv_caches(((0,), (1,), (0, 1)))
    worker = CpuTensorWorker(caches, CHUNK, CHUNKS)
    first, second = pages(caches, list(range(BLOCKS)))
    store = device(([0, 1, 2], 0), ([], 0), ([3, 4], 4))  # the last one starts at its chunk's second block
    worker.submit_store(1, store, CPULoadStoreSpec([3, 0]))
    for cache in caches.tensors:
        cache.tensor.zero_()
    worker.submit_load(2, CPULoadStoreSpec([3, 0]), store)

    assert torch.equal(caches.tensors[0].tensor[:5], first[:5])
    assert not caches.tensors[1].tensor[:3].any()
    assert torch.equal(caches.tensors[1].tensor[3:5], second[3:5])


def test_a_shared_region_holds_the_bytes_where_storage_tiers_read_them(tmp_path: object) -> None:
    caches = kv_caches(((0, 1),))
    chunk_bytes = 4096
    settings = {
        "engine_id": f"tierpick-test-{id(tmp_path)}",
        "num_chunks": CHUNKS,
        "kv_bytes_per_chunk": chunk_bytes,
        "cpu_page_size": 2 * CHUNK * PAGE,
    }
    reader = SharedOffloadRegion(rank=None, **settings)
    worker = CpuTensorWorker(caches, CHUNK, CHUNKS, SharedOffloadRegion(rank=0, **settings))
    view = reader.create_kv_memoryview()
    worker.submit_store(1, device(([4, 5, 6], 0)), CPULoadStoreSpec([2]))
    seen = bytes(view.cast("B")[2 * chunk_bytes : 2 * chunk_bytes + 2 * CHUNK * PAGE])
    view.release()
    worker.shutdown()
    worker.shutdown()  # twice does no harm
    reader.cleanup()

    assert seen == b"".join(page.numpy().tobytes() for page in pages(caches, [4, 5, 6]))
