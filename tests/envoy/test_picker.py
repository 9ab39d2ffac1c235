"""What tierpick promises, with everything real but the engines: Envoy, the `epp` process, sockets, files, signals."""

from __future__ import annotations

import asyncio
import contextlib
import io
import random
import signal
from collections import Counter
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
import yaml

import epp
from epp.toolbox.demo import model
from epp.toolbox.demo.fleet import write_endpoints
from epp.toolbox.demo.picker_config import write_picker_config
from epp.toolbox.demo.traffic import prose
from epp.toolbox.processes import Children

from .chain import CHAT, COMPLETIONS, Chain, Profile, start_engines, until
from .conftest import Upstream, serving

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="module")]

shared = pytest_asyncio.fixture(scope="module", loop_scope="module")
both_profiles = pytest.mark.parametrize("profile", Profile, ids=lambda profile: profile.value)

CONFIGS = Path(epp.__file__).parent.parent / "config"
HBM_TOKENS = 64 * 16
"""Of one engine; its CPU RAM has 25 times as much."""
ENGINE_SIZES = ("--hbm-blocks=65", "--cpu-chunks=400")


@shared
async def http():
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=20)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        yield session


@shared
def tokenizer(tmp_path_factory):
    """A directory with a tokenizer and a chat template."""
    directory = tmp_path_factory.mktemp("tokenizer")
    model.write_model(directory)
    return directory


@shared
async def chain(http, tokenizer, tmp_path_factory):
    """Three engines in a file that is watched, and our ready two-tier configuration."""
    directory = tmp_path_factory.mktemp("chain")
    async with Children(directory) as children:
        chain = Chain(children, http, directory, f"--config-file={directory / 'config.yaml'}", "--observe-streams=1")
        _, chain.engines = await start_engines(children, "engine", f"--tokenizer={tokenizer}", *ENGINE_SIZES, count=3)
        chain.endpoints_file = directory / "endpoints.yaml"
        write_endpoints(chain.endpoints_file, chain.engines)
        write_picker_config(directory / "config.yaml", chain.endpoints_file, tokenizer)
        await chain.start_picker(feeds=3)
        await asyncio.gather(*map(chain.start_envoy, Profile))
        yield chain


def text(words=150):
    """Never the same twice: nobody holds it. About 1.2 tokens a word."""
    return prose(random.Random(), words)


def address_of(chain, name):
    [address] = [engine.http for engine in chain.engines if engine.name == name]
    return address


