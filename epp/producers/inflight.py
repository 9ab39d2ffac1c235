"""What we ourselves have in flight at each endpoint: requests, and prompt tokens it must still compute.

The account is always kept, whether or not a configuration lists `inflight-load-producer`; that plugin only says how
tokens are estimated. Every entry is a ticket that takes back exactly what it added, once, and from the endpoint object
it was added to: late ends, double ends and endpoints that left cannot make a figure wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, NamedTuple

import msgspec

from epp.config.environment import Environment
from epp.config.registry import Parameters, plugin
from epp.fleet.endpoint import Endpoint
from epp.fleet.fleet import Fleet
from epp.scheduling.plugin import Scheduling
from epp.telemetry import Reading, Telemetry
from epp.telemetry.pool import endpoint_name

_SHARED = "inflight"
_NO_FLOW = ("default-flow", 0)


class Tokens(NamedTuple):
    """What a request is expected to cost an endpoint."""

    prompt: int
    """Uncached prompt tokens, gone with the first byte of the response."""
    output: int = 0
    """Tokens to generate, gone with its end."""


class Ticket:
    """One request at one endpoint. Both methods may be called at any time, in any order, any number of times."""

    __slots__ = ("_book", "endpoint", "fairness_id", "output", "priority", "prompt")

    def __init__(self, endpoint: Endpoint, tokens: Tokens, flow: tuple[str, int], book: set[Ticket]) -> None:
        self.endpoint = endpoint
        self.prompt, self.output = tokens
        self.fairness_id, self.priority = flow
        self._book = book
        book.add(self)
        endpoint.inflight_requests += 1
        endpoint.inflight_tokens += self.prompt + self.output

    def first_byte(self) -> None:
        """The prompt is computed: its tokens no longer load the endpoint."""
        self.endpoint.inflight_tokens -= self.prompt
        self.prompt = 0

    def close(self) -> None:
        if self in self._book:
            self._book.discard(self)
            self.endpoint.inflight_requests -= 1
            self.endpoint.inflight_tokens -= self.prompt + self.output
            self.prompt = self.output = 0


class InFlight:
    """The account of one process, shared by all that need it: see `of`."""

    def __init__(self, fleet: Fleet, telemetry: Telemetry) -> None:
        self._fleet = fleet
        self._telemetry = telemetry
        self._open: set[Ticket] = set()
        self.estimate: Callable[[Scheduling, Endpoint], Tokens] = lambda scheduling, endpoint: Tokens(
            uncached_tokens(scheduling, endpoint)
        )
        self.producer = InFlightLoadProducer.type
        """Name of the plugin instance that set `estimate`, for the metrics."""
        telemetry.add_source("inflight", self.readings)

    @staticmethod
    def of(environment: Environment) -> InFlight:
        found = environment.shared.get(_SHARED)
        if not isinstance(found, InFlight):
            found = environment.shared[_SHARED] = InFlight(environment.fleet, environment.telemetry)
        return found

    def __len__(self) -> int:
        """Requests in flight, at endpoints that have left too."""
        return len(self._open)

    def start(self, endpoint: Endpoint, uncached_tokens: int) -> Ticket:
        return Ticket(endpoint, Tokens(uncached_tokens), _NO_FLOW, self._open)

    def picked(self, scheduling: Scheduling, endpoint: Endpoint) -> Ticket:
        """`start` with the tokens that the prediction leaves to compute, in the request's own flow."""
        request = scheduling.request
        flow = (request.fairness_id, request.priority)
        return Ticket(endpoint, self.estimate(scheduling, endpoint), flow, self._open)

    def readings(self) -> Iterator[Reading]:
        """A zero for every endpoint, so that an idle one is seen to be idle, and what each open ticket adds."""
        for endpoint in self._fleet.endpoints:
            yield from self._of(endpoint, *_NO_FLOW, 0, 0)
        for ticket in self._open:
            if self._fleet.get(ticket.endpoint.address) is ticket.endpoint:
                tokens = ticket.prompt + ticket.output
                yield from self._of(ticket.endpoint, ticket.fairness_id, ticket.priority, 1, tokens)

    def _of(self, endpoint: Endpoint, fairness_id: str, priority: int, requests: int, tokens: int) -> Iterator[Reading]:
        flow = (self._telemetry.bounded_fairness_id(fairness_id), str(priority))
        labels = (endpoint_name(endpoint), endpoint.spec.namespace, self.producer, *flow)
        yield "inflight_requests", labels, requests
        yield "inflight_tokens", labels, tokens


def uncached_tokens(scheduling: Scheduling, endpoint: Endpoint, producer: str = "") -> int:
    """Prompt tokens that `endpoint` will have to compute: by the matches of `producer`, else by the exact prediction,
    else by the best match of any producer. 0 where the prompt's tokens are not known."""
    return max(0, scheduling.request.prompt_tokens - _cached_tokens(scheduling, endpoint.slot, producer))


def _cached_tokens(scheduling: Scheduling, slot: int, producer: str) -> int:
    if producer:
        match = scheduling.matches.get(producer)
        return match.cached_tokens[slot] if match else 0
    if scheduling.hits and (hit := scheduling.hits[slot]) is not None:
        return hit.cached
    return max((match.cached_tokens[slot] for match in scheduling.matches.values()), default=0)


class InFlightLoadParameters(Parameters, frozen=True):
    add_estimated_output_tokens: bool = False
    output_ratio: Annotated[float, msgspec.Meta(ge=0)] = 1.5
    """Output tokens a prompt token."""
    max_estimated_output_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None
    prefix_match_info_producer_name: str = ""
    """Whose matches count; "" = the exact prediction, or the best match there is."""
    sync_cross_replica_state: bool = True
    """Without effect: each replica counts what it sends."""


@plugin("inflight-load-producer", InFlightLoadParameters)
class InFlightLoadProducer:
    name: str
    type: str

    def __init__(self, name: str, parameters: InFlightLoadParameters, environment: Environment) -> None:
        self.name = name
        self._parameters = parameters
        account = InFlight.of(environment)
        account.estimate = self.estimate
        account.producer = name

    def produce(self, scheduling: Scheduling) -> None:
        """Nothing: the figures stand on the endpoints at all times."""

    def estimate(self, scheduling: Scheduling, endpoint: Endpoint) -> Tokens:
        prompt = uncached_tokens(scheduling, endpoint, self._parameters.prefix_match_info_producer_name)
        return Tokens(prompt, self._output(scheduling) if self._parameters.add_estimated_output_tokens else 0)

    def _output(self, scheduling: Scheduling) -> int:
        request, parameters = scheduling.request, self._parameters
        bounds = (request.max_output_tokens, parameters.max_estimated_output_tokens)
        guess = round(request.prompt_tokens * parameters.output_ratio)
        return min([guess, *(bound for bound in bounds if bound is not None)])
