"""What the demo's clients say and when: seeded plans and the histories that turn them into request bodies. Pure.

Two kinds of traffic, both at once. *Conversations*: chat, a shared system prompt, a history that grows by the engine's
own answers. *Bursts*: completions over a long shared document, several at the same moment. What is asked afterwards,
one request after another, is in `moves`.

Sizes are in words here; what they come to in tokens is counted with the model's tokenizer (`distinct_tokens`).
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

PERSONAS = 6
CONVERSATIONS_PER_S = 20.0
"""Chat requests a second that the plan aims at, over all conversations."""
BURSTS_PER_S = 1.6
NEW_DOCUMENT_SHARE = 0.25
THINK_S = (2.0, 5.0)
SERVICE_GUESS_S = 0.4
"""What the plan assumes an answer takes, to place the following turn; the driver waits for the real answer."""
RAMP_S = 4.0
STREAMED_SHARE = 0.75
MAX_TOKENS = (12, 24)

_VOCABULARY = (
    "account address after again agent always amount answer apply area argument array attach balance batch before "
    "block branch buffer build cache cancel carry change charge check choose client close code column commit compare "
    "complete config connect contain copy count create credit customer data date decide default delay deliver deploy "
    "describe detail device different direct document domain draft early edge empty engine entry error estimate event "
    "every example expect export extend factor failure field figure file filter final first follow format forward "
    "found frame free from function future general group handle header history holder hour image import include index "
    "input inside install invoice issue item join keep kernel known label large later layer length level limit line "
    "list load local logic long machine manager many match matter measure memory message method middle minute mode "
    "model month more move name need network never next node normal notice number object offer offset open option "
    "order other output owner package page paid part path payment person place plan point policy port prefix present "
    "price process product profile prompt queue quick quiet range rate reach read reason record region release remove "
    "repeat reply report request reset result return review right round route rule sample save scale scan schema "
    "second section select send server service session share ship short signal simple since single size small source "
    "space split stage start state step still stock store story stream subject submit switch system table target task "
    "team test text their there thread ticket tier time token total trace track transfer tree type under union unit "
    "until update usage user value version view volume wait warm week where which while window with without word "
    "work world write yard year yield zone"
)
WORDS = _VOCABULARY.split()


class Style(Enum):
    CHAT = "chat"
    TEXT = "completion"
    TOKENS = "completion (token ids)"


@dataclass(frozen=True, slots=True)
class Turn:
    text: str
    think_s: float
    """Between the previous answer (or the session's start) and this turn."""
    max_tokens: int
    stream: bool


@dataclass(frozen=True, slots=True)
class Session:
    """One client: an opening that others may share, then turns one after another."""

    name: str
    style: Style
    start_s: float
    opening: str
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    sessions: tuple[Session, ...]

    @property
    def requests(self) -> int:
        return sum(len(session.turns) for session in self.sessions)


@dataclass(slots=True)
class History:
    """What was said so far in one session, and the request bodies that follow from it."""

    style: Style
    opening: str
    said: list[str] = field(default_factory=list)
    """User, assistant, user …"""

    def say(self, text: str) -> None:
        self.said.append(text)

    def copy(self) -> History:
        return History(self.style, self.opening, [*self.said])

    def body(self, model: str, max_tokens: int, *, stream: bool = False, salt: str = "") -> dict[str, Any]:
        body: dict[str, Any] = {"model": model, "max_tokens": max_tokens, "temperature": 0}
        if self.style is Style.CHAT:
            body["messages"] = self.messages()
        elif self.style is Style.TEXT:
            body["prompt"] = self._text()
        else:
            body["prompt"] = list(self._text().encode())  # each byte is a token of a byte-level vocabulary
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if salt:
            body["cache_salt"] = salt
        return body

    def messages(self) -> list[dict[str, str]]:
        roles = ("user", "assistant")
        turns = [{"role": roles[i % 2], "content": text} for i, text in enumerate(self.said)]
        return [{"role": "system", "content": self.opening}, *turns]

    def rendered(self) -> str:
        """The prompt as the engine sees it, as text."""
        return render(self.messages()) if self.style is Style.CHAT else self._text()

    def _text(self) -> str:
        # An answer continues the prompt without a gap, so the blocks that it filled can be found again.
        turns = (text if i % 2 else f"\n\n{text}" for i, text in enumerate(self.said))
        return self.opening + "".join(turns)


def render(messages: Iterable[dict[str, str]]) -> str:
    """ChatML, as the demo model's template writes it."""
    turns = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    return f"{turns}<|im_start|>assistant\n"


def prose(rng: random.Random, words: int) -> str:
    """Sentences without meaning, about `words` words long."""
    sentences = []
    while words > 0:
        length = min(words, rng.randint(6, 14))
        sentences.append(" ".join(rng.choices(WORDS, k=length)).capitalize() + ".")
        words -= length
    return " ".join(sentences)


def plan(seed: int, seconds: float) -> Plan:
    """Concurrent traffic of about `seconds`; the same for the same arguments."""
    rng = random.Random(seed)
    personas = [f"You are assistant {i}. {prose(rng, 380)}" for i in range(PERSONAS)]
    cycle = sum(THINK_S) / 2 + SERVICE_GUESS_S
    count = max(1, round(CONVERSATIONS_PER_S * cycle))
    chats = [_conversation(rng, f"chat-{i}", rng.choice(personas), seconds) for i in range(count)]
    return Plan((*chats, *_bursts(rng, seconds)))


def _conversation(rng: random.Random, name: str, persona: str, seconds: float) -> Session:
    start = at = rng.uniform(0, min(RAMP_S, seconds / 2))
    turns = [_turn(rng, 0.0, rng.randint(150, 500))]
    while (at := at + SERVICE_GUESS_S + (think := rng.uniform(*THINK_S))) < seconds:
        turns.append(_turn(rng, think, rng.randint(60, 240)))
    return Session(name, Style.CHAT, start, persona, tuple(turns))


def _bursts(rng: random.Random, seconds: float) -> Iterator[Session]:
    documents = [_document(rng, 0)]
    at, number = rng.expovariate(BURSTS_PER_S), 0
    while at < seconds:
        if rng.random() < NEW_DOCUMENT_SHARE:
            documents.append(_document(rng, len(documents)))
        document = documents[-1] if rng.random() < 0.5 else rng.choice(documents)
        for _ in range(rng.choice((1, 2, 3, 4))):
            question = (_turn(rng, 0.0, rng.randint(15, 40)),)
            yield Session(f"ask-{number}", Style.TEXT, at, document, question)
            number += 1
        at += rng.expovariate(BURSTS_PER_S)


def _document(rng: random.Random, number: int) -> str:
    return f"Document {number}. {prose(rng, rng.randint(700, 1500))}"


def _turn(rng: random.Random, think_s: float, words: int) -> Turn:
    return Turn(prose(rng, words), think_s, rng.randint(*MAX_TOKENS), rng.random() < STREAMED_SHARE)


def final_histories(plan: Plan) -> Iterator[History]:
    """Each session as it stands before its last answer, with stand-ins of `max_tokens` words for the answers."""
    for session in plan.sessions:
        history = History(session.style, session.opening)
        for turn in session.turns[:-1]:
            history.say(turn.text)
            history.say(f" {session.name}" + " reply" * turn.max_tokens)
        history.say(session.turns[-1].text)
        yield history


def distinct_tokens(prompts: Iterable[Sequence[int]], block_size: int) -> int:
    """Tokens in different prefix blocks: what a cache must hold to keep all of it once."""
    seen: set[int] = set()
    for prompt in prompts:
        key = 0
        for start in range(0, len(prompt) - block_size + 1, block_size):
            key = hash((key, *prompt[start : start + block_size]))
            seen.add(key)
    return len(seen) * block_size
