"""Text once encoded is not encoded again: where a text may be cut, and the ids of the pieces seen so far.

A conversation grows at its end, so nearly all of a long prompt has been encoded before. Texts are cut into pieces of a
few thousand characters at places where cutting cannot change the ids (see `pretokens`), always counted from the start,
so that texts which share a beginning share their first pieces.
"""

from __future__ import annotations

import re
import secrets
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Protocol

import xxhash

PIECE_CHARS = 2048


class Cutter(Protocol):
    def cut(self, text: str) -> list[str]:
        """Pieces that, joined, are the text, and whose ids, joined, are the text's ids."""


class Whole:
    """For tokenizers of which nothing is known."""

    def cut(self, text: str) -> list[str]:
        return [text]


class AtWords:
    """Cut at the first certain end of a word after every `PIECE_CHARS` characters."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self.pattern = pattern

    def cut(self, text: str) -> list[str]:
        pieces, start, search = [], 0, self.pattern.search
        while found := search(text, start + PIECE_CHARS):
            pieces.append(text[start : found.end()])
            start = found.end()
        pieces.append(text[start:])
        return pieces


class AtTokens:
    """Cut around added tokens, which the tokenizer itself takes out first, before it looks at the text between.

    A token that reaches out for blanks or asks for word boundaries (`lstrip`, `rstrip`, `single_word`) sees its
    neighbours: a text that holds one is not cut at all.
    """

    def __init__(self, plain: Iterable[str], reaching: Iterable[str]) -> None:
        self._reaching = frozenset(reaching)
        self._tokens = re.compile(f"({any_of({*plain, *self._reaching})})")

    def cut(self, text: str) -> list[str]:
        pieces = self._tokens.split(text)
        if self._reaching and not self._reaching.isdisjoint(pieces[1::2]):
            return [text]
        return [piece for piece in pieces if piece]


def any_of(words: Iterable[str]) -> str:
    """A regular expression for the longest of `words` at a place: a trie, so that thousands cost like one."""
    trie: dict[str, dict[str, object]] = {}
    for word in words:
        node = trie
        for char in word:
            node = node.setdefault(char, {})  # type: ignore[assignment]
        node[""] = {}
    return _trie_pattern(trie) if trie else "(?!)"


def _trie_pattern(node: dict[str, dict[str, object]]) -> str:
    branches = [
        re.escape(char) + _trie_pattern(child)  # type: ignore[arg-type]
        for char, child in node.items()
        if char
    ]
    if not branches:
        return ""
    group = branches[0] if len(branches) == 1 and "" not in node else f"(?:{'|'.join(branches)})"
    return f"{group}?" if "" in node else group


class PieceCache:
    """Ids of pieces, least recently used first to go. Holds hashes of texts, not texts. For one thread only."""

    _OVERHEAD = 200
    """Bytes an entry costs besides its ids."""

    def __init__(self, max_bytes: int) -> None:
        self.bytes = 0
        self.max_bytes = max_bytes
        self._seed = secrets.randbits(64)  # nobody outside can construct two texts of one key
        self._ids: OrderedDict[bytes, bytes] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ids)

    def keys(self, pieces: Sequence[str]) -> list[bytes]:
        digest, seed = xxhash.xxh3_128_digest, self._seed
        return [digest(piece.encode(), seed) for piece in pieces]

    def get(self, key: bytes) -> bytes | None:
        ids = self._ids.get(key)
        if ids is not None:
            self._ids.move_to_end(key)
        return ids

    def put(self, key: bytes, ids: bytes) -> None:
        if key in self._ids or len(ids) + self._OVERHEAD > self.max_bytes:
            return
        self._ids[key] = ids
        self.bytes += len(ids) + self._OVERHEAD
        while self.bytes > self.max_bytes:
            _, evicted = self._ids.popitem(last=False)
            self.bytes -= len(evicted) + self._OVERHEAD
