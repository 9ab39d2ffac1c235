from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from epp.config.environment import Environment
from epp.config.errors import ConfigError, Findings
from epp.config.loader import load
from epp.config.strict import convert
from epp.fleet.endpoint import Endpoint, EndpointSpec
from epp.fleet.fleet import Fleet
from epp.producers.kv_events import MUTE, KvEvents
from epp.producers.precise import PrecisePrefixCacheProducer, PrecisePrefixParameters
from epp.requests.model import InferenceRequest
from epp.routing import Outcome, Termination
from epp.scheduling.plugin import Certainty, ProfileResult, Scheduling, SchedulingResult, TierHit
from epp.scheduling.scheduler import Scheduler
from epp.telemetry import Telemetry
from indexer.plan import MAX_CANDIDATES, MAX_PLANS
from indexer.stream import State
from indexer.wire import BlockStored
from tests.epp.scheduling.scheduled import schedule

BLOCK = 16
MODEL = "tiny"
ENDED = Outcome(Termination.NATURAL)


def tokens(blocks: int, extra: int = 0, first: int = 0) -> bytes:
    return struct.pack(f"<{blocks * BLOCK + extra}I", *range(first, first + blocks * BLOCK + extra))


def parse(**parameters: Any) -> PrecisePrefixParameters:
    findings = Findings()
    parsed = convert(parameters, PrecisePrefixParameters, "parameters", findings)
    findings.raise_errors()
    assert parsed is not None
    return parsed


class Bench:
    """A fleet whose feeds have no sockets; events are applied by hand."""

    def __init__(self, endpoints: int = 3) -> None:
        self.now = 0.0
        self.environment = Environment(Fleet(), Telemetry(), clock=lambda: self.now)
        self.environment.fleet.apply(EndpointSpec(f"10.0.0.{n}:8000", f"pod-{n}") for n in range(endpoints))

    async def start(self) -> None:
        self.producer("feeds", kvEventsConfig={"discoverPods": False})
        await self.events.start()
        for endpoint in self.endpoints:
            self.residency(endpoint).model = MODEL

    @property
    def events(self) -> KvEvents:
        return KvEvents.of(self.environment)

    @property
    def endpoints(self) -> Sequence[Endpoint]:
        return self.environment.fleet.endpoints

    def residency(self, endpoint: Endpoint) -> Any:
        return self.events.feeds[endpoint].residency

    def producer(self, name: str = "precise", **parameters: Any) -> PrecisePrefixCacheProducer:
        producer = PrecisePrefixCacheProducer(name, parse(**parameters), self.environment)
        producer.name = name
        return producer

    def store(self, endpoint: Endpoint, blocks: range, tier: str = "gpu", first: int = 0) -> None:
        """Blocks of the prompt `tokens(…, first=first)`."""
        hashes = [1 + first * 1000 + n for n in range(blocks.stop)]
        event = BlockStored(
            hashes[blocks.start :],
            parent=hashes[blocks.start - 1] if blocks.start else None,
            tokens=tokens(blocks.stop, first=first)[blocks.start * BLOCK * 4 :],
            block_size=BLOCK,
            tier=tier,
            extras={},
        )
        self.residency(endpoint).apply([event])

    def scheduling(self, *prompts: bytes, **fields: Any) -> Scheduling:
        fields = {"target_model": MODEL, **fields}
        request = InferenceRequest("r", "/v1/completions", {}, b"", tokens=list(prompts), **fields)
        return Scheduling(request, self.endpoints, now=self.now)


def picked(endpoint: Endpoint, prefill: Endpoint | None = None) -> SchedulingResult:
    profiles: dict[str, ProfileResult | None] = {"default": ProfileResult([], [], {}, [endpoint])}
    if prefill is not None:
        profiles["prefill"] = ProfileResult([], [], {}, [prefill])
    return SchedulingResult(profiles, "default")


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    await bench.start()
    yield bench
    await bench.events.stop()


