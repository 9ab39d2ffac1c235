"""The gRPC side over loopback, with grpc's own client in Envoy's place."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from pathlib import Path

import grpc
import pytest
import uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc

from epp import tls
from epp.routing import Answer, Route, Termination
from epp.server import ExtProcServer, ServerOptions
from epp.wire import SERVICE
from proto import ext_proc_pb2 as pb
from tests.waiting import until

PROCESS = f"/{SERVICE}/Process"


class Director:
    def __init__(self):
        self.picking = asyncio.Event()
        self.release = asyncio.Event()
        self.release.set()
        self.finished = asyncio.Queue()
        self.picks = 0

    async def pick(self, head, body, subset):
        self.picks += 1
        self.picking.set()
        await self.release.wait()
        return Route("10.0.0.7:8000")

    def answered(self, route, response):
        return Answer()

    def observe(self, route, data, end_of_stream):
        pass

    def finish(self, head, route, outcome):
        self.finished.put_nowait(outcome.termination)


@pytest.fixture
def director():
    return Director()


@pytest.fixture
async def serve(director):
    """Starts servers on free ports; stops them."""
    async with contextlib.AsyncExitStack() as stack:
        yield lambda **options: stack.enter_async_context(serving(director, **options))


@contextlib.asynccontextmanager
async def serving(director, **options):
    defaults = {"port": 0, "health_port": 0, "secure_serving": False, "bind": "127.0.0.1", "quiet_period": 0.01}
    server = ExtProcServer(director, ServerOptions(**defaults | options))
    try:
        await server.start()
        yield server
    finally:
        await server.stop()


@pytest.fixture
async def channel():
    async with contextlib.AsyncExitStack() as stack:

        async def channel(port, credentials=None, host="localhost"):
            target = f"{host}:{port}"
            opened = grpc.aio.secure_channel(target, credentials) if credentials else grpc.aio.insecure_channel(target)
            return await stack.enter_async_context(opened)

        yield channel


def headers(path="/v1/models", end_of_stream=True):
    message = pb.ProcessingRequest()
    message.request_headers.headers.headers.add(key=":path", raw_value=path.encode())
    message.request_headers.end_of_stream = end_of_stream
    return message.SerializeToString()


def body(size):
    return pb.ProcessingRequest(request_body=pb.HttpBody(body=bytes(size), end_of_stream=True)).SerializeToString()


async def ask(call, *messages):
    for message in messages:
        await call.write(message)
    return pb.ProcessingResponse.FromString(await call.read())


async def test_a_request_is_routed(serve, channel, director):
    server = await serve()
    call = (await channel(server.port)).stream_stream(PROCESS)()
    reply = await ask(call, headers())
    assert reply.request_headers.response.header_mutation.set_headers[0].header.raw_value == b"10.0.0.7:8000"
    assert server.in_flight == 1
    await call.done_writing()
    assert await call.code() is grpc.StatusCode.OK
    assert await director.finished.get() is Termination.CLIENT
    assert server.in_flight == 0


async def test_a_cancelled_stream_cancels_the_pick_and_finishes(serve, channel, director):
    server = await serve()
    director.release.clear()
    call = (await channel(server.port)).stream_stream(PROCESS)()
    await call.write(headers())
    await director.picking.wait()
    call.cancel()
    assert await director.finished.get() is Termination.CLIENT
    assert director.finished.empty()


async def test_a_protocol_error_ends_the_stream_with_internal(serve, channel, director, caplog):
    server = await serve()
    call = (await channel(server.port)).stream_stream(PROCESS)()
    await call.write(headers(end_of_stream=False))
    await call.write(headers())
    with pytest.raises(grpc.aio.AioRpcError, match="RequestHeaders in state") as error:
        await call.read()
    assert error.value.code() is grpc.StatusCode.INTERNAL
    assert await director.finished.get() is Termination.ERROR
    assert "protocol error" in caplog.text


async def test_a_body_over_the_limit_is_answered_and_not_cut_off(serve, channel):
    server = await serve(max_body_bytes=5 << 20)
    call = (await channel(server.port)).stream_stream(PROCESS)()
    reply = await ask(call, headers(end_of_stream=False), body((5 << 20) + 1))
    assert reply.immediate_response.status.code == 413


BATCH = 50
BATCHES = 60


@pytest.mark.parametrize("routed", [False, True], ids=["picking", "routed"])
async def test_thousands_of_cancelled_streams_finish_once_each_and_leave_nothing_behind(
    serve, channel, director, routed
):
    server = await serve()
    opened = await channel(server.port)
    await cancelled_streams(opened, director, routed)
    await until(lambda: not server.in_flight)
    tasks, memory = len(asyncio.all_tasks()), resident_bytes()
    for _ in range(BATCHES - 1):
        await cancelled_streams(opened, director, routed)
    await until(lambda: not server.in_flight and len(asyncio.all_tasks()) <= tasks)
    assert director.picks == BATCHES * BATCH
    assert director.finished.empty()
    assert resident_bytes() - memory < 8 << 20


async def cancelled_streams(opened, director, routed):
    (director.release.set if routed else director.release.clear)()
    started = director.picks
    calls = [opened.stream_stream(PROCESS)() for _ in range(BATCH)]
    for call in calls:
        await call.write(headers())
    for call in calls if routed else ():
        await call.read()
    await until(lambda: director.picks == started + BATCH)
    for call in calls:
        call.cancel()
    for _ in calls:
        assert await director.finished.get() is Termination.CLIENT


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_uvloop_does_as_well():
    async def streams():
        director = Director()
        async with serving(director) as server, grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as opened:
            for routed in (False, True):
                await cancelled_streams(opened, director, routed)
            call = opened.stream_stream(PROCESS)()
            await ask(call, headers())
            await server.drain(0.0)
            assert await call.code() is grpc.StatusCode.OK

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(streams())


class TestHealth:
    NAMES = ("", "readiness", "inference-extension", SERVICE, "anything")

    @staticmethod
    async def check(channel, port, name):
        stub = health_pb2_grpc.HealthStub(await channel(port))
        response = await stub.Check(health_pb2.HealthCheckRequest(service=name))
        return health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)

    @pytest.mark.parametrize("port", ["port", "health_port"])
    async def test_readiness_by_any_name_on_both_ports(self, serve, channel, port):
        server = await serve()
        at = getattr(server, port)
        assert {await self.check(channel, at, name) for name in self.NAMES} == {"NOT_SERVING"}
        assert await self.check(channel, at, "liveness") == "SERVING"
        server.health.set_ready(True)
        assert {await self.check(channel, at, name) for name in self.NAMES} == {"SERVING"}

    async def test_watch_tells_of_changes(self, serve, channel):
        server = await serve()
        stub = health_pb2_grpc.HealthStub(await channel(server.health_port))
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        server.health.set_ready(True)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()


class TestDrain:
    async def test_streams_in_flight_finish_before_the_stop(self, serve, channel):
        server = await serve()
        server.health.set_ready(True)
        call = (await channel(server.port)).stream_stream(PROCESS)()
        await ask(call, headers())
        draining = asyncio.create_task(server.drain(10.0))
        await until(lambda: not server.health.ready)
        assert await TestHealth.check(channel, server.health_port, SERVICE) == "NOT_SERVING"
        assert not draining.done()
        await call.done_writing()
        assert await call.code() is grpc.StatusCode.OK
        await draining

    @pytest.mark.parametrize("at_most", [0.0, 0.05])
    async def test_a_stream_that_does_not_end_is_ended_in_good_order(self, serve, channel, director, caplog, at_most):
        server = await serve()
        call = (await channel(server.port)).stream_stream(PROCESS)()
        await ask(call, headers())
        await server.drain(at_most)
        assert "1 streams are let go" in caplog.text
        assert server.in_flight == 0
        assert await call.code() is grpc.StatusCode.OK
        assert await director.finished.get() is Termination.CLIENT

    async def test_an_idle_server_stops_after_the_quiet_period(self, serve):
        server = await serve(quiet_period=0.3)
        draining = asyncio.create_task(server.drain(60.0))
        await asyncio.sleep(0.1)
        assert not draining.done()
        await asyncio.wait_for(draining, 5.0)

    async def test_streams_that_come_late_are_served_and_make_the_quiet_start_anew(self, serve, channel):
        server = await serve(quiet_period=0.3)
        draining = asyncio.create_task(server.drain(60.0))
        opened = await channel(server.port)
        for _ in range(4):
            await asyncio.sleep(0.15)
            call = opened.stream_stream(PROCESS)()
            assert (await ask(call, headers())).HasField("request_headers")
            await call.done_writing()
            assert await call.code() is grpc.StatusCode.OK
        assert not draining.done()
        await asyncio.wait_for(draining, 5.0)

    @pytest.mark.parametrize("at_most", [0.0, 0.05])
    async def test_the_time_given_ends_the_quiet_period_without_a_complaint(self, serve, caplog, at_most):
        server = await serve(quiet_period=60.0)
        await asyncio.wait_for(server.drain(at_most), 5.0)
        assert not server.health.ready
        assert not caplog.records


class TestTls:
    @staticmethod
    async def route(channel, port, certificate):
        credentials = grpc.ssl_channel_credentials(certificate)
        call = (await channel(port, credentials)).stream_stream(PROCESS)()
        return await ask(call, headers())

    async def test_a_certificate_from_a_directory_and_its_successor(self, serve, channel, tmp_path):
        pairs = [tls.self_signed(), tls.self_signed()]

        def write(pair):
            (tmp_path / "tls.key").write_bytes(pair[0])
            (tmp_path / "tls.crt").write_bytes(pair[1])

        write(pairs[0])
        server = await serve(secure_serving=True, cert_path=str(tmp_path), enable_cert_reload=True)
        assert await self.route(channel, server.port, pairs[0][1])
        write(pairs[1])
        # a subchannel is shared by channels with equal arguments: another name is another connection
        call = grpc.aio.secure_channel(
            f"localhost:{server.port}",
            grpc.ssl_channel_credentials(pairs[1][1]),
            options=[("grpc.use_local_subchannel_pool", 1)],
        )
        async with call as fresh:
            assert await ask(fresh.stream_stream(PROCESS)(), headers())

    async def test_a_bad_directory_stops_the_start(self, serve, tmp_path):
        with pytest.raises(FileNotFoundError):
            await serve(secure_serving=True, cert_path=str(tmp_path))


@pytest.mark.parametrize("of", ["port", "health_port"])
async def test_a_port_in_use_stops_the_start(serve, of):
    port = (await serve()).port
    with pytest.raises(OSError, match=rf"in use.*{port}"):
        await serve(**{of: port})


async def test_an_address_of_another_machine_stops_the_start(serve):
    with pytest.raises(OSError, match=r"192\.0\.2\.1"):
        await serve(bind="192.0.2.1")


@pytest.mark.parametrize("bind", ["::1", "[::1]", "::"])
async def test_ipv6(serve, channel, bind):
    server = await serve(bind=bind)
    call = (await channel(server.port, host="[::1]")).stream_stream(PROCESS)()
    assert (await ask(call, headers())).HasField("request_headers")
