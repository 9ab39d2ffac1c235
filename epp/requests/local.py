"""Exact tokens from tokenizers in local directories, without holding up other requests.

What is new in a prompt is usually short and is encoded at once. Longer work goes to a few threads, where the encoder
releases the GIL; when too much is queued there, a request is routed unscored rather than late.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import jinja2

from epp.requests.chat import ChatTemplates, Unrenderable
from epp.requests.model import ChatPrompt, InferenceRequest, Prompt
from epp.requests.model_files import TokenizerError
from epp.requests.tokenizer import Plan, Tokenizer, Untokenisable

INLINE_COST = 24_000
"""Plain ASCII characters that may be encoded on the event loop: one to two milliseconds."""
RENDER_INLINE_BYTES = 1 << 20
RENDER_INLINE_PIECES = 1024
"""Chats in larger bodies, or of more pieces, are rendered in a thread."""
MAX_CHARS = 8 << 20
"""Of a request's texts. Nothing longer is encoded in time, and each may take a hundred bytes until it is."""
THREADS = 2
QUEUE = 64
"""Requests that may be in the hands of the threads at once."""

A = TypeVar("A")
R = TypeVar("R")


class Model:
    """One tokenizer and its chat templates. Raises `TokenizerError`."""

    def __init__(self, directory: str | Path) -> None:
        self.tokenizer = Tokenizer(directory)
        try:
            self._templates = ChatTemplates(self.tokenizer.chat_templates(), self.tokenizer.special_tokens())
        except jinja2.TemplateError as error:
            raise TokenizerError(f"{directory}: chat template: {error}") from error

    def written(self, prompt: Prompt) -> str | bytes:
        """The text the engine encodes; ids stay ids. Raises `Unrenderable`."""
        return self._templates.render(prompt) if isinstance(prompt, ChatPrompt) else prompt

    def plan(self, prompt: Prompt, written: str | bytes, special: bool | None) -> Plan:
        """`special`: as the client asked; the engine's own default is yes for texts, no for chats."""
        if isinstance(written, bytes):
            return Plan([written], [], 0)
        return self.tokenizer.plan(written, add_special_tokens=isinstance(prompt, str) if special is None else special)


class LocalTokens:
    """`directories`: model name → tokenizer directory. A single directory serves every model name."""

    def __init__(self, directories: Mapping[str, str]) -> None:
        loaded = {directory: Model(directory) for directory in dict.fromkeys(directories.values())}
        self._models = {name: loaded[directory] for name, directory in directories.items()}
        self._only = next(iter(loaded.values())) if len(loaded) == 1 else None
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="tokens")
        self.queued = 0
        """Requests whose tokens are being made in a thread, or wait for one."""

    @property
    def occupancy(self) -> dict[str, float]:
        """How full what is bounded is, 0..1."""
        tokenizers = [model.tokenizer for model in self._models.values()]
        pieces, words = (max(fills) for fills in zip(*((t.cache_fill, t.words_fill) for t in tokenizers), strict=True))
        return {"queue": self.queued / QUEUE, "pieces": pieces, "words": words}

    async def start(self) -> None:
        """Touch everything once, so that the first request does not pay for it."""
        for model in self._models.values():
            model.tokenizer.encode("warm-up", add_special_tokens=True)
            await self._in_thread(model.tokenizer.encode_batch, ["warm-up"])

    async def stop(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def produce(self, request: InferenceRequest) -> Awaitable[None] | None:
        """Set `request.tokens`, or `request.unscored` to the reason why not; at once where that is quick."""
        model = self._models.get(request.target_model) or self._models.get(request.model) or self._only
        if model is None:
            request.unscored = "no tokenizer for this model"
            return None
        if _takes_long(request):
            return self._later(request, self._render_and_tokenise(request, model))
        try:
            plans = self._plans(request, model, [model.written(prompt) for prompt in request.prompts])
        except (Unrenderable, Untokenisable) as reason:
            request.unscored = str(reason)
            return None
        if sum(plan.cost for plan in plans) > INLINE_COST:
            return self._later(request, self._encode(request, model, plans))
        tokenizer = model.tokenizer
        request.tokens = [tokenizer.finish(plan, tokenizer.encode_inline(plan.pieces)) for plan in plans]
        return None

    def _plans(self, request: InferenceRequest, model: Model, texts: Sequence[str | bytes]) -> list[Plan]:
        if sum(len(text) for text in texts if isinstance(text, str)) > MAX_CHARS:
            raise Untokenisable("prompt too long")
        special = request.add_special_tokens
        return [model.plan(prompt, text, special) for prompt, text in zip(request.prompts, texts, strict=True)]

    async def _render_and_tokenise(self, request: InferenceRequest, model: Model) -> None:
        texts = [await self._in_thread(model.written, prompt) for prompt in request.prompts]
        await self._encode(request, model, self._plans(request, model, texts))

    async def _encode(self, request: InferenceRequest, model: Model, plans: Sequence[Plan]) -> None:
        pieces = [piece for plan in plans for piece in plan.pieces]
        encoded = iter(await self._in_thread(model.tokenizer.encode_batch, pieces))
        request.tokens = [model.tokenizer.finish(plan, [next(encoded) for _ in plan.missing]) for plan in plans]

    async def _later(self, request: InferenceRequest, work: Coroutine[Any, Any, None]) -> None:
        if self.queued >= QUEUE:
            work.close()
            request.unscored = "tokenizer busy"
            return
        self.queued += 1
        try:
            await work
        except (Unrenderable, Untokenisable) as reason:
            request.unscored = str(reason)
        finally:
            self.queued -= 1

    def _in_thread(self, function: Callable[[A], R], argument: A) -> Awaitable[R]:
        return asyncio.get_running_loop().run_in_executor(self._pool, function, argument)


def _takes_long(request: InferenceRequest) -> bool:
    """To render."""
    prompt = request.prompts[0]
    if not isinstance(prompt, ChatPrompt):
        return False
    return len(request.body) > RENDER_INLINE_BYTES or prompt.pieces > RENDER_INLINE_PIECES