class TestMatch:
    async def test_each_tier_publishes_what_it_serves(self, bench: Bench) -> None:
        a, b, _ = bench.endpoints
        bench.store(a, range(4))
        bench.store(a, range(10), "cpu")
        bench.store(b, range(6), "storage")
        producers = [bench.producer(f"p-{tier}", tier=tier) for tier in ("gpu", "cpu", "storage", "all")]
        scheduling = bench.scheduling(tokens(12, 1))
        for producer in producers:
            producer.produce(scheduling)
        matches = scheduling.matches
        assert matches["p-gpu"].blocks == [4, 0, 0]
        assert matches["p-cpu"].blocks == [10, 0, 0]
        assert matches["p-storage"].blocks == [10, 6, 0]
        assert matches["p-all"].blocks == pytest.approx([4 + 0.8 * 6, 0.5 * 6, 0])
        assert matches["p-gpu"].cached_tokens == [64, 0, 0]
        assert matches["p-all"].cached_tokens == [160, 96, 0], "tokens are not weighted"
        assert {(match.total, match.block_size) for match in matches.values()} == {(12, BLOCK)}
        assert scheduling.hits == [TierHit(64, 96, 0), TierHit(0, 0, 96), TierHit()]

    async def test_the_weights_of_tiers_can_be_set(self, bench: Bench) -> None:
        a, b, _ = bench.endpoints
        bench.store(a, range(4))
        bench.store(a, range(10), "cpu")
        bench.store(b, range(6), "tape")
        weights = [{"name": "cpu", "weight": 0.25}, {"name": "tape", "weight": 0.125}]
        producer = bench.producer(indexerConfig={"kvCacheBackendConfigs": weights})
        scheduling = bench.scheduling(tokens(12, 1))
        producer.produce(scheduling)
        assert scheduling.matches["precise"].blocks == pytest.approx([4 + 0.25 * 6, 0.125 * 6, 0])

    async def test_several_prompts_are_added_up(self, bench: Bench) -> None:
        a = bench.endpoints[0]
        bench.store(a, range(4))
        bench.store(a, range(3), first=5000)
        producer = bench.producer()
        scheduling = bench.scheduling(tokens(6), tokens(3, 8, first=5000), tokens(0, 5))
        producer.produce(scheduling)
        match = scheduling.matches["precise"]
        assert (match.total, match.blocks[0], match.cached_tokens[0]) == (9, 7, 112)
        assert scheduling.hits[0] == TierHit(112)

    async def test_without_tokens_there_is_no_match(self, bench: Bench) -> None:
        scheduling = bench.scheduling()
        bench.producer().produce(scheduling)
        assert scheduling.matches == {}
        assert scheduling.hits == []

    async def test_a_prompt_shorter_than_a_block_matches_nothing(self, bench: Bench) -> None:
        bench.store(bench.endpoints[0], range(1))
        scheduling = bench.scheduling(tokens(0, 5))
        bench.producer().produce(scheduling)
        assert (scheduling.matches["precise"].total, scheduling.matches["precise"].blocks) == (0, [0, 0, 0])

    async def test_another_salt_is_another_prompt(self, bench: Bench) -> None:
        bench.store(bench.endpoints[0], range(4))
        scheduling = bench.scheduling(tokens(6), cache_salt="tenant")
        bench.producer().produce(scheduling)
        assert scheduling.matches["precise"].blocks == [0, 0, 0]

    async def test_an_alias_of_the_model_finds_the_models_blocks(self, bench: Bench) -> None:
        bench.store(bench.endpoints[0], range(4))
        scheduling = bench.scheduling(tokens(6), target_model="nickname")
        bench.producer().produce(scheduling)
        assert scheduling.matches["precise"].blocks == [4, 0, 0]

    async def test_only_the_candidates_count(self, bench: Bench) -> None:
        for endpoint in bench.endpoints:
            bench.store(endpoint, range(4))
        scheduling = bench.scheduling(tokens(6))
        scheduling.endpoints = [bench.endpoints[2]]
        bench.producer().produce(scheduling)
        assert scheduling.matches["precise"].blocks == [0, 0, 4]
        assert scheduling.hits == [None, None, TierHit(64)]

    async def test_an_endpoint_that_just_left_holds_nothing_but_has_its_place(self, bench: Bench) -> None:
        scheduling = bench.scheduling(tokens(6))
        bench.store(bench.endpoints[0], range(4))
        bench.environment.fleet.apply([bench.endpoints[0].spec])
        bench.producer().produce(scheduling)
        assert scheduling.matches["precise"].blocks == [4, 0, 0]

    async def test_the_block_size_is_the_engines_and_the_configured_one_until_then(self, bench: Bench) -> None:
        producer = bench.producer(tokenProcessorConfig={"blockSizeTokens": 32})
        scheduling = bench.scheduling(tokens(8))
        producer.produce(scheduling)
        assert (scheduling.matches["precise"].block_size, scheduling.matches["precise"].total) == (32, 4)
        bench.store(bench.endpoints[0], range(2))
        scheduling = bench.scheduling(tokens(8))
        producer.produce(scheduling)
        assert (scheduling.matches["precise"].block_size, scheduling.matches["precise"].total) == (16, 8)

    async def test_what_is_known_of_candidates_is_kept_until_it_changes(self, bench: Bench) -> None:
        a, b, c = bench.endpoints
        known = bench.events.candidates([a, c])
        assert bench.events.candidates([c, a]) is not known
        assert bench.events.candidates([a, c]) is known
        bench.store(a, range(2))
        known, before = bench.events.candidates([a, c]), known
        assert (before.sizes, known.sizes) == ([0, 0], [BLOCK, 0])
        bench.events.feeds[b].stream.disconnected("the connection broke")
        assert bench.events.candidates([a, c]) is not known
        bench.environment.fleet.apply([a.spec, b.spec])
        assert bench.events.candidates([a, c]).endpoints == [a]
        for number in range(200):
            bench.events.candidates([a, b] * number)
        assert len(bench.events._candidates) <= MAX_PLANS
        assert sum(map(len, bench.events._candidates)) <= MAX_CANDIDATES

    async def test_several_instances_look_up_once(self, bench: Bench) -> None:
        producers = [bench.producer(f"p-{tier}", tier=tier) for tier in ("gpu", "cpu", "all")]
        scheduling = bench.scheduling(tokens(6))
        for producer in producers:
            producer.produce(scheduling)
        lookups = "llm_d_epp_kv_cache_index_lookup_requests_total"
        assert bench.environment.telemetry.registry.get_sample_value(lookups) == 1


