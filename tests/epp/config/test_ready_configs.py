"""The files in config/ and llm-d's own examples load; a misspelt key in any of them does not (K01)."""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from epp.config.loader import Configuration
from epp.config.text import parse
from epp.fleet.discovery.file import endpoint_specs

CONFIG = Path(__file__).parents[3] / "config"
READY = sorted(path for path in CONFIG.glob("*.yaml") if "EndpointPickerConfig" in path.read_text())

Load = Callable[[str], Configuration]
Problems = Callable[[str], list[str]]

PRECISE = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- {type: token-producer, parameters: {modelName: Qwen/Qwen3-8B, vllm: {url: "http://localhost:8000"}}}
- {type: endpoint-notification-source}
- type: precise-prefix-cache-producer
  parameters:
    tokenProcessorConfig: {blockSizeTokens: 16}
    speculativeIndexing: true
    indexerConfig: {kvBlockIndexConfig: {enableMetrics: true}}
    kvEventsConfig: {topicFilter: "kv@", concurrency: 32, discoverPods: true, podDiscoveryConfig: {socketPort: 5557}}
- {type: prefix-cache-scorer, parameters: {prefixMatchInfoProducerName: precise-prefix-cache-producer}}
- {type: kv-cache-utilization-scorer}
- {type: active-request-scorer}
- {type: no-hit-lru-scorer, parameters: {prefixMatchInfoProducerName: precise-prefix-cache-producer}}
dataLayer:
  sources:
  - pluginRef: endpoint-notification-source
    extractors: [{pluginRef: precise-prefix-cache-producer}]
schedulingProfiles:
- name: default
  plugins:
  - {pluginRef: active-request-scorer, weight: 4}
  - {pluginRef: kv-cache-utilization-scorer, weight: 2}
  - {pluginRef: prefix-cache-scorer, weight: 2}
  - {pluginRef: no-hit-lru-scorer, weight: 2}
"""

AFFINITY = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- {type: token-load-scorer}
- {type: inflight-load-producer}
- {type: approx-prefix-cache-producer, parameters: {maxPrefixTokensToMatch: 40960}}
- {type: prefix-cache-affinity-filter, parameters: {affinityThreshold: 0.80}}
schedulingProfiles:
- name: default
  plugins: [{pluginRef: prefix-cache-affinity-filter}, {pluginRef: token-load-scorer}]
"""

FILE_DISCOVERY = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- {type: file-discovery, parameters: {path: /etc/epp/endpoints.yaml, watchFile: true}}
- {type: queue-scorer}
- {type: prefix-cache-scorer}
dataLayer: {discovery: {pluginRef: file-discovery}}
schedulingProfiles: [{name: default, plugins: [{pluginRef: queue-scorer}, {pluginRef: prefix-cache-scorer}]}]
"""

DISAGGREGATED = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- {type: approx-prefix-cache-producer, parameters: {maxPrefixTokensToMatch: 16384, lruCapacityPerServer: 31250}}
- {type: prefix-cache-scorer}
- {type: prefill-filter}
- {type: decode-filter}
- {type: max-score-picker}
- {type: disagg-profile-handler, parameters: {deciders: {prefill: prefix-based-pd-decider}}}
- {type: prefix-based-pd-decider, parameters: {nonCachedTokens: 16}}
schedulingProfiles:
- name: prefill
  plugins: [{pluginRef: prefill-filter}, {pluginRef: max-score-picker}, {pluginRef: prefix-cache-scorer, weight: 2}]
- name: decode
  plugins: [{pluginRef: decode-filter}, {pluginRef: max-score-picker}, {pluginRef: prefix-cache-scorer, weight: 2}]
"""

FLOW_CONTROL = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
featureGates: [flowControl]
plugins: [{type: queue-scorer}, {type: round-robin-fairness-policy}, {type: fcfs-ordering-policy},
  {type: concurrency-detector, parameters: {maxConcurrency: 132, concurrencyMode: requests, headroom: 0.0}}]
flowControl:
  saturationDetector: {pluginRef: concurrency-detector}
  maxBytes: "10Gi"
  maxRequests: "1k"
  defaultRequestTTL: "60s"
  priorityBands:
  - priority: 100
    maxRequests: "500"
    fairnessPolicyRef: round-robin-fairness-policy
    orderingPolicyRef: fcfs-ordering-policy
  - {priority: -10, maxRequests: "50"}
