"""An endpoint, what its engine last told about its load, and what we ourselves have in flight there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class EngineLoad:
    """Last scraped (or streamed) figures. `updated_at` is monotonic seconds, 0 = never heard.

    Replaced whole with every new reading, never changed in place: a decision may keep what it saw by reference.
    """

    waiting: int = 0
    running: int = 0
    kv_usage: float = 0.0
    """0..1, HBM blocks of running requests."""
    block_size: int = 0
    """Tokens a KV block; 0 = unknown."""
    num_blocks: int = 0
    """HBM capacity in KV blocks; 0 = unknown."""
    cpu_blocks_per_chunk: int = 0
    """KV blocks an offloaded chunk; 0 = unknown."""
    updated_at: float = 0.0
    cpu_chunks: int = 0
    """Capacity of the CPU tier in chunks; 0 = unknown."""
    asleep: bool = False
    """The engine has discarded what its HBM held, and serves nobody until it is woken. False = not, or unknown."""
    streamed_until: float = 0.0
    """Until then (monotonic seconds) these figures, which the engine sent by itself, are newer than scraped ones; 0 =
    they are scraped."""


@dataclass(slots=True, frozen=True)
class EndpointSpec:
    """What discovery says. Identity is `address`; the rest may change in place."""

    address: str
    """`ip:port` (IPv6 bracketed): where requests go."""
    name: str = ""
    namespace: str = "default"
    labels: Mapping[str, str] = field(default_factory=dict)
    rank: int = 0
    """Index of the port among the pod's target ports; offsets the event ports."""
    metrics_address: str = ""
    """`ip:port` of /metrics; "" = `address`."""
    kv_events: str = ""
    """ZMQ address of the event publisher, e.g. `tcp://10.0.0.7:5557`; "" = derived from the producer's config."""
    kv_replay: str = ""
    uid: str = ""
    """The pod's unique id where the source has one; with `namespace` and `name` it tells a replaced pod from an
    updated one."""


@dataclass(slots=True, eq=False)
class Endpoint:
    spec: EndpointSpec
    slot: int
    """Small dense integer, unique among live endpoints, reused after removal: per-request figures are lists
    indexed by it."""
    load: EngineLoad = field(default_factory=EngineLoad)
    inflight_requests: int = 0
    inflight_tokens: int = 0
    """Uncached prompt tokens we sent there and that have not answered yet."""

    reachable: bool = True
    """False = its own port refuses connections. Set through `Fleet.reached`."""

    gone: bool = False
    """Has left the fleet. Requests that waited meanwhile may still hold it, and its slot may have a new owner."""

    address: str = field(init=False)
    """That of every `spec` it will have."""

    def __post_init__(self) -> None:
        self.address = self.spec.address
