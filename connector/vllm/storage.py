"""Storage tiers whose events can be trusted: what is gone is told, and what is found is told too.

vLLM's `fs` and `obj` tiers announce what they store, and never that it is gone: others delete it. These are vLLM's
tiers, watched. A chunk that a lookup misses though it was announced is announced as removed. Files are also looked for
by a thread, so many a second, so that deletions are told while the engine is idle. A chunk that a lookup finds without
its having been announced (it is from before a restart, or another engine's) is announced.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import islice
from typing import Any

from vllm.distributed.kv_events import MEDIUM_STORAGE, BlockRemoved, KVCacheEvent
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadKey,
    ReqContext,
    get_offload_block_hash,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager
from vllm.v1.kv_offload.tiering.obj.manager import ObjectStoreSecondaryTierManager

logger = logging.getLogger("vllm.tierpick")

POOL_FILE = "tierpick-pool"
TURN_SECONDS = 0.1
JOIN_SECONDS = 2.0  # a network mount can hang; the engine must end all the same


class Watch:
    """Which chunks of one tier are announced, and the removal of those that turn out to be gone.

    The engine's scheduler thread announces; a removal is published from whichever thread notices it. It names the
    chunk's last block only: the ledger removes what was announced for it.

    Args:
        publish: publishes events, in order, from any thread.
        limit: announced chunks kept; beyond it the oldest are announced as removed.
        path_of: the file of a chunk; None where there are no files to look for.
        locality: the tier's, for its events.
    """

    def __init__(
        self,
        publish: Callable[[list[KVCacheEvent]], None],
        limit: int,
        path_of: Callable[[OffloadKey], str] | None = None,
        locality: Locality | None = None,
    ) -> None:
        self._publish = publish
        self._limit = limit
        self._path_of = path_of
        self._locality = locality
        self._lock = threading.Lock()
        self._taken: dict[OffloadKey, None] = {}
        self._announced: dict[OffloadKey, None] = {}
        self._doubted: deque[OffloadKey] = deque()
        self._to_scan: list[OffloadKey] = []
        self._wake = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None

    def knows(self, key: OffloadKey) -> bool:
        """Whether a chunk is announced, or about to be."""
        return key in self._announced or key in self._taken

    def take(self, keys: Iterable[OffloadKey]) -> list[OffloadKey]:
        """Of chunks that are stored, those still to be announced; the caller does so, then calls `published`."""
        with self._lock:
            new = [key for key in dict.fromkeys(keys) if not self.knows(key)]
            self._taken.update(dict.fromkeys(new))
        return new

    def published(self) -> None:
        """What was taken is in the stream: from now on its removal may follow."""
        if not self._taken:
            return
        with self._lock:
            self._announced |= self._taken
            self._taken.clear()
            excess = list(islice(self._announced, max(len(self._announced) - self._limit, 0)))
            for key in excess:
                del self._announced[key]
        if excess:
            self._publish([self._removal(key) for key in excess])

    def missed(self, key: OffloadKey) -> None:
        """A lookup did not find a chunk; as its answer may be an old one, the thread, if there is one, has a look."""
        if key not in self._announced:
            return
        if self._thread is None:
            self._gone(key)
        else:
            self._doubted.append(key)
            self._wake.set()

    def _gone(self, key: OffloadKey) -> None:
        with self._lock:
            if key not in self._announced:
                return
            del self._announced[key]
        self._publish([self._removal(key)])

    def _removal(self, key: OffloadKey) -> BlockRemoved:
        return BlockRemoved(
            block_hashes=[maybe_convert_block_hash(BlockHash(get_offload_block_hash(key)))],
            medium=MEDIUM_STORAGE,
            group_idx=get_offload_group_idx(key),
            locality=self._locality.value if self._locality is not None else None,
        )

    # --- the thread

    def start(self, per_second: float) -> None:
        """Look for files, in a thread, until `close`: at once for those missed, else this many a second."""
        if self._path_of is None:
            return
        self._thread = threading.Thread(target=self._run, args=(per_second,), name="tierpick-storage", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(JOIN_SECONDS)

    def _run(self, per_second: float) -> None:
        turn = max(TURN_SECONDS, 1 / per_second) if per_second else math.inf
        due = time.monotonic() + turn
        while not self._closed:
            wait = due - time.monotonic()
            self._wake.wait(None if wait == math.inf else max(wait, 0))
            self._wake.clear()
            try:
                while self._doubted:
                    self._check(self._doubted.popleft())
                if time.monotonic() >= due:
                    due = time.monotonic() + turn
                    self._scan(round(per_second * turn))
            except Exception:
                logger.exception("looking for the files of a storage tier failed")

    def _scan(self, count: int) -> None:
        for _ in range(count):
            if not self._to_scan:
                with self._lock:
                    self._to_scan = list(self._announced)
                if not self._to_scan:
                    return
            self._check(self._to_scan.pop())

    def _check(self, key: OffloadKey) -> None:
        assert self._path_of is not None
        if not os.path.exists(self._path_of(key)):
            self._gone(key)


class ToldTier:
    """Mixed in before one of vLLM's tiers: `watch`, once the connector has set it, learns of what happens there."""

    watch: Watch | None = None
    path_of: Callable[[OffloadKey], str] | None = None
    events: list[OffloadingEvent] | None
    medium: Medium
    locality: Locality | None

    def __init__(self, **settings: Any) -> None:
        self._hits: list[tuple[OffloadKey, ReqContext]] = []
        super().__init__(**settings)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        result: LookupResult = super().lookup(key, req_context)  # type: ignore[misc]
        if self.watch is not None and self.events is not None:
            if result is LookupResult.HIT:
                self._hits.append((key, req_context))
                if not self.watch.knows(key):
                    found = OffloadingEvent(keys=[key], medium=self.medium, removed=False, locality=self.locality)
                    self.events.append(found)
            elif result is LookupResult.MISS:
                self.watch.missed(key)
        return result

    def take_hits(self) -> list[tuple[OffloadKey, ReqContext]]:
        """The chunks found since the last call, with the request; vLLM begins to promote them."""
        hits, self._hits = self._hits, []
        return hits

    def take_events(self) -> Iterable[OffloadingEvent]:
        for event in super().take_events():  # type: ignore[misc]
            # storing a chunk whose file is there already makes no second copy
            new = event.keys if self.watch is None else self.watch.take(event.keys)
            if new:
                yield replace(event, keys=new)