class TestSpeculation:
    @pytest.fixture
    def producer(self, bench: Bench) -> PrecisePrefixCacheProducer:
        return bench.producer(speculativeIndexing=True)

    def pick(self, bench: Bench, producer: PrecisePrefixCacheProducer, endpoint: Endpoint) -> Scheduling:
        scheduling = bench.scheduling(tokens(6, 1))
        producer.produce(scheduling)
        producer.picked(scheduling, picked(endpoint))
        return scheduling

    def seen(self, bench: Bench, producer: PrecisePrefixCacheProducer, blocks: int = 6) -> Scheduling:
        scheduling = bench.scheduling(tokens(blocks, 1))
        producer.produce(scheduling)
        return scheduling

    async def test_a_pick_draws_equal_prompts_but_proves_nothing(
        self, bench: Bench, producer: PrecisePrefixCacheProducer
    ) -> None:
        self.pick(bench, producer, bench.endpoints[1])
        after = self.seen(bench, producer)
        assert after.matches["precise"].blocks == [0, 6, 0]
        assert after.matches["precise"].cached_tokens == [0, 0, 0]
        assert after.hits == [TierHit(), TierHit(), TierHit()]
        assert self.seen(bench, producer, 3).matches["precise"].blocks == [0, 3, 0]

    async def test_it_continues_the_proven_run(self, bench: Bench, producer: PrecisePrefixCacheProducer) -> None:
        b = bench.endpoints[1]
        bench.store(b, range(2))
        self.pick(bench, producer, b)
        assert bench.events.speculation.keys == 4
        assert self.seen(bench, producer).matches["precise"].blocks == [0, 6, 0]
        bench.store(b, range(2, 4))
        assert self.seen(bench, producer).matches["precise"].blocks == [0, 6, 0]
        assert self.seen(bench, producer).matches["precise"].cached_tokens == [0, 64, 0]

    async def test_blocks_that_cpu_ram_would_serve_are_not_counted_twice(
        self, bench: Bench, producer: PrecisePrefixCacheProducer
    ) -> None:
        b = bench.endpoints[1]
        bench.store(b, range(5), "cpu")
        assert self.pick(bench, producer, b).matches["precise"].blocks == pytest.approx([0, 4, 0])
        assert self.seen(bench, producer).matches["precise"].blocks == pytest.approx([0, 6, 0])

    async def test_the_end_of_the_request_ends_it(self, bench: Bench, producer: PrecisePrefixCacheProducer) -> None:
        first = self.pick(bench, producer, bench.endpoints[1])
        second = self.pick(bench, producer, bench.endpoints[1])
        producer.finished(first, picked(bench.endpoints[1]), ENDED)
        assert self.seen(bench, producer).matches["precise"].blocks == [0, 6, 0]
        producer.finished(second, picked(bench.endpoints[1]), ENDED)
        assert self.seen(bench, producer).matches["precise"].blocks == [0, 0, 0]

    async def test_time_ends_it(self, bench: Bench) -> None:
        producer = bench.producer(speculativeIndexing=True, speculativeTTL="500ms")
        self.pick(bench, producer, bench.endpoints[1])
        bench.now = 0.6
        bench.events.speculation.expire(bench.now)
        assert self.seen(bench, producer).matches["precise"].blocks == [0, 0, 0]

    async def test_it_leaves_with_its_endpoint(self, bench: Bench, producer: PrecisePrefixCacheProducer) -> None:
        self.pick(bench, producer, bench.endpoints[1])
        bench.environment.fleet.apply([bench.endpoints[0].spec])
        assert bench.events.speculation.keys == 0

    async def test_prefill_target_is_noted_too(self, bench: Bench, producer: PrecisePrefixCacheProducer) -> None:
        scheduling = bench.scheduling(tokens(6, 1))
        producer.produce(scheduling)
        producer.picked(scheduling, picked(bench.endpoints[0], prefill=bench.endpoints[2]))
        assert self.seen(bench, producer).matches["precise"].blocks == [6, 0, 6]

    async def test_several_instances_note_a_pick_once(self, bench: Bench) -> None:
        producers = [bench.producer(f"p-{n}", speculativeIndexing=True) for n in range(3)]
        plain = bench.producer("plain")
        scheduling = bench.scheduling(tokens(6, 1))
        for producer in (*producers, plain):
            producer.produce(scheduling)
        for producer in (*producers, plain):
            producer.picked(scheduling, picked(bench.endpoints[0]))
        assert bench.events.speculation.keys == 6
        after = self.seen(bench, plain)
        assert after.matches["plain"].blocks == [0, 0, 0], "an instance without speculation sees none"
        producers[2].finished(scheduling, picked(bench.endpoints[0]), ENDED)
        assert bench.events.speculation.keys == 0

    async def test_without_speculation_nothing_is_noted(self, bench: Bench) -> None:
        self.pick(bench, bench.producer(), bench.endpoints[1])
        assert len(bench.events.speculation) == 0


