"""Load figures out of an engine's Prometheus page: a scan for the few lines we need, not a parse of the page (pure).

Reads gauges and counters in the text format. Only complete lines count, and only finite values in their range: a
figure that is there but senseless is treated like one that is missing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from epp.fleet.endpoint import EngineLoad

ENGINE_LABEL = "llm-d.ai/engine-type"
LEGACY_ENGINE_LABEL = "inference.networking.k8s.io/engine-type"
DEFAULT_ENGINE = "vllm"

_IMPLAUSIBLE = 1e12


@dataclass(slots=True, frozen=True)
class Value:
    """The value of the series; `match`, as `label="value"`, says which of several."""

    name: bytes
    match: bytes = b""


@dataclass(slots=True, frozen=True)
class Label:
    """A number carried as a label of an info metric."""

    name: bytes
    label: bytes


Spec = Value | Label


@dataclass(slots=True, frozen=True)
class EngineMetrics:
    """Where an engine shows each figure. Of several places the first that is there counts: old names stay readable.
    Without `waiting` and `running` a page is not an engine's."""

    waiting: tuple[Spec, ...]
    running: tuple[Spec, ...]
    kv_usage: tuple[Spec, ...] = ()
    block_size: tuple[Spec, ...] = ()
    num_blocks: tuple[Spec, ...] = ()
    cpu_blocks_per_chunk: tuple[Spec, ...] = ()
    cpu_chunks: tuple[Spec, ...] = ()
    asleep: tuple[Spec, ...] = ()
    """Any of them above 0."""


_TRITON_LLM_REQUESTS = b"nv_trt_llm_request_metrics"
_TRITON_LLM_BLOCKS = b"nv_trt_llm_kv_cache_block_metrics"

ENGINES: Mapping[str, EngineMetrics] = {
    "vllm": EngineMetrics(
        waiting=(Value(b"vllm:num_requests_waiting"),),
        running=(Value(b"vllm:num_requests_running"),),
        kv_usage=(Value(b"vllm:kv_cache_usage_perc"), Value(b"vllm:gpu_cache_usage_perc")),
        block_size=(Label(b"vllm:cache_config_info", b"block_size"),),
        num_blocks=(Label(b"vllm:cache_config_info", b"num_gpu_blocks"),),
        cpu_blocks_per_chunk=(Label(b"vllm:kv_offload_config_info", b"cpu_blocks_per_chunk"),),
        cpu_chunks=(Label(b"vllm:kv_offload_config_info", b"cpu_num_chunks"),),
        asleep=(
            Value(b"vllm:engine_sleep_state", b'sleep_state="weights_offloaded"'),
            Value(b"vllm:engine_sleep_state", b'sleep_state="discard_all"'),
        ),
    ),
    "sglang": EngineMetrics(
        waiting=(Value(b"sglang:num_queue_reqs"),),
        running=(Value(b"sglang:num_running_reqs"),),
        kv_usage=(Value(b"sglang:token_usage"),),
        block_size=(Label(b"sglang:cache_config_info", b"page_size"),),
        num_blocks=(Label(b"sglang:cache_config_info", b"num_pages"),),
    ),
    "trtllm-serve": EngineMetrics(
        waiting=(Value(b"trtllm_num_requests_waiting"),),
        running=(Value(b"trtllm_num_requests_running"),),
        kv_usage=(Value(b"trtllm_kv_cache_utilization"),),
        block_size=(Value(b"trtllm_kv_cache_tokens_per_block"),),
        num_blocks=(Value(b"trtllm_kv_cache_max_blocks"),),
    ),
    "triton-tensorrt-llm": EngineMetrics(
        waiting=(Value(_TRITON_LLM_REQUESTS, b'request_type="waiting"'),),
        running=(Value(_TRITON_LLM_REQUESTS, b'request_type="scheduled"'),),
        kv_usage=(Value(_TRITON_LLM_BLOCKS, b'kv_cache_block_type="fraction"'),),
        block_size=(Value(_TRITON_LLM_BLOCKS, b'kv_cache_block_type="tokens_per"'),),
        num_blocks=(Value(_TRITON_LLM_BLOCKS, b'kv_cache_block_type="max"'),),
    ),
    "triton": EngineMetrics(
        waiting=(Value(b"nv_inference_pending_request_count"),),
        running=(Value(b"nv_inference_exec_count"),),
    ),
}


