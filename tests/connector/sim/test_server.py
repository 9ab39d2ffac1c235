"""One engine over HTTP and ZMQ, as a client and a consumer of its events see it."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import aiohttp
import msgspec
import pytest
import zmq
import zmq.asyncio
from prometheus_client.parser import text_string_to_metric_families

from connector.answers import END
from connector.sim import cli
from connector.sim.engine import Engine
from connector.sim.tokens import load_codec

FAST = ["--speed", "100000", "--block-size", "4", "--hbm-blocks", "33"]


@dataclass
class Served:
    """A running engine, a client for it, and what a subscriber that counts references makes of its events."""

    engine: Engine
    addresses: cli.Addresses
    http: aiohttp.ClientSession
    subscriber: Any
    marks: Iterator[int] = field(default_factory=count)

    async def post(self, path: str, body: Any, status: int = 200) -> Any:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.http.post(path, data=data) as response:
            assert response.status == status, await response.text()
            return await response.json()

    async def stream(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The chunks of a streamed answer; the last must be [DONE]."""
        async with self.http.post(path, json={**body, "stream": True}) as response:
            assert response.content_type == "text/event-stream"
            chunks = [line[6:] for line in (await response.read()).splitlines() if line]
        assert chunks.pop() == b"[DONE]"
        return [json.loads(chunk) for chunk in chunks]

    async def metric(self, name: str) -> dict[str, Any]:
        """The samples of one metric: value by sample name, labels of the last under `labels`."""
        async with self.http.get("/metrics") as response:
            families = text_string_to_metric_families(await response.text())
            samples = [sample for family in families for sample in family.samples if sample.name.startswith(name)]
        return {sample.name: sample.value for sample in samples} | {"labels": samples[-1].labels}

    async def settle(self) -> None:
        await eventually(lambda: not self.engine.has_work)

    async def hear(self) -> dict[str, Counter[int]]:
        """What a subscriber holds that counts references: live messages, and by replay what came before it joined."""
        live: dict[bytes, bytes] = {}
        while not live:  # a request more each time, so that there is something to hear
            mark = {"prompt": [2, 2, 2, 2, 2], "cache_salt": f"mark {next(self.marks)}", "max_tokens": 1}
            await self.post("/v1/completions", mark)
            await self.settle()
            while await self.subscriber.poll(50):
                topic, sequence, payload = await self.subscriber.recv_multipart()
                assert topic == f"kv@{self.addresses.http}@sim-8b".encode()
                live[sequence] = payload
        told = await self.replay()
        assert live.items() <= told.items()
        return believed(told.values())

    async def last_payload(self) -> bytes:
        return (await self.replay()).popitem()[1]

    async def replay(self) -> dict[bytes, bytes]:
        dealer = self.subscriber.context.socket(zmq.DEALER)
        dealer.connect(self.addresses.replay)
        await dealer.send_multipart([b"", bytes(8)])
        told: dict[bytes, bytes] = {}
        while (reply := await dealer.recv_multipart())[2] != END:
            told[reply[2]] = reply[3]
        dealer.close(linger=0)
        return told


def believed(payloads: Iterable[bytes]) -> dict[str, Counter[int]]:
    """Reference counts per medium after these batches."""
    held: dict[str, Counter[int]] = {}
    for event in (event for payload in payloads for event in msgspec.msgpack.decode(payload)[1]):
        if event["type"] == "AllBlocksCleared":
            for tier in event["tiers"]:
                held[tier] = Counter()
        elif event["type"] == "BlockStored":
            held.setdefault(event["medium"], Counter()).update(event["block_hashes"])
        else:
            held[event["medium"]].subtract(event["block_hashes"])
    return {medium: +counts for medium, counts in held.items()}


async def eventually(condition: Callable[[], bool]) -> None:
    for _ in range(5000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it never comes true")


@pytest.fixture
async def serve(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., Any]]:
    """Starts an engine with these flags, and a subscriber to its events."""
    engines: list[Engine] = []

    class Watched(Engine):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            engines.append(self)

    monkeypatch.setattr(cli, "Engine", Watched)
    async with AsyncExitStack() as stack:
        context = zmq.asyncio.Context()
        stack.callback(context.destroy, linger=0)

        async def start(*flags: str) -> Served:
            parser = argparse.ArgumentParser()
            cli.add_arguments(parser)
            args = parser.parse_args([*FAST, *flags])
            addresses, _ = await cli.start_engine(args, 0, load_codec(args.tokenizer), stack)
            subscriber = context.socket(zmq.SUB)
            stack.callback(subscriber.close, linger=0)
            subscriber.subscribe(b"")
            subscriber.connect(addresses.events)
            http = await stack.enter_async_context(aiohttp.ClientSession(f"http://{addresses.http}"))
            return Served(engines[-1], addresses, http, subscriber)

        yield start


async def test_events_add_up_to_what_the_engine_holds(serve) -> None:
    sim = await serve("--cpu-chunks", "40", "--storage-chunks", "-1")
    prompts = [[1000 * (i % 5) + t for t in range(10 + i)] for i in range(40)]
    await asyncio.gather(*(sim.post("/v1/completions", {"prompt": p, "max_tokens": 6}) for p in prompts))
    assert await sim.hear() == sim.engine.residency()


