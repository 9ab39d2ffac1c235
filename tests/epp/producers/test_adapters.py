"""Models, their aliases and LoRA adapters, by name: predictions beside what a simulated engine then reports."""

from __future__ import annotations

import argparse
import functools
import random
import struct
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import aiohttp
import pytest

from connector.sim import cli
from connector.sim.tokens import load_codec
from epp.config.environment import Environment
from epp.fleet.endpoint import Endpoint, EndpointSpec
from epp.fleet.fleet import Fleet
from epp.fleet.model_names import ModelList
from epp.fleet.models import ModelSettings, ModelWatcher
from epp.producers.kv_events import KvEvents
from epp.producers.precise import PrecisePrefixCacheProducer, PrecisePrefixParameters
from epp.requests.model import InferenceRequest
from epp.scheduling.plugin import Scheduling
from epp.telemetry import Telemetry
from indexer.names import MAX_MODELS, NOBODYS
from indexer.stream import State
from indexer.wire import BlockStored
from tests import waiting

BASE, ALIAS = "sim-8b", "chat"
BLOCK = 16
FLAGS = ["--speed=100000", "--hbm-blocks=400", "--lora=poet", "--lora=lawyer"]


until = functools.partial(waiting.until, seconds=10)


@dataclass
class Picker:
    """Its feeds and lists are real, its requests only looked up."""

    environment: Environment = field(default_factory=lambda: Environment(Fleet(), Telemetry()))

    def __post_init__(self) -> None:
        self.producer = PrecisePrefixCacheProducer("precise", PrecisePrefixParameters(), self.environment)
        self.events = KvEvents.of(self.environment)

    def predict(self, model: str, prompt: list[int], salt: str = "") -> int:
        """Cached tokens, at the one endpoint there is."""
        tokens = [struct.pack(f"<{len(prompt)}I", *prompt)]
        request = InferenceRequest(
            "r", "/v1/completions", {}, b"", target_model=model, tokens=tokens, cache_salt=salt
        )  # fmt: skip
        scheduling = Scheduling(request, self.environment.fleet.endpoints, now=0.0)
        self.producer.produce(scheduling)
        (hit,) = scheduling.hits
        assert hit is not None
        return hit.gpu + hit.cpu + hit.storage


@dataclass
class Chain(Picker):
    """And a simulated engine."""

    http: aiohttp.ClientSession | None = None

    async def complete(self, model: str, prompt: list[int], salt: str = "", status: int = 200) -> int:
        """Cached tokens, as the engine reports them; its events have arrived then."""
        body = {"model": model, "prompt": prompt, "max_tokens": 1, "cache_salt": salt}
        assert self.http is not None
        async with self.http.post("/v1/completions", json=body) as response:
            assert response.status == status
            usage = (await response.json())["usage"] if status == 200 else {}
        (feed,) = self.events.feeds.values()
        heartbeats = feed.counters.messages + 2
        await until(lambda: feed.counters.messages >= heartbeats)
        return usage["prompt_tokens_details"]["cached_tokens"] if usage else 0


def prompt(blocks: int = 4) -> list[int]:
    """Never the same twice."""
    return [random.randrange(3, 200) for _ in range(blocks * BLOCK + 1)]


@pytest.fixture
async def chain(request: pytest.FixtureRequest) -> AsyncIterator[Chain]:
    """Its engine's topic names the base model, unless the test says otherwise."""
    flags = getattr(request, "param", [])
    async with AsyncExitStack() as stack:
        parser = argparse.ArgumentParser()
        cli.add_arguments(parser)
        args = parser.parse_args([*FLAGS, "--heartbeat-s=0.02", *flags])
        addresses, _ = await cli.start_engine(args, 0, load_codec(args.tokenizer), stack)
        chain = Chain(http=await stack.enter_async_context(aiohttp.ClientSession(f"http://{addresses.http}")))
        watcher = ModelWatcher(
            chain.environment.fleet, chain.events.models, ModelSettings(interval=3600, shortest=0.01)
        )  # fmt: skip
        for service in (watcher, chain.events):
            await service.start()
            stack.push_async_callback(service.stop)
        spec = EndpointSpec(addresses.http, "sim", kv_events=addresses.events, kv_replay=addresses.replay)
        chain.environment.fleet.apply([spec])
        (feed,) = chain.events.feeds.values()
        await until(lambda: feed.state is State.LIVE and len(chain.events.models))
        yield chain


async def test_an_adapters_very_first_request_is_not_taken_for_the_base_models(chain: Chain) -> None:
    shared = prompt()
    assert await chain.complete(BASE, shared) == 0
    assert chain.predict(BASE, shared) == 4 * BLOCK
    for name in ("poet", "lawyer"):
        assert chain.predict(name, shared) == 0 == await chain.complete(name, shared)
        assert chain.predict(name, shared) == 4 * BLOCK == await chain.complete(name, shared)
    assert chain.predict(BASE, shared) == 4 * BLOCK == await chain.complete(BASE, shared)


async def test_predictions_are_exact_for_any_mixture_of_names_and_salts(chain: Chain) -> None:
    texts = [prompt(6), prompt(6)]
    rng = random.Random(3)
    for _ in range(30):
        name, text, salt = rng.choice((BASE, "poet", "lawyer")), rng.choice(texts), rng.choice(("", "tenant"))
        part = text[: rng.randrange(1, 6) * BLOCK + 1]
        predicted = chain.predict(name, part, salt)
        assert await chain.complete(name, part, salt) == predicted


