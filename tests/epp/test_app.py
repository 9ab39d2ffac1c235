"""The whole picker: in this process on free ports, and as the `epp` program."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from aiohttp import web
from grpc_health.v1 import health_pb2, health_pb2_grpc

from epp import app as module
from epp.app import App, StartError
from epp.config.errors import ConfigError
from epp.fleet.model_names import Kind
from epp.options import Options
from epp.toolbox.processes import free_ports
from epp.wire import METHOD, SERVICE
from proto import ext_proc_pb2 as pb

ENGINE = "127.0.0.1:9"
CONFIG = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins: [{type: queue-scorer}, {type: prefix-cache-scorer}]
dataLayer: {injectDefaults: false}
schedulingProfiles: [{name: default, plugins: [{pluginRef: queue-scorer}, {pluginRef: prefix-cache-scorer}]}]
"""
FROM_A_FILE = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins: [{{type: file-discovery, parameters: {{path: {path}, watchFile: true}}}}, {{type: queue-scorer}}]
dataLayer: {{injectDefaults: false, discovery: {{pluginRef: file-discovery}}}}
schedulingProfiles: [{{name: default, plugins: [{{pluginRef: queue-scorer}}]}}]
"""
WITH_CURVE = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- {{type: token-producer}}
- {{type: precise-prefix-cache-producer, parameters: {{kvEventsConfig: {{curve: {{serverKeyFile: {path}}}}}}}}}
- {{type: queue-scorer}}
schedulingProfiles: [{{name: default, plugins: [{{pluginRef: queue-scorer}}]}}]
"""
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def options(**fields: Any) -> Options:
    free = {"grpc_port": 0, "grpc_health_port": 0, "metrics_port": 0}
    local = {"bind": "127.0.0.1", "secure_serving": False, "config_text": CONFIG, "endpoints": (ENGINE,)}
    return Options(**{**free, **local, **fields})


@contextlib.asynccontextmanager
async def running(**fields: Any) -> AsyncIterator[App]:
    app = App(options(**fields))
    await app.start()
    try:
        yield app
    finally:
        await app.stop()


@pytest.fixture
async def app() -> AsyncIterator[App]:
    async with running() as app:
        yield app


def message(**fields: Any) -> bytes:
    return pb.ProcessingRequest(**fields).SerializeToString()


def headers(end_of_stream: bool = False, **values: str) -> pb.HttpHeaders:
    header_map = pb.HeaderMap(headers=[pb.HeaderValue(key=k, raw_value=v.encode()) for k, v in values.items()])
    return pb.HttpHeaders(headers=header_map, end_of_stream=end_of_stream)


GET = message(request_headers=headers(end_of_stream=True, **{":method": "GET", ":path": "/v1/models"}))
POST = message(request_headers=headers(**{":method": "POST", ":path": "/v1/completions"}))
BODY = message(request_body=pb.HttpBody(body=b'{"model": "m", "prompt": "hello"}', end_of_stream=True))
ANSWER = message(response_headers=headers(**{":status": "200", "content-type": "text/event-stream"}))
ANSWER_END = message(response_body=pb.HttpBody(body=b"data: [DONE]\n\n", end_of_stream=True))


def call(channel: grpc.aio.Channel) -> Any:
    return channel.stream_stream(f"/{SERVICE}/{METHOD}")()


async def reply(stream: Any, *messages: bytes) -> pb.ProcessingResponse:
    """The first reply after these messages."""
    for each in messages:
        await stream.write(each)
    return pb.ProcessingResponse.FromString(await stream.read())


def destination(response: pb.ProcessingResponse) -> str:
    (mutation,) = [
        option.header.raw_value.decode()
        for option in response.request_headers.response.header_mutation.set_headers
        if option.header.key == "x-gateway-destination-endpoint"
    ]
    metadata = response.dynamic_metadata.fields["envoy.lb"].struct_value.fields["x-gateway-destination-endpoint"]
    assert metadata.string_value == mutation
    return mutation


async def health(port: int, service: str = "") -> int:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return int((await stub.Check(health_pb2.HealthCheckRequest(service=service))).status)


async def page(app: App, path: str) -> str:
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{app.ports['metrics']}{path}") as got:
        assert got.status == 200
        return await got.text()


