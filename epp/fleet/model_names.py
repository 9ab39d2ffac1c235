"""What a model's name in a request means, as the engines' own lists (`GET /v1/models`) say: the base model, or an
adapter, whose cache is its own (pure).

Of a name that no list has, nothing is to be expected: the engine will refuse it, or load an adapter for it. Where no
engine gives a list, names mean what they meant without one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from enum import Enum

import msgspec

MAX_NAMES = 1024
"""Of one engine; what it lists beyond is not read."""
MAX_NAME = 512
_SERVES_ANY_NAME = "sglang"
"""Who owns the models of engines that answer to any name with their base model, but to `base:adapter`."""


class Kind(Enum):
    BASE = "base"
    """A base model, or another name of one."""
    ADAPTER = "adapter"
    UNLISTED = "unlisted"
    """There are lists, or soon will be, and it is in none."""
    UNKNOWN = "unknown"
    """There are no lists."""


@dataclass(slots=True, frozen=True)
class ModelList:
    bases: frozenset[str] = frozenset()
    adapters: Mapping[str, str] = field(default_factory=dict)
    """Name → what the engine loaded it from; "" = not said."""
    any_name: bool = False
    """The engine answers to names that it does not list, with its base model."""


class _Card(msgspec.Struct, gc=False):
    id: str
    root: str | None = None
    parent: str | None = None
    owned_by: str | None = None


class _Page(msgspec.Struct, gc=False):
    data: list[msgspec.Raw]


_decode_page = msgspec.json.Decoder(_Page).decode
_decode_card = msgspec.json.Decoder(_Card).decode


def read_models(page: bytes) -> ModelList:
    """Raises ValueError if the page names no model. A card that cannot be read is left out."""
    try:
        raw_cards = _decode_page(page).data
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"no list of models: {error}") from error
    cards = [card for raw in raw_cards[:MAX_NAMES] if (card := _read_card(raw)) is not None]
    if not cards:
        raise ValueError("an empty list of models")
    return ModelList(
        bases=frozenset(card.id for card in cards if not _is_adapter(card)),
        adapters={card.id: card.root or "" for card in cards if _is_adapter(card)},
        any_name=any(card.owned_by == _SERVES_ANY_NAME for card in cards),
    )


def _read_card(raw: msgspec.Raw) -> _Card | None:
    try:
        card = _decode_card(raw)
    except (msgspec.DecodeError, RecursionError):
        return None
    return card if 0 < len(card.id) <= MAX_NAME else None


def _is_adapter(card: _Card) -> bool:
    """Adapters say what they adapt; base models and their aliases have no parent."""
    return bool(card.parent) and card.parent != card.id


class ModelNames:
    """The lists of all engines, by whatever identifies them."""

    def __init__(self, repointed: Callable[[str], None] = lambda name: None) -> None:
        self.missed = 0
        """How often an unlisted name was asked for: a list may be out of date."""
        self._repointed = repointed
        """Told of each adapter's name that an engine uses for another adapter than before."""
        self._lists: dict[Hashable, ModelList] = {}
        self._pending: set[Hashable] = set()
        self._sources: dict[Hashable, dict[str, str]] = {}
        """What each engine's adapters were last loaded from, with those it has unloaded: their blocks may remain."""
        self._bases: Counter[str] = Counter()
        self._adapters: Counter[str] = Counter()
        self._any_name = 0

    def __len__(self) -> int:
        """Engines whose list is known."""
        return len(self._lists)

    def kind(self, name: str) -> Kind:
        if name in self._adapters:  # first: who has it as an adapter does not share the base model's cache
            return Kind.ADAPTER
        if name in self._bases:
            return Kind.BASE
        if not self._lists and not self._pending:
            return Kind.UNKNOWN
        if self._any_name and ":" not in name:
            return Kind.BASE
        self.missed += 1
        return Kind.UNLISTED

    def asked(self, engine: Hashable) -> None:
        """Its list is on its way."""
        self._pending.add(engine)

    def failed(self, engine: Hashable) -> None:
        """It gives no list now. What it listed before stays."""
        self._pending.discard(engine)

    def listed(self, engine: Hashable, models: ModelList) -> None:
        self._pending.discard(engine)
        if models == self._lists.get(engine):
            return
        self._drop(engine)
        self._lists[engine] = models
        self._bases.update(models.bases)
        self._adapters.update(models.adapters.keys())
        self._any_name += models.any_name
        self._compare(engine, models)

    def forget(self, engine: Hashable) -> None:
        """It has left."""
        self._pending.discard(engine)
        self._sources.pop(engine, None)
        self._drop(engine)

    def _drop(self, engine: Hashable) -> None:
        former = self._lists.pop(engine, None)
        if former is not None:
            self._bases -= Counter(former.bases)
            self._adapters -= Counter(former.adapters.keys())
            self._any_name -= former.any_name

    def _compare(self, engine: Hashable, models: ModelList) -> None:
        sources = self._sources.setdefault(engine, {})
        moved = [name for name, source in models.adapters.items() if sources.get(name, source) != source]
        if len(sources) > MAX_NAMES:
            sources.clear()
        sources.update(models.adapters)
        for name in moved:
            self._repointed(name)