schedulingProfiles: [{name: default, plugins: [{pluginRef: queue-scorer, weight: 2}]}]
"""

EXAMPLES = {"precise": PRECISE, "affinity": AFFINITY, "file discovery": FILE_DISCOVERY}
GOOD = {**{path.name: path.read_text() for path in READY}, **EXAMPLES}


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A directory as `tokenizerPath` wants it."""
    Tokenizer(WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.mark.parametrize("name", GOOD)
def test_it_loads_without_a_warning(loaded: Load, tokenizer: Path, name: str) -> None:
    assert loaded(GOOD[name].replace("/etc/epp/tokenizer", str(tokenizer))).warnings == ()


def test_the_endpoints_example_is_valid() -> None:
    assert [spec.address for spec in endpoint_specs((CONFIG / "endpoints.yaml").read_bytes())] == [
        "10.0.0.10:8000",
        "10.0.0.11:8000",
    ]


def test_the_tiered_guide_has_three_indexes(loaded: Load) -> None:
    """no-hit-lru-scorer reads the default one, so llm-d creates it, and so do we."""
    configuration = loaded(GOOD["tiered-approx.yaml"])
    assert [p.name for p in configuration.producers] == [
        "token-producer",
        "gpu-prefix-cache-producer",
        "cpu-prefix-cache-producer",
        "approx-prefix-cache-producer",
    ]
    assert [weight for _, weight in configuration.profiles[0].scorers] == [1.0] * 5


def test_what_is_not_available_is_named(problems: Problems) -> None:
    assert problems(DISAGGREGATED) == [
        f'plugins[{position}].type: "{kind}" is known in llm-d, but not available in tierpick yet'
        for position, kind in ((5, "disagg-profile-handler"), (6, "prefix-based-pd-decider"))
    ]
    assert problems(FLOW_CONTROL)[0] == "featureGates: flowControl is not available in tierpick yet"


def paths(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Of every key, at any depth."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield (*path, key)
            yield from paths(item, (*path, key))
    elif isinstance(value, list):
        for position, item in enumerate(value):
            yield from paths(item, (*path, position))


def changed(value: Any, path: tuple[str | int, ...], *, key: str = "", to: Any = None) -> Any:
    """A copy in which the last key of `path` is renamed to `key`, or its value is `to`."""
    if isinstance(value, list):
        return [changed(item, path[1:], key=key, to=to) if i == path[0] else item for i, item in enumerate(value)]
    if len(path) > 1:
        return {k: changed(item, path[1:], key=key, to=to) if k == path[0] else item for k, item in value.items()}
    return {(key or k) if k == path[0] else k: to if k == path[0] and not key else v for k, v in value.items()}


def shown(path: tuple[str | int, ...]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)[1:]


def one_letter_off(word: str, rng: random.Random) -> str:
    position = rng.randrange(len(word))
    letter = rng.choice([c for c in string.ascii_letters if c != word[position]])
    return word[:position] + rng.choice((letter, word[position] + letter)) + word[position + 1 :]


@pytest.mark.parametrize("name", GOOD)
def test_any_key_misspelt_is_refused_by_its_path(problems: Problems, name: str) -> None:
    rng = random.Random(name)
    document = parse(GOOD[name])
    for path in paths(document):
        wrong = one_letter_off(str(path[-1]), rng)
        found = problems(msgspec.json.encode(changed(document, path, key=wrong)).decode())
        where = shown((*path[:-1], wrong))
        assert [problem for problem in found if problem.startswith(f"{where}: unknown field")], (where, found)


@pytest.mark.parametrize("name", GOOD)
def test_any_reference_misspelt_is_refused_by_its_path(problems: Problems, tokenizer: Path, name: str) -> None:
    document = parse(GOOD[name].replace("/etc/epp/tokenizer", str(tokenizer)))
    references = [path for path in paths(document) if path[-1] in ("pluginRef", "prefixMatchInfoProducerName")]
    assert references
    for path in references:
        right = reduce(lambda value, part: value[part], path, document)
        found = problems(msgspec.json.encode(changed(document, path, to=right[:-1])).decode())
        complaint = f'named "{right[:-1]}"; did you mean "{right}"?'
        assert [problem for problem in found if problem.startswith(shown(path)) and complaint in problem], (path, found)
