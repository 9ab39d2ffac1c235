"""approx-prefix-cache-producer: which endpoint probably holds which prefix, judged by what was sent there.

For engines without KV events. Every endpoint has an LRU of the blocks of the prompts that were routed to it, as large
as its engine's cache is believed to be. Several instances with different capacities stand for several cache tiers.

Where this departs from llm-d's producer of the same name, it does so to be closer to the engine:

- Capacities are in engine blocks (`num_gpu_blocks`, or `lruCapacityPerServer` blocks of `blockSizeTokens`) and are
  converted to this index's entries of 64 tokens; llm-d takes the number over unconverted, four times too much.
- A prompt's last blocks are evicted before its first, as engines free them. What is left is then a usable prefix.
- A match is an unbroken run from the first block, per endpoint.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Annotated

import msgspec
import xxhash

from epp.config.environment import Environment
from epp.config.registry import Parameters, plugin
from epp.fleet.endpoint import Endpoint
from epp.requests.model import InferenceRequest
from epp.scheduling.plugin import PrefixMatch, Scheduling, SchedulingResult

SMALLEST_BLOCK = 64
"""Tokens. Smaller blocks find hardly more and cost more."""

PREFILL = "prefill"

Keys = list[list[int]]
"""Of each prompt of a request, the keys of its blocks; a key stands for the block and all before it."""

Count = Annotated[int, msgspec.Meta(ge=0)]


class ApproxPrefixParameters(Parameters, frozen=True):
    auto_tune: bool = True
    """Take block size and capacity from the engines' metrics where they export them."""
    block_size_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Default 16; blocks of fewer than 64 tokens are put together."""
    block_size: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Deprecated name of blockSizeTokens."""
    max_prefix_tokens_to_match: Count = 131_072
    """0 = maxPrefixBlocksToMatch decides."""
    max_prefix_blocks_to_match: Count = 2_048
    """Deprecated. 0 = no limit."""
    lru_capacity_per_server: Annotated[int, msgspec.Meta(ge=1)] = 31_250
    """Blocks of blockSizeTokens that one endpoint holds, where its metrics do not say (or autoTune is off)."""

    def __post_init__(self) -> None:
        if self.block_size is not None and self.block_size_tokens not in (None, self.block_size):
            raise ValueError("blockSize is the deprecated name of blockSizeTokens; they contradict each other")

    @property
    def configured_block(self) -> int:
        return self.block_size_tokens or self.block_size or 16


class LruIndex:
    """Block key → endpoints that hold it, as a bit mask of slots, with an LRU for each endpoint."""

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}
        self._recent: dict[int, OrderedDict[int, None]] = {}

    def __len__(self) -> int:
        """Entries, counted once for each endpoint."""
        return sum(len(recent) for recent in self._recent.values())

    def insert(self, slot: int, keys: Sequence[int], capacity: int) -> None:
        """`keys` are one prompt's, from the first block. Keeps the most recent `capacity` entries of the endpoint."""
        recent = self._recent.setdefault(slot, OrderedDict())
        holders, bit = self._holders, 1 << slot
        for key in reversed(keys[:capacity]):
            recent[key] = None
            recent.move_to_end(key)
            holders[key] = holders.get(key, 0) | bit
        while len(recent) > capacity:
            self._release(recent.popitem(last=False)[0], bit)

    def remove(self, slot: int) -> None:
        for key in self._recent.pop(slot, ()):
            self._release(key, 1 << slot)

    def run_lengths(self, keys: Sequence[int], candidates: int) -> dict[int, int]:
        """Slot → blocks held without a break from the first, for the slots of the bit mask `candidates`."""
        lengths: dict[int, int] = {}
        alive, holders = candidates, self._holders
        for length, key in enumerate(keys):
            still = alive & holders.get(key, 0)
            if still != alive:
                lengths.update(dict.fromkeys(slots_of(alive ^ still), length))
                alive = still
                if not alive:
                    return lengths
        lengths.update(dict.fromkeys(slots_of(alive), len(keys)))
        return lengths

    def _release(self, key: int, bit: int) -> None:
        left = self._holders[key] & ~bit
        if left:
            self._holders[key] = left
        else:
            del self._holders[key]


def slots_of(mask: int) -> list[int]:
    slots = []
    while mask:
        lowest = mask & -mask
        slots.append(lowest.bit_length() - 1)
        mask ^= lowest
    return slots


