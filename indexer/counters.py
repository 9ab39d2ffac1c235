"""What happened to one publisher's stream, as numbers that only go up."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Counters:
    messages: int = 0
    """Live messages, well formed."""
    replayed: int = 0
    malformed: int = 0
    """Messages of either socket whose frames are wrong."""
    unreadable: int = 0
    """Batches whose payload could not be read as a whole."""
    skipped: Counter[str] = field(default_factory=Counter)
    """Events and notes that could not be read, by reason."""
    not_indexed: Counter[str] = field(default_factory=Counter)
    """Events that former residencies did not index, by reason."""
    former: Counter[str] = field(default_factory=Counter)
    """What former residencies counted besides."""
    duplicates: int = 0
    gaps: int = 0
    missed: int = 0
    """Batches in gaps, repaired or not."""
    lost: int = 0
    """Times that what was held had to be forgotten because of a loss."""
    restarts: int = 0
    replays: int = 0
    """Times the replay socket was asked."""
    replays_failed: int = 0
    truncated: int = 0
    """Replays that began later than asked."""
    snapshots: int = 0
    """Taken whole."""
    snapshots_failed: int = 0
    """Asked for and not come whole in time. A publisher that has none to give is not counted."""
    reconnections: int = 0