async def test_a_reset_over_http_empties_the_tiers_and_is_told_at_once(serve) -> None:
    sim = await serve("--cpu-chunks", "40")
    await sim.post("/v1/completions", {"prompt": list(range(20))})
    await sim.settle()
    assert await sim.post("/reset_prefix_cache?reset_external=true", {}) == {"success": True}
    async with asyncio.timeout(5):
        while (told := believed((await sim.replay()).values())) != {"GPU": Counter(), "CPU": Counter()}:
            assert set(told) == {"GPU", "CPU"}
    answer = await sim.post("/v1/completions", {"prompt": list(range(20))})
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_usage_tells_the_cached_tokens_in_json_and_in_the_last_chunk(serve) -> None:
    sim = await serve()
    body = {"model": "sim-8b", "prompt": "a prompt of some length", "max_tokens": 5, "ignore_eos": True}
    whole = await sim.post("/v1/completions", body)
    assert whole["usage"] == {
        "prompt_tokens": 23, "completion_tokens": 5, "total_tokens": 28, "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip
    chunks = await sim.stream("/v1/completions", {**body, "stream_options": {"include_usage": True}})
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 20}
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == whole["choices"][0]["text"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None] * 4 + ["length"]
    assert len(await sim.stream("/v1/completions", body)) == 5


async def test_a_conversation_that_quotes_the_answer_finds_it_cached(serve) -> None:
    sim = await serve()
    messages = [{"role": "user", "content": "hi"}]
    first = await sim.post("/v1/chat/completions", {"messages": messages, "max_completion_tokens": 12})
    said = first["choices"][0]["message"]
    assert (said["role"], len(said["content"])) == ("assistant", 12)
    messages += [said, {"role": "user", "content": "go on"}]
    second = await sim.post("/v1/chat/completions", {"messages": messages, "max_tokens": 4})
    before = first["usage"]["prompt_tokens"] + 12 - 1
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == before // 4 * 4
    chunks = await sim.stream("/v1/chat/completions", {"messages": messages, "max_tokens": 4})
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks)
    assert text == second["choices"][0]["message"]["content"]


async def test_several_prompts_are_several_choices_and_one_usage(serve) -> None:
    sim = await serve()
    answer = await sim.post("/v1/completions", {"prompt": ["abc", "abcdef"], "max_tokens": 2})
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (9, 4)


@pytest.mark.parametrize(
    ("body", "status", "naming"),
    [
        (b"{", 400, "invalid request body"),
        (b'{"prompt":"\\ud800"}', 400, "invalid request body"),
        ({"prompt": 3}, 400, "$.prompt"),
        ({"prompt": []}, 400, "prompt"),
        ({"prompt": ""}, 400, "prompt token"),
        ({"prompt": [1, -1]}, 400, "prompt"),
        ({"prompt": [[1], "x", [None]]}, 400, "prompt"),
        ({"prompt": [True]}, 400, "prompt"),
        ({"prompt": "x", "max_tokens": 0}, 400, "output token"),
        ({"prompt": "x", "max_tokens": 128}, 400, "maximum model length of 128"),
        ({"prompt": "x", "n": 2}, 400, "n other than 1"),
        ({"prompt": "x", "model": "other"}, 404, "`other` does not exist"),
    ],
)
async def test_what_cannot_be_served_is_refused_with_a_reason(serve, body: Any, status: int, naming: str) -> None:
    sim = await serve()
    error = (await sim.post("/v1/completions", body, status=status))["error"]
    assert naming in error["message"]
    assert error["code"] == status
    assert not sim.engine.has_work


async def test_a_client_that_leaves_frees_everything(serve) -> None:
    sim = await serve("--speed", "1", "--cpu-chunks", "40", "--max-num-seqs", "2")

    async def leave_after(chunks: int) -> None:
        body = {"prompt": list(range(30)), "max_tokens": 90, "stream": True}
        async with sim.http.post("/v1/completions", json=body) as response:
            for _ in range(chunks):
                await response.content.readuntil(b"\n\n")
            response.close()

    impatient = [asyncio.create_task(leave_after(1)) for _ in range(2)]
    await asyncio.gather(*impatient)
    queued = [asyncio.create_task(leave_after(100)) for _ in range(4)]
    await eventually(lambda: sim.engine.waiting_count == 2)
    for task in queued:
        task.cancel()
    await asyncio.gather(*queued, return_exceptions=True)
    await sim.settle()
    assert (sim.engine.running_count, sim.engine.waiting_count, sim.engine.usage) == (0, 0, 0)
    assert sim.engine.stats.ended == {"length": 0, "abort": 6}