class TestTrust:
    """In feeds, by what happened to them: `live` has heard its engine from the first batch on, `late` joined it at
    a later one, `lost` has no connection any more."""

    def happens(self, bench: Bench, live: Endpoint, late: Endpoint, lost: Endpoint) -> None:
        empty = msgspec.msgpack.encode([0.0, [], 0])
        for endpoint, first in ((live, 0), (late, 5), (lost, 0)):
            stream = bench.events.feeds[endpoint].stream
            stream.connected()
            stream.live([f"kv@{endpoint.address}@{MODEL}".encode(), first.to_bytes(8, "big"), empty])
            bench.store(endpoint, range(4))
        stream.disconnected("the connection broke")

    def states(self, scheduling: Scheduling) -> list[tuple[str, float] | None]:
        assert scheduling.certainty is not None
        return [scheduling.certainty.of(endpoint.slot) for endpoint in scheduling.endpoints]

    async def test_what_happens_to_a_feed_between_two_requests_is_seen_by_the_second(self, bench: Bench) -> None:
        endpoint, other, _ = bench.endpoints
        producer, stream = bench.producer(), bench.events.feeds[endpoint].stream
        stream.connected()
        stream.live([f"kv@{endpoint.address}@{MODEL}".encode(), bytes(8), msgspec.msgpack.encode([0.0, [], 0])])
        bench.store(endpoint, range(4))

        def look_up() -> tuple[Any, list[float]]:
            scheduling = bench.scheduling(tokens(6))
            producer.produce(scheduling)
            return self.states(scheduling)[0], scheduling.matches["precise"].blocks

        assert look_up() == (("live", 1.0), [4, 0, 0])
        stream.disconnected("the connection broke")
        assert look_up() == (("lost", 0.0), [0, 0, 0])
        stream.connected()
        assert look_up() == (("unsure", 0.5), [2, 0, 0])
        bench.now = 10.0
        stream.tick()
        assert look_up() == (("unsure", 0.25), [1, 0, 0])
        bench.store(other, range(2), "cpu")
        assert look_up() == (("unsure", 0.25), [1, 0.8 * 2, 0])
        bench.environment.fleet.apply([endpoint.spec])
        assert look_up() == (("unsure", 0.25), [1])

    async def test_blocks_count_by_how_far_the_feed_is_trusted_and_proven_tokens_in_full(self, bench: Bench) -> None:
        self.happens(bench, *bench.endpoints)
        scheduling = bench.scheduling(tokens(4, 1))
        bench.producer().produce(scheduling)
        assert scheduling.matches["precise"].blocks == [4, 2, 0]
        assert scheduling.matches["precise"].cached_tokens == [64, 64, 64]
        assert scheduling.hits == [TierHit(64), TierHit(64), TierHit(64)]
        assert self.states(scheduling) == [("live", 1.0), ("unsure", 0.5), ("lost", 0.0)]

    async def test_trust_returns_with_time(self, bench: Bench) -> None:
        self.happens(bench, *bench.endpoints)
        bench.now = 60.0
        for feed in bench.events.feeds.values():
            feed.stream.tick()
        scheduling = bench.scheduling(tokens(4, 1))
        bench.producer().produce(scheduling)
        assert scheduling.matches["precise"].blocks == [4, 3, 0]

    async def test_where_every_feed_is_live_every_block_counts(self, bench: Bench) -> None:
        self.happens(bench, *bench.endpoints)
        scheduling = bench.scheduling(tokens(4, 1))
        scheduling.endpoints = bench.endpoints[:1]
        bench.producer().produce(scheduling)
        assert scheduling.matches["precise"].blocks == [4]
        assert scheduling.certainty == Certainty([State.LIVE], ())

    async def test_who_is_no_candidate_has_no_state(self, bench: Bench) -> None:
        self.happens(bench, *bench.endpoints)
        scheduling = bench.scheduling(tokens(4, 1))
        scheduling.endpoints = bench.endpoints[1:2]
        bench.producer().produce(scheduling)
        assert scheduling.certainty is not None
        assert [scheduling.certainty.of(slot) for slot in (0, 1, 2)] == [None, ("unsure", 0.5), None]

    @pytest.mark.parametrize(("picked_at", "blocks"), [(0, [8, 2, 0]), (1, [4, 4, 0]), (2, [4, 2, 0])])
    async def test_blocks_expected_of_a_pick_count_no_more_than_proven_ones(
        self, bench: Bench, picked_at: int, blocks: list[float]
    ) -> None:
        self.happens(bench, *bench.endpoints)
        producer = bench.producer(speculativeIndexing=True)
        scheduling = bench.scheduling(tokens(8, 1))
        producer.produce(scheduling)
        producer.picked(scheduling, picked(bench.endpoints[picked_at]))
        after = bench.scheduling(tokens(8, 1))
        producer.produce(after)
        assert after.matches["precise"].blocks == blocks

    async def test_the_trust_is_that_of_the_moment_of_the_pick(self, bench: Bench) -> None:
        self.happens(bench, *bench.endpoints)
        scheduling = bench.scheduling(tokens(4, 1))
        bench.producer().produce(scheduling)
        bench.events.feeds[bench.endpoints[0]].stream.disconnected("gone")
        assert self.states(scheduling)[0] == ("live", 1.0)


