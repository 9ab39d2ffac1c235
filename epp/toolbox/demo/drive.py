"""The demo's clients: sessions that talk to one HTTP address, and a record of each request as its client saw it.

Latencies are the client's. A streamed answer's first token is the first event that carries one; a JSON answer arrives
whole, so its `first_at` is its `done_at`, and only streamed answers say something about time to first token.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from epp.toolbox.demo.moves import Action, Move
from epp.toolbox.demo.traffic import History, Plan, Session, Style

REQUEST_TIMEOUT_S = 30.0
PATHS = {Style.CHAT: "/v1/chat/completions", Style.TEXT: "/v1/completions", Style.TOKENS: "/v1/completions"}


@dataclass(slots=True)
class Call:
    """One request and what came back. Times are monotonic seconds; tokens are the engine's own `usage`."""

    id: str
    what: str
    """For messages to people; may be empty."""
    style: Style
    prompt: str
    """The prompt as text, rendered as the engine's template renders it."""
    stream: bool
    sent_at: float = 0.0
    first_at: float = 0.0
    done_at: float = 0.0
    status: int = 0
    error: str = ""
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    """None = the answer did not say."""
    text: str = ""
    served: str = ""
    """Name of the engine that answered, if it said so."""

    @property
    def failed(self) -> bool:
        return bool(self.error)


class Client:
    """Sends to `base_url`; every finished call is kept in `calls` and told to `on_done`."""

    def __init__(self, http: aiohttp.ClientSession, base_url: str, model: str, on_done: Callable[[Call], None]) -> None:
        self.calls: list[Call] = []
        self._http = http
        self._base_url = base_url
        self.model = model
        self._on_done = on_done

    async def ask(
        self, name: str, history: History, max_tokens: int, *, stream: bool, salt: str = "", what: str = ""
    ) -> Call:
        """Send what `history` says now. Failures are recorded on the call, not raised."""
        call = Call(name, what, history.style, history.rendered(), stream)
        body = history.body(self.model, max_tokens, stream=stream, salt=salt)
        call.sent_at = time.monotonic()
        try:
            async with self._http.post(
                self._base_url + PATHS[history.style],
                data=json.dumps(body),
                headers={"content-type": "application/json", "x-request-id": call.id},
                timeout=aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S),
            ) as response:
                await _read(response, call)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            call.error = f"{type(error).__name__}: {error}"
        call.done_at = time.monotonic()
        call.first_at = call.first_at or call.done_at
        self.calls.append(call)
        self._on_done(call)
        return call


async def _read(response: aiohttp.ClientResponse, call: Call) -> None:
    call.status = response.status
    call.served = response.headers.get("x-sim-engine", "")
    if response.status != 200:
        call.error = f"HTTP {response.status}: {(await response.text())[:300]}"
        return
    if call.stream:
        async for event in _events(response):
            _take(call, event)
    else:
        _take(call, json.loads(await response.read()))
    if call.cached_tokens is None:
        call.error = "the answer has no usage.prompt_tokens_details.cached_tokens"


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The JSON events of an SSE answer. Raises ValueError if it ends without `[DONE]`."""
    async for line in response.content:
        if line.startswith(b"data:"):
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            yield json.loads(data)
    raise ValueError("the stream ended without [DONE]")


def _take(call: Call, part: dict[str, Any]) -> None:
    """Text and usage of a whole answer, or of one event of a stream. Raises ValueError on an error event."""
    if "error" in part:
        raise ValueError(f"error in the answer: {part['error']}")
    for choice in part.get("choices", ()):
        message = choice.get("delta") or choice.get("message") or {}
        text = choice.get("text") or message.get("content") or ""
        if text and not call.first_at and call.stream:
            call.first_at = time.monotonic()
        call.text += text
    if usage := part.get("usage"):
        call.prompt_tokens = usage.get("prompt_tokens", 0)
        call.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")


async def run_plan(client: Client, plan: Plan, label: str) -> dict[str, History]:
    """All sessions of the plan at once, each in its own time; request ids begin with `label`.

    Returns what was said in each session, by its name.
    """
    async with asyncio.TaskGroup() as group:
        tasks = {s.name: group.create_task(_run_session(client, s, label), name=s.name) for s in plan.sessions}
    return {name: task.result() for name, task in tasks.items()}


async def _run_session(client: Client, session: Session, label: str) -> History:
    await asyncio.sleep(session.start_s)
    history = History(session.style, session.opening)
    for number, turn in enumerate(session.turns):
        await asyncio.sleep(turn.think_s)
        history.say(turn.text)
        call = await client.ask(f"{label}-{session.name}-{number}", history, turn.max_tokens, stream=turn.stream)
        history.say(call.text)
        if call.failed:
            break  # without its answer the conversation cannot go on
    return history


async def run_moves(
    client: Client,
    moves: Sequence[Move],
    earlier: Mapping[str, History],
    label: str,
    settled: Callable[[], Awaitable[None]],
) -> None:
    """One move after another; `settled` returns once all earlier requests' cache events have reached the picker.

    `earlier` are the histories, by name, that moves can return to.
    """
    histories = dict(earlier)
    answers: dict[str, str] = {}
    for number, move in enumerate(moves):
        await settled()
        history = histories[move.history] = _next_history(move, histories, answers)
        what = f"{move.action.value} ({move.style.value})"
        call = await client.ask(
            f"{label}-{number}", history, move.max_tokens, stream=move.stream, salt=move.salt, what=what
        )
        answers[move.history] = call.text


def _next_history(move: Move, histories: Mapping[str, History], answers: Mapping[str, str]) -> History:
    match move.action:
        case Action.OPEN | Action.FLOOD:
            history = History(move.style, move.opening)
        case Action.SALT | Action.RETURN:
            history = histories[move.source].copy()
        case Action.REPEAT | Action.EXTEND:
            history = histories[move.history]
    if move.action is Action.EXTEND:
        history.say(answers[move.history])
    if move.action not in (Action.REPEAT, Action.SALT):
        history.say(move.text)
    return history
