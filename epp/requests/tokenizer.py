"""A model's own tokenizer, from a local directory, giving exactly the ids the engine will compute.

Encoding is in two steps, so that the caller decides where the work runs: `plan` finds what was seen before (cheap, on
the event loop), `encode_inline` or `encode_batch` encodes the rest, `finish` remembers and joins. `encode_batch`
touches no shared state and releases the GIL; everything else belongs to one thread.
"""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct
from tokenizers import AddedToken

from epp.requests import model_files, pretokens
from epp.requests.ids import to_bytes
from epp.requests.inline import InlineEncoder
from epp.requests.model_files import TokenizerError, content_of
from epp.requests.segments import AtTokens, AtWords, Cutter, PieceCache, Whole

# One request is one thread's work: splitting a batch over all cores would starve the event loop.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

CACHE_BYTES = 128 << 20
BATCH = 256
"""Pieces that are encoded at once."""
_SLOW_FACTOR = 4
"""What a UTF-8 byte beyond the first of a character costs, in plain ASCII characters."""


class Untokenisable(Exception):
    """This text has no exact ids; the message says why without quoting it."""


class Plan(Struct):
    """One text: the ids known already and the pieces still to be encoded."""

    ids: list[bytes]
    missing: list[tuple[int, bytes, str]]
    """(position in `ids`, cache key, piece)"""
    cost: int
    """Of encoding what is missing, in plain ASCII characters."""

    @property
    def pieces(self) -> list[str]:
        return [piece for _, _, piece in self.missing]


class Tokenizer:
    """`directory` holds tokenizer.json and, for chats, tokenizer_config.json. Raises `TokenizerError`."""

    def __init__(self, directory: str | os.PathLike[str], *, cache_bytes: int = CACHE_BYTES) -> None:
        self.directory = Path(directory)
        path = self.directory / "tokenizer.json"
        description = model_files.read_json(path)
        self.config = model_files.merged_config(self.directory)
        self._backend = model_files.load_backend(path, self.config)
        tokens = list(self._backend.get_added_tokens_decoder().values())
        words = pretokens.analyse(description)
        self._cutter: Cutter
        self._inline: InlineEncoder | None = None
        if words is None or any(map(_reaches, tokens)):
            self._cutter = _coarse_cutter(description, tokens)
        else:
            composes = pretokens.composes(description.get("normalizer"))
            cut = pretokens.cut_pattern(_spellings(tokens), normalised=composes)
            self._cutter = AtWords(cut)
            self._inline = InlineEncoder(self._backend, words, cut, composes=composes)
        self._cache = PieceCache(cache_bytes)
        self._prefix, self._suffix = self._around()

    @property
    def cache_fill(self) -> float:
        """0..1."""
        return self._cache.bytes / self._cache.max_bytes

    @property
    def words_fill(self) -> float:
        """0..1."""
        return self._inline.fill if self._inline else 0.0

    def plan(self, text: str, *, add_special_tokens: bool) -> Plan:
        pieces = self._cutter.cut(text) if text else []
        try:
            keys = self._cache.keys(pieces)
        except UnicodeEncodeError:
            raise Untokenisable("lone surrogate") from None
        known = [self._prefix] if add_special_tokens else []
        missing, cost = [], 0
        for key, piece in zip(keys, pieces, strict=True):
            ids = self._cache.get(key)
            if ids is None:
                missing.append((len(known), key, piece))
                cost += self._cost(piece)
            known.append(ids or b"")
        if add_special_tokens:
            known.append(self._suffix)
        return Plan(known, missing, cost)

    def _cost(self, piece: str) -> int:
        if self._inline is None:
            return 2 * _SLOW_FACTOR * len(piece)
        return len(piece) if piece.isascii() else len(piece) + _SLOW_FACTOR * (len(piece.encode()) - len(piece))

    def encode_inline(self, pieces: Sequence[str]) -> list[bytes]:
        """On the event loop, for a few thousand characters."""
        return [self._inline.encode(piece) for piece in pieces] if self._inline else self.encode_batch(pieces)

    def encode_batch(self, pieces: Sequence[str]) -> list[bytes]:
        """May run in any thread, several at a time."""
        ids: list[bytes] = []
        for at in range(0, len(pieces), BATCH):  # an encoding takes far more memory than its ids
            encodings = self._backend.encode_batch_fast(list(pieces[at : at + BATCH]), add_special_tokens=False)
            ids += [to_bytes(encoding.ids) for encoding in encodings]
        return ids

    def finish(self, plan: Plan, encoded: Iterable[bytes]) -> bytes:
        """Little-endian uint32 ids of the whole text."""
        for (position, key, _), ids in zip(plan.missing, encoded, strict=True):
            plan.ids[position] = ids
            self._cache.put(key, ids)
        return b"".join(plan.ids)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> bytes:
        plan = self.plan(text, add_special_tokens=add_special_tokens)
        return self.finish(plan, self.encode_inline(plan.pieces))

    def chat_templates(self) -> dict[str, str]:
        """By name; the usual only one is called "default". Empty = the model cannot chat."""
        return model_files.chat_templates(self.directory, self.config)

    def special_tokens(self) -> dict[str, str]:
        """What templates may refer to by name, e.g. `bos_token`."""
        return {
            name: text for name in self.config if name.endswith("_token") and (text := content_of(self.config[name]))
        }

    def _around(self) -> tuple[bytes, bytes]:
        """What the tokenizer puts before and after a text, if asked to (BOS, EOS)."""
        bare = self._backend.encode("a", add_special_tokens=False).ids
        full = self._backend.encode("a", add_special_tokens=True).ids
        for start in range(len(full) - len(bare) + 1):
            if full[start : start + len(bare)] == bare:
                return to_bytes(full[:start]), to_bytes(full[start + len(bare) :])
        raise TokenizerError(f"{self.directory / 'tokenizer.json'}: post-processor does more than add special tokens")


def _reaches(token: AddedToken) -> bool:
    return bool(token.lstrip or token.rstrip or token.single_word)


def _spellings(tokens: Sequence[AddedToken]) -> set[str]:
    return {text for token in tokens for text in (token.content, unicodedata.normalize("NFC", token.content))}


def _coarse_cutter(description: Mapping[str, Any], tokens: Sequence[AddedToken]) -> Cutter:
    if pretokens.first_text_matters(description):
        return Whole()
    raw = [token for token in tokens if not token.normalized and token.content]
    return AtTokens(
        (token.content for token in raw if not _reaches(token)), (token.content for token in raw if _reaches(token))
    )
