"""What receiving events costs: from an engine's PUB socket to visible in the index. CPU time of the receiving process.

    python -m tests.bench.bench_feed [--quick]

The publisher is another process on the same machine, over loopback TCP; payloads are as vLLM sends them (maps, integer
hashes, block size 16, token ids up to 150 000). Counted is everything the receiving process does, ZMQ's own thread
included, on uvloop with a `Feed` as the picker has it, from an empty index on: what it grows by is in it. Best of three
runs: other work on the machine only ever adds.

- `ingest_cpu_ns_per_block`: events of 32 new blocks, as fast as the publisher can.
- `ingest_cpu_ns_per_block_paced`: the same, 500 messages a second, so that each wakes the loop.
- `ingest_cpu_ns_per_block_decode`: one block an event and a message, as when answers are generated.
- `produce_us_…`: CPU µs of a precise producer for a request, with keys; half of the endpoints hold the prompt.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import struct
import subprocess
import sys
import time

import uvloop
import zmq

from epp.config.environment import Environment
from epp.fleet.endpoint import EndpointSpec
from epp.fleet.fleet import Fleet
from epp.producers.kv_events import KvEvents, KvEventsConfig
from epp.producers.precise import PrecisePrefixCacheProducer, PrecisePrefixParameters
from epp.requests.model import InferenceRequest
from epp.scheduling.plugin import Scheduling
from epp.telemetry import Telemetry
from indexer.feed import Feed, FeedAddress, Hub
from indexer.index import PrefixIndex
from indexer.wire import BlockStored
from tests.bench.bench_index import BLOCK_SIZE, TOP_TOKEN, one_event

TOPIC = b"kv@10.0.0.1:8000@model"


def measure(*, quick: bool = False) -> dict[str, float]:
    messages, runs = (1000, 1) if quick else (4000, 3)
    return {
        "ingest_cpu_ns_per_block": best(runs, messages, 32),
        "ingest_cpu_ns_per_block_paced": best(runs, messages // 4, 32, per_second=500),
        "ingest_cpu_ns_per_block_decode": best(runs, messages * 4, 1),
        **{
            f"produce_us_{blocks}_blocks_{endpoints}_endpoints": produce(blocks, endpoints, 100 if quick else 1000)
            for blocks, endpoints in ((13, 8), (512, 64))
        },
    }


# --- from the socket


def best(runs: int, messages: int, blocks: int, *, per_second: int = 0) -> float:
    return min(ingest(messages, blocks, per_second=per_second) for _ in range(runs))


def ingest(messages: int, blocks: int, *, per_second: int = 0) -> float:
    """CPU nanoseconds a block."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_ingest(messages, blocks, per_second))


async def _ingest(messages: int, blocks: int, per_second: int) -> float:
    arguments = [sys.executable, "-m", __spec__.name, "--publish", str(messages), str(blocks), str(per_second)]
    publisher = await asyncio.create_subprocess_exec(*arguments, stdout=subprocess.PIPE, stdin=subprocess.PIPE)
    assert publisher.stdout is not None
    assert publisher.stdin is not None
    port = int(await publisher.stdout.readline())
    hub, index = Hub(), PrefixIndex()
    feed = Feed(lambda: index.publisher("bench"), FeedAddress(f"tcp://127.0.0.1:{port}", "", "kv@"))
    feed.open(hub)
    assert await publisher.stdout.readline() == b"subscribed\n"
    begin = time.process_time_ns()
    publisher.stdin.write(b"go\n")
    while feed.stream.last_seq + 1 < messages:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    spent = time.process_time_ns() - begin
    assert feed.residency.held("gpu") == messages * blocks
    feed.close()
    hub.close()
    publisher.stdin.close()
    await publisher.wait()
    return spent / (messages * blocks)


def publish(messages: int, blocks: int, per_second: int) -> None:
    """The other process: binds, waits for a subscription and for a line on stdin, sends, waits for the end of stdin."""
    rng = random.Random(1)
    payloads = [one_event(rng, blocks) for _ in range(messages)]
    context = zmq.Context()
    socket = context.socket(zmq.XPUB)
    socket.set_hwm(0)
    print(socket.bind_to_random_port("tcp://127.0.0.1"), flush=True)
    socket.recv()
    print("subscribed", flush=True)
    sys.stdin.readline()
    for seq, payload in enumerate(payloads):
        socket.send_multipart([TOPIC, seq.to_bytes(8, "big"), payload])
        if per_second:
            time.sleep(1 / per_second)
    sys.stdin.read()
    context.destroy(linger=0)


# --- to the request


def produce(blocks: int, endpoints: int, repeat: int) -> float:
    """CPU microseconds a request: the first time that its prompt is seen, since keys are computed per request."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_produce(blocks, endpoints, repeat))


async def _produce(blocks: int, endpoints: int, repeat: int) -> float:
    environment = Environment(Fleet(), Telemetry())
    parameters = PrecisePrefixParameters(kv_events_config=KvEventsConfig(discover_pods=False))
    producer = PrecisePrefixCacheProducer("precise", parameters, environment)
    producer.name = "precise"
    environment.fleet.apply(EndpointSpec(f"10.0.{n // 250}.{n % 250}:8000") for n in range(endpoints))
    events = KvEvents.of(environment)
    await events.start()
    rng = random.Random(blocks)
    tokens = struct.pack(f"<{blocks * BLOCK_SIZE}I", *(rng.randrange(TOP_TOKEN) for _ in range(blocks * BLOCK_SIZE)))
    for number, feed in enumerate(events.feeds.values()):
        held = rng.randrange(1, blocks + 1) if number % 2 else 1
        event = BlockStored(
            list(range(1, held + 1)), tokens=tokens[: held * BLOCK_SIZE * 4], block_size=BLOCK_SIZE, extras={}
        )
        feed.residency.apply([event])
    best = min(_time(producer, environment, tokens) for _ in range(repeat))
    await events.stop()
    return best / 1000


def _time(producer: PrecisePrefixCacheProducer, environment: Environment, tokens: bytes) -> int:
    request = InferenceRequest("r", "/v1/completions", {}, b"", target_model="model", tokens=[tokens])
    scheduling = Scheduling(request, environment.fleet.endpoints, now=0.0)
    begin = time.perf_counter_ns()
    producer.produce(scheduling)
    return time.perf_counter_ns() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--publish", nargs=3, type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.publish:
        publish(*arguments.publish)
        return
    for key, value in measure(quick=arguments.quick).items():
        print(f"{key:45} {value:10.1f}")


if __name__ == "__main__":
    main()