async def flush_hbm(chain, name):
    """Fills an engine's HBM with what nobody will ask for again."""
    for _ in range(HBM_TOKENS // 200 + 1):
        reply = await chain.complete(text(200), only=address_of(chain, name))
        assert (reply.status, reply.engine) == (200, name)
    await chain.settled()


class TestWarmPrompts:
    @both_profiles
    async def test_the_second_turn_of_a_conversation_goes_where_the_first_is_in_hbm(self, chain, profile):
        messages = [{"role": "system", "content": text()}, {"role": "user", "content": text(20)}]
        first = await chain.chat(messages, profile=profile)
        await chain.settled()
        messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": text(20)}]
        second = await chain.chat(messages, profile=profile)
        decision = await chain.decision(second)
        assert second.engine == first.engine
        assert second.cached_tokens > 150
        assert decision["predicted"] == {
            "gpu": second.cached_tokens, "cpu": 0, "storage": 0, "total": second.cached_tokens
        }  # fmt: skip
        assert decision["delivered_cached_tokens"] == second.cached_tokens
        assert decision["prediction"] == "exact"

    @both_profiles
    async def test_a_prompt_that_hbm_has_lost_goes_where_it_is_in_cpu_ram(self, chain, profile):
        prompt = text()
        first = await chain.complete(prompt, profile=profile)
        await flush_hbm(chain, first.engine)
        again = await chain.complete(prompt, profile=profile)
        decision = await chain.decision(again)
        assert again.engine == first.engine
        assert again.cached_tokens >= 128
        assert decision["predicted"] == {
            "gpu": 0, "cpu": again.cached_tokens, "storage": 0, "total": again.cached_tokens
        }  # fmt: skip
        assert decision["prediction"] == "exact"

    async def test_a_prompt_in_both_tiers_is_predicted_tier_by_tier(self, chain):
        stem, rest = text(), text()
        first = await chain.complete(stem + rest)
        await flush_hbm(chain, first.engine)
        await chain.complete(stem)
        await chain.settled()
        again = await chain.complete(stem + rest)
        decision = await chain.decision(again)
        predicted = decision["predicted"]
        assert again.engine == first.engine
        assert predicted["gpu"] >= 128
        assert predicted["cpu"] >= 128
        assert predicted["gpu"] + predicted["cpu"] == predicted["total"] == again.cached_tokens
        assert decision["prediction"] == "exact"

    async def test_token_ids_and_streams_are_predicted_too(self, chain):
        ids = [random.randrange(3, 1000) for _ in range(200)]
        first = await chain.complete(ids)
        await chain.settled()
        second = await chain.complete(ids, stream=True, stream_options={"include_usage": True})
        assert second.body.endswith(b"data: [DONE]\n\n")
        decision = await chain.decision(second)
        assert second.engine == first.engine
        assert decision["predicted"]["total"] == decision["delivered_cached_tokens"] == 192


class TestColdPrompts:
    async def test_they_go_around(self, chain):
        engines = Counter([(await chain.complete(text(30))).engine for _ in range(12)])
        assert engines == {engine.name: 4 for engine in chain.engines}


BIG = 100_000
NO_JSON = "request body"
BAD = {
    "text": (COMPLETIONS, b"hello", NO_JSON),
    "truncated": (COMPLETIONS, b'{"model": "demo", "prompt": "a', NO_JSON),
    "trailing garbage": (CHAT, b'{"model": "demo", "messages": [{"role": "user", "content": "a"}]} x', NO_JSON),
    "a list": (COMPLETIONS, b'[{"model": "demo", "prompt": "a"}]', NO_JSON),
    "a string": (CHAT, b'"model"', NO_JSON),
    "NaN": (COMPLETIONS, b'{"model": "demo", "prompt": "a", "temperature": NaN}', NO_JSON),
    "not UTF-8": (COMPLETIONS, b'{"model": "demo", "prompt": "\xff"}', "prompt"),
    "nothing but brackets": (CHAT, b"[" * BIG, NO_JSON),
    "a deep prompt": (COMPLETIONS, b'{"model": "demo", "prompt": %s}' % (b"[" * BIG + b"]" * BIG), "nested too deeply"),
    "a deep unknown field": (CHAT, b'{"model": "demo", "x": %s}' % (b"[" * BIG + b"]" * BIG), NO_JSON),
    "deep messages": (CHAT, b'{"model": "demo", "messages": %s}' % (b"[" * BIG + b"]" * BIG), NO_JSON),
    "no model": (COMPLETIONS, b'{"prompt": "a"}', "model"),
    "an empty model": (CHAT, b'{"model": "", "messages": [{"role": "user", "content": "a"}]}', "model"),
    "a number as model": (CHAT, b'{"model": 7, "messages": [{"role": "user", "content": "a"}]}', "model"),
    "no prompt": (COMPLETIONS, b'{"model": "demo"}', "prompt"),
    "an empty prompt": (COMPLETIONS, b'{"model": "demo", "prompt": ""}', "prompt"),
    "an empty list of prompts": (COMPLETIONS, b'{"model": "demo", "prompt": []}', "prompt"),
    "an object as prompt": (COMPLETIONS, b'{"model": "demo", "prompt": {"a": 1}}', "prompt"),
    "a mixed prompt": (COMPLETIONS, b'{"model": "demo", "prompt": ["a", 1]}', "prompt"),
    "a surrogate in the prompt": (COMPLETIONS, b'{"model": "demo", "prompt": "a\\ud800"}', "prompt"),
    "no messages": (CHAT, b'{"model": "demo"}', "messages"),
    "empty messages": (CHAT, b'{"model": "demo", "messages": []}', "messages"),
    "a string as messages": (CHAT, b'{"model": "demo", "messages": "a"}', "messages"),
    "a number as message": (CHAT, b'{"model": "demo", "messages": [7]}', "messages[0]"),
    "no role": (CHAT, b'{"model": "demo", "messages": [{"content": "a"}]}', "messages[0].role"),
    "a number as content": (CHAT, b'{"model": "demo", "messages": [{"role": "user", "content": 7}]}', "content"),
    "a surrogate in a message": (
        CHAT, b'{"model": "demo", "messages": [{"role": "user", "content": "\\udfff"}]}', "messages",
    ),
    "an object as tools": (
        CHAT, b'{"model": "demo", "messages": [{"role": "user", "content": "a"}], "tools": {}}', "tools",
    ),
    "a number as salt": (COMPLETIONS, b'{"model": "demo", "prompt": "a", "cache_salt": 7}', "cache_salt"),
    "a string as flag": (COMPLETIONS, b'{"model": "demo", "prompt": "a", "add_special_tokens": 1}', "special_tokens"),
}  # fmt: skip
"""Name → path, body, and what the answer must name."""


class TestBadInput:
    @both_profiles
    async def test_each_is_a_400_that_names_the_field_and_no_other_request_suffers(self, chain, profile):
        async def good():
            reply = await chain.complete(text(30), profile=profile)
            assert (reply.status, reply.json["usage"]["completion_tokens"]) == (200, 4)

        async def bad(name, path, body, named):
            reply = await chain.send("POST", path, data=body, profile=profile)
            assert (name, reply.status, reply.engine) == (name, 400, "")
            assert reply.headers["content-type"] == "application/json"
            assert named in reply.error, name
            assert reply.json["error"]["code"] == 400

        before = await chain.metrics()
        async with asyncio.timeout(15), asyncio.TaskGroup() as group:
            for name, case in BAD.items():
                group.create_task(bad(name, *case))
                group.create_task(good())
        moved = (await chain.metrics()).since(before)
        assert moved("llm_d_epp_request_error_total", error_code="BadRequest") == len(BAD)
        assert moved("llm_d_epp_request_error_total") == len(BAD)
        chain.children.check()

    @pytest.mark.parametrize("ids", [[-1], [1e20], [True], [1.5], [2**32], [[1, 2], [-1]]], ids=str)
    async def test_token_ids_out_of_range_are_the_engines_business(self, chain, ids):
        reply = await chain.complete(ids)
        assert (reply.status, bool(reply.engine)) == (400, True)  # the engine's own verdict
        decision = await chain.decision(reply)
        assert (decision["unscored"], decision["predicted"]) == ("token ids out of range", None)

    async def test_images_are_routed_unscored(self, chain):
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        reply = await chain.chat([{"role": "user", "content": [{"type": "text", "text": "what?"}, image]}])
        assert reply.engine
        assert (await chain.decision(reply))["unscored"] == "multimodal"

    @both_profiles
    async def test_a_path_that_nobody_knows_is_answered_by_an_engine(self, chain, profile):
        reply = await chain.send("POST", "/v1/no/such/thing", data=b"{", profile=profile)
        assert (reply.status, bool(reply.engine)) == (404, True)


class TestSubsetHints:
    @both_profiles
    async def test_only_the_endpoints_of_the_hint_are_candidates(self, chain, profile):
        prompt = text()
        first = await chain.complete(prompt, profile=profile)
        await chain.settled()
        others = [engine for engine in chain.engines if engine.name != first.engine]
        again = await chain.complete(prompt, profile=profile, only=",".join(engine.http for engine in others))
        decision = await chain.decision(again)
        assert again.engine in {engine.name for engine in others}
        assert {candidate["name"] for candidate in decision["candidates"]} == {engine.name for engine in others}

    @both_profiles
    async def test_a_hint_that_fits_nobody_is_a_503(self, chain, profile):
        reply = await chain.complete("a", profile=profile, only="10.9.9.9:1")
        assert (reply.status, reply.headers["x-llm-d-request-dropped-reason"]) == (503, "rejected-no-endpoints")


@contextlib.asynccontextmanager
async def another_engine(chain, tokenizer, name):
    """Beside the others, and in the file until the block is left."""
    engines = chain.engines
    async with Children(chain.directory / name) as children:
        process, [engine] = await start_engines(children, name, f"--tokenizer={tokenizer}", *ENGINE_SIZES)
        chain.engines = [*engines, engine]
        write_endpoints(chain.endpoints_file, chain.engines)
        try:
            yield engine, process
        finally:
            chain.engines = engines
            write_endpoints(chain.endpoints_file, engines)
            await chain.hears(len(engines))


class TestFleetChanges:
    async def test_an_engine_in_the_file_is_picked_and_one_that_leaves_it_is_not(self, chain, tokenizer):
        async with another_engine(chain, tokenizer, "newcomer") as (engine, _):
            async with asyncio.timeout(5):
                prompt = await picked(chain, "newcomer")
            await chain.settled()
            assert "newcomer" in (await chain.metrics()).page
        again = await chain.complete(prompt)
        assert again.status == 200
        assert again.engine != "newcomer"
        assert "newcomer" not in await chain.endpoints()
        page = (await chain.metrics()).page
        assert "newcomer" not in page
        assert engine.http not in page

    async def test_an_engine_that_is_killed_harms_no_other(self, chain, tokenizer):
        async with another_engine(chain, tokenizer, "victim") as (_, process):
            async with asyncio.timeout(5):
                await picked(chain, "victim")
            warm = {name: text() for name in ("engine-0", "engine-1", "engine-2")}
            for name, prompt in warm.items():
                await chain.complete(prompt, only=address_of(chain, name))
            await chain.settled()
            process.signal_group(signal.SIGKILL)
            async with asyncio.timeout(5):
                cold = await asyncio.gather(*(chain.complete(text(30)) for _ in range(16)))
            assert {reply.engine for reply in cold if reply.status == 200} == set(warm)
            assert {name: (await chain.complete(prompt)).engine for name, prompt in warm.items()} == {
                n: n for n in warm
            }
            await until(lambda: left_out(chain, "victim"))
            after = await asyncio.gather(*(chain.complete(text(30)) for _ in range(16)))
            assert {reply.status for reply in after} == {200}
        assert {(await chain.complete(text(30))).status for _ in range(8)} == {200}


async def left_out(chain, name) -> bool | None:
    return True if not (await chain.endpoints())[name]["reachable"] else None


async def picked(chain, name):
    """Sends cold prompts until the engine gets one, and returns that."""
    while (await chain.complete(prompt := text())).engine != name:
        pass
    return prompt


class TestMetrics:
    async def test_a_hit_in_hbm_moves_every_family_it_should(self, chain):
        prompt = text()
        first = await chain.complete(prompt)
        await chain.settled()
        before = await chain.metrics()
        await chain.decision(again := await chain.complete(prompt))
        moved = (await chain.metrics()).since(before)
        requests = {"model_name": model.NAME, "target_model_name": model.NAME}
        assert again.cached_tokens > 128
        assert moved("llm_d_epp_request_total", **requests) == 1
        assert moved("llm_d_epp_request_duration_seconds_count", **requests) == 1
        assert moved("llm_d_epp_request_input_tokens_count", **requests) == 1
        assert moved("llm_d_epp_request_cached_tokens_sum", **requests) == again.cached_tokens
        assert moved("llm_d_epp_request_ttft_seconds_count", streaming="false", **requests) == 1
        assert moved("llm_d_epp_scheduler_attempts_total", status="success", endpoint_name=first.engine) == 1
        assert moved("llm_d_epp_scheduler_e2e_duration_seconds_count") == 1
        assert moved("llm_d_epp_request_processing_duration_seconds_count") == 1
        assert moved("llm_d_epp_response_processing_duration_seconds_count") == 1
        assert moved("llm_d_epp_kv_cache_index_lookup_hits_total") == again.cached_tokens // 16
        for producer in ("gpu-prefix-cache-producer", "cpu-prefix-cache-producer"):
            plugin = {"plugin_name": producer, "plugin_type": "precise-prefix-cache-producer"}
            assert moved("llm_d_epp_prefix_indexer_hit_ratio_count", **plugin) == 1
            assert moved("llm_d_epp_prefix_indexer_hit_ratio_sum", **plugin) == pytest.approx(1)
            assert moved("llm_d_epp_prefix_indexer_hit_bytes_sum", **plugin) == 4 * again.cached_tokens
            assert before.total("llm_d_epp_prefix_indexer_size", **plugin) > 0
        assert moved("tierpick_predicted_tokens_total", tier="gpu") == again.cached_tokens
        assert moved("tierpick_predicted_tokens_total", tier="cpu") == 0
        assert moved("tierpick_prediction_total", result="exact") == 1

    async def test_a_hit_in_cpu_ram_moves_the_cpu_tiers_series_only(self, chain):
        prompt = text()
        first = await chain.complete(prompt)
        await flush_hbm(chain, first.engine)
        before = await chain.metrics()
        await chain.decision(again := await chain.complete(prompt))
        moved = (await chain.metrics()).since(before)
        assert moved("llm_d_epp_prefix_indexer_hit_bytes_sum", plugin_name="gpu-prefix-cache-producer") == 0
        assert moved("llm_d_epp_prefix_indexer_hit_bytes_sum", plugin_name="cpu-prefix-cache-producer") == (
            4 * again.cached_tokens
        )
        assert moved("tierpick_predicted_tokens_total", tier="gpu") == 0
        assert moved("tierpick_predicted_tokens_total", tier="cpu") == again.cached_tokens > 0

    async def test_events_are_counted_by_pod(self, chain):
        before = await chain.metrics()
        for engine in chain.engines:
            await flush_hbm(chain, engine.name)
        after = await chain.metrics()
        moved = after.since(before)
        assert after.total("llm_d_epp_kv_cache_events_active_subscribers") == len(chain.engines)
        for engine in chain.engines:
            pod = {"pod_identifier": engine.http}
            assert moved("llm_d_epp_kv_cache_events_messages_received_total", **pod) > 0
            assert after.values("llm_d_epp_kv_cache_events_subscriber_reconnections_total", **pod) == [0]
            assert after.values("llm_d_epp_kv_cache_events_zmq_errors_total", operation="recv", **pod) == [0]
        assert moved("llm_d_epp_kv_cache_index_admissions_total") > 0
        assert moved("llm_d_epp_kv_cache_index_evictions_total") > 0
        assert moved("llm_d_epp_kv_cache_events_dedup_removed_hashes_forwarded_total") > 0


class TestRestart:
    async def test_a_picker_that_starts_before_warm_engines_knows_what_they_hold(self, chain):
        in_hbm, in_cpu = text(), text()
        first = await chain.complete(in_cpu)
        await flush_hbm(chain, first.engine)
        second = await chain.complete(in_hbm)
        await chain.settled()
        assert await chain.end_picker() == 0
        await chain.start_picker(feeds=3)
        for prompt, engine, tier in ((in_hbm, second.engine, "gpu"), (in_cpu, first.engine, "cpu")):
            again = await chain.complete(prompt)
            decision = await chain.decision(again)
            assert again.engine == engine
            assert decision["predicted"][tier] == again.cached_tokens > 0
            assert decision["prediction"] == "exact"


@shared
async def tiered(http, tokenizer, tmp_path_factory):
    """Starts the picker with one of the tiered configurations. Its two engines are known by --endpoints only, so their
    events must be where llm-d looks for them: at port 5557."""
    directory = tmp_path_factory.mktemp("tiered")
    network = f"127.{random.randrange(64, 250)}.{random.randrange(250)}"
    async with contextlib.AsyncExitStack() as stack:
        children = await stack.enter_async_context(Children(directory))
        engines = []
        for host in (f"{network}.1", f"{network}.2"):
            _, [engine] = await start_engines(
                children, host, f"--host={host}", "--events-port=5557", f"--tokenizer={tokenizer}", *ENGINE_SIZES
            )
            engines.append(engine)

        async def start(config):
            own = await stack.enter_async_context(Children(directory / config))
            ready = (CONFIGS / config).read_text().replace("/etc/epp/tokenizer", str(tokenizer))
            (directory / config / "config.yaml").write_text(ready)
            endpoints = ",".join(engine.http for engine in engines)
            chain = Chain(
                own, http, directory / config,
                f"--config-file={directory / config / 'config.yaml'}", f"--endpoints={endpoints}",
                "--drain-timeout=0",
            )  # fmt: skip
            await chain.start_picker()
            await chain.start_envoy(Profile.BUFFERED)
            return chain

        yield start


class TestTheTieredGuide:
    async def test_as_it_is_it_keeps_conversations_together(self, tiered):
        chain = await tiered("tiered-approx.yaml")
        await self.check_conversations(chain)

    async def test_fed_by_events_it_predicts_exactly(self, tiered):
        chain = await tiered("tiered-precise.yaml")
        await until(chain.subscribes, 5)
        for decision in await self.check_conversations(chain):
            assert decision["prediction"] == "exact"
            assert decision["predicted"]["gpu"] == decision["delivered_cached_tokens"] > 128

    async def check_conversations(self, chain):
        """Four conversations of two turns: both engines get some, and no conversation changes its engine."""
        messages = [[{"role": "user", "content": text()}] for _ in range(4)]
        firsts = [await chain.chat(each) for each in messages]
        assert len({reply.engine for reply in firsts}) == 2
        await chain.settled()
        decisions = []
        for each, first in zip(messages, firsts, strict=True):
            more = [{"role": "assistant", "content": first.text}, {"role": "user", "content": text(20)}]
            second = await chain.chat([*each, *more])
            assert (second.engine, second.cached_tokens > 128) == (first.engine, True)
            decisions.append(await chain.decision(second))
        return decisions


CAP = 6_000_000
EVEN_CONFIG = """
apiVersion: llm-d.ai/v1
kind: EndpointPickerConfig
plugins:
- {type: file-discovery, parameters: {path: %s, watchFile: true}}
- {type: queue-scorer}
- {type: kv-cache-utilization-scorer}
schedulingProfiles:
- name: default
  plugins: [{pluginRef: queue-scorer}, {pluginRef: kv-cache-utilization-scorer}]
dataLayer: {discovery: {pluginRef: file-discovery}}
"""


@shared
async def plain(http, tmp_path_factory):
    """Two HTTP servers that are no engines, and a configuration in which both always score alike."""
    directory = tmp_path_factory.mktemp("plain")
    async with serving(Upstream()) as one, serving(Upstream()) as other, Children(directory) as children:
        chain = Chain(
            children, http, directory, f"--config-file={directory / 'config.yaml'}", f"--max-body-bytes={CAP}"
        )
        chain.upstreams = [one, other]
        chain.endpoints_file = directory / "endpoints.yaml"
        write_upstreams(chain, chain.upstreams)
        (directory / "config.yaml").write_text(EVEN_CONFIG % chain.endpoints_file)
        await chain.start_picker()
        await asyncio.gather(*(chain.start_envoy(profile, max_body_bytes=CAP) for profile in Profile))
        yield chain


def write_upstreams(chain, upstreams):
    endpoints = [dict(zip(("address", "port"), each.address.split(":"), strict=True)) for each in upstreams]
    named = [{"name": f"upstream-{number}", **endpoint} for number, endpoint in enumerate(endpoints)]
    chain.endpoints_file.write_text(yaml.safe_dump({"endpoints": named}))


def received(chain, reply):
    """What the server that answered got: the request and its body."""
    [found] = [
        (request, body)
        for upstream in chain.upstreams
        for request, body in upstream.requests
        if request.headers.get("x-request-id") == reply.id
    ]
    return found


class TestPlainServers:
    async def test_equal_scores_are_spread(self, plain):
        replies = [await plain.complete("a") for _ in range(20)]
        decisions = [await plain.decision(reply) for reply in replies]
        assert all(len({candidate["score"] for candidate in each["candidates"]}) == 1 for each in decisions)
        assert {each["chosen"] for each in decisions} == {upstream.address for upstream in plain.upstreams}

    @both_profiles
    async def test_multipart_to_an_unclaimed_path_arrives_byte_for_byte(self, plain, profile):
        part = b'--cut\r\ncontent-disposition: form-data; name="file"; filename="a.wav"\r\n\r\n%s\r\n--cut--\r\n'
        body = part % random.randbytes(5_000_000)
        headers = {"content-type": (content_type := "multipart/form-data; boundary=cut")}
        reply = await plain.send(
            "POST", "/v1/audio/transcriptions", data=io.BytesIO(body), headers=headers, profile=profile
        )
        request, got = received(plain, reply)
        assert (reply.status, got == body) == (200, True)
        assert request.headers["content-type"] == content_type

    @both_profiles
    @pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "DELETE"])
    async def test_requests_without_a_body_are_routed(self, plain, profile, method):
        reply = await plain.send(method, "/v1/models?a=b", profile=profile)
        request, _ = received(plain, reply)
        assert (reply.status, request.method, request.path_qs) == (200, method, "/v1/models?a=b")

    @both_profiles
    async def test_a_body_over_the_cap_is_a_413(self, plain, profile):
        reply = await plain.send("POST", COMPLETIONS, data=io.BytesIO(bytes(CAP + 1)), profile=profile)
        assert reply.status == 413
        assert reply.headers["content-type"] == "application/json"
        assert str(CAP) in reply.error

    @both_profiles
    async def test_without_endpoints_it_is_a_503_that_says_so_until_there_are_some(self, plain, profile):
        write_upstreams(plain, [])
        await until(lambda: fleet_of(plain, 0), 5)
        for method, arguments in (("POST", {"json": {"model": "m", "prompt": "a"}}), ("GET", {})):
            reply = await plain.send(method, COMPLETIONS, profile=profile, **arguments)
            assert reply.status == 503
            assert reply.headers["x-llm-d-request-dropped-reason"] == "rejected-no-endpoints"
            assert reply.json["error"]["code"] == 503
        write_upstreams(plain, plain.upstreams)
        await until(lambda: fleet_of(plain, 2), 5)
        assert (await plain.complete("a", profile=profile)).status == 200

    async def test_sigterm_lets_streams_finish(self, plain):
        for upstream in plain.upstreams:
            upstream.release.clear()
        async with contextlib.AsyncExitStack() as stack:
            streams = [
                await stack.enter_async_context(plain.request("POST", "/sse", data=b"{}", profile=profile))
                for profile in Profile
            ]
            for stream in streams:
                await stream.content.readuntil(b"data: 2\n\n")
            ending = asyncio.create_task(plain.end_picker())
            await until(plain.stops_serving)
            assert (await plain.complete("a")).status == 200  # a gateway may be late to notice
            for upstream in plain.upstreams:
                upstream.release.set()
            assert [await stream.content.read() for stream in streams] == [b"data: [DONE]\n\n"] * 2
        assert await ending == 0
        await plain.start_picker()


