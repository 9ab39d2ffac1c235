"""The simulated engine against a real one: the prompts of a recording in, the recording's messages out.

Compared message by message, all fields. Within a message the order of HBM events and of removals is vLLM's; the order
of lower-tier BlockStored events is a set's, so those are compared as a set. D's engine hashes with CBOR and sends
digests, so there each hash is first replaced by the number of its first appearance.

Not compared: messages behind the last listed request (A from sequence 19, B from 49), bursts whose requests the
recordings do not list. Supplied here, because request lines leave it out: the session ids and report mode of S6 and
S6b, how many tokens S8 and S9 put out (any number that fills no further block gives the same events), S8b's output
tokens (the recorded events hold them), and how many steps the second of two concurrent requests came behind the first.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from connector.events import encode_batch
from connector.sim.engine import EngineConfig
from connector.sim.hashing import Identity
from connector.sim.offload import HBM_ONLY, OffloadConfig

OPTIONS = {"S6": {"session_id": "sess-1"}, "S6b": {"session_id": "sess-hdr", "report_reused": True}}
UNLISTED_OUTPUTS = {"S8": 4, "S8b": 70, "S9": 2}


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    tiers: OffloadConfig
    messages: int
    """How many messages the listed requests caused."""
    late: dict[str, int]
    """How many steps the second of a concurrent pair came behind the first."""


CASES = [
    Case("A-gpu-only", HBM_ONLY, 19, {"S8": 0}),
    Case("B-offload-selfdesc", OffloadConfig(24), 49, {"S8": 1, "S8b": 1}),
    Case("C-offload-selfdesc-chunk2-bigcpu", OffloadConfig(256, 2, prompt_only=False), 46, {"S8": 1, "S8b": 1}),
    Case("D-offload-placeholder-bytes-cbor", OffloadConfig(16, 2, self_describing=False), 45, {"S8": 1, "S8b": 1}),
    Case("E-offload-selfdesc", OffloadConfig(16, 2), 46, {"S8": 2, "S8b": 1}),
    Case("F-tiering-fs", OffloadConfig(16, storage_chunks=-1), 68, {"S8": 2, "S8b": 1}),
]


def output_in_events(payloads: Iterable[bytes], prompt: list[int]) -> list[int]:
    """The tokens decoded behind a prompt shorter than a block, as the recorded HBM events show them."""
    tokens: list[int] = []
    parent = None
    for payload in payloads:
        for event in msgspec.msgpack.decode(payload)[1]:
            if event["type"] != "BlockStored" or event["medium"] != "GPU":
                continue
            begins = not tokens and event["token_ids"][: len(prompt)] == prompt
            if begins or (tokens and event["parent_block_hash"] == parent):
                tokens += event["token_ids"]
                parent = event["block_hashes"][-1]
    return tokens[len(prompt) :]


def play(bench: Any, line: dict[str, Any], case: Case, payloads: list[bytes]) -> Any:
    """Do what one line of the recording says; returns its first request, done."""
    if "action" in line:
        assert bench.engine.reset_prefix_cache(external=line["reset_external"])
        return None
    label = line["label"].split()[0]
    prompt = line["prompt_token_ids"]
    script = output_in_events(payloads, prompt) if label == "S8b" else line.get("output_token_ids") or []
    identity = Identity(cache_salt=line.get("cache_salt") or "")
    length = UNLISTED_OUTPUTS.get(label) or len(script)
    more = OPTIONS.get(label, {})
    first = bench.request(prompt, length, identity=identity, script=script, **more)
    if line.get("concurrent"):
        for _ in range(case.late[label]):
            bench.step()
        bench.request(prompt, length, identity=identity, script=script)
    bench.drain()
    return first


def in_order(payload: bytes) -> list[dict[str, Any]]:
    """A batch's events, the arbitrary part of their order taken out: lower-tier stored events are sorted."""
    keyed = []
    section = 0
    for event in msgspec.msgpack.decode(payload)[1]:
        arbitrary = event["type"] == "BlockStored" and event["medium"] != "GPU"
        section += not arbitrary
        keyed.append((section, str(event) if arbitrary else "", event))
    return [event for _, _, event in sorted(keyed, key=lambda item: item[:2])]


def numbered(payloads: Iterable[bytes]) -> list[bytes]:
    """The same batches with each block hash replaced by the number of its first appearance."""
    seen: dict[Any, int] = {}

    def number(block_hash: Any) -> int | None:
        return None if block_hash is None else seen.setdefault(block_hash, len(seen))

    batches = []
    for payload in payloads:
        batch = msgspec.msgpack.decode(payload)
        for event in batch[1]:
            if "block_hashes" in event:
                event["block_hashes"] = [number(block_hash) for block_hash in event["block_hashes"]]
            if "parent_block_hash" in event:
                event["parent_block_hash"] = number(event["parent_block_hash"])
        batches.append(msgspec.msgpack.encode(batch))
    return batches


@pytest.fixture
def played(request: pytest.FixtureRequest, new_bench: Any, read_recording: Any) -> tuple[Any, ...]:
    case: Case = request.param
    lines, payloads = read_recording(case.name)
    sizes = EngineConfig(32, 16, max_num_batched_tokens=512, max_num_seqs=16, offload=case.tiers, plain_events=True)
    bench = new_bench(sizes)
    requests = [(line, play(bench, line, case, payloads)) for line in lines]
    return case, bench, requests, payloads


@pytest.mark.parametrize("played", CASES, indirect=True, ids=lambda case: case.name)
def test_every_request_finds_as_many_cached_tokens_as_the_real_engine_reported(played: tuple[Any, ...]) -> None:
    _, _, requests, _ = played
    figures = [(line["label"], line.get("cached_tokens"), request) for line, request in requests if request]
    told = [(label, cached, request.cached_tokens) for label, cached, request in figures if cached is not None]
    assert len(told) >= 17
    assert [label for label, recorded, simulated in told if recorded != simulated] == []


@pytest.mark.parametrize("played", CASES, indirect=True, ids=lambda case: case.name)
def test_every_message_has_the_events_that_the_real_engine_sent(played: tuple[Any, ...]) -> None:
    case, bench, _, payloads = played
    simulated = [encode_batch(batch, at=0.0) for batch in bench.batches]
    recorded = payloads[: case.messages]
    if case.name.startswith("D-"):
        simulated, recorded = numbered(simulated), numbered(recorded)
    assert len(simulated) == len(recorded)
    for sequence, (ours, theirs) in enumerate(zip(simulated, recorded, strict=True)):
        assert in_order(ours) == in_order(theirs), f"message {sequence}"


def test_what_is_left_out_of_the_comparison_is_only_what_no_request_line_explains(read_recording: Any) -> None:
    behind = {case.name: len(read_recording(case.name)[1]) - case.messages for case in CASES}
    assert {name[0]: count for name, count in behind.items() if count} == {"A": 184, "B": 343}


def test_recorded_lines_are_all_played(read_recording: Any) -> None:
    for case in CASES:
        for line in read_recording(case.name)[0]:
            known = "action" in line or line.get("output_token_ids") or line["label"].split()[0] in UNLISTED_OUTPUTS
            assert known, json.dumps(line)[:200]
