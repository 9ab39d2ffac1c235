"""Exact tokens from the engine's own render endpoints, for where no tokenizer directory is at hand.

The endpoint is one HTTP round trip away and as slow as it is busy, so it is never waited for longer than configured,
never by more requests than `QUEUE` at once, and left alone for a while after several failures in a row. Every failure
routes the request unscored.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import aiohttp
import msgspec

from epp.requests.ids import to_bytes
from epp.requests.model import ChatPrompt, InferenceRequest

CONNECTIONS = 16
QUEUE = 64
FAILURES = 3
PAUSE = 5.0
"""Seconds without calls after `FAILURES` failures in a row."""
WARM_UP_TRIES = 24
WARM_UP_INTERVAL = 5.0
MAX_ANSWER_BYTES = 32 << 20


class _Rendered(msgspec.Struct, gc=False):
    token_ids: list[int]


_chat_decoder = msgspec.json.Decoder(_Rendered)
_completion_decoder = msgspec.json.Decoder(list[_Rendered])
_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


class RenderError(Exception):
    """Why there are no tokens, in a few words that are the same for the same cause."""


class RenderTokens:
    """`model` replaces the client's model name: the endpoint knows base models only. `timeout` is in seconds."""

    def __init__(self, url: str, model: str, timeout: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._url = url.rstrip("/")
        self._model = msgspec.Raw(msgspec.json.encode(model))
        self._timeout = aiohttp.ClientTimeout(total=timeout)
        self._clock = clock
        self._session: aiohttp.ClientSession | None = None
        self._warm_up: asyncio.Task[None] | None = None
        self._failures = 0
        self._paused_until = 0.0
        self.queued = 0
        """Requests that wait for the endpoint."""

    @property
    def occupancy(self) -> dict[str, float]:
        """How full what is bounded is, 0..1."""
        return {"queue": self.queued / QUEUE}

    async def start(self) -> None:
        connector = aiohttp.TCPConnector(limit=CONNECTIONS)
        self._session = aiohttp.ClientSession(timeout=self._timeout, connector=connector)
        self._warm_up = asyncio.create_task(self._warm(), name="render warm-up")

    async def stop(self) -> None:
        if self._warm_up is not None:
            self._warm_up.cancel()
            await asyncio.gather(self._warm_up, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    async def produce(self, request: InferenceRequest) -> None:
        """Set `request.tokens`, or `request.unscored` to the reason why not."""
        if self.queued >= QUEUE:
            request.unscored = "render: busy"
            return
        if self._clock() < self._paused_until:
            request.unscored = "render: paused after failures"
            return
        self.queued += 1
        try:
            tokens = await self._render(request.body, chat=isinstance(request.prompts[0], ChatPrompt))
            if len(tokens) != len(request.prompts):
                raise RenderError("wrong number of prompts")
            request.tokens = tokens
            self._failures = 0
        except RenderError as error:
            request.unscored = f"render: {error}"
            self._failed()
        finally:
            self.queued -= 1

    def _failed(self) -> None:
        self._failures += 1
        if self._failures >= FAILURES:
            self._failures = 0
            self._paused_until = self._clock() + PAUSE

    async def _render(self, body: bytes, *, chat: bool) -> list[bytes]:
        """Raises `RenderError`."""
        answer = await self._post("/v1/chat/completions/render" if chat else "/v1/completions/render", body)
        try:
            rendered = [_chat_decoder.decode(answer)] if chat else _completion_decoder.decode(answer)
            return [to_bytes(prompt.token_ids) for prompt in rendered]
        except (msgspec.DecodeError, RecursionError, OverflowError):
            raise RenderError("unreadable answer") from None

    async def _post(self, path: str, body: bytes) -> bytes:
        if self._session is None:
            raise RenderError("not started")
        headers = {"content-type": "application/json"}
        try:
            async with self._session.post(self._url + path, data=self._with_model(body), headers=headers) as response:
                if response.status != 200:
                    raise RenderError(f"status {response.status}")
                return await _read(response)
        except TimeoutError:
            raise RenderError("timeout") from None
        except aiohttp.ClientError as error:
            raise RenderError(type(error).__name__) from None

    def _with_model(self, body: bytes) -> bytes:
        """All other values go on byte for byte: template fields the picker does not know may matter."""
        fields = _fields_decoder.decode(body)
        if fields.get("model") == self._model:
            return body
        fields["model"] = self._model
        return msgspec.json.encode(fields)

    async def _warm(self) -> None:
        """The first render loads the endpoint's tokenizer; better before the first request than during it."""
        body: dict[str, Any] = {"model": self._model, "messages": [{"role": "user", "content": "warm-up"}]}
        for _ in range(WARM_UP_TRIES):
            try:
                await self._render(msgspec.json.encode(body), chat=True)
                return
            except RenderError:
                await asyncio.sleep(WARM_UP_INTERVAL)


async def _read(response: aiohttp.ClientResponse) -> bytes:
    parts, size = [], 0
    async for part in response.content.iter_any():
        size += len(part)
        if size > MAX_ANSWER_BYTES:
            raise RenderError("answer too large")
        parts.append(part)
    return b"".join(parts)
