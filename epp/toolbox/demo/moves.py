"""What the demo asks one request after another, where every prediction must be exact: seeded moves. Pure.

The moves are chosen so that each way in which a prefix can be found or lost occurs, in HBM and in CPU RAM. They run on
a fleet that concurrent traffic has filled: a *return* to it finds its beginning in HBM, or in CPU RAM, or in HBM and
then in CPU RAM. New prompts, long ones above all, push others out of HBM, and a part of the moves goes back to what
was left alone longest, which by then only CPU RAM holds.

A salted prompt is a history of its own: it is first computed anew, and what continues it finds it under its salt.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from epp.toolbox.demo.traffic import Session, Style, prose

MAX_TOKENS = (1, 4, 20)
"""The longest fills a block of its own."""
WORDS = {Style.CHAT: (20, 160), Style.TEXT: (20, 160), Style.TOKENS: (10, 40)}
"""Of a new turn, at least and at most: token ids are bytes, so more tokens a word."""
FLOOD_WORDS = (900, 1000)
LEFT_ALONE_SHARE = 0.5
"""Of the moves that go back to a history: how many go to the one that was left alone longest."""


class Action(Enum):
    """What a move does, each with its own way to be predicted wrongly."""

    OPEN = "new prompt"
    REPEAT = "the same prompt again"
    EXTEND = "history plus answer plus a new turn"
    SALT = "a known prompt under a cache_salt"
    FLOOD = "a long new prompt that pushes others out of HBM"
    RETURN = "a session of the concurrent traffic goes on"


_WEIGHTS = {
    Action.OPEN: 10,
    Action.REPEAT: 20,
    Action.EXTEND: 25,
    Action.SALT: 8,
    Action.FLOOD: 14,
    Action.RETURN: 25,
}


@dataclass(frozen=True, slots=True)
class Move:
    action: Action
    history: str
    """Name of the history that the move opens or continues."""
    source: str
    """Name of the history that SALT and RETURN start from; else empty."""
    style: Style
    opening: str
    text: str
    max_tokens: int
    stream: bool
    salt: str = ""


def exact_moves(seed: int, count: int, sessions: Sequence[Session]) -> list[Move]:
    """`count` moves: a new prompt of each style, then all kinds; `sessions` are those that RETURN can go on with."""
    rng = random.Random(seed ^ 0xE8AC7)
    persona = f"You answer exactly. {prose(rng, 160)}"
    moves: list[Move] = []
    last: dict[str, Move] = {}  # of each history; the one that was left alone longest first
    for number in range(count):
        action = rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0] if number >= len(Style) else Action.OPEN
        if action is Action.RETURN:
            move = _return(rng, f"exact-{number}", rng.choice(sessions))
        elif action is Action.FLOOD:
            move = _flood(rng, f"exact-{number}", persona)
        elif action is Action.OPEN:
            move = _open(rng, f"exact-{number}", persona, len(last))
        else:
            move = _again(rng, action, f"exact-{number}", _known(rng, last))
        last.pop(move.history, None)
        last[move.history] = move
        moves.append(move)
    return moves


def _known(rng: random.Random, last: Mapping[str, Move]) -> Move:
    if rng.random() < LEFT_ALONE_SHARE:
        return next(iter(last.values()))
    return rng.choice(list(last.values()))


def _open(rng: random.Random, name: str, persona: str, opened: int) -> Move:
    style = list(Style)[opened % len(Style)]
    return _move(rng, Action.OPEN, name, style, WORDS[style], opening=persona)


def _flood(rng: random.Random, name: str, persona: str) -> Move:
    """It begins as the other prompts do, so it is sent where they are, and pushes them out however many pods there
    are."""
    style = rng.choice((Style.CHAT, Style.TEXT))
    return _move(rng, Action.FLOOD, name, style, FLOOD_WORDS, opening=persona)


def _return(rng: random.Random, name: str, session: Session) -> Move:
    return _move(rng, Action.RETURN, name, session.style, WORDS[session.style], source=session.name)


def _again(rng: random.Random, action: Action, name: str, known: Move) -> Move:
    if action is Action.SALT:
        salt = f"tenant-{rng.randint(1, 2)}"
        return _move(rng, action, name, known.style, WORDS[known.style], source=known.history, salt=salt)
    return _move(rng, action, known.history, known.style, WORDS[known.style], salt=known.salt)


def _move(
    rng: random.Random, action: Action, history: str, style: Style, words: tuple[int, int], *,
    source: str = "", opening: str = "", salt: str = "",
) -> Move:  # fmt: skip
    text = prose(rng, rng.randint(*words))
    return Move(action, history, source, style, opening, text, rng.choice(MAX_TOKENS), rng.random() < 0.5, salt)
