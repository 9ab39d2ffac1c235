"""The HBM block pool: which physical block holds what, and which is reused next.

Blocks are reused in the order of one free queue: least recently freed first, blocks without a hash before all others.
A freed block keeps its contents, and can be hit, until it is taken for something new; only then is it evicted. The
same hash can live in several blocks; each copy is announced and removed on its own. Block 0 is vLLM's null block and
is never handed out.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from connector.events import GPU, AllBlocksCleared, BlockRemoved, Event, Hash
from connector.sim.hashing import BlockHash, external_hash


class Block:
    """One physical block: `refs` requests use it; `hash` is set while its contents are addressable."""

    __slots__ = ("block_id", "hash", "refs")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.refs = 0
        self.hash: BlockHash | None = None


class BlockPool:
    """`num_blocks` physical blocks, one of them the null block; `events` collects what the wire must say."""

    def __init__(self, num_blocks: int) -> None:
        self.usable = num_blocks - 1
        self.events: list[Event] = []
        self._free = OrderedDict((block_id, Block(block_id)) for block_id in range(1, num_blocks))
        self._cached: dict[BlockHash, dict[int, Block]] = {}

    @property
    def free_count(self) -> int:
        return len(self._free)

    @property
    def usage(self) -> float:
        """The share of usable blocks that requests hold, 0 to 1."""
        return 1 - len(self._free) / self.usable

    def hits(self, hashes: Sequence[BlockHash], limit: int) -> list[Block]:
        """The blocks that hold the longest leading run of `hashes`, `limit` at most; the oldest copy of each."""
        found: list[Block] = []
        for block_hash in hashes[:limit]:
            copies = self._cached.get(block_hash)
            if copies is None:
                break
            found.append(next(iter(copies.values())))
        return found

    def touch(self, blocks: Iterable[Block]) -> None:
        """Take a reference on blocks that were hit, out of the free queue where they lay in it."""
        for block in blocks:
            if block.refs == 0:
                del self._free[block.block_id]
            block.refs += 1

    def take(self, count: int) -> list[Block]:
        """Hand out `count` blocks from the head of the free queue, evicting what they held."""
        taken = [self._free.popitem(last=False)[1] for _ in range(count)]
        for block in taken:
            self._evict(block)
            block.refs = 1
        return taken

    def cache(self, blocks: Iterable[Block], hashes: Iterable[BlockHash]) -> None:
        """Make the contents of full blocks addressable by their hashes."""
        for block, block_hash in zip(blocks, hashes, strict=True):
            block.hash = block_hash
            self._cached.setdefault(block_hash, {})[block.block_id] = block

    def free(self, blocks: Iterable[Block]) -> None:
        """Drop one reference on each block; `blocks` come tail first, and are reused in that order."""
        unhashed: list[Block] = []
        for block in blocks:
            block.refs -= 1
            if block.refs:
                continue
            if block.hash is None:
                unhashed.append(block)
            else:
                self._free[block.block_id] = block
        for block in reversed(unhashed):
            self._free[block.block_id] = block
            self._free.move_to_end(block.block_id, last=False)

    def clear(self, *, silently: bool = False) -> bool:
        """Forget all contents; refused (False) while any request holds a block. `silently`, as vLLM itself does it, the
        event does not say of what."""
        if self.free_count != self.usable:
            return False
        for block in self._free.values():
            block.hash = None
        self._cached.clear()
        self.events.append(AllBlocksCleared(None if silently else [GPU]))
        return True

    def residency(self) -> Counter[Hash]:
        """How many copies of each hash, in its external form, are addressable."""
        return Counter({external_hash(block_hash): len(copies) for block_hash, copies in self._cached.items()})

    def _evict(self, block: Block) -> None:
        if block.hash is None:
            return
        copies = self._cached[block.hash]
        del copies[block.block_id]
        if not copies:
            del self._cached[block.hash]
        self.events.append(BlockRemoved([external_hash(block.hash)], GPU, group_idx=0))
        block.hash = None
