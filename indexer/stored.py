"""What a stored event says of its blocks."""

from __future__ import annotations

from msgspec.structs import replace

from indexer.groups import PREFIX_KINDS
from indexer.keys import chain, is_opaque, is_salt, opaque
from indexer.wire import BlockStored


def usable(event: BlockStored) -> BlockStored:
    """An event that has no tokens, or not just its blocks' own: as far as it can be used."""
    size = 4 * event.block_size
    if len(event.tokens) == size * (event.lead + len(event.hashes)):
        return event
    if len(event.tokens) > size * len(event.hashes) and event.kind not in ("", *PREFIX_KINDS):
        # vLLM gives the tokens of blocks that such a group does not keep too, but not their hashes
        return replace(event, tokens=b"")
    return replace(event, block_size=0) if event.tokens else event


def described_size(event: BlockStored) -> int:
    """Tokens a block; 0 where the event does not describe its blocks, and its size may mean anything."""
    return event.block_size if event.tokens or event.kind not in ("", *PREFIX_KINDS) else 0


def says_all(event: BlockStored) -> bool:
    """Do tokens, adapter and extra keys of the event determine its blocks' keys? Off the GPU engines leave extra keys
    out; on it, an event without them is from an engine that has none."""
    return event.extras is not None or event.tier == "gpu"


def keys_after(event: BlockStored, before: int, unit: int) -> list[int]:
    """Keys of the event's blocks, given the key of what is before them. `unit`: tokens that keys stand for, where that
    is not a block; 0 = it is."""
    lead, extras = event.lead, event.extras or {}
    if not unit:
        if not lead:
            return chain(event.tokens, event.block_size, before, extras)
        return chain(event.tokens, event.block_size, before, {lead + i: extra for i, extra in extras.items()})[lead:]
    if is_opaque(before):
        return list(map(opaque, event.hashes))
    salt = {0: extras[0]} if event.parent is None and not lead and is_salt(extras.get(0, b"")) else {}
    step = event.block_size // unit
    keys = chain(event.tokens, unit, before, salt)[step - 1 :: step][lead:]
    media = min(extras.keys() - salt.keys(), default=len(keys))
    # in which of its units a block's media are is not said
    return [*keys[:media], *map(opaque, event.hashes[media:])]
