from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="runs in the vLLM venv: make test-vllm")

import numpy as np
from vllm.v1.kv_offload.base import Locality, LookupResult, OffloadKey, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import TransferJob

from connector.vllm.options import completed
from connector.vllm.specs import TieredStorageOffloadingSpec
from connector.vllm.storage import ToldFileSystemTier, Watch

pytestmark = pytest.mark.vllm

PAGE = 4096


def key(number: int, group: int = 0) -> OffloadKey:
    return make_offload_key(number.to_bytes(32, "big"), group)


def until(condition: Callable[[], Any], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class Files:
    """A directory of files by key, a watch over it, and what it published."""

    def __init__(self, directory: Path, limit: int = 100) -> None:
        self.directory = directory
        self.published: list[Any] = []
        self.watch = Watch(self.published.extend, limit, self.path_of, Locality.REMOTE)

    def path_of(self, chunk: OffloadKey) -> str:
        return str(self.directory / chunk.hex())

    def announce(self, *numbers: int) -> list[OffloadKey]:
        for number in numbers:
            Path(self.path_of(key(number))).touch()
        taken = self.watch.take([key(number) for number in numbers])
        self.watch.published()
        return taken

    def delete(self, *numbers: int) -> None:
        for number in numbers:
            os.unlink(self.path_of(key(number)))

    @property
    def removed(self) -> list[int]:
        return [block for event in self.published for block in event.block_hashes]


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Files]:
    files = Files(tmp_path)
    yield files
    files.watch.close()


def test_a_chunk_is_announced_once_until_it_is_gone(files: Files) -> None:
    assert files.announce(1, 2, 1) == [key(1), key(2)]
    assert files.announce(2, 3) == [key(3)]
    files.watch.missed(key(2))
    assert files.announce(2) == [key(2)]


def test_a_removal_names_the_chunks_last_block_its_group_and_where_the_tier_is(files: Files) -> None:
    files.watch.take([key(7, group=2)])
    files.watch.published()
    files.watch.missed(key(7, group=2))

    (event,) = files.published
    assert (event.block_hashes, event.medium, event.group_idx, event.locality) == ([7], "STORAGE", 2, "REMOTE")


def test_what_was_never_announced_is_not_removed(files: Files) -> None:
    files.watch.take([key(1)])  # on its way, but not in the stream yet
    files.watch.missed(key(1))
    files.watch.missed(key(2))
    assert files.published == []


def test_beyond_the_limit_the_oldest_are_announced_as_removed(tmp_path: Path) -> None:
    files = Files(tmp_path, limit=3)
    files.announce(1, 2)
    files.announce(3, 4, 5)
    assert files.removed == [1, 2]
    assert files.announce(1) == [key(1)]  # told anew when it turns up again


def test_a_thread_finds_out_which_files_are_gone(files: Files) -> None:
    files.announce(*range(1, 31))
    files.watch.start(per_second=10_000)
    files.delete(3, 30, 17)
    until(lambda: len(files.removed) == 3)
    files.announce(40)
    files.delete(40)
    until(lambda: 40 in files.removed)

    assert sorted(files.removed) == [3, 17, 30, 40]


def test_a_missed_file_is_looked_for_first_and_only_removed_if_it_is_gone(files: Files) -> None:
    files.announce(1, 2)
    files.watch.start(per_second=0)
    files.delete(2)
    files.watch.missed(key(1))  # an old answer
    files.watch.missed(key(2))
    until(lambda: files.removed)

    assert files.removed == [2]


def test_a_fault_while_looking_does_not_end_the_looking(tmp_path: Path) -> None:
    files = Files(tmp_path)
    faults = [OSError("stale handle")]

    def path_of(chunk: OffloadKey) -> str:
        if faults:
            raise faults.pop()
        return files.path_of(chunk)

    watch = Watch(files.published.extend, 10, path_of)
    watch.take([key(1)])
    watch.published()
    watch.start(per_second=10_000)
    until(lambda: files.removed)
    watch.close()

    assert not faults