@pytest.mark.parametrize("chain", [[f"--served-model-name={ALIAS}", f"--topic=kv@pod@{BASE}"]], indirect=True)
async def test_another_name_of_the_base_model_shares_its_cache(chain: Chain) -> None:
    shared = prompt()
    await chain.complete(ALIAS, shared)
    assert chain.predict(ALIAS, shared) == 4 * BLOCK == await chain.complete(ALIAS, shared)
    assert chain.predict("poet", shared) == 0 == await chain.complete("poet", shared)


@pytest.mark.parametrize("chain", [["--topic=kv@pod"]], indirect=True)
async def test_the_same_where_topics_name_no_model(chain: Chain) -> None:
    shared = prompt()
    await chain.complete(BASE, shared)
    assert chain.predict(BASE, shared) == 4 * BLOCK
    assert chain.predict("poet", shared) == 0


async def test_nothing_is_expected_for_a_name_that_the_engine_does_not_serve(chain: Chain) -> None:
    shared = prompt()
    await chain.complete(BASE, shared)
    before = dict(chain.events.index.roots)
    for name in ("nobody", "sim-8b ", "SIM-8B", NOBODYS, *map(str, range(2 * MAX_MODELS))):
        assert chain.predict(name, shared) == 0
    await chain.complete("nobody", shared, status=404)
    assert chain.events.index.roots == before  # clients cannot fill the table


async def test_without_a_model_a_request_is_for_the_base_model(chain: Chain) -> None:
    shared = prompt()
    await chain.complete(BASE, shared)
    (feed,) = chain.events.feeds.values()
    assert feed.residency.model == BASE
    assert chain.predict("", shared) == 4 * BLOCK


class TestWithoutAnEngine:
    """Events applied by hand."""

    @pytest.fixture
    async def picker(self) -> AsyncIterator[Picker]:
        picker = Picker()
        await picker.events.start()
        picker.environment.fleet.apply([EndpointSpec("127.0.0.1:1", kv_events="inproc://nobody")])
        yield picker
        await picker.events.stop()

    def held(self, picker: Picker, text: list[int], lora: str = "", seed: int = 100) -> None:
        ((_endpoint, feed),) = picker.events.feeds.items()
        feed.residency.model = BASE
        tokens = struct.pack(f"<{len(text)}I", *text)[: len(text) // BLOCK * BLOCK * 4]
        hashes = [seed + n for n in range(len(text) // BLOCK)]
        feed.residency.apply([BlockStored(hashes, None, tokens, BLOCK, "gpu", lora, extras={})])

    def endpoint(self, picker: Picker) -> Endpoint:
        return picker.environment.fleet.endpoints[0]

    async def test_where_no_engine_gives_a_list_an_unknown_name_is_an_alias(self, picker: Picker) -> None:
        text = prompt()
        self.held(picker, text)
        assert picker.predict("whatever", text) == 4 * BLOCK

    async def test_until_the_first_list_comes_nothing_is_expected_for_a_name_that_may_be_an_adapters(
        self, picker: Picker
    ) -> None:
        text = prompt()
        self.held(picker, text)
        picker.events.models.asked(self.endpoint(picker))
        assert picker.predict("poet", text) == 0
        assert picker.predict(BASE, text) == 4 * BLOCK

    async def test_an_adapter_loaded_from_elsewhere_is_another_adapter(self, picker: Picker) -> None:
        """vLLM's block hashes hold an adapter's path, which its events do not tell: the old blocks stay, unused."""
        text, models = prompt(), picker.events.models
        models.listed(self.endpoint(picker), ModelList(frozenset([BASE]), {"poet": "/p1"}))
        self.held(picker, text)
        self.held(picker, text, "poet", seed=200)
        assert picker.predict("poet", text) == 4 * BLOCK
        models.listed(self.endpoint(picker), ModelList(frozenset([BASE]), {"poet": "/p2"}))
        assert picker.predict("poet", text) == 0
        assert picker.predict(BASE, text) == 4 * BLOCK
        self.held(picker, text[: 2 * BLOCK], "poet", seed=300)
        assert picker.predict("poet", text) == 2 * BLOCK

    async def test_however_many_adapters_are_listed_only_what_is_held_of_one_is_expected(self, picker: Picker) -> None:
        text, index = prompt(), picker.events.index
        self.held(picker, text)
        names = {f"lora-{n}": "" for n in range(MAX_MODELS + 1)}
        picker.events.models.listed(self.endpoint(picker), ModelList(frozenset([BASE]), names))
        assert {picker.predict(name, text) for name in names} == {0}
        assert len(index.roots) == MAX_MODELS
        self.held(picker, text, "lora-7", seed=200)
        assert [picker.predict(name, text) for name in ("lora-6", "lora-7", BASE)] == [0, 4 * BLOCK, 4 * BLOCK]

    async def test_of_a_listed_adapter_for_whose_name_there_is_no_room_nothing_is_expected(
        self, picker: Picker
    ) -> None:
        text, names = prompt(), picker.events.index.names
        self.held(picker, text)
        picker.events.models.listed(self.endpoint(picker), ModelList(frozenset([BASE]), {"poet": ""}))
        for number in range(MAX_MODELS):
            names.use(f"lora-{number}")
        assert [picker.predict(name, text) for name in ("poet", BASE)] == [0, 4 * BLOCK]

    async def test_a_name_that_was_a_models_and_is_now_another_name_of_one_is_that(self, picker: Picker) -> None:
        """After a rollout, in which the engines' topics began to say the model's own name."""
        text = prompt()
        picker.events.index.publisher("gone", ALIAS).close()
        self.held(picker, text)
        picker.events.models.listed(self.endpoint(picker), ModelList(frozenset([BASE, ALIAS])))
        assert picker.predict(ALIAS, text) == 4 * BLOCK