class ToldFileSystemTier(ToldTier, FileSystemTierManager):
    """vLLM's `fs` tier, watched; its metrics keep the label `fs`."""

    def __init__(self, *, tier_type: str, **settings: Any) -> None:
        super().__init__(tier_type="fs", **settings)
        self.path_of = self.file_mapper.get_file_name

    def shutdown(self) -> None:
        if self.watch is not None:
            self.watch.close()
        super().shutdown()

    def pool(self, names: str) -> str | None:
        """Name the store: equal for engines that find each other's files, wherever they mount it, and only for them.

        A file beside the chunks says which directory it is.

        Args:
            names: what else must be equal for a chunk's file to have the same name.

        Returns:
            None where the directory cannot be written.
        """
        directory = self.file_mapper.base_path
        try:
            identity = _identity(os.path.join(directory, POOL_FILE))
        except OSError as error:
            logger.warning("it cannot be told which engines share %s: %s", directory, error)
            return None
        return hashlib.sha256(f"{identity} {names}".encode()).hexdigest()[:32]


class ToldObjectStoreTier(ToldTier, ObjectStoreSecondaryTierManager):
    """vLLM's `obj` tier, watched; that an object is gone is noticed only by looking it up."""

    def __init__(self, *, tier_type: str, **settings: Any) -> None:
        super().__init__(tier_type="obj", **settings)


def _identity(path: str) -> str:
    """What the file at `path` says; where it is missing, one of the engines makes it."""
    if not os.path.exists(path):
        draft = f"{path}.{secrets.token_hex(8)}"
        with open(draft, "w") as file:
            file.write(secrets.token_hex(16))
        try:
            os.link(draft, path)
        except FileExistsError:
            pass  # another engine was first
        finally:
            os.unlink(draft)
    with open(path) as file:
        return file.read()