class TestMuteEngines:
    """Requests are served, and not one event tells of it: the wrong port, or a rank that does not publish."""

    def serve(self, bench: Bench, endpoint: Endpoint, prompt: bytes = tokens(4), status: int = 200) -> None:
        producer = bench.producer()
        scheduling = bench.scheduling(prompt)
        producer.produce(scheduling)
        producer.finished(scheduling, picked(endpoint), replace(ENDED, status=status))

    def hear(self, bench: Bench, endpoint: Endpoint, number: int) -> None:
        empty = msgspec.msgpack.encode([0.0, [], 0])
        bench.events.feeds[endpoint].stream.live([b"kv@p@tiny", number.to_bytes(8, "big"), empty])

    async def test_show_by_requests_since_they_were_heard(self, bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
        mute, heard, idle = bench.endpoints
        for number in range(MUTE):
            self.hear(bench, heard, number)
            self.serve(bench, heard)
            self.serve(bench, mute)
        assert {f["endpoint"]: f["requests_since_heard"] for f in bench.events.snapshot()} == {
            mute.address: MUTE,
            heard.address: 0,
            idle.address: 0,
        }
        shown = "tierpick_feed_requests_since_heard", {"pod_identifier": mute.address}
        assert bench.environment.telemetry.registry.get_sample_value(*shown) == MUTE
        assert [r.message for r in caplog.records if "mute" in r.message] == [
            "an endpoint serves requests, but its engine is mute"
        ]
        self.hear(bench, mute, 0)
        assert bench.events.requests_since_heard(mute) == 0

    async def test_requests_that_leave_nothing_to_tell_do_not_count(self, bench: Bench) -> None:
        endpoint = bench.endpoints[0]
        self.serve(bench, endpoint, prompt=tokens(0, 5))
        self.serve(bench, endpoint, status=503)
        assert bench.events.requests_since_heard(endpoint) == 0
        self.serve(bench, endpoint)
        assert bench.events.requests_since_heard(endpoint) == 1

    async def test_several_instances_count_a_request_once(self, bench: Bench) -> None:
        producers = [bench.producer(f"p-{n}") for n in range(3)]
        scheduling = bench.scheduling(tokens(4))
        for producer in producers:
            producer.produce(scheduling)
        for producer in producers:
            producer.finished(scheduling, picked(bench.endpoints[0]), replace(ENDED, status=200))
        assert bench.events.requests_since_heard(bench.endpoints[0]) == 1

    async def test_a_request_that_ends_after_its_endpoint_has_left_is_nothing(self, bench: Bench) -> None:
        endpoint = bench.endpoints[0]
        bench.environment.fleet.apply([])
        bench.events.served(endpoint)
        assert bench.events.snapshot() == []


class TestParameters:
    def test_llm_ds_parameters_are_taken(self) -> None:
        parse(
            tokenProcessorConfig={"blockSizeTokens": 64, "hashSeed": "42", "hashAlgorithm": "xxh64"},
            indexerConfig={
                "kvBlockIndexConfig": {
                    "inMemoryConfig": {"size": 1000, "podCacheSize": 32},
                    "costAwareMemoryConfig": {"size": "2GiB"},
                    "enableMetrics": True,
                    "metricsLoggingInterval": 60000000000,
                },
                "kvCacheBackendConfigs": [{"name": "gpu", "weight": 1.0}],
            },
            kvEventsConfig={
                "zmqEndpoint": "",
                "topicFilter": "kv@",
                "concurrency": 16,
                "engineType": "sglang",
                "discoverPods": True,
                "podDiscoveryConfig": {
                    "podLabelSelector": "a=b",
                    "podNamespace": "n",
                    "socketPort": 5556,
                    "replaySocketPort": 5600,
                },
            },
            speculativeIndexing=True,
            speculativeTTL="1m30s",
        )

    def test_the_defaults_are_llm_ds(self) -> None:
        parameters = parse()
        assert parameters.token_processor_config.block == 16
        assert (parameters.speculative_indexing, parameters.speculative_ttl) == (False, "2s")
        assert (parameters.tier, parameters.kv_events_config) == ("all", None)
        events = parse(kvEventsConfig={}).kv_events_config
        assert events is not None
        assert (events.topic_filter, events.discover_pods, events.zmq_endpoint) == ("kv@", True, "")
        pods = events.pod_discovery_config
        assert (pods.socket_port, pods.replay_socket_port) == (5557, 0)

    @pytest.mark.parametrize(
        ("parameters", "named"),
        [
            ({"podDiscoveryConfig": {}}, "podDiscoveryConfig"),
            ({"tier": "disk"}, "tier"),
            ({"kvEventsConfig": {"engineType": "other"}}, "engineType"),
            ({"kvEventsConfig": {"podDiscoveryConfig": {"socketPort": 70000}}}, "socketPort"),
            ({"tokenProcessorConfig": {"hashAlgorithm": "xxhash"}}, "hashAlgorithm"),
            ({"tokenProcessorConfig": {"blockSizeTokens": -1}}, "blockSizeTokens"),
            ({"indexerConfig": {"kvBlockIndexConfig": {"redisConfig": {"address": "redis://r"}}}}, "redisConfig"),
            ({"indexerConfig": {"kvBlockIndexConfig": {"redisConfig": {}}}}, "redisConfig"),
            ({"indexerConfig": {"tokenizersPoolConfig": {}}}, "tokenizersPoolConfig"),
            ({"speculativeTTL": "soon"}, "speculativeTTL"),
        ],
    )
    def test_what_cannot_be_is_named(self, parameters: dict[str, Any], named: str) -> None:
        with pytest.raises(ConfigError, match=named):
            parse(**parameters)

    async def test_instances_that_disagree_on_the_feeds_are_named(self, bench: Bench) -> None:
        with pytest.raises(ValueError, match=r'"b".*"feeds"'):
            bench.producer("b", kvEventsConfig={"topicFilter": "other@"})
        bench.producer("c")  # says nothing, takes theirs


async def test_more_blocks_in_a_medium_that_nobody_knows_do_not_outweigh_hbm(bench: Bench) -> None:
    a, b, _ = bench.endpoints
    bench.store(a, range(10))
    bench.store(b, range(12), "foo")
    scheduling = bench.scheduling(tokens(12, 1))
    bench.producer().produce(scheduling)
    assert scheduling.matches["precise"].blocks == [10, 6, 0]


async def test_requests_that_clients_give_the_same_id_are_two(bench: Bench) -> None:
    producer, b = bench.producer(speculativeIndexing=True), bench.endpoints[1]
    first, second = bench.scheduling(tokens(6, 1)), bench.scheduling(tokens(4, 1))
    for scheduling in (first, second):
        producer.produce(scheduling)
        producer.picked(scheduling, picked(b))
    producer.finished(second, picked(b), ENDED)
    again = bench.scheduling(tokens(6, 1))
    producer.produce(again)
    assert again.matches["precise"].blocks == [0, 6, 0]
    producer.finished(first, picked(b), ENDED)
    assert bench.events.speculation.keys == 0


BY_SPECULATION = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: precise-prefix-cache-producer
  parameters: {speculativeIndexing: true, kvEventsConfig: {discoverPods: false}}
- {type: prefix-cache-scorer, parameters: {prefixMatchInfoProducerName: precise-prefix-cache-producer}}
schedulingProfiles: [{name: default, plugins: [{pluginRef: prefix-cache-scorer}]}]
"""


async def test_a_burst_of_equal_prompts_stays_together_though_no_event_has_come_yet(bench: Bench) -> None:
    for endpoint in bench.endpoints:
        stream = bench.events.feeds[endpoint].stream
        stream.connected()
        stream.live([f"kv@{endpoint.address}@{MODEL}".encode(), bytes(8), msgspec.msgpack.encode([0.0, [], 0])])
    configuration = load(BY_SPECULATION, bench.environment)
    scheduler = Scheduler(
        producers=configuration.producers,
        profiles=configuration.profiles,
        handler=configuration.handler,
        plugins=list(configuration.plugins.values()),
        telemetry=bench.environment.telemetry,
        rng=bench.environment.rng,
    )
    targets = set()
    for _ in range(50):
        scheduling = bench.scheduling(tokens(20, 1))
        result = await schedule(scheduler, scheduling)
        scheduler.picked(scheduling, result)
        targets.add(result.target.picked[0])
    assert len(targets) == 1