class Tier:
    """vLLM's tiering manager over a CPU tier of four chunks, with one file-system tier of ours."""

    def __init__(self, root: Path, **more: Any) -> None:
        config = {
            "cpu_bytes_to_use": 4 * PAGE,
            "secondary_tiers": [{"type": "fs", "root_dir": str(root), "n_read_threads": 1, "n_write_threads": 1}],
            "spec_name": "TieringOffloadingSpec",
        }
        self.spec = TieredStorageOffloadingSpec(
            OffloadingConfig(
                groups=(OffloadingGroupConfig(tokens_per_block=16, layer_names=("a",), group_id=0),),
                worker_kv_bytes_per_block=PAGE,
                enable_kv_cache_events=True,
                extra_config=completed(config),
                engine_id=f"tierpick-test-{id(self)}",
                model=OffloadingModelConfig(name=more.pop("model", "tiny"), dtype="bfloat16"),
                cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
                parallel=OffloadingParallelConfig(
                    rank=0,
                    world_size=1,
                    tp_size=1,
                    pp_size=1,
                    pcp_size=1,
                    dcp_size=1,
                    data_parallel_index=0,
                    data_parallel_size=1,
                    data_parallel_rank_local=None,
                    is_parallelism_agnostic=False,
                ),
                **more,
            )
        )
        self.manager = self.spec.get_manager()
        (self.tier,) = self.manager.secondary_tiers
        assert isinstance(self.tier, ToldFileSystemTier)
        self.published: list[Any] = []
        self.tier.watch = Watch(self.published.extend, 100)
        self._jobs = iter(range(1000))

    def store(self, *numbers: int, root: Path | None = None) -> None:
        job = TransferJob(next(self._jobs), [key(n) for n in numbers], np.arange(len(numbers)), False, ReqContext("r"))
        self.tier.submit_store(job)
        self.tier.drain_jobs()
        list(self.tier.get_finished_jobs())

    def look_up(self, number: int) -> LookupResult:
        """One request's lookup, until it is answered."""
        context = ReqContext(f"request {next(self._jobs)}")
        found: list[LookupResult] = []

        def answered() -> bool:
            found.append(self.tier.lookup(key(number), context))
            self.tier.on_schedule_end(ScheduleEndContext((), ()))
            return found[-1] is not LookupResult.RETRY

        until(answered)
        self.tier.on_request_finished(context)
        return found[-1]

    def announced(self) -> list[OffloadKey]:
        keys = [key for event in self.tier.take_events() for key in event.keys]
        self.tier.watch.published()
        return keys


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[Callable[..., Tier]]:
    made: list[Tier] = []

    def make(root: str = "root", **more: Any) -> Tier:
        made.append(Tier(tmp_path / root, **more))
        return made[-1]

    yield make
    for tier in made:
        tier.manager.shutdown()


def test_the_tier_is_still_fs_to_vllms_metrics(tiers: Callable[..., Tier]) -> None:
    assert tiers().tier.tier_type == "fs"


def test_storing_a_chunk_again_announces_no_second_copy(tiers: Callable[..., Tier]) -> None:
    tier = tiers()
    tier.store(1, 2)
    assert tier.announced() == [key(1), key(2)]
    tier.store(2, 3)
    assert tier.announced() == [key(3)]


def test_a_store_that_fails_is_not_announced(tiers: Callable[..., Tier], tmp_path: Path) -> None:
    tier = tiers()
    (tmp_path / "root").rename(tmp_path / "away")
    (tmp_path / "root").touch()  # no directory can be made here
    tier.store(1)
    assert tier.announced() == []


def test_a_lookup_that_misses_tells_that_the_file_is_gone(tiers: Callable[..., Tier]) -> None:
    tier = tiers()
    tier.store(1, 2)
    tier.announced()
    os.unlink(tier.tier.path_of(key(2)))

    assert tier.look_up(1) is LookupResult.HIT
    assert tier.look_up(2) is LookupResult.MISS
    assert [event.block_hashes for event in tier.published] == [[2]]


def test_a_file_from_before_a_restart_is_announced_once_it_is_found(tiers: Callable[..., Tier]) -> None:
    tiers().store(1)
    restarted = tiers()
    assert restarted.look_up(1) is LookupResult.HIT
    assert restarted.look_up(1) is LookupResult.HIT
    assert restarted.announced() == [key(1)]
    assert [hit for hit, _ in restarted.tier.take_hits()] == [key(1), key(1)]
    assert restarted.tier.take_hits() == []


def test_engines_that_find_each_others_files_are_in_one_pool(tiers: Callable[..., Tier], tmp_path: Path) -> None:
    (tmp_path / "mounted elsewhere").symlink_to(tmp_path / "root")
    pool = tiers().tier.pool("sha256 None")
    assert pool is not None
    assert pool == tiers().tier.pool("sha256 None") == tiers("mounted elsewhere").tier.pool("sha256 None")


@pytest.mark.parametrize(
    ("root", "names", "more"),
    [("other", "sha256 None", {}), ("root", "sha256 7", {}), ("root", "sha256 None", {"model": "larger"})],
    ids=["another directory", "another hash seed", "another model"],
)
def test_engines_that_do_not_are_not(tiers: Callable[..., Tier], root: str, names: str, more: dict[str, Any]) -> None:
    assert tiers().tier.pool("sha256 None") != tiers(root, **more).tier.pool(names)


def test_a_directory_that_cannot_be_written_is_no_pool(
    tiers: Callable[..., Tier], monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = tiers()

    def refuse(*_: object) -> None:
        raise PermissionError(13, "read-only")

    monkeypatch.setattr(os, "link", refuse)
    assert tier.tier.pool("sha256 None") is None