class TestRunning:
    @pytest.mark.parametrize("port", ["grpc", "grpc_health"])
    async def test_it_is_ready_on_both_ports(self, app: App, port: str) -> None:
        assert await health(app.ports[port]) == SERVING
        assert await health(app.ports[port], SERVICE) == SERVING

    async def test_a_request_gets_a_route_and_leaves_its_traces(self, app: App) -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{app.ports['grpc']}") as channel:
            stream = call(channel)
            assert destination(await reply(stream, POST, BODY)) == ENGINE
            assert (await reply(stream)).HasField("request_body")
            assert len(app.in_flight) == 1
            await reply(stream, ANSWER)
            await reply(stream, ANSWER_END)
            await stream.done_writing()
            assert await stream.code() is grpc.StatusCode.OK
        assert len(app.in_flight) == 0
        (decision,) = json.loads(await page(app, "/debug/decisions"))["decisions"]
        assert (decision["model"], decision["chosen"]) == ("m", ENGINE)
        assert decision["outcome"]["termination"] == "natural"
        assert set(decision["candidates"][0]["scorers"]["queue-scorer"]) == {"raw", "weight", "weighted"}
        metrics = await page(app, "/metrics")
        assert 'llm_d_epp_request_total{fairness_id="default-flow",model_name="m"' in metrics
        assert 'llm_d_epp_ready_endpoints{name="epp"} 1.0' in metrics

    async def test_the_pages_on_the_metrics_port(self, app: App) -> None:
        assert json.loads(await page(app, "/healthz")) == {"status": "ok", "synced": True, "endpoints": 1}
        assert json.loads(await page(app, "/debug/feeds")) == {"feeds": []}
        assert "queue-scorer" in json.loads(await page(app, "/debug/plugins/state"))["plugins"]

    async def test_a_bad_request_is_answered_at_once(self, app: App) -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{app.ports['grpc']}") as channel:
            broken = message(request_body=pb.HttpBody(body=b"{", end_of_stream=True))
            response = await reply(call(channel), POST, broken)
            assert response.immediate_response.status.code == 400

    async def test_the_size_limit_is_honoured(self) -> None:
        async with running(max_body_bytes=20) as app:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{app.ports['grpc']}") as channel:
                response = await reply(call(channel), POST, BODY)
            assert response.immediate_response.status.code == 413

    async def test_endpoints_from_a_file(self, tmp_path: Path) -> None:
        path = tmp_path / "endpoints.yaml"
        path.write_text("endpoints: [{name: a, address: 127.0.0.1, port: 9}]")
        async with running(config_text=FROM_A_FILE.format(path=path), endpoints=()) as app:
            assert [endpoint.address for endpoint in app.fleet.endpoints] == [ENGINE]

    async def test_tls_is_on_by_default(self) -> None:
        async with running(secure_serving=True) as app:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{app.ports['grpc']}") as channel:
                with pytest.raises(grpc.aio.AioRpcError):
                    await reply(call(channel), GET)
            assert await health(app.ports["grpc_health"]) == SERVING

    async def test_ipv6(self) -> None:
        async with running(bind="::1") as app, grpc.aio.insecure_channel(f"[::1]:{app.ports['grpc']}") as channel:
            assert destination(await reply(call(channel), GET)) == ENGINE

    async def test_too_short_a_scrape_interval_is_raised(self, caplog: pytest.LogCaptureFixture) -> None:
        App(options(config_text="", refresh_metrics_interval=0.001))
        assert "scraped every 0.05 s, not every 0.001 s" in caplog.text


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that somebody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.fixture
def fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Why the picker did not start with these options."""
    monkeypatch.setattr(module.logs, "configure", lambda *_: None)

    def fails(**fields: Any) -> str:
        assert module.run(options(**fields)) == 1
        told = capsys.readouterr()
        assert told.out == ""
        return told.err.splitlines()[-1]

    return fails


class TestNotStarting:
    def test_a_bad_configuration_names_the_path_and_the_nearest_name(self, fails: Callable[..., str]) -> None:
        complaint = fails(config_text=CONFIG.replace("pluginRef: queue-scorer", "pluginRef: queue-scorr"))
        assert complaint.startswith("epp: ")
        assert "pluginRef: " in complaint
        assert 'did you mean "queue-scorer"?' in complaint

    def test_no_source_of_endpoints(self, fails: Callable[..., str]) -> None:
        complaint = fails(endpoints=())
        assert complaint.startswith("epp: no source of endpoints: ")
        assert "--endpoints=" in complaint

    def test_two_sources_of_endpoints(self, fails: Callable[..., str], tmp_path: Path) -> None:
        complaint = fails(config_text=FROM_A_FILE.format(path=tmp_path / "endpoints.yaml"))
        assert complaint == "epp: --endpoints and dataLayer.discovery exclude each other"

    def test_an_endpoint_that_is_none(self, fails: Callable[..., str]) -> None:
        assert fails(endpoints=("engine-0:8000",)) == "epp: --endpoints: 'engine-0:8000' is not ip:port"

    def test_an_endpoints_file_that_is_not_there(self, fails: Callable[..., str], tmp_path: Path) -> None:
        path = tmp_path / "endpoints.yaml"
        complaint = fails(config_text=FROM_A_FILE.format(path=path), endpoints=())
        assert complaint.startswith("epp: ")
        assert f"No such file or directory: '{path}'" in complaint

    def test_an_endpoints_file_that_is_wrong(self, fails: Callable[..., str], tmp_path: Path) -> None:
        path = tmp_path / "endpoints.yaml"
        path.write_text("endpoints: [{name: a, adress: 127.0.0.1, port: 9}]")
        complaint = fails(config_text=FROM_A_FILE.format(path=path), endpoints=())
        assert "endpoints[0]" in complaint

    def test_a_configuration_file_that_cannot_be_read(self, fails: Callable[..., str], tmp_path: Path) -> None:
        path = tmp_path / "config.yaml"
        assert fails(config_file=str(path)).startswith("epp: --config-file: ")
        path.write_bytes(b"\xff\xfe")
        assert fails(config_file=str(path)).startswith("epp: --config-file: ")
        assert fails(config_file=str(tmp_path)).startswith("epp: --config-file: ")

    def test_a_bad_certificate_directory(self, fails: Callable[..., str], tmp_path: Path) -> None:
        complaint = fails(secure_serving=True, cert_path=str(tmp_path))
        assert complaint == f"epp: cannot start: [Errno 2] No such file or directory: '{tmp_path}/tls.key'"
        for name in ("tls.key", "tls.crt"):
            (tmp_path / name).write_text("not PEM")
        assert fails(secure_serving=True, cert_path=str(tmp_path)).startswith("epp: cannot start: ")

    @pytest.mark.parametrize("port", ["grpc_port", "grpc_health_port", "metrics_port"])
    def test_a_port_in_use(self, fails: Callable[..., str], taken: int, port: str) -> None:
        complaint = fails(**{port: taken})
        assert complaint.startswith("epp: cannot start: ")
        assert str(taken) in complaint
        assert "in use" in complaint

    def test_a_key_file_that_is_none(self, fails: Callable[..., str], tmp_path: Path) -> None:
        (tmp_path / "engine.key").write_text("-----BEGIN PUBLIC KEY-----")
        complaint = fails(config_text=WITH_CURVE.format(path=tmp_path / "engine.key"))
        assert complaint.startswith("epp: cannot start: kvEventsConfig.curve: ")
        assert f"{tmp_path}/engine.key: not a CURVE key file" in complaint

    async def test_what_had_started_is_stopped(self, taken: int) -> None:
        (free,) = free_ports(1)
        with pytest.raises(StartError):
            await App(options(grpc_health_port=taken, metrics_port=free)).start()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", free)

    async def test_also_after_a_bad_endpoints_file(self, tmp_path: Path) -> None:
        path = tmp_path / "endpoints.yaml"
        path.write_text("endpoints: 7")
        app = App(options(config_text=FROM_A_FILE.format(path=path), endpoints=()))
        with pytest.raises(ConfigError):
            await app.start()
        assert app._started == []


class Program:
    """The `epp` program, until the end of the test."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[dict[str, Any]] = []

    async def until(self, text: str) -> dict[str, Any]:
        """The first line of its log, from here on, with that message."""
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            if not line.startswith(b"{"):
                raise AssertionError(line.decode())
            self.lines.append(json.loads(line))
            if self.lines[-1]["msg"] == text:
                return self.lines[-1]
        raise AssertionError(self.lines)


