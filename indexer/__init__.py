"""KV events in, prefix residency out: which endpoint holds which blocks of a prompt, tier by tier."""

from indexer.index import PrefixIndex
from indexer.match import Match, Prompt, match
from indexer.residency import Residency
from indexer.wire import (
    BadPayload,
    Batch,
    BlockRemoved,
    BlocksCleared,
    BlockStored,
    Event,
    Skipped,
    decode_batch,
    parse_topic,
)

__all__ = [
    "BadPayload",
    "Batch",
    "BlockRemoved",
    "BlockStored",
    "BlocksCleared",
    "Event",
    "Match",
    "PrefixIndex",
    "Prompt",
    "Residency",
    "Skipped",
    "decode_batch",
    "match",
    "parse_topic",
]
