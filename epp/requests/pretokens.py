"""What a tokenizer's pre-tokenizer lets us do without changing a single token id.

A byte-level BPE merges only inside the "words" its pre-tokenizer makes, so a text may be encoded in parts wherever a
word is certain to end. Proving that for any regular expression is out of reach; but nearly all published tokenizers
put together the same few alternatives. Each alternative listed here has been checked for one property: no way through
it, not even one that fails later, consumes a letter or digit and then a character of `RIGHT`. Where every alternative
is known and whitespace and punctuation are covered, then between such a pair

* a word always ends, whatever stands further left or right;
* the words on the left do not depend on what follows (their matches see the same "no letter, no digit, no blank"),
  and those on the right do not depend on what precedes, as none of the alternatives looks behind.

So cutting there is exact. An alternative that is not listed makes the tokenizer "unknown": slower, never wrong.
For printable ASCII the character classes have one meaning only, so there the words themselves can be found with `re`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

LEFT = (
    "0-9A-Za-z\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u02af\u0391-\u03a1\u03a3-\u03c9\u0410-\u044f\u0621-\u063a\u0641-\u064a"
    "\u0905-\u0939\u0e01-\u0e30\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3"
)
"""Letters and digits that every Unicode version knows as such and that normalisation leaves alone (a regex class)."""

RIGHT = ' \t\r\n!"#$%&()*+,-./:;<=>?@[\\]^`{|}~\u3000\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f'
"""Blanks and punctuation; no apostrophe (contractions), no underscore."""

_CONTRACTIONS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])",
    r"'(?i:[sdmt]|ll|ve|re)",
    *("'s", "'t", "'re", "'ve", "'m", "'ll", "'d"),
)
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_LETTERS = (
    r"[^\r\n\p{L}\p{N}]?\p{L}+",
    r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
    r" ?\p{L}+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+""",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    _CJK,
)
_NUMBERS = (r"\p{N}{1,3}", r"\p{N}", r"\p{N}+", r" ?\p{N}+")
_PUNCTUATION = (
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
    r" ?[^\s\p{L}\p{N}]+",
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
    r" ?[\p{P}\p{S}]+[\r\n]*",
)
_BLANKS = (r"\s*[\r\n]+", r"\s*[\r\n]", r"\s+(?!\S)", r"\s+")
_KNOWN = frozenset((*_CONTRACTIONS, *_LETTERS, *_NUMBERS, *_PUNCTUATION, *_BLANKS))

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""What a ByteLevel pre-tokenizer with `use_regex` splits by."""


@dataclass(slots=True, frozen=True)
class Words:
    """The known stages of a pre-tokenizer; each splits the pieces of the one before."""

    stages: tuple[re.Pattern[str], ...]
    """For text of printable ASCII, tab and line ends only: `findall` gives the pieces of a stage."""

    def ascii(self, text: str) -> list[str]:
        pieces = [text]
        for stage in self.stages:
            pieces = list(chain.from_iterable(map(stage.findall, pieces)))
        return pieces


PLAIN_ASCII = re.compile(r"[\t\n\r -~]*")


def analyse(tokenizer: Mapping[str, Any]) -> Words | None:
    """`tokenizer` is a parsed tokenizer.json. None where any part of it is not known to be safe."""
    if not _plain_bpe(tokenizer["model"]) or not keeps_ascii(tokenizer.get("normalizer")):
        return None
    patterns = _patterns(_flatten(tokenizer.get("pre_tokenizer")))
    if patterns is None:
        return None
    stages = [split_alternatives(pattern) for pattern in patterns]
    if not all(_KNOWN.issuperset(stage) for stage in stages) or not any(map(_covers_right, stages)):
        return None
    return Words(tuple(_ascii_stage(stage) for stage in stages if stage != [_CJK]))


def cut_pattern(added_tokens: Iterable[str], *, normalised: bool) -> re.Pattern[str]:
    """Matches the last character before a place where text may be cut: no added token can straddle it."""
    right = set(RIGHT) - (set("<=>") if normalised else set())  # these three compose with a following overlay
    inside = re.compile(f"[{LEFT}](.)", re.DOTALL)
    for token in added_tokens:
        right -= {follower for at in range(len(token)) if (found := inside.match(token, at)) for follower in found[1]}
    return re.compile(f"[{LEFT}](?=[{re.escape(''.join(sorted(right)))}])")


def first_text_matters(tokenizer: Mapping[str, Any]) -> bool:
    """Whether text after an added token may be treated differently from text at the start."""
    return any(part["type"] == "Metaspace" for part in _flatten(tokenizer.get("pre_tokenizer")))


def keeps_ascii(normalizer: Mapping[str, Any] | None) -> bool:
    """No normalizer, or one (NFC) that leaves ASCII alone and may be applied part by part at our cuts."""
    if normalizer is None:
        return True
    if normalizer["type"] == "Sequence":
        return all(keeps_ascii(part) for part in normalizer["normalizers"])
    return bool(normalizer["type"] == "NFC")


def composes(normalizer: Mapping[str, Any] | None) -> bool:
    """Whether a normalizer that keeps ASCII is there at all: some files have an empty sequence."""
    if normalizer is None:
        return False
    return normalizer["type"] != "Sequence" or any(map(composes, normalizer["normalizers"]))


def _plain_bpe(model: Mapping[str, Any]) -> bool:
    odd = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
    return model.get("type") == "BPE" and not any(model.get(name) for name in odd)


def _flatten(pre_tokenizer: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if pre_tokenizer is None:
        return []
    if pre_tokenizer["type"] == "Sequence":
        return [leaf for part in pre_tokenizer["pretokenizers"] for leaf in _flatten(part)]
    return [pre_tokenizer]


def _patterns(parts: Sequence[Mapping[str, Any]]) -> list[str] | None:
    """The regular expressions of Splits that end in a ByteLevel; None for anything else."""
    if not parts or parts[-1]["type"] != "ByteLevel" or parts[-1].get("add_prefix_space"):
        return None
    patterns = [_split_pattern(part) for part in parts[:-1]]
    if parts[-1].get("use_regex", True):
        patterns.append(_GPT2)
    return None if None in patterns else [pattern for pattern in patterns if pattern is not None]


def _split_pattern(part: Mapping[str, Any]) -> str | None:
    if part["type"] == "Digits":
        return r"\p{N}" if part.get("individual_digits") else r"\p{N}+"
    if part["type"] != "Split" or part.get("behavior") != "Isolated" or part.get("invert"):
        return None
    pattern = part["pattern"].get("Regex")
    return None if pattern is None else pattern.replace("\r", r"\r").replace("\n", r"\n")


def split_alternatives(pattern: str) -> list[str]:
    """Cut a regular expression at its outermost `|`."""
    alternatives, depth, in_class, start, at = [], 0, False, 0, 0
    while at < len(pattern):
        char = pattern[at]
        if char == "\\":
            at += 1
        elif in_class:
            in_class = char != "]"
        elif char == "[":
            in_class = True
        elif char in "()":
            depth += 1 if char == "(" else -1
        elif char == "|" and depth == 0:
            alternatives.append(pattern[start:at])
            start = at + 1
        at += 1
    return [*alternatives, pattern[start:]]


def _covers_right(stage: Sequence[str]) -> bool:
    return r"\s+" in stage and not set(_PUNCTUATION).isdisjoint(stage)


_ASCII_CLASSES = {
    "L": "A-Za-z",
    "Lu": "A-Z",
    "Ll": "a-z",
    "N": "0-9",
    "P": r"!\"#%&'()*,\-./:;?@\[\\\]_{}",
    "S": r"$+<=>\^`|~",
    "M": "",
    "Lt": "",
    "Lm": "",
    "Lo": "",
}


def _ascii_stage(alternatives: Sequence[str]) -> re.Pattern[str]:
    """What no alternative matches stays together, up to the next match, as one piece."""
    matches = "|".join(map(_in_ascii, alternatives))
    digits_only = len(alternatives) == 1 and alternatives[0].startswith(r"\p{N}")
    return re.compile(f"{matches}|[^0-9]+" if digits_only else rf"{matches}|(?:(?!{matches})[\s\S])+")


def _in_ascii(pattern: str) -> str:
    """Replace Unicode classes by what they hold of ASCII."""
    out, in_class = [], False
    for part in re.findall(r"\\p\{\w+\}|\\.|[\s\S]", pattern):
        if part.startswith(r"\p"):
            characters = _ASCII_CLASSES[part[3:-1]]
            out.append(characters if in_class else f"[{characters}]")
            continue
        in_class = part == "[" or (in_class and part != "]")
        out.append(part)
    return "".join(out)
