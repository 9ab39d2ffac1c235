"""What Envoy sends, and what somebody sends who found the port: ext_proc messages into a whole picker but for gRPC."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry

from epp import wire
from epp.config.environment import Environment
from epp.config.loader import load
from epp.decisions import Decisions
from epp.director import RequestDirector, Settings
from epp.exchange.machine import PeerError
from epp.fleet.endpoint import EndpointSpec
from epp.fleet.fleet import Fleet
from epp.producers.inflight import InFlight
from epp.routing import LB_NAMESPACE, SERVED, SUBSET, SUBSET_NAMESPACE
from epp.scheduling.plugin import Scheduling
from epp.scheduling.scheduler import Scheduler
from epp.stream import Stream
from epp.telemetry import Telemetry
from proto import ext_proc_pb2 as pb
from tests.fuzz.source import Source
from tests.fuzz.target import Script, Target, refused
from tests.fuzz.targets import answers, bodies

CONFIGURATION = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: token-producer
  parameters: {estimate: {}}
- type: approx-prefix-cache-producer
- type: inflight-load-producer
  parameters: {addEstimatedOutputTokens: true}
- type: prefix-cache-scorer
- type: token-load-scorer
- type: active-request-scorer
- type: no-hit-lru-scorer
- type: queue-scorer
- type: kv-cache-utilization-scorer
- type: prefix-cache-affinity-filter
- type: weighted-random-picker
schedulingProfiles:
- name: default
  plugins:
  - pluginRef: prefix-cache-affinity-filter
  - pluginRef: prefix-cache-scorer
  - pluginRef: token-load-scorer
  - pluginRef: active-request-scorer
  - pluginRef: no-hit-lru-scorer
  - pluginRef: queue-scorer
  - pluginRef: kv-cache-utilization-scorer
  - pluginRef: weighted-random-picker
"""
MAX_BODY = 100_000
ENDPOINTS = [f"10.0.0.{n}:8000" for n in range(1, 5)]
MESSAGE, LEAVE = b"m", b"l"
"""A piece is a message; or the peer leaves, whatever was to follow."""
_LABEL_SETS = 2_000
_WAITING_PATH = "/v1/chat/completions/"


class Waits:
    """A producer that some requests have to wait for."""

    name = type = "waits"
    produce_timeout = 1.0

    async def _wait(self) -> None:
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    def produce(self, scheduling: Scheduling) -> Any:
        return self._wait() if scheduling.request.path == _WAITING_PATH else None


class Picker:
    def __init__(self) -> None:
        fleet = Fleet()
        self.telemetry = Telemetry(CollectorRegistry())
        environment = Environment(fleet, self.telemetry, rng=random.Random(1))
        configuration = load(CONFIGURATION, environment)
        self.telemetry.watch(fleet, "pool")
        fleet.apply(EndpointSpec(address) for address in ENDPOINTS)
        waits = Waits()
        self.fleet = fleet
        self.in_flight = InFlight.of(environment)
        self.director = RequestDirector(
            fleet=fleet,
            scheduler=Scheduler(
                producers=[waits, *configuration.producers],
                profiles=configuration.profiles,
                handler=configuration.handler,
                plugins=[waits, *configuration.plugins.values()],
                telemetry=self.telemetry,
                rng=environment.rng,
            ),
            in_flight=self.in_flight,
            telemetry=self.telemetry,
            decisions=Decisions(100),
            settings=Settings(max_body_bytes=MAX_BODY, observe_streams=1.0, emit_scores=True),
            rng=environment.rng,
        )

    def check(self) -> None:
        """Between two requests."""
        assert len(self.in_flight) == 0
        assert all(e.inflight_requests == 0 and e.inflight_tokens == 0 for e in self.fleet.endpoints)
        requests = self.telemetry._requests
        assert len(requests) <= requests.limit + 1
        assert all(len(name) <= 256 for name in requests.models._known)


class Call:
    """The transport of a stream; its end is the script's."""

    def __init__(self, script: Script, loop: asyncio.AbstractEventLoop) -> None:
        self._script = iter(script)
        self._loop = loop
        self.stream: Stream | None = None
        self.closed = loop.create_future()
        self.replies = 0

    def read(self) -> None:
        assert self.stream is not None
        piece = next(self._script, LEAVE)
        self._loop.call_soon(self.stream.received, None if piece[:1] == LEAVE else piece[1:])

    def send(self, message: bytes) -> None:
        assert pb.ProcessingResponse.FromString(message).WhichOneof("response")
        self.replies += 1

    def exchange(self, message: bytes) -> None:
        self.send(message)
        self.read()

    def close(self, _: Stream, error: PeerError | None) -> None:
        self.closed.set_result(error)


