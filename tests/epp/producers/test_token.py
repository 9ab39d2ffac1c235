"""token-producer: one source of tokens, chosen by its parameters; failures leave a reason, never an error."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from tokenizers import Tokenizer, models, pre_tokenizers

from epp.config.environment import Environment
from epp.config.registry import instantiate, plugin_types
from epp.fleet.fleet import Fleet
from epp.producers.token import TokenParameters, TokenProducer
from epp.requests.local import LocalTokens
from epp.requests.model import ChatPrompt, InferenceRequest, Prompt
from epp.requests.render import RenderTokens
from epp.scheduling.plugin import Scheduling
from epp.telemetry import Telemetry

TOKEN = b"\7\0\0\0"


@pytest_asyncio.fixture
async def environment() -> AsyncIterator[Environment]:
    environment = Environment(Fleet(), Telemetry())
    yield environment
    for service in environment.services:
        await service.stop()


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("model")
    backend = Tokenizer(models.BPE({character: i for i, character in enumerate("helo")}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.save(str(path / "tokenizer.json"))
    return str(path)


def parameters(**given: Any) -> TokenParameters:
    return msgspec.convert(given, TokenParameters)


def producer(environment: Environment, **given: Any) -> TokenProducer:
    made = instantiate(plugin_types()["token-producer"], "tokens", parameters(**given), environment)
    assert isinstance(made, TokenProducer)
    return made


def scheduling(*prompts: Prompt, unscored: str = "") -> Scheduling:
    request = InferenceRequest("r1", "/", {}, b"", model="m", target_model="m", prompts=prompts, unscored=unscored)
    return Scheduling(request, [], 0.0)


def produced(made: TokenProducer, *prompts: Prompt, unscored: str = "") -> InferenceRequest:
    run = scheduling(*prompts, unscored=unscored)
    assert made.produce(run) is None
    return run.request


async def test_without_parameters_tokens_are_estimated(environment: Environment) -> None:
    assert produced(producer(environment), "abcd").tokens == [b"abcd"]
    assert produced(producer(environment, modelName="m", estimate={}), "abcd").tokens == [b"abcd"]


async def test_a_directory_gives_exact_tokens(environment: Environment, directory: str) -> None:
    by_path = producer(environment, tokenizerPath=directory)
    by_name = producer(environment, tokenizers={"m": directory})
    exact = b"".join(number.to_bytes(4, "little") for number in (0, 1, 2, 2, 3))
    assert produced(by_path, "hello").tokens == produced(by_name, "hello").tokens == [exact]
    assert [type(service) for service in environment.services] == [LocalTokens, LocalTokens]


@pytest.mark.parametrize(
    "given", [{"modelName": "m"}, {"modelName": "m", "vllm": {"url": "http://x:1", "timeout": "2s"}}]
)
async def test_a_model_name_selects_the_render_endpoint(environment: Environment, given: dict[str, Any]) -> None:
    made = producer(environment, **given)
    run = scheduling("hello")
    later = made.produce(run)
    assert later is not None
    await later
    assert run.request.unscored == "render: not started"
    assert [type(service) for service in environment.services] == [RenderTokens]
    assert made.produce_timeout > (2 if "vllm" in given else 5)


async def test_token_ids_pass_through_whatever_the_source(environment: Environment, directory: str) -> None:
    for given in ({}, {"tokenizerPath": directory}, {"modelName": "m"}):
        assert produced(producer(environment, **given), TOKEN, TOKEN).tokens == [TOKEN, TOKEN]


async def test_requests_without_prompts_or_with_tokens_are_left_alone(environment: Environment) -> None:
    made = producer(environment)
    assert produced(made, unscored="path").unscored == "path"
    run = scheduling("abcd")
    run.request.tokens = [TOKEN]
    made.produce(run)
    assert run.request.tokens == [TOKEN]


async def test_multimodal_chats_are_estimated_but_never_given_exact_tokens(
    environment: Environment, directory: str
) -> None:
    chat = ChatPrompt([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])
    estimated = produced(producer(environment), chat, unscored="multimodal")
    assert estimated.tokens
    assert estimated.unscored == ""
    for given in ({"tokenizerPath": directory}, {"modelName": "m"}):
        exact = produced(producer(environment, **given), chat, unscored="multimodal")
        assert (exact.tokens, exact.unscored) == ((), "multimodal")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"udsTokenizerConfig": {"socketFile": "/tmp/x"}}, "udsTokenizerConfig"),
        ({"modelName": "m", "vllm": {}, "tokenizerPath": "/x"}, "tokenizerPath: cannot be combined with vllm"),
        ({"tokenizerPath": "/x", "tokenizers": {"m": "/x"}}, "tokenizers: cannot be combined"),
        ({"vllm": {}}, "modelName: required"),
        ({"vllm": {"timeout": "soon"}}, "timeout"),
        ({"vllm": {"uri": ""}}, "uri"),
        ({"estimate": {"image": 1}}, r"estimate\.image"),
        ({"tokeniserPath": "/x"}, "tokeniserPath"),
    ],
)
def test_parameters_that_contradict_or_are_unknown_are_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=message):
        parameters(**given)


async def test_a_directory_that_cannot_be_used_is_refused_at_once(environment: Environment, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        producer(environment, tokenizerPath=str(tmp_path))


async def test_what_is_bounded_shows_how_full_it_is(environment: Environment, directory: str) -> None:
    producer(environment, tokenizerPath=directory)
    page = {
        sample.labels["name"]: sample.value
        for metric in environment.telemetry.collect()
        for sample in metric.samples
        if sample.name == "tierpick_occupancy_ratio"
    }
    assert page["tokens queue"] == page["tokens pieces"] == page["tokens words"] == 0
