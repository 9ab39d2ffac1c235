"""Requests that meet the tiers in every way they can be met: what is said, seeded. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from epp.toolbox.demo.traffic import prose

from . import tiny_model

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SALTS = ("", "red", "blue")
_TREES = 8
_CONVERSATIONS = 5
_LONGEST_CHAT_BYTES = 1200
_TOKENS = range(3, 1000)
_ANSWERS = (1, 1, 1, 8, 40)
"""Tokens; 40 fill a block that no prompt had."""


@dataclass(frozen=True, slots=True)
class Ask:
    kind: str
    path: str
    body: dict[str, Any]
    conversation: int = -1


def completion(prompt: str | list[int], *, kind: str = "", max_tokens: int = 1, salt: str = "") -> Ask:
    return Ask(kind, COMPLETIONS, _body(max_tokens, salt) | {"prompt": prompt})


def chat(messages: list[dict[str, str]], *, max_tokens: int = 1, salt: str = "", conversation: int = -1) -> Ask:
    return Ask("chat", CHAT, _body(max_tokens, salt) | {"messages": messages}, conversation)


def _body(max_tokens: int, salt: str) -> dict[str, Any]:
    body = {"model": tiny_model.NAME, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return body | ({"cache_salt": salt} if salt else {})


class Traffic:
    """Prompts of 20 to 400 tokens, in equal shares: token ids and text that share prefixes, and growing conversations.
    `salted`: each with one of three salts, none being one of them."""

    def __init__(self, seed: int, *, salted: bool = False) -> None:
        self._rng = random.Random(seed)
        self._salts = SALTS if salted else SALTS[:1]
        self._trees = [self._tokens(64, 200) for _ in range(_TREES)]
        self._documents = [prose(self._rng, self._rng.randrange(40, 130)) for _ in range(_TREES)]
        self._conversations = [self._opening() for _ in range(_CONVERSATIONS)]
        self._kinds = (self._token_ids, self._text, self._chat)

    def take(self, count: int) -> Iterator[Ask]:
        """An answered chat must be handed to `answered` before the next is taken."""
        for _ in range(count):
            yield self._rng.choice(self._kinds)()

    def answered(self, ask: Ask, text: str) -> None:
        if ask.conversation >= 0:
            self._conversations[ask.conversation].append({"role": "assistant", "content": text})

    def _token_ids(self) -> Ask:
        tree = self._rng.choice(self._trees)
        prompt = tree[: self._rng.randrange(20, len(tree) + 1)]
        prompt += self._tokens(0, 1 + self._rng.choice((0, 0, 5, 40, 70)))
        if self._rng.random() < 0.3:
            self._trees[self._rng.randrange(_TREES)] = prompt[:220]
        return completion(prompt, kind="token ids", max_tokens=self._answer(), salt=self._salt())

    def _text(self) -> Ask:
        words = self._rng.choice(self._documents).split(" ")
        prompt = " ".join(words[: self._rng.randrange(15, len(words) + 1)])
        prompt += prose(self._rng, self._rng.choice((0, 0, 5, 40)))
        if self._rng.random() < 0.3:
            self._documents[self._rng.randrange(_TREES)] = prompt[:900]
        return completion(prompt, kind="text", max_tokens=self._answer(), salt=self._salt())

    def _chat(self) -> Ask:
        number = self._rng.randrange(_CONVERSATIONS)
        messages = self._conversations[number]
        if sum(len(message["content"].encode()) for message in messages) > _LONGEST_CHAT_BYTES:
            messages = self._conversations[number] = self._opening()
        messages.append({"role": "user", "content": prose(self._rng, self._rng.randrange(3, 30))})
        # a conversation keeps its salt, else none of its turns would find the one before
        salt = self._salts[number % len(self._salts)]
        return chat(list(messages), max_tokens=self._answer(), salt=salt, conversation=number)

    def _opening(self) -> list[dict[str, str]]:
        return [{"role": "system", "content": self._rng.choice(self._documents)[:300]}]

    def _tokens(self, least: int, below: int) -> list[int]:
        return self._rng.choices(_TOKENS, k=self._rng.randrange(least, below))

    def _answer(self) -> int:
        return self._rng.choice(_ANSWERS)

    def _salt(self) -> str:
        return self._rng.choice(self._salts)
