"""A whole picker whose endpoints come and go by the thousand: nothing of them is left behind."""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator

import aiohttp
import grpc
import pytest
import zmq
from prometheus_client.parser import text_string_to_metric_families as parse

from connector.events import CPU, GPU, BlockStored, Tier
from connector.journal import About
from connector.publisher import Publisher
from epp.app import App
from epp.fleet.endpoint import Endpoint, EndpointSpec
from epp.options import Options
from epp.producers.kv_events import KvEvents
from epp.wire import METHOD, SERVICE
from indexer.feed import Feed
from indexer.lane import Lane
from indexer.residency import Residency
from indexer.stream import State, Stream
from proto import ext_proc_pb2 as pb
from tests import waiting

ROUNDS, AT_ONCE = 20, 50
TRACED = 6
"""Rounds at the end in which every allocation is noted, which takes time."""
BLOCKS = 5
PACKAGES = ("epp", "indexer")
"""Whose memory is looked at: libraries have bounded caches of their own, which fill in the course of the test."""
CONFIG = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
  - {type: token-producer}
  - {type: precise-prefix-cache-producer, parameters: {speculativeIndexing: true, kvEventsConfig: {topicFilter: ""}}}
  - {type: approx-prefix-cache-producer}
  - {type: prefix-cache-scorer, parameters: {prefixMatchInfoProducerName: precise-prefix-cache-producer}}
  - {type: no-hit-lru-scorer, parameters: {prefixMatchInfoProducerName: approx-prefix-cache-producer}}
  - {type: queue-scorer}
schedulingProfiles:
  - name: default
    plugins: [{pluginRef: prefix-cache-scorer}, {pluginRef: no-hit-lru-scorer}, {pluginRef: queue-scorer}]
"""
POST = pb.HttpHeaders(
    headers=pb.HeaderMap(
        headers=[
            pb.HeaderValue(key=":method", raw_value=b"POST"),
            pb.HeaderValue(key=":path", raw_value=b"/v1/completions"),
        ]
    )
)

ANSWER = pb.HttpHeaders(headers=pb.HeaderMap(headers=[pb.HeaderValue(key=":status", raw_value=b"200")]))
BODY = pb.HttpBody(body=b'{"model": "m", "prompt": "' + b"hello " * 200 + b'"}', end_of_stream=True)


until = functools.partial(waiting.until, seconds=20)


class Picker:
    """And the one engine at the other end of all its connections."""

    def __init__(self) -> None:
        options = Options(
            grpc_port=0, grpc_health_port=0, metrics_port=0, bind="127.0.0.1", secure_serving=False,
            config_text=CONFIG, endpoints=("127.0.0.1:9",), decisions=0,
        )  # fmt: skip
        self.app = App(options)
        about = About(heartbeat=0.2, tiers={GPU: Tier(1000), CPU: Tier(600, chunk=4)})
        self.engine = Publisher(
            about, endpoint="tcp://127.0.0.1:*", bind=True, replay_endpoint="tcp://127.0.0.1:*", topic="kv@@m"
        )
        for medium in (GPU, CPU):
            for n in range(BLOCKS):
                self.engine.publish([BlockStored([n + 1], None, [n] * 16, 16, None, medium, None)])
        assert self.engine.flush(5)

    @property
    def events(self) -> KvEvents:
        return KvEvents.of(self.app.environment)

    def specs(self, number: int) -> list[EndpointSpec]:
        addresses = {"kv_events": self.engine.endpoint, "kv_replay": self.engine.replay_endpoint or ""}
        return [
            EndpointSpec(f"127.0.{number}.{n + 1}:9", f"pod-{number}-{n}", uid=f"{number}-{n}", **addresses)
            for n in range(AT_ONCE)
        ]

    async def come_and_go(self, number: int) -> None:
        self.app.fleet.apply(self.specs(number))
        await until(lambda: all(feed.state is State.LIVE for feed in self.events.feeds.values()))
        assert {feed.residency.held("gpu") for feed in self.events.feeds.values()} == {BLOCKS}
        highest = max(feed.residency.bits("gpu") for feed in self.events.feeds.values())
        assert highest.bit_length() <= 8 * AT_ONCE, "bits are used again"
        await self.request()
        self.app.fleet.apply([])

    async def request(self) -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.app.ports['grpc']}") as channel:
            stream = channel.stream_stream(f"/{SERVICE}/{METHOD}")()
            for message in (pb.ProcessingRequest(request_headers=POST), pb.ProcessingRequest(request_body=BODY)):
                await stream.write(message.SerializeToString())
            assert pb.ProcessingResponse.FromString(await stream.read()).HasField("request_headers")
            await stream.write(pb.ProcessingRequest(response_headers=ANSWER).SerializeToString())
            await stream.done_writing()
        await until(lambda: not self.app.in_flight)

    async def series(self) -> set[tuple[str, frozenset[tuple[str, str]]]]:
        """Of the metrics page."""
        url = f"http://127.0.0.1:{self.app.ports['metrics']}/metrics"
        async with aiohttp.ClientSession() as session, session.get(url) as page:
            families = list(parse(await page.text()))
        return {(sample.name, frozenset(sample.labels.items())) for family in families for sample in family.samples}

    async def settled(self) -> None:
        """What was cancelled has ended, and ZMQ's own thread has closed what we closed."""
        await until(lambda: not self.events.index.sweep() and not self.app.in_flight)
        seen = [-1]
        while seen[-1] != open_files():
            seen.append(open_files())
            await asyncio.sleep(0.05)

    async def stop(self) -> None:
        self.app.fleet.apply([])
        self.engine.close()
        await self.app.stop()


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def objects() -> Counter[str]:
    """A timer would show, too: by the stream that it is to wake."""
    kinds = (Endpoint, Feed, Stream, Residency, Lane, zmq.Socket, asyncio.Task)
    gc.collect()
    return Counter(type(thing).__name__ for thing in gc.get_objects() if isinstance(thing, kinds))


@pytest.fixture
async def picker() -> AsyncIterator[Picker]:
    picker = Picker()
    await picker.app.start()
    yield picker
    await picker.stop()


async def test_a_thousand_endpoints_leave_nothing_behind(picker: Picker) -> None:
    for number in range(2):  # what is made once is made
        await picker.come_and_go(number)
    await picker.settled()
    events, files, things, series = picker.events, open_files(), objects(), await picker.series()
    for number in range(2, ROUNDS + 2):
        if number == ROUNDS - TRACED + 2:
            tracemalloc.start()
        await picker.come_and_go(number)
    await picker.settled()
    gc.collect()
    ours = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, f"*/{part}/*") for part in PACKAGES])
    tracemalloc.stop()
    index = events.index
    assert objects() == things
    await until(lambda: open_files() <= files)
    assert await picker.series() - series == set()
    assert sum(trace.size for trace in ours.traces) < 100_000, "empty tables, but not 300 bytes an endpoint"
    assert (len(index.masks), index.known_hashes, events.speculation.keys) == (0, 0, 0)
    assert index.roots.keys() <= {"m", "\0"}
    assert [name for name, kept in vars(events).items() if isinstance(kept, dict | set) and kept] == []
