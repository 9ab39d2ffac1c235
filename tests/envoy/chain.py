"""The whole chain in real processes: simulated engines, the picker, and an Envoy of each profile in front of it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import grpc
import msgspec
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from epp.toolbox.bootstrap import BootstrapOptions, Profile, render
from epp.toolbox.demo import model
from epp.toolbox.demo.fleet import Engine, fetch_json, start_envoy
from epp.toolbox.processes import Child, Children, free_ports

from .conftest import HOST, ext_proc_index, http_filters, manager

READY_S = 20.0
POLL_S = 0.02
ONLY = "x-only"
"""Request header whose value becomes the subset hint, as a gateway would set it."""
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
_ids = itertools.count()


async def start_engines(children: Children, name: str, *arguments: str, count: int = 1) -> tuple[Child, list[Engine]]:
    """In one process. Of 16-token blocks, and chunks of 4 blocks; 50 times as fast as the engine they stand for."""
    child = await children.start(name, [
        sys.executable, "-m", "connector.sim", f"--engines={count}", f"--name={name}",
        f"--model={model.NAME}", "--blocks-per-chunk=4", "--max-num-seqs=32", "--speed=50", *arguments,
    ])  # fmt: skip

    async def announced() -> list[Engine] | None:
        lines = child.output.read_text().split("\n")[:-1]
        return [msgspec.json.decode(line, type=Engine) for line in lines] if len(lines) == count else None

    return child, await child.until(announced, READY_S)


@dataclass(frozen=True)
class Reply:
    id: str
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def engine(self) -> str:
        """Name of the simulated engine that answered; "" = none did."""
        return self.headers.get("x-sim-engine", "")

    @property
    def text(self) -> str:
        [choice] = self.json["choices"]
        return choice["message"]["content"] if "message" in choice else choice["text"]

    @property
    def cached_tokens(self) -> int:
        return self.json["usage"]["prompt_tokens_details"]["cached_tokens"]

    @property
    def error(self) -> str:
        return self.json["error"]["message"]


class Chain:
    """A picker process, an Envoy of each wanted profile, and what a client and an operator do with them."""

    def __init__(self, children: Children, http: aiohttp.ClientSession, directory, *arguments: str) -> None:
        self.children = children
        self.http = http
        self.urls: dict[Profile, str] = {}
        self.directory = directory
        self._arguments = arguments
        self._grpc, self._health, self._metrics = free_ports(3)
        self._starts = itertools.count()
        self.picker = None

    # the processes

    async def start_picker(self, *, feeds: int | None = None) -> None:
        """Ready = it says so, and hears so many engines."""
        self.picker = await self.children.start(f"picker-{next(self._starts)}", [
            sys.executable, "-m", "epp.cli", f"--bind={HOST}", "--secure-serving=false", f"--grpc-port={self._grpc}",
            f"--grpc-health-port={self._health}", f"--metrics-port={self._metrics}", *self._arguments,
        ])  # fmt: skip
        await self.picker.until(self._serves, READY_S)
        if feeds is not None:
            await self.hears(feeds)

    async def _serves(self) -> bool | None:
        try:
            await self.page("/healthz")
        except aiohttp.ClientError:
            return None
        return "ready" in self.picker.log.read_text() or None

    async def end_picker(self) -> int:
        """Asks it to stop as Kubernetes does, and gives its exit code."""
        self.picker.signal_group(signal.SIGTERM)

        async def ended() -> int | None:
            return self.picker.exit_code

        return await until(ended)

    async def stops_serving(self) -> bool | None:
        """True once its health check tells gateways to look elsewhere."""
        async with grpc.aio.insecure_channel(f"{HOST}:{self._health}") as channel:
            answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        return answer.status == health_pb2.HealthCheckResponse.NOT_SERVING or None

    async def start_envoy(self, profile: Profile, **options: Any) -> None:
        port, admin = free_ports(2)
        bootstrap = render(
            BootstrapOptions(
                profile=profile, listen=f"{HOST}:{port}", picker=f"{HOST}:{self._grpc}", secure=False, admin_port=admin,
                **options,
            )
        )  # fmt: skip
        manager(bootstrap)["preserve_external_request_id"] = True
        http_filters(bootstrap).insert(ext_proc_index(bootstrap), _HINT_FROM_HEADER)
        path = self.directory / f"envoy-{profile.value}.json"
        path.write_text(json.dumps(bootstrap))
        await start_envoy(self.children, self.http, path, admin)
        self.urls[profile] = f"http://{HOST}:{port}"

    # the client

    @contextlib.asynccontextmanager
    async def request(self, method, path, *, profile=Profile.BUFFERED, only="", headers=None, **arguments):
        headers = {"x-request-id": f"test-{next(_ids)}", **(headers or {}), **({ONLY: only} if only else {})}
        async with self.http.request(method, self.urls[profile] + path, headers=headers, **arguments) as response:
            yield response

    async def send(self, method, path, **arguments) -> Reply:
        async with self.request(method, path, **arguments) as response:
            sent = response.request_info.headers["x-request-id"]
            return Reply(sent, response.status, response.headers, await response.read())

    async def complete(self, prompt, *, max_tokens=4, profile=Profile.BUFFERED, only="", **fields) -> Reply:
        body = {"model": model.NAME, "prompt": prompt, "max_tokens": max_tokens, **fields}
        return await self.send("POST", COMPLETIONS, json=body, profile=profile, only=only)

    async def chat(self, messages, *, max_tokens=4, profile=Profile.BUFFERED, only="", **fields) -> Reply:
        body = {"model": model.NAME, "messages": messages, "max_tokens": max_tokens, **fields}
        return await self.send("POST", CHAT, json=body, profile=profile, only=only)

    # the operator

    async def page(self, path: str) -> Any:
        return await fetch_json(self.http, f"http://{HOST}:{self._metrics}{path}")

    async def decision(self, reply: Reply, *, among: int = 1000, poll_s: float = POLL_S) -> dict[str, Any]:
        """Of a request, once it is over. It must be `among` so many of the newest."""

        async def found() -> dict[str, Any] | None:
            decisions = (await self.page(f"/debug/decisions?limit={among}"))["decisions"]
            return next((d for d in decisions if d["id"] == reply.id and d["outcome"]), None)

        return await until(found, poll_s=poll_s)

    async def endpoints(self) -> dict[str, dict[str, Any]]:
        """By name."""
        return {endpoint["name"]: endpoint for endpoint in (await self.page("/debug/endpoints"))["endpoints"]}

    async def hears(self, feeds: int) -> None:
        async def heard() -> bool | None:
            states = [feed["state"] for feed in (await self.page("/debug/feeds"))["feeds"]]
            return states == ["live"] * feeds or None

        await until(heard)

    async def subscribes(self) -> bool | None:
        """True once it is connected to every engine's events."""
        connected = (await self.metrics()).total("llm_d_epp_kv_cache_events_active_subscribers")
        return connected == len(await self.endpoints()) or None

    async def settled(self) -> None:
        """Until the engines have had nothing to say for a while: copies to CPU RAM go on after an answer."""
        seen, rounds = None, 0
        while rounds < 4:
            await asyncio.sleep(POLL_S)
            now = [(feed["endpoint"], feed["last_seq"]) for feed in (await self.page("/debug/feeds"))["feeds"]]
            seen, rounds = now, rounds + 1 if now == seen else 0

    async def metrics(self) -> Metrics:
        async with self.http.get(f"http://{HOST}:{self._metrics}/metrics") as response:
            return Metrics(await response.text())

    async def until_idle(self) -> None:
        """Until no request counts as in flight, anywhere it is shown."""

        async def idle() -> bool | None:
            counted = await self.in_flight()
            return not any(counted.values()) or None

        try:
            await until(idle)
        except TimeoutError:
            raise AssertionError(f"still in flight: {await self.in_flight()}") from None

    async def in_flight(self) -> dict[str, float]:
        metrics, endpoints = await self.metrics(), (await self.endpoints()).values()
        shown = ("inflight_requests", "inflight_tokens", "request_running")
        return {
            **{name: sum(metrics.values(f"llm_d_epp_{name}")) for name in shown},
            "endpoints' requests": sum(endpoint["inflight_requests"] for endpoint in endpoints),
            "endpoints' tokens": sum(endpoint["inflight_tokens"] for endpoint in endpoints),
        }