def block_keys(tokens: bytes, root: int, block_bytes: int, limit: int) -> list[int]:
    """Keys of the first `limit` blocks. A last, partial block counts: prompts that differ only there are different."""
    digest, key, keys = xxhash.xxh3_64_intdigest, root, []
    for start in range(0, min(len(tokens), limit * block_bytes), block_bytes):
        key = digest(tokens[start : start + block_bytes], key)
        keys.append(key)
    return keys


def root_key(request: InferenceRequest, block: int) -> int:
    """Models, salts and block sizes never share keys."""
    model = xxhash.xxh3_64_intdigest(request.target_model.encode(), block)
    return xxhash.xxh3_64_intdigest(request.cache_salt.encode(), model)


@plugin("approx-prefix-cache-producer", ApproxPrefixParameters)
class ApproxPrefixCacheProducer:
    name: str
    type: str

    def __init__(self, name: str, parameters: ApproxPrefixParameters, environment: Environment) -> None:
        self._parameters = parameters
        self._index = LruIndex()
        self._metrics = environment.telemetry.prefix_indexer(name, self.type, lambda: len(self._index))
        environment.fleet.subscribe(self)

    def requires(self) -> Sequence[str]:
        return ("token-producer",)

    def produce(self, scheduling: Scheduling) -> None:
        if not scheduling.request.tokens:
            return
        block = self._block(scheduling.endpoints)
        keys = self._keys(scheduling, block)
        match = self._match(scheduling, keys, block)
        scheduling.matches[self.name] = match
        scheduling.notes[self.name] = (keys, block)
        self._metrics.matched(max(match.blocks), match.total, block * 4)

    def picked(self, scheduling: Scheduling, result: SchedulingResult) -> None:
        note: tuple[Keys, int] | None = scheduling.notes.get(self.name)
        if note is None:
            return
        keys, block = note
        for profile in (result.target, result.profiles.get(PREFILL)):
            if profile is not None:
                endpoint = profile.picked[0]
                for prompt in keys:
                    self._index.insert(endpoint.slot, prompt, self._capacity(endpoint, block))

    def endpoint_added(self, endpoint: Endpoint) -> None: ...

    def endpoint_updated(self, endpoint: Endpoint) -> None: ...

    def endpoint_removed(self, endpoint: Endpoint) -> None:
        self._index.remove(endpoint.slot)

    def _block(self, endpoints: Sequence[Endpoint]) -> int:
        """Tokens an entry stands for: by the first candidate that reports its block size, else as configured."""
        tuned = endpoints if self._parameters.auto_tune else ()
        reported = next((endpoint.load.block_size for endpoint in tuned if endpoint.load.block_size), 0)
        return max(SMALLEST_BLOCK, reported or self._parameters.configured_block)

    def _capacity(self, endpoint: Endpoint, block: int) -> int:
        """Entries of `block` tokens that the endpoint can hold."""
        load = endpoint.load
        if self._parameters.auto_tune and load.num_blocks and load.block_size:
            return max(1, load.num_blocks * load.block_size // block)
        return max(1, self._parameters.lru_capacity_per_server * self._parameters.configured_block // block)

    def _limit(self, block: int, tokens: int) -> int:
        """Blocks of one prompt that are looked at."""
        parameters = self._parameters
        if parameters.max_prefix_tokens_to_match:
            return parameters.max_prefix_tokens_to_match // block
        return parameters.max_prefix_blocks_to_match or tokens

    def _keys(self, scheduling: Scheduling, block: int) -> Keys:
        """Instances that cut prompts alike share the work."""
        request = scheduling.request
        limit = self._limit(block, request.prompt_tokens)
        note = f"{self.type}/{block}/{limit}"
        keys: Keys | None = scheduling.notes.get(note)
        if keys is None:
            root = root_key(request, block)
            keys = scheduling.notes[note] = [block_keys(tokens, root, block * 4, limit) for tokens in request.tokens]
        return keys

    def _match(self, scheduling: Scheduling, keys: Keys, block: int) -> PrefixMatch:
        candidates = 0
        for endpoint in scheduling.endpoints:
            candidates |= 1 << endpoint.slot
        match = PrefixMatch(
            total=sum(map(len, keys)),
            block_size=block,
            blocks=[0.0] * candidates.bit_length(),
            cached_tokens=[0] * candidates.bit_length(),
        )
        for tokens, prompt in zip(scheduling.request.tokens, keys, strict=True):
            for slot, length in self._index.run_lengths(prompt, candidates).items():
                match.blocks[slot] += length
                match.cached_tokens[slot] += min(length * block, len(tokens) // 4)
        return match
