"""The traffic under which faults happen: a few clients that go on talking, and can be asked to be silent for a while.

Answers are not streamed. A proxy can send a request again for as long as nothing of an answer has come, and of a JSON
answer nothing comes before all of it; what an engine had begun to stream when it died, only the client could ask again.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from epp.toolbox.demo.drive import Client
from epp.toolbox.demo.traffic import History, Style, prose

TALKERS = 10
THINK_S = (0.2, 0.9)
TURNS = (2, 6)
OPENINGS = 5
OPENING_WORDS = (150, 400)
TURN_WORDS = (40, 200)
MAX_TOKENS = (8, 40)
REMEMBERED = 200
"""Requests that can be asked again afterwards."""


class Gate:
    """Lets requests begin, or none."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._inside = 0
        self._empty = asyncio.Event()
        self._empty.set()

    async def opened(self) -> None:
        await self._open.wait()

    @contextmanager
    def inside(self) -> Iterator[None]:
        self._inside += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._inside -= 1
            if not self._inside:
                self._empty.set()

    @asynccontextmanager
    async def closed(self) -> AsyncIterator[None]:
        """Once those inside are done, until the block is left."""
        self._open.clear()
        try:
            await self._empty.wait()
            yield
        finally:
            self._open.set()


@dataclass(frozen=True, slots=True)
class Said:
    """A request that was answered."""

    history: History
    answer: str
    served: str

    def asked_again(self) -> History:
        return self.history.copy()

    def continued(self, text: str) -> History:
        longer = self.history.copy()
        longer.say(self.answer)
        longer.say(text)
        return longer


class Traffic:
    """Talks until cancelled."""

    def __init__(self, client: Client, seed: int) -> None:
        self.gate = Gate()
        self.said: deque[Said] = deque(maxlen=REMEMBERED)
        """The newest last."""
        self._client = client
        self._seed = seed
        rng = random.Random(seed)
        self._openings = [f"Opening {i}. {prose(rng, rng.randint(*OPENING_WORDS))}" for i in range(OPENINGS)]

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(TALKERS):
                group.create_task(self._talk(number), name=f"talker {number}")

    async def _talk(self, number: int) -> None:
        rng = random.Random(self._seed * 1000 + number)
        conversation = 0
        while True:
            conversation += 1
            style = rng.choice((Style.CHAT, Style.TEXT))
            await self._conversation(rng, f"talk-{number}-{conversation}", History(style, rng.choice(self._openings)))

    async def _conversation(self, rng: random.Random, name: str, history: History) -> None:
        for turn in range(rng.randint(*TURNS)):
            await asyncio.sleep(rng.uniform(*THINK_S))
            await self.gate.opened()
            with self.gate.inside():
                history.say(prose(rng, rng.randint(*TURN_WORDS)))
                call = await self._client.ask(f"{name}-{turn}", history, rng.randint(*MAX_TOKENS), stream=False)
            if call.failed:
                return
            self.said.append(Said(history.copy(), call.text, call.served))
            history.say(call.text)