async def fleet_of(chain, count):
    return len(await chain.endpoints()) == count or None


class TestTheEnd:
    """Comes last: after all the traffic above, nothing may be left of it."""

    @both_profiles
    async def test_of_clients_that_leave_nothing_stays_in_flight(self, chain, profile):
        async def leaves_mid_stream():
            body = {"model": model.NAME, "prompt": text(), "max_tokens": 600, "stream": True}
            async with chain.request("POST", COMPLETIONS, json=body, profile=profile) as response:
                await response.content.readuntil(b"\n\n")

        async def leaves_before_the_answer():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(random.random() / 20):
                    await chain.complete(text(), max_tokens=600, profile=profile)

        async def leaves_mid_body():
            host, port = chain.urls[profile].removeprefix("http://").split(":")
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{")
            await writer.drain()
            writer.close()
            await writer.wait_closed()

        async def fails():
            assert (await chain.send("POST", CHAT, data=b"{", profile=profile)).status == 400

        kinds = (leaves_mid_stream, leaves_before_the_answer, leaves_mid_body, fails)
        await asyncio.gather(*(kind() for kind in kinds * 5))
        await chain.until_idle()

    async def test_all_counters_are_back_at_zero(self, chain, plain):
        await chain.until_idle()
        await plain.until_idle()
        assert (await chain.metrics()).total("tierpick_occupancy_ratio", name="speculative keys") == 0
