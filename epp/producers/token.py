"""token-producer: the token ids of a request's prompts, from exactly one source.

`tokenizerPath` or `tokenizers` name local directories (exact, no network); `vllm` asks the engine's render endpoints
(exact, a round trip per request); with neither, tokens are estimated from bytes, which only approximate prefix
matching can use. Whatever goes wrong with one request, it is routed unscored with the reason noted.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterator, Mapping
from typing import Any

import msgspec

from epp.config.environment import Environment
from epp.config.registry import Parameters, plugin
from epp.config.units import Duration, seconds
from epp.requests.estimate import estimate
from epp.requests.local import LocalTokens
from epp.requests.model import InferenceRequest
from epp.requests.openai import MULTIMODAL
from epp.requests.render import RenderTokens
from epp.scheduling.plugin import Scheduling
from epp.telemetry.pulled import OCCUPANCY, Reading

LOCAL_TIMEOUT = 5.0
"""Seconds; a fresh prompt of a million tokens takes two or three."""


class VLLMParameters(msgspec.Struct, forbid_unknown_fields=True, rename="camel", kw_only=True, frozen=True):
    url: str = "http://localhost:8000"
    timeout: Duration = "5s"
    mm_timeout: Duration = "30s"
    """Accepted for llm-d's sake; multimodal prompts are routed unscored and never sent to be rendered."""


class TokenParameters(Parameters, frozen=True):
    model_name: str = ""
    """What the render endpoint calls the model. Alone, it selects `vllm` with its defaults."""
    vllm: VLLMParameters | None = None
    estimate: dict[str, Any] | None = None
    """No settings: images count as a fixed number of tokens."""
    tokenizer_path: str = ""
    """Directory with tokenizer.json (and tokenizer_config.json, chat_template.jinja), for every model name."""
    tokenizers: Mapping[str, str] = {}
    """Such directories by model name."""
    uds_tokenizer_config: Any = None

    def __post_init__(self) -> None:
        if self.uds_tokenizer_config is not None:
            raise ValueError(
                "udsTokenizerConfig: the tokenizer sidecar is not supported; set tokenizerPath or vllm.url"
            )
        if self.estimate:
            raise ValueError(f"estimate.{next(iter(self.estimate))}: the estimate has no settings here")
        sources = ("vllm", "estimate", "tokenizerPath", "tokenizers")
        values = (self.vllm, self.estimate, self.tokenizer_path or None, self.tokenizers or None)
        given = [name for name, value in zip(sources, values, strict=True) if value is not None]
        if len(given) > 1:
            raise ValueError(f"{given[1]}: cannot be combined with {given[0]}; tokens come from one source")
        if self.vllm is not None and not self.model_name:
            raise ValueError("modelName: required with vllm")

    @property
    def directories(self) -> Mapping[str, str]:
        return {self.model_name: self.tokenizer_path} if self.tokenizer_path else self.tokenizers

    @property
    def renders(self) -> bool:
        return self.vllm is not None or bool(self.model_name and not self.directories and self.estimate is None)


@plugin("token-producer", TokenParameters)
class TokenProducer:
    name: str
    type: str

    def __init__(self, name: str, parameters: TokenParameters, environment: Environment) -> None:
        """Loads the tokenizers: a directory that cannot be used is a `ValueError` here, not a surprise later."""
        self.name = name
        self.produce_timeout = LOCAL_TIMEOUT
        self._exact: LocalTokens | RenderTokens | None = None
        if parameters.directories:
            self._exact = LocalTokens(parameters.directories)
        elif parameters.renders:
            settings = parameters.vllm or VLLMParameters()
            timeout = seconds(settings.timeout)
            self._exact = RenderTokens(settings.url, parameters.model_name, timeout, clock=environment.clock)
            self.produce_timeout = timeout + 1  # the client's own timeout says more
        if self._exact is not None:
            environment.services.append(self._exact)
            environment.telemetry.add_source(name, self._readings)

    def _readings(self) -> Iterator[Reading]:
        for what, fill in self._exact.occupancy.items() if self._exact is not None else ():
            yield OCCUPANCY, (f"{self.name} {what}",), fill

    def produce(self, scheduling: Scheduling) -> Awaitable[None] | None:
        request = scheduling.request
        if request.tokens or not request.prompts:
            return None
        if self._exact is None:
            _estimate(request)
            return None
        if request.unscored:
            return None
        ids = [prompt for prompt in request.prompts if isinstance(prompt, bytes)]
        if len(ids) == len(request.prompts):
            request.tokens = ids
            return None
        return self._exact.produce(request)


def _estimate(request: InferenceRequest) -> None:
    request.tokens = [estimate(prompt) for prompt in request.prompts]
    if request.unscored == MULTIMODAL:
        request.unscored = ""
