"""What crosses between the ext_proc exchange and the director: plain values, no gRPC, no plugins.

One HTTP request lives as: `RequestHead` + body → `Director.pick` → `Route` (or a `Refusal`) → `ResponseHead` →
`Director.answered` → body pieces → `Director.observe` → `Director.finish(Outcome)`, the last exactly once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from enum import Enum
from typing import Protocol

from msgspec import Struct

DESTINATION = "x-gateway-destination-endpoint"
SERVED = "x-gateway-destination-endpoint-served"
SUBSET = "x-gateway-destination-endpoint-subset"
LB_NAMESPACE = "envoy.lb"
SUBSET_NAMESPACE = "envoy.lb.subset_hint"


class RequestHead(Struct, frozen=True):
    """Request headers as Envoy sent them. Keys are lower-case, pseudo headers (`:path`) included; for a repeated
    header the last value wins. `received_at` is monotonic seconds."""

    headers: Mapping[str, str]
    received_at: float
    end_of_stream: bool = False

    @property
    def path(self) -> str:
        return self.headers.get(":path", "")

    @property
    def method(self) -> str:
        return self.headers.get(":method", "")


class Route(Struct):
    """Where the request goes. `decision` is the director's own record; the exchange only carries it."""

    destination: str
    """`ip:port[,ip:port…]`: goes into the header and, the same string, into the dynamic metadata."""
    set_headers: Sequence[tuple[str, str]] = ()
    remove_headers: Sequence[str] = ()
    metadata: Mapping[str, object] = {}
    """Further entries of the `envoy.lb` dynamic metadata namespace."""
    body: bytes | None = None
    """The body to forward; None = the client's own bytes, untouched."""
    decision: object = None


class ResponseHead(Struct, frozen=True):
    status: int
    headers: Mapping[str, str]
    served: str = ""
    """`envoy.lb/x-gateway-destination-endpoint-served`, where the data plane reports it."""
    at: float = 0.0
    """Monotonic seconds."""


class Observe(Enum):
    """How much of the response body the director wants to see."""

    __hash__ = object.__hash__  # Enum's own is Python code

    NOTHING = 0
    WHOLE = 1
    """A JSON answer: once, complete."""
    CHUNKS = 2
    """An event stream: chunk by chunk as it passes."""


class Answer(Struct):
    """The director's reply to response headers."""

    observe: Observe = Observe.NOTHING
    set_headers: Sequence[tuple[str, str]] = ()


class Termination(Enum):
    NATURAL = "natural"
    REFUSED = "refused"
    """We answered with an ImmediateResponse."""
    CLIENT = "client disconnect"
    ERROR = "error"


class Outcome(Struct, frozen=True, gc=False):
    """How the exchange ended. Exactly one a request, in every way a stream can end."""

    termination: Termination
    status: int = 0
    """Response status; 0 if none was seen."""
    response_bytes: int = 0
    """Body bytes that passed through us; 0 where the body was not requested from Envoy."""
    first_byte_at: float = 0.0
    """Monotonic seconds of the first response body chunk (duplex), else of the response headers; 0 if none."""
    at: float = 0.0


class Director(Protocol):
    """What the server needs of the rest of the picker."""

    def pick(self, head: RequestHead, body: bytes, subset: Sequence[str] | None) -> Route | Awaitable[Route]:
        """At once, or later if that takes time; cancelled if the client leaves. `subset` None = no hint; empty =
        nothing is allowed. Raises `Refusal`."""

    def answered(self, route: Route, response: ResponseHead) -> Answer: ...

    def observe(self, route: Route, data: bytes, end_of_stream: bool) -> None: ...

    def finish(self, head: RequestHead | None, route: Route | None, outcome: Outcome) -> None:
        """Exactly once for every stream that carried request headers. Never raises."""
