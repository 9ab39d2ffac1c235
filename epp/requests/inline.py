"""Encoding on the event loop: plain ASCII text as words found with `re` and looked up in a dictionary.

Most of what is new in a prompt consists of words seen before. Splitting them off here is several times faster than
handing the text to the tokenizer, but holds the GIL: for a few thousand characters at a time, and for one thread only.
Text that is not plain ASCII goes through the backend, cut out as narrowly as is exact.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

from tokenizers import Tokenizer as Backend

from epp.requests import pretokens
from epp.requests.ids import to_bytes
from epp.requests.segments import any_of

_REMEMBERED = 1 << 16
_SHORT = 64


class InlineEncoder:
    """For byte-level tokenizers that `pretokens` knows, without added tokens that see their neighbours.

    `composes`: the tokenizer normalises text, so that raw text does not show where all added tokens are.
    """

    def __init__(self, backend: Backend, words: pretokens.Words, cut: re.Pattern[str], *, composes: bool) -> None:
        tokens = backend.get_added_tokens_decoder()
        self._raw = _Splitter(token.content for token in tokens.values() if not token.normalized)
        self._normalised = _Splitter(token.content for token in tokens.values() if token.normalized)
        self._token_ids = {token.content: to_bytes([number]) for number, token in tokens.items()}
        self._composes = composes
        self._words = words
        self._cuts = re.compile(f"(?<={cut.pattern})")
        self._word_ids = _Remembered(lambda word: [token.id for token in backend.model.tokenize(_byte_level(word))])
        self._odd_ids = _Remembered(lambda text: backend.encode_batch_fast([text], add_special_tokens=False)[0].ids)

    @property
    def fill(self) -> float:
        """0..1: of what is remembered of words, or of stretches of other text."""
        return max(len(self._word_ids), len(self._odd_ids)) / _REMEMBERED

    def encode(self, text: str) -> bytes:
        """The tokenizer takes out raw tokens first, and looks for the others in what it has made of the rest."""
        return self._around_tokens(self._raw.split(text), self._encode_normalised)

    def _encode_normalised(self, text: str) -> bytes:
        parts = self._normalised.split(text)
        if len(parts) > 1 and self._composes and not text.isascii():
            return self._odd_ids[text]  # what follows a token may compose with its last character
        return self._around_tokens(parts, self._encode_plain)

    def _around_tokens(self, parts: list[str], encode: Callable[[str], bytes]) -> bytes:
        """Every second part is a token."""
        if len(parts) == 1:
            return encode(parts[0])
        return b"".join([self._token_ids[part] if at % 2 else encode(part) for at, part in enumerate(parts)])

    def _encode_plain(self, text: str) -> bytes:
        """`text` holds no added token."""
        if pretokens.PLAIN_ASCII.fullmatch(text):
            return b"".join(map(self._word_ids.__getitem__, self._words.ascii(text)))
        if text.isascii():
            return self._odd_ids[text]
        stretches = ["".join(group) for _, group in groupby(self._cuts.split(text), str.isascii)]
        if len(stretches) == 1:
            return self._odd_ids[text]
        return b"".join(map(self._encode_plain, stretches))


class _Splitter:
    """Finds added tokens. Most are not ASCII, and looking for the others alone in ASCII text takes next to no time."""

    def __init__(self, tokens: Iterable[str]) -> None:
        known = set(filter(None, tokens))
        self._patterns = [re.compile(f"({any_of(some)})") for some in (known, filter(str.isascii, known))]

    def split(self, text: str) -> list[str]:
        """What is around tokens, and tokens, in turn."""
        return self._patterns[text.isascii()].split(text)


class _Remembered(dict[str, bytes]):
    """Short text → ids, filled on demand and emptied when full."""

    def __init__(self, encode: Callable[[str], Sequence[int]]) -> None:
        super().__init__()
        self._encode = encode

    def __missing__(self, text: str) -> bytes:
        ids = to_bytes(self._encode(text))
        if len(text) <= _SHORT:
            if len(self) >= _REMEMBERED:
                self.clear()
            self[text] = ids
        return ids


def _byte_level(text: str) -> str:
    return text.translate(_BYTE_LEVEL)


# Byte-level vocabularies write blanks and control characters as letters from U+0100 on.
_BYTE_LEVEL = {code: chr(0x100 + code) for code in range(0x21)}
