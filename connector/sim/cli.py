"""`python -m connector.sim`: one or several simulated engines in one process, each on ports of its own.

Prints one JSON line per engine on standard output once it serves, and stops cleanly on SIGTERM or SIGINT.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass

import zmq
from aiohttp import web

from connector.curve import Curve, load_curve
from connector.events import CPU, GPU, STORAGE, Tier
from connector.journal import About
from connector.publisher import Publisher
from connector.sim.engine import Engine, EngineConfig
from connector.sim.model import ServiceModel
from connector.sim.offload import OffloadConfig
from connector.sim.runner import Runner, cancel
from connector.sim.server import Names, Server
from connector.sim.tokens import Codec, load_codec

DEFAULTS = EngineConfig()
MODEL = ServiceModel()


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where one engine is: `http` as ip:port, the sockets as ZMQ endpoints."""

    name: str
    http: str
    events: str
    replay: str
    model: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All flags of the simulated engine; defaults are those of an 8B model on one mid-size GPU."""
    _add_identity(parser.add_argument_group("identity and ports"))
    _add_sizes(parser.add_argument_group("sizes"))
    _add_times(parser.add_argument_group("service times"))
    _add_wire(parser.add_argument_group("events"))


def _add_identity(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--engines", type=_at_least(1), default=1, help="engines in this process (default %(default)s)")
    group.add_argument("--host", default="127.0.0.1", help="address to bind (default %(default)s)")
    group.add_argument("--port", type=int, default=0, help="HTTP port, +1 for each further engine; 0: any free port")
    group.add_argument("--events-port", type=int, default=0, help="event port, likewise")
    group.add_argument("--replay-port", type=int, default=0, help="replay port, likewise")
    group.add_argument("--name", default="sim", help="engine name; several get -0, -1, ... (default %(default)s)")
    group.add_argument("--model", default="sim-8b", help="model name (default %(default)s)")
    group.add_argument("--served-model-name", help="what clients ask for (default: --model)")
    group.add_argument("--lora", action="append", default=[], metavar="NAME", help="an adapter to serve; repeatable")
    group.add_argument("--tokenizer", metavar="DIR", help="directory with tokenizer.json (default: UTF-8 bytes + 3)")


def _add_sizes(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--block-size", type=_at_least(1), default=DEFAULTS.block_size, help="tokens in an HBM block")
    group.add_argument(
        "--hbm-blocks", type=_at_least(2), default=DEFAULTS.hbm_blocks, help="HBM blocks, null block included"
    )
    group.add_argument("--cpu-chunks", type=_at_least(0), default=0, help="chunks of the CPU tier; 0: no offloading")
    group.add_argument("--blocks-per-chunk", type=_at_least(1), default=1, help="HBM blocks in a chunk")
    group.add_argument(
        "--storage-chunks", type=_at_least(-1), default=0, help="chunks of the storage tier; 0: none, -1: no limit"
    )
    group.add_argument("--offload-decode", action="store_true", help="offload blocks filled while decoding, too")
    group.add_argument("--max-num-seqs", type=_at_least(1), default=DEFAULTS.max_num_seqs, help="requests run at once")
    group.add_argument(
        "--max-num-batched-tokens", type=_at_least(1), default=DEFAULTS.max_num_batched_tokens, help="tokens in a step"
    )


def _add_times(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--prefill-tokens-per-s", type=_rate, default=MODEL.prefill_tokens_per_s)
    group.add_argument("--decode-ms", type=float, default=MODEL.decode_s * 1e3, help="milliseconds of a decode step")
    group.add_argument("--cpu-gbps", type=_rate, default=MODEL.cpu_gbps, help="GB/s between HBM and CPU memory")
    group.add_argument("--storage-gbps", type=_rate, default=MODEL.storage_gbps, help="GB/s to and from storage")
    group.add_argument(
        "--bytes-per-token", type=_at_least(1), default=MODEL.bytes_per_token, help="KV bytes of one token"
    )
    group.add_argument("--speed", type=_rate, default=1.0, help="divides all times (default %(default)s)")


def _add_wire(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--topic", help="event topic (default kv@HOST:PORT@SERVED_MODEL_NAME)")
    group.add_argument("--buffer-steps", type=_at_least(1), default=10_000, help="messages that replay can repeat")
    group.add_argument("--heartbeat-s", type=_rate, default=1.0, help="the longest silence (default %(default)s)")
    group.add_argument(
        "--plain-events", action="store_true", help="as vLLM without our connector: no notes, heartbeats, snapshots"
    )
    group.add_argument("--placeholder-events", action="store_true", help="lower-tier events with the last hash only")
    group.add_argument(
        "--curve-secret-key-file", metavar="FILE", default="", help="CURVE on the event and replay ports"
    )
    group.add_argument(
        "--curve-client-keys-dir", metavar="DIR", default="", help="*.key files of those who may connect"
    )
    group.add_argument(
        "--old-replay-form", action="store_true", help="replay replies without topic, as before vLLM 0.26"
    )


def _at_least(lowest: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = int(text)
        if value < lowest:
            raise argparse.ArgumentTypeError(f"{text} is less than {lowest}")
        return value

    return number


def _rate(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def engine_config(args: argparse.Namespace) -> EngineConfig:
    offload = OffloadConfig(
        cpu_chunks=args.cpu_chunks,
        blocks_per_chunk=args.blocks_per_chunk,
        storage_chunks=args.storage_chunks,
        prompt_only=not args.offload_decode,
        self_describing=not args.placeholder_events,
    )
    return EngineConfig(
        block_size=args.block_size,
        hbm_blocks=args.hbm_blocks,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        offload=offload,
        plain_events=args.plain_events,
    )


def about(config: EngineConfig, heartbeat: float) -> About:
    offload = config.offload
    chunk = offload.blocks_per_chunk
    tiers = {GPU: Tier(capacity=config.hbm_blocks - 1)}
    if offload.cpu_chunks:
        tiers[CPU] = Tier(capacity=offload.cpu_chunks * chunk, chunk=chunk)
    if offload.storage_chunks:
        unlimited = offload.storage_chunks < 0
        tiers[STORAGE] = Tier(capacity=None if unlimited else offload.storage_chunks * chunk, chunk=chunk)
    return About(heartbeat=heartbeat, tiers=tiers)


def service_model(args: argparse.Namespace) -> ServiceModel:
    return ServiceModel(
        prefill_tokens_per_s=args.prefill_tokens_per_s,
        decode_s=args.decode_ms / 1e3,
        cpu_gbps=args.cpu_gbps,
        storage_gbps=args.storage_gbps,
        bytes_per_token=args.bytes_per_token,
        speed=args.speed,
    )


async def start_engine(
    args: argparse.Namespace, index: int, codec: Codec, stack: AsyncExitStack, curve: Curve | None = None
) -> tuple[Addresses, asyncio.Task[None]]:
    """Start one engine on ports of its own; `stack` takes what stops it. Returns its addresses and its step task."""
    name = args.name if args.engines == 1 else f"{args.name}-{index}"
    model = args.served_model_name or args.model
    listener = socket.create_server((args.host, _port(args.port, index)))
    stack.callback(listener.close)
    address = "{}:{}".format(*listener.getsockname()[:2])
    engine = Engine(engine_config(args), service_model(args), codec.vocabulary)
    note = about(engine.config, args.heartbeat_s)
    publisher = Publisher(
        None if args.plain_events else note,
        endpoint=_endpoint(args.host, _port(args.events_port, index)),
        bind=True,
        replay_endpoint=_endpoint(args.host, _port(args.replay_port, index)),
        topic=args.topic or f"kv@{address}@{model}",
        buffer_steps=args.buffer_steps,
        old_replay_form=args.old_replay_form,
        curve=curve,
    )
    stack.callback(publisher.close)
    runner = Runner(engine, publisher, note)
    names = Names(name, model, args.model, args.lora)
    server = Server(names, runner, publisher, codec, bytes_per_token=args.bytes_per_token)
    http = web.AppRunner(server.application(), handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await http.setup()
    stack.push_async_callback(http.cleanup)
    await web.SockSite(http, listener).start()
    steps = asyncio.create_task(runner.run(), name=f"{name} steps")
    stack.push_async_callback(cancel, steps)
    assert publisher.replay_endpoint is not None
    return Addresses(name, address, publisher.endpoint, publisher.replay_endpoint, model), steps


def _endpoint(host: str, port: int) -> str:
    return f"tcp://{host}:{port or '*'}"


def _port(first: int, index: int) -> int:
    return first + index if first else 0


async def serve(args: argparse.Namespace, curve: Curve | None) -> None:
    """Run until a signal says stop, or an engine fails (its error is raised)."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    codec = load_codec(args.tokenizer)
    async with AsyncExitStack() as stack:
        started = [await start_engine(args, index, codec, stack, curve) for index in range(args.engines)]
        for addresses, _ in started:
            print(json.dumps(asdict(addresses)), flush=True)
        stopped = asyncio.create_task(stop.wait(), name="stop")
        done, _ = await asyncio.wait([stopped, *(steps for _, steps in started)], return_when=asyncio.FIRST_COMPLETED)
        await cancel(stopped)
        for task in done:
            task.result()


def run(args: argparse.Namespace) -> int:
    """Serve with parsed arguments; returns the exit status (1: a port or a file cannot be had, 2: bad arguments)."""
    try:
        engine_config(args)
        curve = load_curve(args.curve_secret_key_file, args.curve_client_keys_dir)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        _run_loop(serve(args, curve))
    except (OSError, zmq.ZMQError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _run_loop(main: Coroutine[None, None, None]) -> None:
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
    else:
        uvloop.run(main)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m connector.sim", description="Simulated vLLM engines.")
    add_arguments(parser)
    return run(parser.parse_args(argv))