class Metrics:
    """A page of metrics."""

    def __init__(self, page: str) -> None:
        self.page = page
        self._samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]

    def values(self, name: str, /, **labels: str) -> list[float]:
        return [s.value for s in self._samples if s.name == name and labels.items() <= s.labels.items()]

    def total(self, name: str, /, **labels: str) -> float:
        """0 where there is no such sample."""
        return sum(self.values(name, **labels))

    def since(self, before: Metrics) -> Callable[..., float]:
        """`moved(name, **labels)`: how much a total has grown."""
        return lambda name, /, **labels: self.total(name, **labels) - before.total(name, **labels)


async def until(probe, timeout_s: float = 10.0, *, poll_s: float = POLL_S):
    """The first answer of `probe` but None."""
    async with asyncio.timeout(timeout_s):
        while (answer := await probe()) is None:  # noqa: ASYNC110
            await asyncio.sleep(poll_s)
        return answer


_HINT_FROM_HEADER = {
    "name": "envoy.filters.http.header_to_metadata",
    "typed_config": {
        "@type": "type.googleapis.com/envoy.extensions.filters.http.header_to_metadata.v3.Config",
        "request_rules": [
            {
                "header": ONLY,
                "on_header_present": {
                    "metadata_namespace": "envoy.lb.subset_hint",
                    "key": "x-gateway-destination-endpoint-subset",
                },
                "remove": True,
            }
        ],
    },
}
