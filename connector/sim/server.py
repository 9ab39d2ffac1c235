"""The engine's HTTP surface: what a router and a client use of vLLM's, on one port per engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import msgspec
from aiohttp import web
from prometheus_client import generate_latest

from connector.publisher import Publisher
from connector.sim.api import (
    END_OF_STREAM,
    Answer,
    ApiError,
    Body,
    ChatBody,
    CompletionBody,
    TokenizeBody,
    Usage,
    bad_request,
    decode_body,
)
from connector.sim.hashing import Identity
from connector.sim.metrics import engine_registry
from connector.sim.requests import Request
from connector.sim.runner import Outputs, Runner
from connector.sim.tokens import Codec

MAX_BODY_BYTES = 64 * 2**20
MAX_QUEUED = 10_000
ENCODE_IN_THREAD_FROM = 20_000
"""Characters from which on a prompt is tokenised beside the event loop."""

PROMETHEUS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
VERSION = "0.32.0+sim"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Names:
    """`name` is the engine's own; `model` is what clients ask for, `root` the model behind it."""

    name: str
    model: str
    root: str
    loras: Sequence[str] = ()

    def identity(self, asked: str | None, cache_salt: str | None) -> Identity:
        """What sets a request's blocks apart; raises ApiError (404) for a model that is not served."""
        salt = cache_salt or ""
        if asked is None or asked == self.model:
            return Identity(salt)
        if asked not in self.loras:
            raise ApiError(404, "NotFoundError", f"The model `{asked}` does not exist.", "model")
        return Identity(salt, asked, self.loras.index(asked) + 1)


