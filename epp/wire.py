"""ext_proc messages: `ProcessingRequest` bytes → event, reply action → `ProcessingResponse` bytes.

The only importer of the generated protobuf module. Does no I/O and keeps no state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

from google.protobuf.message import DecodeError
from google.protobuf.struct_pb2 import Struct, Value

from epp.exchange import actions as act
from epp.exchange import events as ev
from epp.exchange.events import BodyMode
from epp.exchange.machine import PeerError
from epp.routing import DESTINATION, LB_NAMESPACE, SERVED, SUBSET, SUBSET_NAMESPACE, RequestHead, ResponseHead, Route
from proto import ext_proc_pb2 as pb

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
METHOD = "Process"

_CONTROL_HEADERS = (SERVED, SUBSET)
"""What a client may not pass on to an engine, besides the destination, which is overwritten."""

_RESPONSE_HEADERS_TAG = bytes([pb.ProcessingRequest.RESPONSE_HEADERS_FIELD_NUMBER << 3 | 2])


def decode(data: bytes, at: float) -> ev.Event:
    """`at` is when the message came, in monotonic seconds.

    Raises:
        PeerError: not a `ProcessingRequest`, or one of a kind that we do not know.
    """
    try:
        message = pb.ProcessingRequest.FromString(data)
    except DecodeError as error:
        raise PeerError("message is not a ProcessingRequest") from error
    kind = message.WhichOneof("request")
    if kind is None:
        raise PeerError("ProcessingRequest without a known request")
    return _DECODERS[kind](message, at)


def is_response_headers(data: bytes) -> bool:
    """Without decoding: Envoy writes fields in the order of their numbers."""
    return data[:1] == _RESPONSE_HEADERS_TAG


def encode(action: act.Reply) -> bytes:
    return _ENCODERS[type(action)](action)


# Decoding


def _request_headers(message: pb.ProcessingRequest, at: float) -> ev.RequestHeaders:
    headers = message.request_headers
    head = RequestHead(_header_map(headers.headers), at, headers.end_of_stream)
    if not message.HasField("protocol_config"):
        return ev.RequestHeaders(head, subset=_subset(message))
    modes = message.protocol_config
    return ev.RequestHeaders(
        head, _body_mode(modes.request_body_mode), _body_mode(modes.response_body_mode), _subset(message)
    )


def _request_body(message: pb.ProcessingRequest, at: float) -> ev.RequestBody:
    body = message.request_body
    return ev.RequestBody(body.body, body.end_of_stream, _subset(message))


def _request_trailers(message: pb.ProcessingRequest, at: float) -> ev.RequestTrailers:
    return ev.RequestTrailers(_subset(message))


def _response_headers(message: pb.ProcessingRequest, at: float) -> ev.ResponseHeaders:
    headers = _header_map(message.response_headers.headers)
    response = ResponseHead(_status(headers.get(":status", "")), headers, _served(message), at)
    return ev.ResponseHeaders(response, message.response_headers.end_of_stream)


def _status(text: str) -> int:
    return int(text) if len(text) == 3 and text.isascii() and text.isdigit() else 0


def _response_body(message: pb.ProcessingRequest, at: float) -> ev.ResponseBody:
    body = message.response_body
    return ev.ResponseBody(body.body, body.end_of_stream, at)


def _response_trailers(message: pb.ProcessingRequest, at: float) -> ev.ResponseTrailers:
    return ev.ResponseTrailers(at)


_DECODERS: dict[str, Callable[[pb.ProcessingRequest, float], ev.Event]] = {
    "request_headers": _request_headers,
    "request_body": _request_body,
    "request_trailers": _request_trailers,
    "response_headers": _response_headers,
    "response_body": _response_body,
    "response_trailers": _response_trailers,
}


def _header_map(headers: pb.HeaderMap) -> dict[str, str]:
    # Envoy fills one of the two value fields, depending on its version
    return {h.key.lower(): h.raw_value.decode("utf-8", "replace") or h.value for h in headers.headers}


_BODY_MODES = {mode.value: mode for mode in BodyMode}


def _body_mode(number: int) -> BodyMode:
    mode = _BODY_MODES.get(number)
    if mode is None:
        raise PeerError(f"unknown body mode {number}")
    return mode


def _subset(message: pb.ProcessingRequest) -> Sequence[str] | None:
    namespace = _namespace(message, SUBSET_NAMESPACE)
    if namespace is None or SUBSET not in namespace.fields:
        return None
    return tuple(_addresses(namespace.fields[SUBSET]))


def _addresses(value: Value) -> Iterable[str]:
    """Of a list of strings or of one string; either may hold comma lists. Anything else allows nothing."""
    for item in value.list_value.values or (value,):
        yield from filter(None, map(str.strip, item.string_value.split(",")))


def _served(message: pb.ProcessingRequest) -> str:
    namespace = _namespace(message, LB_NAMESPACE)
    return namespace.fields[SERVED].string_value if namespace is not None and SERVED in namespace.fields else ""


def _namespace(message: pb.ProcessingRequest, name: str) -> Struct | None:
    return message.metadata_context.filter_metadata.get(name) if message.HasField("metadata_context") else None


# Encoding


def _route_request(action: act.RouteRequest) -> bytes:
    route = action.route
    if (
        action.response_mode is None
        and route.body is None
        and not (route.set_headers or route.remove_headers or route.metadata)
    ):
        return _plain_route(action.phase, route.destination)
    return _write_route(action)


@lru_cache(4096)
def _plain_route(phase: act.Phase, destination: str) -> bytes:
    """Most routes say nothing but the destination, and there are few of those."""
    return _write_route(act.RouteRequest(Route(destination), phase))


def _write_route(action: act.RouteRequest) -> bytes:
    message = pb.ProcessingResponse()
    common = getattr(message, action.phase.value).response
    common.clear_route_cache = True
    route = action.route
    _set_headers(common.header_mutation, ((DESTINATION, route.destination), *route.set_headers))
    common.header_mutation.remove_headers.extend((*_CONTROL_HEADERS, *route.remove_headers))
    if action.phase is act.Phase.BODY and route.body is not None:
        common.body_mutation.body = route.body
        _set_headers(common.header_mutation, (("content-length", str(len(route.body))),))
    _set_metadata(message.dynamic_metadata.fields[LB_NAMESPACE].struct_value, route.destination, route.metadata)
    if action.response_mode is not None:
        _override_modes(message.mode_override, action.response_mode)
    return message.SerializeToString()


def _set_metadata(namespace: Struct, destination: str, further: Any) -> None:
    if further:
        namespace.update(further)
    namespace.fields[DESTINATION].string_value = destination


def _forward_request_body(action: act.ForwardRequestBody) -> bytes:
    message = pb.ProcessingResponse()
    chunk = message.request_body.response.body_mutation.streamed_response
    chunk.body, chunk.end_of_stream = action.data, action.end_of_stream
    return message.SerializeToString()


def _forward_response_headers(action: act.ForwardResponseHeaders) -> bytes:
    return _write_response_headers(action.body_mode, tuple(action.set_headers))


@lru_cache(64)
def _write_response_headers(body_mode: BodyMode | None, set_headers: tuple[tuple[str, str], ...]) -> bytes:
    message = pb.ProcessingResponse()
    message.response_headers.SetInParent()
    if set_headers:
        _set_headers(message.response_headers.response.header_mutation, set_headers)
    if body_mode is not None:
        _override_modes(message.mode_override, body_mode)
    return message.SerializeToString()


def _forward_response_body(action: act.ForwardResponseBody) -> bytes:
    message = pb.ProcessingResponse()
    chunk = message.response_body.response.body_mutation.streamed_response
    chunk.body, chunk.end_of_stream = action.data, action.end_of_stream
    return message.SerializeToString()


def _reject(action: act.Reject) -> bytes:
    refusal = action.refusal
    message = pb.ProcessingResponse()
    immediate = message.immediate_response
    immediate.status.code = refusal.status
    immediate.body = refusal.body
    _set_headers(immediate.headers, refusal.headers)
    return message.SerializeToString()


def _set_headers(mutation: pb.HeaderMutation, headers: Iterable[tuple[str, str]]) -> None:
    """Overwrites: the option's append fields stay unset."""
    for key, value in headers:
        header = mutation.set_headers.add().header
        header.key, header.raw_value = key, value.encode()


