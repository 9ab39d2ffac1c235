from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from epp.config.environment import Environment
from epp.config.registry import instantiate, plugin_types
from epp.fleet.endpoint import Endpoint, EndpointSpec
from epp.fleet.fleet import Fleet
from epp.producers.approx import ApproxPrefixCacheProducer, LruIndex, block_keys, slots_of
from epp.requests.model import InferenceRequest
from epp.scheduling.plugin import PrefixMatch, ProfileResult, Scheduling, SchedulingResult
from epp.telemetry import Telemetry

BLOCK = 64


def tokens(*blocks: int, tail: int = 0) -> bytes:
    """A prompt of whole blocks, each named by a number, and `tail` further tokens."""
    return b"".join(block.to_bytes(4, "little") * BLOCK for block in blocks) + b"\x07\0\0\0" * tail


class World:
    """A fleet of two endpoints and a producer."""

    def __init__(self, name: str = "approx", **parameters: Any) -> None:
        self.environment = Environment(Fleet(), Telemetry(CollectorRegistry()), rng=random.Random(1))
        self.discover(2)
        self.producer = self.build(name, **parameters)

    def build(self, name: str, **parameters: Any) -> ApproxPrefixCacheProducer:
        kind = plugin_types()["approx-prefix-cache-producer"]
        producer: ApproxPrefixCacheProducer = instantiate(kind, name, kind.parameters(**parameters), self.environment)
        return producer

    def discover(self, count: int) -> None:
        self.environment.fleet.apply([EndpointSpec(f"10.0.0.{i}:8000", name=f"pod-{i}") for i in range(count)])

    @property
    def endpoints(self) -> Sequence[Endpoint]:
        return self.environment.fleet.endpoints

    def ask(self, *prompts: bytes, model: str = "m", salt: str = "") -> Scheduling:
        request = InferenceRequest("r", "/", {}, b"", target_model=model, cache_salt=salt, tokens=prompts)
        scheduling = Scheduling(request, self.endpoints, 0.0)
        self.producer.produce(scheduling)
        return scheduling

    def send(self, to: int, *prompts: bytes, prefill: int | None = None, **fields: str) -> None:
        scheduling = self.ask(*prompts, **fields)
        profiles: dict[str, ProfileResult | None] = {"default": ProfileResult([], [], {}, [self.endpoints[to]])}
        if prefill is not None:
            profiles["prefill"] = ProfileResult([], [], {}, [self.endpoints[prefill]])
        self.producer.picked(scheduling, SchedulingResult(profiles, "default"))

    def match(self, *prompts: bytes, **fields: str) -> PrefixMatch:
        return self.ask(*prompts, **fields).matches["approx"]

    def metric(self, name: str) -> float | None:
        labels = {"plugin_name": "approx", "plugin_type": "approx-prefix-cache-producer"}
        return self.environment.telemetry.registry.get_sample_value(f"llm_d_epp_prefix_indexer_{name}", labels)


