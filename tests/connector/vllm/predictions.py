"""What a picker that hears an engine of `engine.py` expects of it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec

from indexer import PrefixIndex, Prompt, decode_batch, match

from .engine import Batch, Engine

MODEL = "tiny"


class Picker:
    """Its index of one engine, fed with all that the engine ever said."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._index = PrefixIndex()
        self.residency = self._index.publisher("engine", MODEL)
        self._heard = -1
        """Number of the last message."""

    @classmethod
    def of_snapshot(cls, engine: Engine) -> Picker:
        """One that starts now."""
        picker = cls(engine)
        picker._heard, parts = engine.snapshot_parts()
        for batch in parts:
            picker.hear(batch)
        return picker

    def predict(self, tokens: Sequence[int], model: str = MODEL) -> tuple[int, int, int]:
        """Tokens that HBM, CPU RAM and storage would serve now."""
        end = self._engine.next_number()
        for number, batch in self._engine.messages:
            if self._heard < number < end:
                self.hear(batch)
        self._heard = end - 1
        found = match(self._index, Prompt(array("I", tokens).tobytes(), model), [self.residency])
        gpu, cpu, storage, _ = (sum(column) for column in found.tokens([self.residency.block_size]))
        return gpu, cpu, storage

    def hear(self, batch: Batch) -> None:
        decoded = decode_batch(msgspec.msgpack.encode(batch))
        assert not decoded.skipped
        if decoded.notes is not None:
            self.residency.told(decoded.notes)
        self.residency.apply(decoded)
