"""What operators write and engines show: configurations, lists of endpoints, pages of metrics and of models."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from prometheus_client import CollectorRegistry

from epp.config.environment import Environment
from epp.config.errors import ConfigError
from epp.config.loader import load
from epp.fleet.discovery.file import endpoint_specs
from epp.fleet.endpoint import EngineLoad
from epp.fleet.engine_metrics import ENGINES, NotAnEngine, Spec, read_load
from epp.fleet.fleet import Fleet
from epp.fleet.model_names import ModelNames, read_models
from epp.telemetry import Telemetry
from tests.fuzz.source import Source
from tests.fuzz.target import Script, Target

CONFIG = Path(__file__).parents[3] / "config"

_YAML = (
    b"0x" + b"f" * 4000, b"0b" + b"1" * 20000, b"9" * 5000, b"1e999", b".nan", b"&a [*a]", b"*x", b"? [1]",
    b"!!python/object:os.system x", b"<<: {a: 1}", b"~", b"yes", b"12:30:45", b"2024-01-01", b"|\n  x", b"{{{{",
    b"- - - -", b"\t", b"%YAML 1.1", b"---\n---", b"!!binary aGk=", b"!!set {a}", b"!!timestamp 1", b'"\\ud800"',
    b"'\xff'", b"[" * 200, b"a: " * 200,
)  # fmt: skip


def _doctored(source: Source, text: bytes) -> bytes:
    """With some scalar replaced, some line doubled or gone, or worse."""
    for _ in range(source.pick((0, 1, 1, 2, 3))):
        lines = text.split(b"\n")
        at = source.below(len(lines))
        kind = source.below(5)
        if kind < 2:
            lines[at] = (
                lines[at].partition(b":")[0]
                + b": "
                + source.pick((*_YAML, source.json(2), str(source.integer()).encode()))
            )
        elif kind == 2:
            lines.insert(at, source.pick(lines))
        elif kind == 3:
            del lines[at]
        else:
            lines[at] = b" " * source.below(8) + lines[at].strip()
        text = b"\n".join(lines)
    return source.mutate(text) if source.chance(0.2) else text


@cache
def _configurations() -> Sequence[bytes]:
    ready = [path.read_bytes() for path in sorted(CONFIG.glob("*.yaml")) if path.name != "endpoints.yaml"]
    return [*ready, b"", _SMALL]


_SMALL = b"""apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: queue-scorer
schedulingProfiles:
- name: default
  plugins:
  - pluginRef: queue-scorer
    weight: 2
"""


class Configurations(Target):
    share = 1

    def script(self, source: Source) -> Script:
        return (_doctored(source, source.pick(_configurations())),)

    def run(self, script: Script) -> bool:
        environment = Environment(Fleet(), Telemetry(CollectorRegistry()), rng=random.Random(1))
        try:
            load(script[0].decode("utf-8", "replace"), environment)
        except ConfigError:
            return False
        return True


class EndpointFiles(Target):
    share = 2

    def script(self, source: Source) -> Script:
        return (_doctored(source, _ENDPOINTS),)

    def run(self, script: Script) -> bool:
        try:
            specs = endpoint_specs(script[0])
        except ConfigError:
            return False
        Fleet().apply(specs)
        return True


_ENDPOINTS = b"""endpoints:
- name: a
  address: 10.0.0.1
  port: "8000"
  labels: {x: "1"}
- name: b
  namespace: n
  address: "::1"
  port: 8000
  rank: 1
  metricsAddress: "[::1]:9000"
  kvEventsEndpoint: tcp://10.0.0.2:5557
  kvReplayEndpoint: tcp://10.0.0.2:5558
"""


class Metrics(Target):
    """Pages of engines."""

    share = 4

    def script(self, source: Source) -> Script:
        engine = source.pick(list(ENGINES))
        table = ENGINES[engine]
        needed = [_written(spec, b"3") for spec in (table.waiting[0], table.running[0])] if source.chance(0.7) else []
        lines = [*needed, *(_series(source, engine) for _ in range(source.size(12, 2000)))]
        source.random.shuffle(lines)
        page = b"".join(lines)
        return engine.encode(), source.mutate(page) if source.chance(0.3) else page

    def run(self, script: Script) -> bool:
        engine = ENGINES.get(script[0].decode("latin-1"), ENGINES["vllm"])
        try:
            load = read_load(b"".join(script[1:]), engine, EngineLoad(), 0, 1.0).load
        except NotAnEngine:
            return False
        assert 0 <= load.kv_usage <= 1
        assert all(0 <= count < 10**12 for count in (load.waiting, load.running, load.block_size, load.num_blocks))
        return True


def _written(spec: Spec, value: bytes) -> bytes:
    return spec.name + b"{" + getattr(spec, "match", b"") + b"} " + value + b"\n"


def _series(source: Source, engine: str) -> bytes:
    table = ENGINES[engine]
    spec = source.pick([*table.waiting, *table.running, *table.kv_usage, *table.block_size, *table.num_blocks])
    name = spec.name if source.chance(0.95) else source.pick((spec.name + b"_more", source.noise(8)))
    labels = [b'engine="0"', getattr(spec, "match", b"") or b'a="b"']
    if label := getattr(spec, "label", b""):
        labels.append(label + b'="' + source.pick((b"16", b"None", b"9" * 400, b"", b'\\"')) + b'"')
    value = source.pick(
        (b"1", b"0.5", b"NaN", b"+Inf", b"-1", b"1e400", b"9" * 5000, b"1_0", b"", b"1 1700000000", source.noise(6))
    )
    written = b"{" + b",".join(labels[: source.below(4)]) + b"}" if source.chance(0.8) else b""
    return name + written + b" " + value + source.pick((b"\n", b"\n", b"\n", b"\r\n", b""))


class ModelLists(Target):
    """Pages of `/v1/models`."""

    share = 2

    def __init__(self) -> None:
        self._names = ModelNames()

    def script(self, source: Source) -> Script:
        cards = [_card(source) for _ in range(source.size(4, 1500))]
        page = b'{"object":"list","data":[' + b",".join(cards) + b"]}"
        return (source.mutate(page) if source.chance(0.3) else page,)

    def run(self, script: Script) -> bool:
        try:
            models = read_models(script[0])
        except ValueError:
            return False
        self._names.listed("engine", models)
        self._names.kind("base")
        self._names.forget("engine")
        assert len(self._names) == 0
        return True


def _card(source: Source) -> bytes:
    fields = {"id": (b'"base"', b'"sql"'), "root": (b'"/x"', b"null"), "parent": (b'"base"', b"null")}
    members = [b'"%s":%s' % (name.encode(), source.pick((*usual, source.json(2)))) for name, usual in fields.items()]
    return b"{" + b",".join(members) + b',"owned_by":"vllm"}'
