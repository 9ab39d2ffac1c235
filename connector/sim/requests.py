"""One request as the engine sees it: its tokens, how far they are computed, and the blocks that hold them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from connector.events import BlockStored
from connector.sim.blocks import Block
from connector.sim.hashing import NOBODY, BlockHash, Identity, extend_hashes, external_hash


class Phase(Enum):
    """Where a request stands; `LOADED` has its blocks filled from a lower tier and waits to run."""

    WAITING = auto()
    LOADING = auto()
    LOADED = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Request:
    """Constructed by the caller with the first group of fields; the rest is the engine's.

    `script` fixes the first output tokens (recordings replayed); `report_reused` asks for BlockStored events of
    prefix hits too (vLLM's `kv_cache_report_mode: full`).
    """

    request_id: str
    prompt: Sequence[int]
    max_tokens: int
    identity: Identity = NOBODY
    session_id: str | None = None
    report_reused: bool = False
    script: Sequence[int] = ()

    phase: Phase = Phase.WAITING
    tokens: list[int] = field(init=False)
    hashes: list[BlockHash] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    computed: int = 0
    """Tokens whose KV is, or will be at the end of the step under way, in `blocks`."""
    cached_blocks: int = 0
    """How many of `blocks` are addressable by hash."""
    cached_tokens: int = 0
    """Prompt tokens that were not computed because a tier held them: what usage reports."""
    preemptions: int = 0
    answer_state: int = 0
    arrived_at: float = 0.0

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def output_count(self) -> int:
        return len(self.tokens) - len(self.prompt)

    @property
    def prefilling(self) -> bool:
        """More than the last token is still to be computed."""
        return self.computed < len(self.tokens) - 1

    def append(self, token: int, block_size: int) -> None:
        self.tokens.append(token)
        self.extend_hashes(block_size)

    def extend_hashes(self, block_size: int) -> None:
        extend_hashes(self.hashes, self.tokens, block_size, self.identity)

    def stored_event(self, first: int, end: int, block_size: int, medium: str) -> BlockStored:
        """The event that says the request's blocks `first` to `end` (exclusive) are now in `medium`."""
        return BlockStored(
            block_hashes=[external_hash(block_hash) for block_hash in self.hashes[first:end]],
            parent_block_hash=external_hash(self.hashes[first - 1]) if first else None,
            token_ids=self.tokens[first * block_size : end * block_size],
            block_size=block_size,
            lora_id=self.identity.lora_id,
            medium=medium,
            lora_name=self.identity.lora_name or None,
            group_idx=0,
            kv_cache_spec_kind="full_attention",
        )

    def gpu_stored_event(self, first: int, end: int, block_size: int) -> BlockStored:
        """As `stored_event`, with the keys that only HBM events carry."""
        event = self.stored_event(first, end, block_size, "GPU")
        event.extra_keys = [self.identity.event_keys(index) for index in range(first, end)]
        event.session_id = self.session_id
        return event