def engine_of(labels: Mapping[str, str]) -> EngineMetrics:
    """The table an endpoint's labels ask for; an unknown engine type reads as the default one."""
    name = labels.get(ENGINE_LABEL) or labels.get(LEGACY_ENGINE_LABEL) or DEFAULT_ENGINE
    return ENGINES.get(name, ENGINES[DEFAULT_ENGINE])


class NotAnEngine(ValueError):
    """The page lacks the figures every engine shows."""


@dataclass(slots=True, frozen=True)
class PageReading:
    load: EngineLoad
    missing: tuple[str, ...]
    """Figures that every engine of this type shows, yet the page lacks or shows senselessly."""


_OPTIONAL = ("block_size", "num_blocks", "cpu_blocks_per_chunk", "cpu_chunks")


def read_load(page: bytes, engine: EngineMetrics, last: EngineLoad, rank: int, now: float) -> PageReading:
    """The load a page shows; what it does not show stays as in `last`. Raises `NotAnEngine`.

    Where one process serves several data-parallel ranks, the series whose `engine` label is `rank` counts. If what the
    engine sent by itself is still fresh, the page only fills in what that lacks.
    """
    text = b"\n" + page
    waiting, running = _find(text, engine.waiting, rank), _find(text, engine.running, rank)
    if waiting is None or running is None:
        raise NotAnEngine("no figures of waiting and running requests")
    usage = _find(text, engine.kv_usage, rank)
    if usage is not None and usage > 1:
        usage = None
    found = {field: _find(text, getattr(engine, field), rank) for field in _OPTIONAL}
    sizes: dict[str, Any] = {field: int(size) for field, size in found.items() if size is not None}
    asleep = any(_find(text, (spec,), rank) for spec in engine.asleep)
    if last.streamed_until > now:
        load = replace(last, **{field: size for field, size in sizes.items() if not getattr(last, field)})
    else:
        load = replace(
            last,
            waiting=int(waiting),
            running=int(running),
            kv_usage=last.kv_usage if usage is None else usage,
            updated_at=now,
            asleep=asleep,
            streamed_until=0.0,
            **sizes,
        )
    return PageReading(load, ("kv_usage",) if engine.kv_usage and usage is None else ())


def _find(text: bytes, specs: tuple[Spec, ...], rank: int) -> float | None:
    for spec in specs:
        number = _of_rank(text, spec, b"%d" % rank)
        if number is not None:
            return number
    return None


def _of_rank(text: bytes, spec: Spec, rank: bytes) -> float | None:
    first = None
    for labels, value in _series(text, spec.name):
        number = _read(spec, labels, value)
        if number is None:
            continue
        if _label(labels, b"engine") == rank:
            return number
        first = number if first is None else first
    return first


def _series(text: bytes, name: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Label part and value part of each series of one family; they stand together on a page."""
    start = b"\n" + name
    at = text.find(start)
    while at >= 0:
        after, end = at + len(start), text.find(b"\n", at + 1)
        if end < 0:  # cut off: the number may be too
            return
        if text[after : after + 1] in (b"{", b" "):
            labels, _, value = text[after:end].rpartition(b"}")
            yield labels, value
            at = end if text.startswith(start, end) else -1
        else:  # a longer name that begins like ours
            at = text.find(start, end)


def _read(spec: Spec, labels: bytes, value: bytes) -> float | None:
    if isinstance(spec, Label):
        return _number(_label(labels, spec.label))
    number, _, _timestamp = value.strip().partition(b" ")
    return _number(number) if spec.match in labels else None


def _label(labels: bytes, name: bytes) -> bytes:
    """The label's value, which must need no unescaping; b"" without the label. A quote inside another label's value is
    escaped, so neither needle can match there."""
    for opener in (b"{", b","):
        needle = opener + name + b'="'
        at = labels.find(needle)
        if at >= 0:
            return labels[at + len(needle) :].partition(b'"')[0]
    return b""


def _number(text: bytes) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) and 0 <= number < _IMPLAUSIBLE else None