@pytest.fixture
async def epp() -> AsyncIterator[Callable[..., Any]]:
    programs: list[Program] = []

    async def start(*arguments: str) -> Program:
        free = ["--bind=127.0.0.1", "--grpc-port=0", "--grpc-health-port=0", "--metrics-port=0"]
        path = Path(sys.executable).with_name("epp")
        pipe = asyncio.subprocess.PIPE
        programs.append(Program(await asyncio.create_subprocess_exec(path, *free, *arguments, stderr=pipe)))
        return programs[-1]

    yield start
    for program in programs:
        if program.process.returncode is None:
            program.process.kill()
            await program.process.communicate()


class TestProgram:
    async def test_sigterm_drains(self, epp: Callable[..., Any]) -> None:
        program = await epp("--secure-serving=false", f"--endpoints={ENGINE}", f"--config-text={CONFIG}", "--tracing")
        ready = await program.until("ready")
        async with (
            grpc.aio.insecure_channel(f"127.0.0.1:{ready['grpc']}") as channel,
            grpc.aio.insecure_channel(f"127.0.0.1:{ready['grpc_health']}") as health_channel,
        ):
            watch = health_pb2_grpc.HealthStub(health_channel).Watch(health_pb2.HealthCheckRequest())
            assert (await watch.read()).status == SERVING
            stream = call(channel)
            assert destination(await reply(stream, GET)) == ENGINE
            program.process.send_signal(signal.SIGTERM)
            assert (await watch.read()).status == NOT_SERVING
            assert await health(ready["grpc"]) == NOT_SERVING
            assert (await reply(stream, ANSWER)).HasField("response_headers")
            assert (await reply(stream, ANSWER_END)).HasField("response_body")
            await stream.done_writing()
            assert await stream.code() is grpc.StatusCode.OK
            watch.cancel()
        assert (await program.until("stopped"))["in_flight"] == 0
        assert await program.process.wait() == 0
        assert "without effect: --tracing: not in this version" in [line["msg"] for line in program.lines]

    async def test_sigint_stops_at_once(self, epp: Callable[..., Any]) -> None:
        program = await epp(f"--endpoints={ENGINE}", f"--config-text={CONFIG}", "--drain-timeout=1h")
        await program.until("ready")
        program.process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(program.process.wait(), 10) == 0

    async def test_a_bad_configuration_ends_it_with_1(self, epp: Callable[..., Any]) -> None:
        program = await epp(
            f"--endpoints={ENGINE}", f"--config-text={CONFIG.replace('plugins: [{type', 'plugns: [{type')}"
        )
        _, complaint = await program.process.communicate()
        assert program.process.returncode == 1
        assert b'epp: plugns: unknown field; did you mean "plugins"?' in complaint
        assert b"Traceback" not in complaint