class Exchanges(Target):
    """Whole exchanges, in any order of messages."""

    share = 4

    def __init__(self) -> None:
        self._picker = Picker()
        self._loop = asyncio.new_event_loop()

    def close(self) -> None:
        self._loop.close()

    def script(self, source: Source) -> Script:
        pieces = [MESSAGE + message.SerializeToString() for message in _exchange(source)]
        if source.chance(0.15):
            source.random.shuffle(pieces)
        pieces = [source.mutate(piece) if source.chance(0.03) else piece for piece in pieces]
        pieces = [piece for piece in pieces for _ in range(source.pick((1,) * 30 + (0, 2)))]
        if source.chance(0.1):
            pieces.insert(source.below(len(pieces) + 1), LEAVE)
        return tuple(pieces)

    def run(self, script: Script) -> bool:
        call = Call(script, self._loop)
        call.stream = Stream(self._picker.director, call, call.close, max_request_bytes=MAX_BODY)
        call.read()
        error = self._loop.run_until_complete(call.closed)
        if error is not None:
            refused(error)
        assert not asyncio.all_tasks(self._loop)
        self._picker.check()
        return call.replies > 0


class Messages(Target):
    """Single messages into the decoder; whatever it makes of one can be told on."""

    share = 3

    def script(self, source: Source) -> Script:
        message = source.pick(list(_exchange(source))).SerializeToString()
        return (source.mutate(message) if source.chance(0.8) else source.noise(60, 3000),)

    def run(self, script: Script) -> bool:
        try:
            event = wire.decode(script[0], 1.0)
        except PeerError as error:
            return refused(error)
        wire.is_response_headers(script[0])
        return event is not None


def _exchange(source: Source) -> Iterator[pb.ProcessingRequest]:
    path, body = bodies.request(source)
    yield _request_headers(source, path)
    pieces = source.pick((1, 1, 2, 5))
    step = len(body) // pieces + 1
    for n in range(pieces):
        last = n == pieces - 1 and source.chance(0.95)
        yield pb.ProcessingRequest(request_body=pb.HttpBody(body=body[n * step : (n + 1) * step], end_of_stream=last))
    if source.chance(0.05):
        yield pb.ProcessingRequest(request_trailers=pb.HttpTrailers())
    if source.chance(0.1):
        return
    message, streaming = _response_headers(source)
    yield message
    chunks = answers.chunks(source, streaming)
    for n, chunk in enumerate(chunks):
        yield pb.ProcessingRequest(response_body=pb.HttpBody(body=chunk, end_of_stream=n == len(chunks) - 1))
    if source.chance(0.1):
        yield pb.ProcessingRequest(response_trailers=pb.HttpTrailers())


def _request_headers(source: Source, path: str) -> pb.ProcessingRequest:
    message = pb.ProcessingRequest()
    message.request_headers.end_of_stream = source.chance(0.03)
    headers = {
        ":method": source.pick(("POST", "POST", "GET", "CONNECT", "é")),
        ":path": source.pick((path, path, path, _WAITING_PATH)),
    }
    optional = {
        "x-request-id": source.text(),
        "x-llm-d-inference-fairness-id": source.text(),
        "x-original-path": source.text(),
        "expect": "100-continue",
        "upgrade": "websocket",
        "x-gateway-destination-endpoint-subset": "10.0.0.1",
        "content-encoding": "gzip",
    }
    headers |= {name: value for name, value in optional.items() if source.chance(0.06)}
    _add_headers(source, message.request_headers.headers, headers)
    modes = (2, 4, 4, 0, 1, 3, 5, 77)
    if source.chance(0.9):
        message.protocol_config.request_body_mode = source.pick((2, 2, 2, 4, 4, *modes))
        message.protocol_config.response_body_mode = source.pick((0, 0, 2, 4, *modes))
    if source.chance(0.1):
        subset = message.metadata_context.filter_metadata[SUBSET_NAMESPACE].fields[SUBSET]
        if source.chance(0.5):
            subset.string_value = source.pick((ENDPOINTS[0], ",".join(ENDPOINTS), " , ", source.text()))
        else:
            subset.list_value.values.add().string_value = source.pick((*ENDPOINTS, source.text()))
    return message


def _response_headers(source: Source) -> tuple[pb.ProcessingRequest, bool]:
    message = pb.ProcessingRequest()
    streaming = source.chance(0.5)
    headers = {
        ":status": source.pick(("200", "200", "200", "503", "", "２００", "-1", "9" * 5000, "²", source.text())),
        "content-type": "text/event-stream"
        if streaming
        else source.pick(("application/json", "text/plain", source.text())),
    }
    if source.chance(0.4):
        headers["content-length"] = source.pick(("10", "0", "", "-1", "9" * 30, "9" * 5000, "１０", source.text()))
    if source.chance(0.05):
        headers["content-encoding"] = source.pick(("gzip", "identity", "br"))
    _add_headers(source, message.response_headers.headers, headers)
    if source.chance(0.2):
        fields = message.metadata_context.filter_metadata[LB_NAMESPACE].fields
        fields[SERVED].string_value = source.pick((*ENDPOINTS, source.text()))
    return message, streaming


def _add_headers(source: Source, headers: pb.HeaderMap, values: dict[str, str]) -> None:
    for name, value in values.items():
        if source.chance(0.1):
            headers.headers.add(key=name.upper(), value=value)
        else:
            raw = value.encode("utf-8", "surrogatepass")
            headers.headers.add(key=name, raw_value=source.mutate(raw) if source.chance(0.03) else raw)
    for _ in range(source.size(1, 1000)):
        headers.headers.add(key=source.pick(("x-a", "cookie", ":path", "")), raw_value=source.noise(10, 5000))