async def test_fifty_requests_at_once_all_end_and_the_gauges_return_to_zero(serve) -> None:
    sim = await serve("--max-num-seqs", "8", "--cpu-chunks", "64")
    bodies = [{"prompt": [i % 7] * (20 + i), "max_tokens": 10} for i in range(50)]
    answers = await asyncio.gather(*(sim.post("/v1/completions", body) for body in bodies))
    assert {answer["usage"]["completion_tokens"] for answer in answers} == {10}
    await sim.settle()
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
        assert (await sim.metric(name))[name] == 0
    assert (await sim.metric("vllm:time_to_first_token_seconds"))["vllm:time_to_first_token_seconds_count"] == 50
    assert (await sim.metric("vllm:generation_tokens"))["vllm:generation_tokens_total"] == 500


async def test_metrics_tell_the_sizes_that_a_router_reads(serve) -> None:
    sim = await serve("--cpu-chunks", "5", "--blocks-per-chunk", "2")
    cache = (await sim.metric("vllm:cache_config_info"))["labels"]
    offload = (await sim.metric("vllm:kv_offload_config_info"))["labels"]
    assert (cache["block_size"], cache["num_gpu_blocks"]) == ("4", "33")
    assert (offload["cpu_num_chunks"], offload["cpu_blocks_per_chunk"]) == ("5", "2")


async def test_hits_are_counted_per_tier(serve) -> None:
    sim = await serve("--cpu-chunks", "64")
    for prompt in (range(17), range(17), range(100, 227), range(17)):
        await sim.post("/v1/completions", {"prompt": list(prompt), "max_tokens": 1})
        await sim.settle()
    assert (await sim.metric("vllm:prefix_cache_hits"))["vllm:prefix_cache_hits_total"] == 16
    assert (await sim.metric("vllm:external_prefix_cache_hits"))["vllm:external_prefix_cache_hits_total"] == 16


async def test_an_adapter_is_a_model_of_its_own_and_shares_no_blocks(serve) -> None:
    sim = await serve("--lora", "sql")
    for model, cached in (("sim-8b", 0), ("sql", 0), ("sql", 4)):
        answer = await sim.post("/v1/completions", {"model": model, "prompt": "abcdefg", "max_tokens": 1})
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
    async with sim.http.get("/v1/models") as response:
        models = (await response.json())["data"]
    assert [(model["id"], model["parent"]) for model in models] == [("sim-8b", None), ("sql", "sim-8b")]


async def test_tokenize_agrees_with_what_a_request_is_charged(serve) -> None:
    sim = await serve()
    messages = [{"role": "user", "content": "hello"}]
    tokens = await sim.post("/tokenize", {"messages": messages})
    charged = await sim.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1})
    assert tokens["count"] == len(tokens["tokens"]) == charged["usage"]["prompt_tokens"]
    assert (await sim.post("/tokenize", {"prompt": "ab"}))["tokens"] == [100, 101]
    assert "prompt or messages" in (await sim.post("/tokenize", {}, status=400))["error"]["message"]


async def test_a_router_can_find_the_sockets_and_see_that_the_engine_lives(serve) -> None:
    sim = await serve()
    async with sim.http.get("/kv_event_sources") as response:
        source = (await response.json())["0"]
    assert (source["endpoint"], source["replay_endpoint"]) == (sim.addresses.events, sim.addresses.replay)
    assert source["topic"] == f"kv@{sim.addresses.http}@sim-8b"
    async with sim.http.get("/health") as response:
        assert (response.status, response.headers["x-sim-engine"]) == (200, "sim")


async def test_it_says_what_our_connector_says_beside_the_events(serve) -> None:
    sim = await serve(
        "--cpu-chunks", "10", "--blocks-per-chunk", "2", "--storage-chunks", "-1", "--heartbeat-s", "0.02"
    )
    await sim.post("/v1/completions", {"prompt": list(range(20)), "max_tokens": 1})
    await sim.settle()
    async with asyncio.timeout(5):
        while True:  # until a heartbeat behind the last step
            batch = msgspec.msgpack.decode(await sim.last_payload())
            if not batch[1] and batch[3]["tiers"]["STORAGE"]["held"]:
                break
    notes = batch[3]
    assert notes["heartbeat"] == 0.02
    assert notes["load"] == {"waiting": 0, "running": 0, "kv_usage": 0.0}
    assert notes["tiers"] == {
        "GPU": {"capacity": 32, "held": 5},
        "CPU": {"capacity": 20, "held": 4, "chunk": 2},
        "STORAGE": {"held": 4, "chunk": 2},
    }


async def test_plain_it_says_what_vllm_says(serve) -> None:
    sim = await serve("--cpu-chunks", "10", "--plain-events", "--placeholder-events", "--heartbeat-s", "0.02")
    await sim.post("/v1/completions", {"prompt": list(range(20)), "max_tokens": 1})
    await sim.settle()
    async with asyncio.timeout(5):
        while "CPU" not in believed(told := (await sim.replay()).values()):
            pass
    batches = [msgspec.msgpack.decode(payload) for payload in told]
    assert {len(batch) for batch in batches} == {3}
    assert [event["token_ids"] for batch in batches for event in batch[1] if event["medium"] == "CPU"] == [[]] * 5
    assert all(batch[1] for batch in batches)