class TestMatching:
    def test_what_was_sent_somewhere_is_found_there(self) -> None:
        world = World()
        world.send(1, tokens(1, 2, 3))
        match = world.match(tokens(1, 2, 4, 5))
        assert (match.total, match.block_size, match.blocks, match.cached_tokens) == (4, 64, [0.0, 2.0], [0, 128])

    def test_looking_leaves_nothing_behind(self) -> None:
        world = World()
        world.match(tokens(1, 2))
        assert world.match(tokens(1, 2)).blocks == [0.0, 0.0]

    def test_a_run_must_begin_at_the_first_block(self) -> None:
        world = World()
        world.send(0, tokens(1, 2))
        world.send(1, tokens(1, 2, 3, 4))
        world.producer._index.insert(0, block_keys(tokens(1, 2, 3, 4), 0, 4 * BLOCK, 9)[3:], 9)
        assert world.match(tokens(1, 2, 3, 4)).blocks == [2.0, 4.0]

    def test_the_partial_last_block_counts(self) -> None:
        world = World()
        world.send(0, tokens(1, tail=10))
        assert world.match(tokens(1, tail=10)).cached_tokens == [74, 0]
        assert world.match(tokens(1, tail=10)).blocks == [2.0, 0.0]
        assert world.match(tokens(1, tail=11)).cached_tokens == [64, 0]

    def test_several_prompts_are_added_up(self) -> None:
        world = World()
        world.send(0, tokens(1, 2), tokens(5))
        match = world.match(tokens(1, 2), tokens(5, 6), tokens(2))
        assert (match.total, match.blocks, match.cached_tokens) == (5, [3.0, 0.0], [192, 0])

    @pytest.mark.parametrize("other", [{"model": "n"}, {"salt": "s"}, {"model": "ms"}])
    def test_models_and_salts_are_told_apart(self, other: dict[str, str]) -> None:
        world = World()
        world.send(0, tokens(1, 2))
        assert world.match(tokens(1, 2), **other).blocks == [0.0, 0.0]

    def test_the_prefill_endpoint_holds_the_prompt_too(self) -> None:
        world = World()
        world.send(0, tokens(1), prefill=1)
        assert world.match(tokens(1)).blocks == [1.0, 1.0]

    def test_without_tokens_there_is_nothing_to_say(self) -> None:
        world = World()
        world.send(0)
        assert world.ask().matches == {}

    def test_a_short_prompt_matches_after_one_sighting(self) -> None:
        world = World()
        world.send(0, tokens(tail=3))
        match = world.match(tokens(tail=3))
        assert (match.total, match.blocks, match.cached_tokens) == (1, [1.0, 0.0], [3, 0])

    @pytest.mark.parametrize(
        ("parameters", "blocks"),
        [
            ({}, 9),
            ({"max_prefix_tokens_to_match": 200}, 3),
            ({"max_prefix_tokens_to_match": 0, "max_prefix_blocks_to_match": 5}, 5),
            ({"max_prefix_tokens_to_match": 0, "max_prefix_blocks_to_match": 0}, 9),
        ],
    )
    def test_only_so_much_of_a_prompt_is_looked_at(self, parameters: dict[str, Any], blocks: int) -> None:
        assert World(**parameters).match(tokens(*range(9))).total == blocks


class TestBlockSize:
    @pytest.mark.parametrize(
        ("parameters", "reported", "block"),
        [
            ({}, 0, 64),
            ({}, 16, 64),
            ({}, 128, 128),
            ({"block_size_tokens": 256}, 128, 128),
            ({"block_size_tokens": 256}, 0, 256),
            ({"block_size": 256}, 0, 256),
            ({"auto_tune": False, "block_size_tokens": 256}, 128, 256),
            ({"auto_tune": False}, 128, 64),
        ],
    )
    def test_engines_decide_if_they_are_asked_and_answer(
        self, parameters: dict[str, Any], reported: int, block: int
    ) -> None:
        world = World(**parameters)
        for endpoint in world.endpoints:
            endpoint.load.block_size = reported
        assert world.match(tokens(1)).block_size == block

    def test_a_change_of_block_size_never_mixes_keys(self) -> None:
        world = World()
        world.send(0, tokens(1, 1, 1, 1))
        world.endpoints[0].load.block_size = 128
        assert world.match(tokens(1, 1, 1, 1)).blocks == [0.0, 0.0]


class TestCapacity:
    """An entry is 64 tokens; capacities are in the engine's or the configuration's smaller blocks."""

    def held(self, world: World, prompt: bytes) -> float:
        world.send(0, prompt)
        return world.match(prompt).blocks[0]

    def test_it_is_what_the_engine_reports(self) -> None:
        world = World()
        world.endpoints[0].load.block_size, world.endpoints[0].load.num_blocks = 16, 20
        assert self.held(world, tokens(*range(9))) == 5

    @pytest.mark.parametrize(
        ("parameters", "entries"),
        [
            ({"lru_capacity_per_server": 12}, 3),
            ({"lru_capacity_per_server": 3, "block_size_tokens": 128}, 3),
            ({"lru_capacity_per_server": 1}, 1),
        ],
    )
    def test_or_else_what_is_configured(self, parameters: dict[str, Any], entries: int) -> None:
        world = World(auto_tune=False, **parameters)
        assert self.held(world, tokens(*range(18))) == entries

    def test_what_the_engine_reports_later_counts_from_then_on(self) -> None:
        world = World()
        assert self.held(world, tokens(*range(9))) == 9
        world.endpoints[0].load.block_size, world.endpoints[0].load.num_blocks = 16, 8
        world.send(0, tokens(100))
        assert world.match(tokens(*range(9))).blocks[0] == 1
        assert world.metric("size") == 2

    def test_the_least_recent_prompt_goes_first_and_its_tail_before_its_head(self) -> None:
        world = World(auto_tune=False, lru_capacity_per_server=4 * 5)
        world.send(0, tokens(1, 2, 3))
        world.send(0, tokens(7, 8))
        world.send(0, tokens(20))
        assert world.match(tokens(1, 2, 3)).blocks[0] == 2
        assert world.match(tokens(7, 8)).blocks[0] == 2

    def test_use_keeps_a_prompt(self) -> None:
        world = World(auto_tune=False, lru_capacity_per_server=4 * 2)
        world.send(0, tokens(1))
        world.send(0, tokens(2))
        world.send(0, tokens(1))
        world.send(0, tokens(3))
        assert [world.match(tokens(block)).blocks[0] for block in (1, 2, 3)] == [1.0, 0.0, 1.0]

    def test_memory_stays_flat_under_churn(self) -> None:
        world = World(auto_tune=False, lru_capacity_per_server=4 * 50)
        rng = random.Random(5)
        for _ in range(300):
            world.send(rng.randrange(2), tokens(*(rng.randrange(200) for _ in range(8))))
        assert world.metric("size") == 100
        assert len(world.producer._index._holders) <= 100


