from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="runs in the vLLM venv: make test-vllm")

import msgspec
import zmq
import zmq.auth
from vllm.config.kv_events import KVEventsConfig
from vllm.distributed.kv_events import AllBlocksCleared, EventPublisherFactory, KVEventBatch, ZmqEventPublisher
from vllm.utils.network_utils import get_ip

from connector.curve import Curve, load_curve
from connector.journal import About
from connector.vllm.publishing import TieredEventPublisher, take_over

from .ports import free_port

pytestmark = pytest.mark.vllm


def next_message(subscriber: zmq.Socket[bytes]) -> tuple[bytes, list[Any]]:
    assert subscriber.poll(5000)
    topic, _, payload = subscriber.recv_multipart()
    return topic, msgspec.msgpack.decode(payload)


def configured(**settings: object) -> KVEventsConfig:
    return KVEventsConfig(enable_kv_cache_events=True, topic="kv@pod@model", **settings)


def taken_over(config: KVEventsConfig, rank: int = 0, curve: Curve | None = None) -> TieredEventPublisher:
    made: list[TieredEventPublisher] = []
    take_over(config, About(heartbeat=0.05), made.append, curve)
    publisher = EventPublisherFactory.create(config, rank)
    assert [publisher] == made
    return made[0]


def test_the_next_publisher_is_ours_and_the_one_after_it_vllms() -> None:
    config = configured(endpoint=f"tcp://*:{free_port()}")
    taken_over(config).shutdown()
    assert config.publisher == "zmq"

    stock = EventPublisherFactory.create(config)
    stock.shutdown()
    assert isinstance(stock, ZmqEventPublisher)


def test_two_engines_in_a_process_do_not_get_in_each_others_way() -> None:
    first, second = configured(endpoint="tcp://*:0"), configured(endpoint="tcp://*:0")
    made: list[str] = []
    take_over(first, About(), lambda _: made.append("first"))
    take_over(second, About(), lambda _: made.append("second"))
    for config in (second, first):
        EventPublisherFactory.create(config).shutdown()
    assert made == ["second", "first"]


def test_batches_come_with_their_rank_and_notes_on_the_port_of_their_rank() -> None:
    port = free_port()
    publisher = taken_over(configured(endpoint=f"tcp://*:{port - 2}"), rank=2)
    with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
        subscriber.connect(f"tcp://127.0.0.1:{port}")
        subscriber.subscribe(b"")
        heartbeat = next_message(subscriber)  # subscribed
        publisher.publish(KVEventBatch(ts=12.5, events=[AllBlocksCleared()]))
        while (message := next_message(subscriber))[1][1] == []:
            pass
    publisher.shutdown()

    topic, (at, events, rank, notes) = message
    assert topic == b"kv@pod@model"
    assert (at, events, rank) == (12.5, [{"type": "AllBlocksCleared", "tiers": ["GPU"]}], 2)
    assert notes["instance"] == heartbeat[1][3]["instance"]


def test_the_configuration_told_to_others_has_the_endpoints_in_use() -> None:
    port, replay_port = free_port(), free_port()
    config = configured(endpoint=f"tcp://*:{port - 1}", replay_endpoint=f"tcp://*:{replay_port - 1}", buffer_steps=7)
    publisher = taken_over(config, rank=1)
    publisher.shutdown()

    assert publisher.get_publisher_config() == configured(
        endpoint=f"tcp://*:{port}", replay_endpoint=f"tcp://*:{replay_port}", buffer_steps=7
    )


def test_a_port_that_the_system_chose_is_told_with_this_nodes_address() -> None:
    publisher = taken_over(configured(endpoint="tcp://*:0"))
    publisher.shutdown()

    host, _, port = publisher.get_publisher_config().endpoint.rpartition(":")
    assert host == f"tcp://{get_ip()}"
    assert int(port) > 0


def test_whoever_wants_to_know_is_told_after_each_batch() -> None:
    publisher = taken_over(configured(endpoint="tcp://*:0"))
    told: list[int] = []
    publisher.on_published.append(lambda: told.append(1))
    publisher.publish(KVEventBatch(ts=1.0, events=[AllBlocksCleared()]))
    publisher.say([AllBlocksCleared()])
    publisher.shutdown()

    assert told == [1]


def test_with_a_key_only_those_who_know_it_are_served(tmp_path: Path) -> None:
    zmq.auth.create_certificates(tmp_path, "engine")
    curve = load_curve(str(tmp_path / "engine.key_secret"))
    assert curve is not None
    port = free_port()
    publisher = taken_over(configured(endpoint=f"tcp://*:{port}"), curve=curve)
    with zmq.Context() as context, context.socket(zmq.SUB) as friend, context.socket(zmq.SUB) as stranger:
        friend.curve_serverkey = curve.public_key
        friend.curve_publickey, friend.curve_secretkey = zmq.curve_keypair()
        for subscriber in (stranger, friend):
            subscriber.linger = 0
            subscriber.connect(f"tcp://127.0.0.1:{port}")
            subscriber.subscribe(b"")
        for _ in range(3):
            assert next_message(friend)[0] == b"kv@pod@model"
        assert not stranger.poll(0)
    publisher.shutdown()
