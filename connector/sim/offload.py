"""The scheduler side of offloading: what is stored below HBM, what a request can load back, and the copies under way.

Follows vLLM's OffloadingConnector with its CPU manager, and its tiering manager with a filesystem tier where storage
is on. Only whole chunks are stored, by default only of prompts; a copy takes its time, at least until the end of the
step after the one that decided it. Storage is fed from the CPU tier as soon as a chunk is readable there, and a hit in
storage is first promoted to the CPU tier while the request waits. Copies never fail.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

from connector.events import CPU, STORAGE, BlockStored, Event
from connector.sim.hashing import BlockHash, external_hash
from connector.sim.model import ServiceModel
from connector.sim.requests import Request
from connector.sim.tiers import Lookup, Tier


@dataclass(frozen=True, slots=True)
class OffloadConfig:
    """The tiers below HBM.

    Attributes:
        cpu_chunks: capacity of the CPU tier in chunks; 0 turns offloading off.
        blocks_per_chunk: HBM blocks in a chunk.
        storage_chunks: capacity of the storage tier in chunks; 0 for none, -1 for no limit (nothing is removed).
        prompt_only: leave blocks filled while decoding in HBM.
        self_describing: events name every block of a chunk, with its tokens; else only the chunk's last hash.
    """

    cpu_chunks: int = 0
    blocks_per_chunk: int = 1
    storage_chunks: int = 0
    prompt_only: bool = True
    self_describing: bool = True

    def __post_init__(self) -> None:
        if self.storage_chunks and not self.cpu_chunks:
            raise ValueError("a storage tier needs a CPU tier in front of it")


HBM_ONLY = OffloadConfig()


class Copy(Enum):
    LOAD = auto()
    """CPU to HBM."""
    STORE = auto()
    """HBM to CPU."""
    WRITE = auto()
    """CPU to storage."""
    READ = auto()
    """Storage to CPU."""


@dataclass(slots=True, eq=False)
class Transfer:
    """One copy; `due` is when it is done, None while it has not started."""

    copy: Copy
    request: Request
    keys: list[BlockHash]
    seconds: float
    due: float | None = None


@dataclass(slots=True)
class Progress:
    """One request's offloading so far.

    `used` maps the chunks it touched to their place in the prompt; `asked` holds those that storage was asked for, and
    `answered` says that its answer was acted on.
    """

    stored_chunks: int = 0
    allocated_blocks: int = 0
    transfers: int = 0
    used: dict[BlockHash, int] = field(default_factory=dict)
    asked: set[BlockHash] = field(default_factory=set)
    answered: bool = False


class Offloader:
    """Decides stores and loads step by step; the engine calls in the order of the methods below."""

    def __init__(self, config: OffloadConfig, block_size: int, model: ServiceModel) -> None:
        self.config = config
        self.cpu = Tier(CPU, config.cpu_chunks)
        limit = None if config.storage_chunks < 0 else config.storage_chunks
        self.storage = Tier(STORAGE, limit, locality="LOCAL") if config.storage_chunks else None
        self._block_size = block_size
        self._chunk_tokens = block_size * config.blocks_per_chunk
        self._model = model
        self._progress: dict[Request, Progress] = {}
        self._transfers: list[Transfer] = []
        self._being_loaded: set[BlockHash] = set()

    @property
    def busy(self) -> bool:
        return bool(self._transfers)

    def idle_seconds(self, now: float) -> float:
        """How long nothing happens: until a copy can start, or is done."""
        waits = (0.0 if transfer.due is None else transfer.due - now for transfer in self._transfers)
        return max(min(waits, default=0.0), 0.0)

    def start_step(self, now: float) -> None:
        """Start the copies decided in the last step, and see which storage copies are done."""
        for transfer in self._transfers:
            if transfer.due is None:
                transfer.due = now + transfer.seconds
        for transfer in self._take_done(now, (Copy.WRITE, Copy.READ)):
            self._finish_storage_copy(transfer)

    def match(self, request: Request, local_tokens: int, now: float) -> int | None:
        """How many tokens past `local_tokens` can be loaded; None: ask again in a later step."""
        progress = self._progress.setdefault(request, Progress())
        if progress.transfers:
            return None
        first = local_tokens // self._chunk_tokens
        hits = self._leading_hits(request, first, now)
        if hits is None:
            return None
        gained = (first + len(hits)) * self._chunk_tokens - local_tokens
        if gained < self._chunk_tokens:
            return 0
        return gained if self._being_loaded.isdisjoint(hits) else None

    def load(self, request: Request, local_tokens: int, external_tokens: int, now: float) -> None:
        """Start loading what `match` promised into the request's blocks."""
        progress = self._progress[request]
        end = (local_tokens + external_tokens) // self._chunk_tokens
        first = local_tokens // self._chunk_tokens
        keys = [self._key(request, index) for index in range(first, end)]
        progress.used.update(zip(keys, range(first, end), strict=True))
        progress.stored_chunks = end
        progress.transfers += 1
        self.cpu.pin(keys)
        self._being_loaded.update(keys)
        seconds = self._model.cpu_copy_seconds(external_tokens)
        self._transfers.append(Transfer(Copy.LOAD, request, keys, seconds, due=now + seconds))

    def plan_stores(self, scheduled: Iterable[tuple[Request, int]], finished: Iterable[Request]) -> None:
        """Offer every chunk that this step completes to the CPU tier.

        Args:
            scheduled: requests of this step, with how many of their tokens will be computed at its end.
            finished: requests that ended since the last step; their use of chunks now counts for recency.
        """
        for request, computed in scheduled:
            progress = self._progress.setdefault(request, Progress())
            progress.allocated_blocks = len(request.blocks)
            self._store(request, progress, computed)
        for request in finished:
            ended = self._progress.pop(request, None)
            if ended is not None:
                self._store(request, ended, request.computed)
                self._refresh(ended)

    def finish_step(self, now: float) -> list[Request]:
        """See which HBM copies are done; returns the requests whose blocks are now loaded."""
        loaded: list[Request] = []
        for transfer in self._take_done(now, (Copy.LOAD, Copy.STORE)):
            progress = self._progress.get(transfer.request)
            if progress is not None:
                progress.transfers -= 1
            if transfer.copy is Copy.LOAD:
                self.cpu.unpin(transfer.keys)
                self._being_loaded.difference_update(transfer.keys)
                loaded.append(transfer.request)
            else:
                self.cpu.complete(transfer.keys)
                self._write_through(transfer)
        return loaded

    def take_events(self) -> list[Event]:
        return self.cpu.take_events() + (self.storage.take_events() if self.storage is not None else [])

    def clear(self, *, silently: bool = False) -> None:
        """Empty the CPU tier and drop the copies under way; storage keeps what is completely written."""
        for transfer in self._transfers:
            self._abandon(transfer)
        self._transfers.clear()
        self._progress.clear()
        self._being_loaded.clear()
        self.cpu.clear(silently=silently)

    def _abandon(self, transfer: Transfer) -> None:
        if self.storage is None:
            return
        if transfer.copy is Copy.WRITE:
            self.storage.drop(transfer.keys)
        elif transfer.copy is Copy.READ:
            self.storage.unpin(transfer.keys)

    def _refresh(self, ended: Progress) -> None:
        used = sorted(ended.used, key=ended.used.__getitem__)
        self.cpu.refresh(used)
        if self.storage is not None:
            self.storage.refresh(used)

    def _full_chunks(self, request: Request) -> int:
        return len(request.hashes) // self.config.blocks_per_chunk

    def _key(self, request: Request, index: int) -> BlockHash:
        return request.hashes[(index + 1) * self.config.blocks_per_chunk - 1]

    def _leading_hits(self, request: Request, first: int, now: float) -> list[BlockHash] | None:
        """The leading run of readable chunks from chunk `first` on; None if one of them may become so shortly."""
        progress = self._progress[request]
        answering = bool(progress.asked)
        run: list[BlockHash] = []
        promoted: list[BlockHash] = []
        settled = True
        for index in range(first, self._full_chunks(request)):
            key = self._key(request, index)
            found = self._lookup(key, progress)
            if found is Lookup.MISS and answering and not progress.answered and self._promote(request, index, key):
                promoted.append(key)
                found = Lookup.PENDING
            if found is Lookup.MISS:
                break
            settled &= found is Lookup.HIT
            run.append(key)
        progress.answered |= answering
        if promoted:
            seconds = self._model.storage_copy_seconds(len(promoted) * self._chunk_tokens)
            self._transfers.append(Transfer(Copy.READ, request, promoted, seconds, due=now + seconds))
        return run if settled else None

    def _lookup(self, key: BlockHash, progress: Progress) -> Lookup:
        """Whether the CPU tier has a chunk; storage, where there is one, takes a step to answer for the others."""
        found = self.cpu.lookup(key)
        if found is Lookup.MISS and self.storage is not None and key not in progress.asked:
            progress.asked.add(key)
            return Lookup.PENDING
        return found

    def _promote(self, request: Request, index: int, key: BlockHash) -> bool:
        """Bring a chunk that storage has into the CPU tier, if there is room.

        A request promotes once only: chunks evicted before it could start do not come back, or two requests that
        need more than the CPU tier holds would evict each other's for ever.
        """
        if self.storage is None or self.storage.lookup(key) is not Lookup.HIT or not self.cpu.make_room(1, (key,)):
            return False
        self.storage.pin((key,))
        self.cpu.admit(key, self._announcement(request, index))
        self._progress[request].used[key] = index
        return True

    def _store(self, request: Request, progress: Progress, computed: int) -> None:
        tokens = min(computed, len(request.tokens))
        if self.config.prompt_only:
            tokens = min(tokens, len(request.prompt))
        end = min(
            tokens // self._chunk_tokens,
            progress.allocated_blocks // self.config.blocks_per_chunk,
            self._full_chunks(request),
        )
        if end <= progress.stored_chunks:
            return
        offered = {self._key(request, index): index for index in range(progress.stored_chunks, end)}
        if self._offer(request, progress, offered):
            progress.stored_chunks = end

    def _offer(self, request: Request, progress: Progress, offered: dict[BlockHash, int]) -> bool:
        """Start storing those of the offered chunks that the tier lacks; False if it cannot make room for them."""
        new = [key for key in offered if self.cpu.lookup(key) is Lookup.MISS]
        known = (key for key in offered if self.cpu.lookup(key) is not Lookup.PENDING)
        progress.used.update((key, offered[key]) for key in known)
        if not new:
            return True
        if not self.cpu.make_room(len(new), offered):
            return False
        for key in new:
            self.cpu.admit(key, self._announcement(request, offered[key]))
        progress.transfers += 1
        seconds = self._model.cpu_copy_seconds(len(new) * self._chunk_tokens)
        self._transfers.append(Transfer(Copy.STORE, request, new, seconds))
        return True

    def _write_through(self, store: Transfer) -> None:
        """Start writing freshly stored chunks to storage; what it cannot take is left out."""
        if self.storage is None:
            return
        new = [key for key in store.keys if self.storage.lookup(key) is Lookup.MISS]
        if not new or not self.storage.make_room(len(new), new):
            return
        for key in new:
            self.storage.admit(key, self.cpu.announcement(key))
        self.cpu.pin(new)
        seconds = self._model.storage_copy_seconds(len(new) * self._chunk_tokens)
        self._transfers.append(Transfer(Copy.WRITE, store.request, new, seconds))

    def _finish_storage_copy(self, transfer: Transfer) -> None:
        assert self.storage is not None
        if transfer.copy is Copy.WRITE:
            self.cpu.unpin(transfer.keys)
            self.storage.complete(transfer.keys)
        else:
            self.storage.unpin(transfer.keys)
            self.cpu.complete(transfer.keys)

    def _announcement(self, request: Request, index: int) -> BlockStored:
        per_chunk = self.config.blocks_per_chunk
        if self.config.self_describing:
            return request.stored_event(index * per_chunk, (index + 1) * per_chunk, self._block_size, CPU)
        return BlockStored([external_hash(self._key(request, index))], None, [], 0, None, CPU, None, group_idx=0)

    def _take_done(self, now: float, kinds: Collection[Copy]) -> list[Transfer]:
        """Remove and return the copies of these kinds that are done by `now`, in the order they were decided."""
        done: list[Transfer] = []
        rest: list[Transfer] = []
        for transfer in self._transfers:
            is_done = transfer.copy in kinds and transfer.due is not None and transfer.due <= now
            (done if is_done else rest).append(transfer)
        self._transfers = rest
        return done
