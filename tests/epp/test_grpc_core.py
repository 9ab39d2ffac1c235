"""Calls over loopback, with grpc's own client; what each handler does is the test's."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import threading

import grpc
import pytest
import uvloop
from grpc._cython import cygrpc

from epp import grpc_core
from epp.grpc_core import BURST, Pump, Server
from tests.waiting import until

ECHO = "/test/Echo"


class Echo:
    """Sends back what it gets, each message `times` times; ends when the peer does."""

    def __init__(self, call, times=1):
        self.call = call
        self.times = times
        self.heard = []

    def received(self, message):
        self.heard.append(message)
        if message is None:
            self.call.end()
            return
        for _ in range(self.times - 1):
            self.call.send(message)
        self.call.exchange(message)


class Quiet:
    """Reads one message and leaves the rest to the test."""

    def __init__(self, call):
        self.call = call
        self.heard = asyncio.Queue()

    def received(self, message):
        self.heard.put_nowait(message)


@contextlib.asynccontextmanager
async def serving(accept, **options):
    """A channel to a server, and the handlers that `accept` makes of its calls."""

    def make(call):
        made.append(accept(call))
        return made[-1]

    made = []
    pump = Pump()
    server = Server(pump, "127.0.0.1", 0, {ECHO: make}, **options)
    pump.start()
    server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            yield channel, made
    finally:
        await server.stop(0.0)
        await pump.stop()


@pytest.mark.parametrize("times", [1, 2, 7])
@pytest.mark.parametrize("size", [0, 10, 300_000])
async def test_messages_come_and_go_in_order(times, size):
    async with serving(lambda call: Echo(call, times)) as (channel, _):
        call = channel.stream_stream(ECHO)()
        for number in range(5):
            message = bytes([number]) * size
            await call.write(message)
            assert [await call.read() for _ in range(times)] == [message] * times
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK


async def test_what_is_sent_is_sent_before_the_end():
    class Refuse(Quiet):
        def received(self, message):
            for number in range(5):
                self.call.send(bytes([number]) * 100_000)
            self.call.end(grpc.StatusCode.ABORTED, "enough")
            self.call.send(b"too late")
            self.call.end()

    async with serving(Refuse) as (channel, _):
        call = channel.stream_stream(ECHO)()
        await call.write(b"x")
        assert [len(await call.read()) for _ in range(5)] == [100_000] * 5
        assert await call.code() is grpc.StatusCode.ABORTED
        assert await call.details() == "enough"


async def test_a_call_can_be_answered_while_the_next_message_is_read_ahead():
    async with serving(Quiet) as (channel, made):
        call = channel.stream_stream(ECHO)()
        await call.write(b"first")
        await until(lambda: made)
        assert await made[0].heard.get() == b"first"
        made[0].call.read()
        made[0].call.send(b"answer")
        assert await call.read() == b"answer"
        await call.write(b"second")
        assert await made[0].heard.get() == b"second"
        made[0].call.end()
        assert await call.code() is grpc.StatusCode.OK


@pytest.mark.parametrize("waits_by", ["exchange", "read"])
async def test_a_call_can_be_ended_while_it_reads_and_hears_no_more(waits_by):
    async with serving(Quiet) as (channel, made):
        call = channel.stream_stream(ECHO)()
        await call.write(b"first")
        await until(lambda: made and not made[0].heard.empty())
        handler = made[0]
        handler.heard.get_nowait()
        if waits_by == "exchange":
            handler.call.exchange(b"answer")
            assert await call.read() == b"answer"
        else:
            handler.call.read()
        handler.call.end()
        assert await call.code() is grpc.StatusCode.OK
        await asyncio.sleep(0.05)
        assert handler.heard.empty()


@pytest.mark.parametrize("leaves", [True, False], ids=["resets", "closes its side"])
async def test_a_peer_that_is_gone_is_told_by_the_next_read(leaves):
    async with serving(Quiet) as (channel, made):
        call = channel.stream_stream(ECHO)()
        await call.write(b"first")
        await until(lambda: made)
        assert await made[0].heard.get() == b"first"
        if leaves:
            call.cancel()
            await asyncio.sleep(0.05)
        else:
            await call.done_writing()
        for _ in range(3):
            made[0].call.send(b"into the void")
        made[0].call.exchange(b"as well")
        assert await made[0].heard.get() is None
        made[0].call.end()


async def test_who_is_watched_may_close_its_side_and_be_sent_more():
    class Watched(Quiet):
        def received(self, message):
            super().received(message)
            if message is not None:
                self.call.watch()

    async with serving(Watched) as (channel, made):
        call = channel.unary_stream(ECHO)(b"question")
        await until(lambda: made)
        assert await made[0].heard.get() == b"question"
        for answer in (b"one", b"two"):
            made[0].call.send(answer)
            assert await call.read() == answer
        assert made[0].heard.empty()
        call.cancel()
        assert await made[0].heard.get() is None
        made[0].call.end()


async def test_an_unknown_method_is_unimplemented():
    async with serving(Echo) as (channel, made):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await channel.unary_unary("/test/Other")(b"")
        assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert not made


async def test_a_message_over_the_limit_ends_the_call():
    options = [("grpc.max_receive_message_length", 1000)]
    async with serving(Echo, options=options) as (channel, made):
        call = channel.stream_stream(ECHO)()
        await call.write(bytes(1001))
        assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await until(lambda: made[0].heard == [None])


async def test_a_handler_that_fails_is_logged_and_others_go_on(caplog):
    class Faulty(Echo):
        def received(self, message):
            if message == b"fault":
                raise KeyError(message)
            super().received(message)

    async with serving(Faulty) as (channel, _):
        faulty, good = channel.stream_stream(ECHO)(), channel.stream_stream(ECHO)()
        await faulty.write(b"fault")
        await good.write(b"x")
        assert await good.read() == b"x"
        await until(lambda: caplog.records)
        assert caplog.records[0].exc_info
        faulty.cancel()
        good.cancel()


async def test_a_burst_does_not_keep_the_loop_from_its_other_work():
    """With a core that always has one more completion."""
    turns = []

    class Completion:
        completion_type = cygrpc.CompletionType.operation_complete

        def tag(self, _):
            turns.append("completion")

    class Endless:
        def poll(self, deadline=None):
            return Completion() if turns.count("other") < 3 else cygrpc.CompletionQueue().poll(0)

    pump = Pump()
    pump.queue = Endless()
    pump._found, loop = Completion(), asyncio.get_running_loop()
    pump._resume.acquire()
    loop.call_soon(pump._handle, loop)
    while pump._resume.locked():
        await asyncio.sleep(0)
        turns.append("other")
    assert turns[:BURST] == ["completion"] * BURST
    assert turns.count("completion") <= 4 * BURST


@pytest.mark.parametrize("grace", [0.0, 30.0])
async def test_calls_that_are_left_when_the_server_stops_are_cut_off_after_the_grace(grace):
    pump = Pump()
    handlers = []

    def accept(call):
        handlers.append(Quiet(call))
        return handlers[-1]

    server = Server(pump, "127.0.0.1", 0, {ECHO: accept})
    pump.start()
    server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        call = channel.stream_stream(ECHO)()
        await call.write(b"x")
        await until(lambda: handlers)
        await handlers[0].heard.get()
        handlers[0].call.read()
        stopping = asyncio.create_task(server.stop(grace))
        again = asyncio.create_task(server.stop(grace))
        if grace:
            await asyncio.sleep(0.1)
            assert not stopping.done()
            handlers[0].call.end()
            assert await call.code() is grpc.StatusCode.OK
        else:
            assert await handlers[0].heard.get() is None
            assert await call.code() is not grpc.StatusCode.OK
            handlers[0].call.end()
        await stopping
        await again
    await pump.stop()


async def test_a_stopped_pump_leaves_no_thread():
    def pumps():
        return [thread for thread in threading.enumerate() if thread.name == grpc_core.THREAD]

    before = len(pumps())
    async with serving(Echo) as (channel, _):
        call = channel.stream_stream(ECHO)()
        await call.write(b"x")
        assert await call.read() == b"x"
        assert len(pumps()) == before + 1
        call.cancel()
    assert len(pumps()) == before


async def outlive():
    """A call whose handler is late: its server and its pump have stopped before it answers."""
    for method in ("send", "exchange"):
        async with serving(Quiet) as (channel, made):
            await channel.stream_stream(ECHO)().write(b"x")
            await until(lambda made=made: made and not made[0].heard.empty())
        call = made[0].call
        getattr(call, method)(b"late")
        call.read()
        call.watch()
        call.end()


async def talk(calls, messages):
    async with serving(Echo) as (channel, _):

        async def one(number):
            call = channel.stream_stream(ECHO)()
            for turn in range(messages):
                message = f"{number} {turn}".encode()
                await call.write(message)
                assert await call.read() == message
            await call.done_writing()
            assert await call.code() is grpc.StatusCode.OK

        await asyncio.gather(*(one(number) for number in range(calls)))


def run_apart(coroutine, **environment):
    """In a process of its own, which the core may end."""
    code = f"import asyncio; from tests.epp.test_grpc_core import *; asyncio.run({coroutine})"
    subprocess.run([sys.executable, "-c", code], env=os.environ | environment, check=True, timeout=60)


def test_a_call_may_outlive_its_pump():
    run_apart("outlive()")


def test_many_calls_at_once_on_uvloop():
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(talk(200, 10))


@pytest.mark.parametrize("experiments", ["", "-no_such_experiment", "event_engine_listener"])
def test_whatever_way_the_core_reads_its_sockets(experiments):
    """Ours is a wish that other versions of the core need not know."""
    run_apart("talk(20, 5)", GRPC_EXPERIMENTS=experiments)
