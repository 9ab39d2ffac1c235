"""What can happen to an exchange: messages from the data plane, the director's answers, and the end of the stream.

Plain frozen values; `at` is monotonic seconds, stamped by whoever feeds the exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import msgspec

from epp.errors import Refusal
from epp.routing import Answer, RequestHead, ResponseHead, Route


class BodyMode(IntEnum):
    """How the data plane sends a body; the numbers are Envoy's `ProcessingMode.BodySendMode`."""

    NONE = 0
    STREAMED = 1
    BUFFERED = 2
    BUFFERED_PARTIAL = 3
    DUPLEX = 4
    """FULL_DUPLEX_STREAMED"""
    GRPC = 5


class Event(msgspec.Struct, frozen=True):
    """Base of all events."""


class RequestHeaders(Event, frozen=True):
    head: RequestHead
    request_mode: BodyMode = BodyMode.DUPLEX
    """Of the request body. A data plane that does not tell its modes is taken to be full duplex, as gateways are."""
    response_mode: BodyMode = BodyMode.DUPLEX
    subset: Sequence[str] | None = None
    """The subset hint of this message; None = it carries none."""


class RequestBody(Event, frozen=True):
    data: bytes
    end_of_stream: bool
    subset: Sequence[str] | None = None


class RequestTrailers(Event, frozen=True):
    subset: Sequence[str] | None = None


class EndpointPicked(Event, frozen=True):
    route: Route


class PickRefused(Event, frozen=True):
    refusal: Refusal


class ResponseHeaders(Event, frozen=True):
    response: ResponseHead
    end_of_stream: bool = False


class AnswerGiven(Event, frozen=True):
    """The director has seen the response headers."""

    answer: Answer


class ResponseBody(Event, frozen=True):
    data: bytes
    end_of_stream: bool
    at: float


class ResponseTrailers(Event, frozen=True):
    at: float


class StreamClosed(Event, frozen=True):
    """The stream is over, however that came: half-closed, reset, cancelled or failed on our side."""

    at: float
    failed: bool = False
    """We, not the data plane, ended it because of an error."""
