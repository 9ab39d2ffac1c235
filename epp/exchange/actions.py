"""What an exchange asks of whoever drives it.

`PickEndpoint`, `AskDirector`, `ObserveBody` and `Finish` go to the director; the rest (`Reply`) are messages to the
data plane, to be sent in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import msgspec

from epp.errors import Refusal
from epp.exchange.events import BodyMode
from epp.routing import Outcome, RequestHead, ResponseHead, Route


class Action(msgspec.Struct, frozen=True):
    """Base of all actions."""


class PickEndpoint(Action, frozen=True):
    """Answered by `EndpointPicked` or `PickRefused`."""

    head: RequestHead
    body: bytes
    subset: Sequence[str] | None


class AskDirector(Action, frozen=True):
    """Answered by `AnswerGiven`."""

    route: Route
    response: ResponseHead


class ObserveBody(Action, frozen=True):
    route: Route
    data: bytes
    end_of_stream: bool


class Finish(Action, frozen=True):
    """The last action of every exchange whose request headers were seen."""

    head: RequestHead
    route: Route | None
    outcome: Outcome


class Reply(Action, frozen=True):
    """Base of the actions that are messages to the data plane."""


class Phase(Enum):
    """The message of the data plane that a route is the reply to."""

    __hash__ = object.__hash__  # Enum's own is Python code

    HEADERS = "request_headers"
    BODY = "request_body"


class AckRequestHeaders(Reply, frozen=True):
    """Send the body, please."""


class AckRequestBody(Reply, frozen=True):
    pass


class RouteRequest(Reply, frozen=True):
    route: Route
    phase: Phase
    response_mode: BodyMode | None = None
    """Set where the request body is not to be sent to us: the modes are then overridden, and the response's, which
    an override replaces too, is this one."""


class ForwardRequestBody(Reply, frozen=True):
    data: bytes
    end_of_stream: bool


class ForwardRequestTrailers(Reply, frozen=True):
    pass


class ForwardResponseHeaders(Reply, frozen=True):
    set_headers: Sequence[tuple[str, str]] = ()
    body_mode: BodyMode | None = None
    """How the response body is to be sent, if other than configured."""


class AckResponseBody(Reply, frozen=True):
    pass


class ForwardResponseBody(Reply, frozen=True):
    data: bytes
    end_of_stream: bool


class ForwardResponseTrailers(Reply, frozen=True):
    pass


class Reject(Reply, frozen=True):
    """Answer the client ourselves; nothing follows but `Finish`."""

    refusal: Refusal