PRECISE = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- {type: PRODUCER}
- {type: prefix-cache-scorer, parameters: {prefixMatchInfoProducerName: PRODUCER}}
- {type: models-data-source, parameters: {path: /models}}
dataLayer: {injectDefaults: false, sources: [{pluginRef: models-data-source}]}
schedulingProfiles: [{name: default, plugins: [{pluginRef: prefix-cache-scorer}]}]
"""


@pytest.mark.parametrize("producer", ["precise-prefix-cache-producer", "approx-prefix-cache-producer"])
async def test_engines_are_asked_for_their_models_where_predictions_depend_on_them(producer: str) -> None:
    asked = asyncio.Event()

    async def models(request: web.Request) -> web.Response:
        asked.set()
        return web.Response(body=b'{"data": [{"id": "m"}, {"id": "poet", "parent": "m"}]}')

    server = web.Application()
    server.router.add_get("/models", models)
    runner = web.AppRunner(server, access_log=None, shutdown_timeout=0.01)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    address = f"127.0.0.1:{runner.addresses[0][1]}"
    async with running(endpoints=(address,), config_text=PRECISE.replace("PRODUCER", producer)) as app:
        if "precise" in producer:
            names = app.environment.shared["kv-events"].models
            async with asyncio.timeout(10):
                while names.kind("poet") is not Kind.ADAPTER:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        else:
            assert "kv-events" not in app.environment.shared
    await runner.cleanup()
    assert asked.is_set() is ("precise" in producer)
