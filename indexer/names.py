"""Names of models and adapters, and the roots of their chains (pure).

A prompt for a name that is known here matches the blocks of that name only; for any other name, those of the base
model, of which it must be an alias. So names are kept as long as a publisher uses them, and then until there are too
many; the longest unused are given back first. A name that comes back finds what is still held under it, unless some
name was given another meaning meanwhile.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict

from indexer.budget import ENTRY, INT, sized
from indexer.keys import block_key, root_key

MAX_MODELS = 4096
"""Names that are told apart."""
MAX_ADAPTERS = 256
"""Of one publisher; the least recently told makes room. So nobody uses up the names for all."""
NOBODYS = "\0"
"""Stands for all names under which nothing is held."""


class Names:
    """Of all publishers."""

    def __init__(self) -> None:
        self.roots: dict[str, int] = {}
        """Always the same object."""
        self._users: Counter[str] = Counter()
        self._unused = OrderedDict[str, None]()
        """The longest unused first."""
        self._text = 0
        self._renewals = 0
        self.use(NOBODYS)

    @property
    def bytes(self) -> int:
        return sized(self.roots, 4 * INT) + self._text + self._users.total() * ENTRY

    def is_used(self, name: str) -> bool:
        return name in self._users

    def root(self, name: str) -> int | None:
        """It is known from now on; None if there are too many names in use."""
        root = self.roots.get(name)
        if root is None and (len(self.roots) < MAX_MODELS or self._give_back()):
            root = self.roots[name] = self._new_root(name)
            self._unused[name] = None
            self._text += _text_bytes(name)
        return root

    def use(self, name: str) -> int | None:
        """Its root, to be kept until `leave` was called as often; None as for `root`, with nothing to leave then."""
        root = self.root(name)
        if root is not None:
            self._unused.pop(name, None)
            self._users[name] += 1
        return root

    def leave(self, name: str) -> None:
        self._users[name] -= 1
        if not self._users[name]:
            del self._users[name]
            self._unused[name] = None

    def renew(self, name: str) -> None:
        """It means another adapter than before: what is held of it counts no more."""
        self._renewals += 1
        if name in self.roots:
            self.roots[name] = self._new_root(name)

    def _new_root(self, name: str) -> int:
        # a name that was given back meanwhile must not come back with a root it had before it was renewed
        root = root_key(name)
        return block_key(self._renewals.to_bytes(8, "little"), root) if self._renewals else root

    def _give_back(self) -> bool:
        if not self._unused:
            return False
        name, _ = self._unused.popitem(last=False)
        del self.roots[name]
        self._text -= _text_bytes(name)
        return True


class Used:
    """Of one publisher: its base model's name and its adapters'."""

    def __init__(self, names: Names) -> None:
        self.is_forgetful = False
        """Have there been adapters' names that are not known any more? Then an unknown name is no alias."""
        self._names = names
        self._base = ""
        self._adapters = OrderedDict[str, None]()
        """The least recently told first."""

    def base(self, name: str) -> int:
        """Root of the base model of this name ("" = not known), instead of the one before."""
        root = self._names.use(name) if name else None
        if self._base:
            self._names.leave(self._base)
        self._base = "" if root is None else name
        return root_key(name) if root is None else root

    def adapter(self, name: str) -> int | None:
        """Root of an adapter that was told of; None if there are too many names."""
        if name in self._adapters:
            self._adapters.move_to_end(name)
            return self._names.roots[name]
        if len(self._adapters) == MAX_ADAPTERS:
            self._names.leave(self._adapters.popitem(last=False)[0])
            self.is_forgetful = True
        name = sys.intern(name)  # it is one string, however many publishers use it
        root = self._names.use(name)
        if root is None:
            self.is_forgetful = True
        else:
            self._adapters[name] = None
        return root

    def close(self) -> None:
        self.base("")
        for name in self._adapters:
            self._names.leave(name)
        self._adapters.clear()


def _text_bytes(name: str) -> int:
    return INT + 4 * len(name)