class TestFleet:
    def test_an_endpoint_that_left_is_forgotten_and_its_slot_is_clean(self) -> None:
        world = World()
        world.send(1, tokens(1, 2))
        world.send(0, tokens(1))
        world.discover(1)
        assert world.metric("size") == 1
        world.discover(2)
        assert world.match(tokens(1, 2)).blocks == [1.0, 0.0]

    def test_slots_beyond_a_machine_word(self) -> None:
        world = World()
        world.discover(70)
        world.send(69, tokens(1))
        match = world.match(tokens(1))
        assert (len(match.blocks), match.blocks[69], sum(match.blocks)) == (70, 1.0, 1.0)

    def test_only_candidates_are_matched(self) -> None:
        world = World()
        world.send(1, tokens(1))
        request = InferenceRequest("r", "/", {}, b"", target_model="m", tokens=[tokens(1)])
        scheduling = Scheduling(request, world.endpoints[:1], 0.0)
        world.producer.produce(scheduling)
        assert scheduling.matches["approx"].blocks == [0.0]


class TestInstances:
    def test_instances_are_independent_but_share_the_hashing(self) -> None:
        world = World(auto_tune=False, lru_capacity_per_server=4)
        wide = world.build("wide")
        for prompt in (tokens(1), tokens(2)):
            scheduling = world.ask(prompt)
            wide.produce(scheduling)
            assert scheduling.notes["wide"][0] is scheduling.notes["approx"][0]
            result = SchedulingResult({"p": ProfileResult([], [], {}, [world.endpoints[0]])}, "p")
            world.producer.picked(scheduling, result)
            wide.picked(scheduling, result)
        scheduling = world.ask(tokens(1))
        wide.produce(scheduling)
        assert {name: match.blocks[0] for name, match in scheduling.matches.items()} == {"approx": 0.0, "wide": 1.0}


def test_hits_are_exported() -> None:
    world = World()
    world.send(0, tokens(1, 2))
    world.match(tokens(1, 2, 3, 4))
    assert world.metric("hit_ratio_sum") == 0.5
    assert world.metric("hit_bytes_sum") == 2 * 64 * 4
    assert world.metric("hit_ratio_count") == 2


def test_the_index_agrees_with_a_plain_model() -> None:
    rng = random.Random(11)
    index = LruIndex()
    model: dict[int, list[int]] = {slot: [] for slot in range(3)}
    for _ in range(2000):
        slot, capacity = rng.randrange(3), 6
        keys = list(range(start := rng.randrange(20), start + rng.randrange(1, 9)))
        action = rng.random()
        if action < 0.05:
            index.remove(slot)
            model[slot] = []
        elif action < 0.6:
            index.insert(slot, keys, capacity)
            new = keys[:capacity]
            model[slot] = (new + [key for key in model[slot] if key not in new])[:capacity]
        lengths = index.run_lengths(keys, 0b111)
        for each, held in model.items():
            expected = next((i for i, key in enumerate(keys) if key not in held), len(keys))
            assert lengths[each] == expected
    assert len(index) == sum(map(len, model.values()))


def test_slots_of() -> None:
    assert slots_of(0) == []
    assert slots_of(0b1011 | 1 << 100) == [0, 1, 3, 100]