def _override_modes(mode: pb.ProcessingMode, response_body: BodyMode) -> None:
    """An override replaces every mode still to come, so all are stated. The request body is over, or unwanted."""
    mode.response_header_mode = mode.response_trailer_mode = pb.ProcessingMode.SEND
    mode.request_trailer_mode = pb.ProcessingMode.SKIP
    mode.response_body_mode = response_body.value  # type: ignore[assignment]  # at run time an enum is an int


def _constant(message: pb.ProcessingResponse) -> Callable[[Any], bytes]:
    data = message.SerializeToString()
    return lambda _: data


_ENCODERS: dict[type[act.Reply], Callable[[Any], bytes]] = {
    act.AckRequestHeaders: _constant(pb.ProcessingResponse(request_headers=pb.HeadersResponse())),
    act.AckRequestBody: _constant(pb.ProcessingResponse(request_body=pb.BodyResponse())),
    act.RouteRequest: _route_request,
    act.ForwardRequestBody: _forward_request_body,
    act.ForwardRequestTrailers: _constant(pb.ProcessingResponse(request_trailers=pb.TrailersResponse())),
    act.ForwardResponseHeaders: _forward_response_headers,
    act.AckResponseBody: _constant(pb.ProcessingResponse(response_body=pb.BodyResponse())),
    act.ForwardResponseBody: _forward_response_body,
    act.ForwardResponseTrailers: _constant(pb.ProcessingResponse(response_trailers=pb.TrailersResponse())),
    act.Reject: _reject,
}
