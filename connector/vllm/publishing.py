"""Our publisher in the place of vLLM's ZMQ publisher.

vLLM's scheduler makes its publisher right after the connector, by the name in the engine's configuration. So the
connector registers one under a name of its own and puts that name there; making it puts the old name back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from vllm.config.kv_events import KVEventsConfig
from vllm.distributed.kv_events import EventBatch, EventPublisher, EventPublisherFactory
from vllm.utils.network_utils import get_ip, get_tcp_uri

from connector.curve import Curve
from connector.journal import About
from connector.publisher import Publisher, of_rank

logger = logging.getLogger("vllm.tierpick")


class TieredEventPublisher(EventPublisher):
    """vLLM's interface to our Publisher; arguments are those of vLLM's own ZMQ publisher.

    `on_published` are called after every batch, on the caller's thread.
    """

    def __init__(
        self,
        about: About,
        data_parallel_rank: int,
        *,
        endpoint: str,
        replay_endpoint: str | None,
        buffer_steps: int,
        hwm: int,
        max_queue_size: int,
        topic: str,
        curve: Curve | None = None,
    ) -> None:
        super().__init__(data_parallel_rank)
        self.on_published: list[Callable[[], None]] = []
        endpoint = of_rank(endpoint, data_parallel_rank)
        replay_endpoint = of_rank(replay_endpoint, data_parallel_rank)
        self._publisher = Publisher(
            about,
            endpoint=endpoint,
            replay_endpoint=replay_endpoint,
            topic=topic,
            rank=data_parallel_rank,
            buffer_steps=buffer_steps,
            hwm=hwm,
            max_queue_size=max_queue_size,
            curve=curve,
        )
        self._config = KVEventsConfig(
            enable_kv_cache_events=True,
            publisher="zmq",
            endpoint=_reachable(endpoint, self._publisher.endpoint),
            replay_endpoint=_reachable(replay_endpoint, self._publisher.replay_endpoint),
            buffer_steps=buffer_steps,
            hwm=hwm,
            max_queue_size=max_queue_size,
            topic=topic,
        )

    def publish(self, events: EventBatch) -> None:
        self.say(events.events, at=events.ts)
        for react in self.on_published:
            react()

    def say(self, events: Sequence[Any], at: float | None = None) -> None:
        """Publish events that are not a step's; from any thread."""
        self._publisher.publish(events, at=at)

    def flush(self, timeout: float) -> bool:
        """Wait until all this has been sent; False if that takes more than `timeout` seconds."""
        return self._publisher.flush(timeout)

    def shutdown(self) -> None:
        self._publisher.close()

    def get_publisher_config(self) -> KVEventsConfig:
        """The configuration with the endpoints in use: what /kv_event_sources shows."""
        return self._config


def take_over(
    config: KVEventsConfig,
    about: About,
    made: Callable[[TieredEventPublisher], None],
    curve: Curve | None = None,
) -> None:
    """See to it that the publisher that vLLM makes of `config` next is ours; `made` gets it."""
    stock = config.publisher

    def make(data_parallel_rank: int, **settings: Any) -> EventPublisher:
        config.publisher = stock
        publisher = TieredEventPublisher(about, data_parallel_rank, curve=curve, **settings)
        made(publisher)
        return publisher

    name = f"tierpick-{about.instance}"
    EventPublisherFactory.register_publisher(name, make)
    config.publisher = name


def _reachable(wanted: str | None, bound: str | None) -> str | None:
    """What to tell others of an endpoint: for a port that the system chose, that port at an address of this node."""
    if wanted is None or bound is None or not wanted.endswith(":0"):
        return wanted
    return str(get_tcp_uri(get_ip(), int(bound.rpartition(":")[2])))
