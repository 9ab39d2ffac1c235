"""What is tried: a target makes inputs, takes them, and knows what must be true afterwards."""

from __future__ import annotations

from abc import ABC, abstractmethod

from tests.fuzz.source import Source

Script = tuple[bytes, ...]
"""One input: what a peer sends, piece by piece. Most targets take one piece; where states matter, several."""


def refused(error: Exception) -> bool:
    """What `run` returns for a refusal, whose words must not be as many as what it refuses."""
    if len(str(error)) > 1000:
        raise AssertionError(f"a refusal of {len(str(error))} characters: {error!s:.200}")
    return False


class Target(ABC):
    """Made once a process and used for many inputs, so what an input leaves behind shows."""

    share = 1
    """Its part of all inputs, relative to the others'."""

    @abstractmethod
    def script(self, source: Source) -> Script: ...

    @abstractmethod
    def run(self, script: Script) -> bool:
        """True if any of it was of use, False if all was refused as documented. Anything raised is a finding."""

    def close(self) -> None:  # noqa: B027  (most have nothing to close)
        """It is not used any more."""