class Server:
    """Routes and their handlers; give `application` to an aiohttp runner with `handler_cancellation=True`."""

    def __init__(
        self, names: Names, runner: Runner, publisher: Publisher, codec: Codec, *, bytes_per_token: int
    ) -> None:
        self._names = names
        self._runner = runner
        self._publisher = publisher
        self._codec = codec
        self._registry = engine_registry(runner.engine, names.model, bytes_per_token)
        self._started = int(time.time())
        self._count = 0

    def application(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_errors])
        app.on_response_prepare.append(self._sign)
        app.add_routes(
            [
                web.post("/v1/completions", self._completions),
                web.post("/v1/chat/completions", self._chat),
                web.post("/tokenize", self._tokenize),
                web.post("/reset_prefix_cache", self._reset),
                web.get("/health", self._health),
                web.get("/version", self._version),
                web.get("/v1/models", self._models),
                web.get("/metrics", self._metrics),
                web.get("/kv_event_sources", self._event_sources),
            ]
        )
        return app

    # generation

    async def _completions(self, http: web.Request) -> web.StreamResponse:
        body = decode_body(await http.read(), CompletionBody)
        identity = self._names.identity(body.model, body.cache_salt)
        prompts = [await self._encode(prompt, body.add_special_tokens) for prompt in body.prompts()]
        return await self._generate(http, body, identity, prompts, chat=False)

    async def _chat(self, http: web.Request) -> web.StreamResponse:
        body = decode_body(await http.read(), ChatBody)
        identity = self._names.identity(body.model, body.cache_salt)
        prompt = self._render(body.messages, **body.template_options)
        return await self._generate(http, body, identity, [await self._encode(prompt, False)], chat=True)

    async def _generate(
        self, http: web.Request, body: Body, identity: Identity, prompts: list[list[int]], *, chat: bool
    ) -> web.StreamResponse:
        if body.n not in (None, 1):
            raise bad_request("n other than 1 is not simulated", "n")
        outputs: Outputs = asyncio.Queue()
        requests = [self._request(body, identity, prompt, http) for prompt in prompts]
        try:
            self._submit(requests, outputs)
            answer = Answer(self._names.model if body.model is None else body.model, chat)
            if body.stream:
                return await self._stream(http, answer, requests, outputs, usage_chunk=body.wants_usage_chunk)
            return await self._whole(answer, requests, outputs)
        finally:
            for request in requests:
                self._runner.abort(request)

    def _request(self, body: Body, identity: Identity, prompt: list[int], http: web.Request) -> Request:
        self._count += 1
        session = body.session_id or http.headers.get("X-Session-ID")
        return Request(
            f"{self._names.name}-{self._count}", prompt, body.token_limit, identity, session, body.report_reused
        )

    def _submit(self, requests: Sequence[Request], outputs: Outputs) -> None:
        if self._runner.engine.waiting_count + len(requests) > MAX_QUEUED:
            raise ApiError(503, "ServiceUnavailableError", "too many requests are queued")
        try:
            for request in requests:
                self._runner.submit(request, outputs)
        except ValueError as error:
            raise bad_request(str(error)) from error

    async def _whole(self, answer: Answer, requests: list[Request], outputs: Outputs) -> web.Response:
        open_requests = len(requests)
        while open_requests:
            open_requests -= (await outputs.get()).finished
        texts = ["".join(map(self._codec.text, request.tokens[len(request.prompt) :])) for request in requests]
        return web.Response(body=answer.whole(texts, _usage(requests)), content_type="application/json")

    async def _stream(
        self, http: web.Request, answer: Answer, requests: list[Request], outputs: Outputs, *, usage_chunk: bool
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(http)
        index_of = {request: index for index, request in enumerate(requests)}
        if answer.chat:
            await response.write(b"".join(map(answer.opening, index_of.values())))
        open_requests = len(requests)
        while open_requests:
            output = await outputs.get()
            open_requests -= output.finished
            text = self._codec.text(output.token)
            await response.write(answer.piece(index_of[output.request], text, output.finished))
        usage = answer.usage_chunk(_usage(requests)) if usage_chunk else b""
        await response.write(usage + END_OF_STREAM)
        return response

    # tokens

    async def _encode(self, prompt: str | list[int], special: bool) -> list[int]:
        if isinstance(prompt, list):
            return prompt
        if len(prompt) < ENCODE_IN_THREAD_FROM:
            return self._codec.encode(prompt, special=special)
        return await asyncio.to_thread(self._codec.encode, prompt, special=special)

    def _render(self, messages: list[dict[str, object]], **options: object) -> str:
        try:
            return self._codec.render(messages, **options)
        except ValueError as error:
            raise bad_request(str(error), "messages") from error

    async def _tokenize(self, http: web.Request) -> web.Response:
        body = decode_body(await http.read(), TokenizeBody)
        self._names.identity(body.model, None)
        special = body.prompt is not None if body.add_special_tokens is None else body.add_special_tokens
        if body.messages is not None:
            text = self._render(body.messages, tools=body.tools, add_generation_prompt=body.add_generation_prompt)
        elif body.prompt is not None:
            text = body.prompt
        else:
            raise bad_request("either prompt or messages is required")
        tokens = await self._encode(text, special)
        longest = self._runner.engine.config.max_model_len
        return _json({"count": len(tokens), "max_model_len": longest, "tokens": tokens, "token_strs": None})

    # operations

    async def _reset(self, http: web.Request) -> web.Response:
        external = http.query.get("reset_external", "false").lower() in ("true", "1")
        return _json({"success": self._runner.reset_prefix_cache(external)})

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _version(self, _: web.Request) -> web.Response:
        return _json({"version": VERSION})

    async def _models(self, _: web.Request) -> web.Response:
        names = self._names
        entries = [(names.model, names.root, None), *((lora, lora, names.model) for lora in names.loras)]
        models = [self._model(name, root, parent) for name, root, parent in entries]
        return _json({"object": "list", "data": models})

    def _model(self, name: str, root: str, parent: str | None) -> dict[str, object]:
        entry: dict[str, object] = {"id": name, "object": "model", "created": self._started, "owned_by": "vllm"}
        return entry | {"root": root, "parent": parent, "max_model_len": self._runner.engine.config.max_model_len}

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": PROMETHEUS_TYPE})

    async def _event_sources(self, _: web.Request) -> web.Response:
        publisher = self._publisher
        source = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": publisher.endpoint,
            "replay_endpoint": publisher.replay_endpoint,
            "buffer_steps": publisher.buffer_steps,
            "hwm": publisher.hwm,
            "max_queue_size": publisher.max_queue_size,
            "topic": publisher.topic,
        }
        return _json({"0": source})

    async def _sign(self, _: web.Request, response: web.StreamResponse) -> None:
        response.headers["x-sim-engine"] = self._names.name


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ApiError as error:
        return web.Response(status=error.status, body=error.body, content_type="application/json")
    except ConnectionResetError:
        return web.Response()  # the client left while it was written to: nobody reads this


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def _usage(requests: Sequence[Request]) -> Usage:
    return Usage(
        prompt_tokens=sum(len(request.prompt) for request in requests),
        completion_tokens=sum(request.output_count for request in requests),
        cached_tokens=sum(request.cached_tokens for request in requests),
    )
