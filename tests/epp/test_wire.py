"""Coding against Envoy's own message definitions (envoy-data-plane): an oracle that shares no code with ours."""

from __future__ import annotations

from typing import Any

import pytest
from envoy_data_plane.envoy.config.core.v3 import HeaderMap, HeaderValue, Metadata
from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import (
    ProcessingModeBodySendMode as BodySendMode,
)
from envoy_data_plane.envoy.service.ext_proc.v3 import (
    HttpBody,
    HttpHeaders,
    HttpTrailers,
    ProcessingRequest,
    ProcessingResponse,
    ProtocolConfiguration,
)
from envoy_data_plane.google.protobuf import ListValue, Struct, Value

from epp import wire
from epp.errors import Code, Refusal
from epp.exchange import actions as act
from epp.exchange import events as ev
from epp.exchange.events import BodyMode
from epp.exchange.machine import PeerError
from epp.routing import DESTINATION, LB_NAMESPACE, SERVED, SUBSET, SUBSET_NAMESPACE, RequestHead, ResponseHead, Route

ROUTE = Route("10.0.0.7:8000")


def headers(*pairs: tuple[str, Any]) -> HeaderMap:
    return HeaderMap(
        headers=[
            HeaderValue(key=key, raw_value=value) if isinstance(value, bytes) else HeaderValue(key=key, value=value)
            for key, value in pairs
        ]
    )


def metadata(**namespaces: dict[str, Value]) -> Metadata:
    return Metadata(filter_metadata={name.replace("__", "."): Struct(fields=f) for name, f in namespaces.items()})


def text(value: str) -> Value:
    return Value(string_value=value)


def texts(*values: str) -> Value:
    return Value(list_value=ListValue(values=[text(value) for value in values]))


def decode(**fields: Any) -> ev.Event:
    return wire.decode(bytes(ProcessingRequest(**fields)), at=5.0)


def encode(action: act.Reply) -> ProcessingResponse:
    return ProcessingResponse.parse(wire.encode(action))


class TestRequestHeaders:
    def test_the_first_message_tells_the_modes(self):
        event = decode(
            request_headers=HttpHeaders(headers=headers((":path", b"/v1/models")), end_of_stream=True),
            protocol_config=ProtocolConfiguration(
                request_body_mode=BodySendMode.BUFFERED, response_body_mode=BodySendMode.NONE
            ),
        )
        head = RequestHead({":path": "/v1/models"}, received_at=5.0, end_of_stream=True)
        assert event == ev.RequestHeaders(head, BodyMode.BUFFERED, BodyMode.NONE, None)

    def test_without_them_full_duplex_is_meant(self):
        event = decode(request_headers=HttpHeaders(headers=headers()))
        assert event == ev.RequestHeaders(RequestHead({}, 5.0), BodyMode.DUPLEX, BodyMode.DUPLEX, None)

    @pytest.mark.parametrize("mode", list(BodySendMode))
    def test_all_of_envoys_modes_are_known(self, mode):
        event = decode(
            request_headers=HttpHeaders(headers=headers()),
            protocol_config=ProtocolConfiguration(request_body_mode=mode, response_body_mode=mode),
        )
        assert event.request_mode.value == event.response_mode.value == mode.value

    @pytest.mark.parametrize(
        ("pairs", "decoded"),
        [
            ([("X-Request-Id", b"a")], {"x-request-id": "a"}),
            ([("x-request-id", "a")], {"x-request-id": "a"}),
            ([("a", b"1"), ("A", b"2")], {"a": "2"}),
            ([("a", b"")], {"a": ""}),
            ([("a", b"\xff\xfe")], {"a": "\ufffd\ufffd"}),
        ],
        ids=["raw", "text", "repeated", "empty", "not-utf-8"],
    )
    def test_header_forms(self, pairs, decoded):
        assert decode(request_headers=HttpHeaders(headers=headers(*pairs))).head.headers == decoded

    def test_raw_value_is_preferred(self):
        both = HeaderMap(headers=[HeaderValue(key="a", value="text", raw_value=b"raw")])
        assert decode(request_headers=HttpHeaders(headers=both)).head.headers == {"a": "raw"}


class TestSubset:
    @pytest.mark.parametrize(
        ("value", "subset"),
        [
            (texts("10.0.0.1:8000", "10.0.0.2:8000"), ("10.0.0.1:8000", "10.0.0.2:8000")),
            (text("10.0.0.1:8000,10.0.0.2:8000"), ("10.0.0.1:8000", "10.0.0.2:8000")),
            (texts("10.0.0.1:8000, 10.0.0.2:8000 ", "10.0.0.3:1"), ("10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:1")),
            (text(" 10.0.0.1 "), ("10.0.0.1",)),
            (texts(), ()),
            (text(""), ()),
            (texts("", ","), ()),
            (Value(number_value=1.0), ()),
            (Value(list_value=ListValue(values=[Value(number_value=1.0), text("a:1")])), ("a:1",)),
        ],
    )
    def test_every_encoding_of_a_hint(self, value, subset):
        hint = metadata(**{SUBSET_NAMESPACE.replace(".", "__"): {SUBSET: value}})
        assert decode(request_body=HttpBody(body=b"x", end_of_stream=True), metadata_context=hint) == ev.RequestBody(
            b"x", True, subset
        )

    @pytest.mark.parametrize("context", [None, metadata(), metadata(envoy__lb={SUBSET: text("a:1")})])
    def test_no_hint(self, context):
        assert decode(request_trailers=HttpTrailers(), metadata_context=context) == ev.RequestTrailers(None)

    def test_it_may_come_with_any_request_message(self):
        hint = metadata(**{SUBSET_NAMESPACE.replace(".", "__"): {SUBSET: text("a:1")}})
        for fields in (
            {"request_headers": HttpHeaders(headers=headers())},
            {"request_body": HttpBody()},
            {"request_trailers": HttpTrailers()},
        ):
            assert decode(**fields, metadata_context=hint).subset == ("a:1",)


class TestResponseMessages:
    def test_headers_with_status_and_served_endpoint(self):
        event = decode(
            response_headers=HttpHeaders(headers=headers((":status", b"200"), ("Content-Type", b"text/plain"))),
            metadata_context=metadata(envoy__lb={SERVED: text("10.0.0.7:8000")}),
        )
        assert event == ev.ResponseHeaders(
            ResponseHead(200, {":status": "200", "content-type": "text/plain"}, "10.0.0.7:8000", 5.0), False
        )

    @pytest.mark.parametrize("status", [b"", b"2oo", b"-1", b"9" * 5000, "２００".encode(), b"0200"])
    def test_a_status_that_is_none(self, status):
        assert decode(response_headers=HttpHeaders(headers=headers((":status", status)))).response.status == 0

    def test_body_and_trailers(self):
        assert decode(response_body=HttpBody(body=b"x", end_of_stream=True)) == ev.ResponseBody(b"x", True, 5.0)
        assert decode(response_trailers=HttpTrailers(trailers=headers(("a", b"b")))) == ev.ResponseTrailers(5.0)

    def test_response_headers_are_recognised_without_decoding(self):
        message = ProcessingRequest(response_headers=HttpHeaders(headers=headers()), metadata_context=metadata())
        assert wire.is_response_headers(bytes(message))
        assert not wire.is_response_headers(bytes(ProcessingRequest(request_body=HttpBody())))


class TestBadMessages:
    @pytest.mark.parametrize("data", [b"", b"\x0a", b"\xff\xff\xff", b"\x12\x05ab"])
    def test_are_protocol_errors(self, data):
        with pytest.raises(PeerError):
            wire.decode(data, 0.0)

    def test_an_unknown_body_mode_is_named(self):
        data = bytes(ProcessingRequest(request_headers=HttpHeaders(headers=headers()))) + b"\x5a\x02\x08\x63"
        with pytest.raises(PeerError, match="99"):
            wire.decode(data, 0.0)


def set_headers(mutation: Any) -> list[tuple[str, bytes]]:
    assert all(option.append is None and not option.append_action for option in mutation.set_headers)
    return [(option.header.key, option.header.raw_value) for option in mutation.set_headers]


class TestRoute:
    def test_a_route_that_only_names_its_destination_is_encoded_like_any_other(self):
        for route in (ROUTE, Route("10.0.0.8:8000"), Route("10.0.0.7:8000,10.0.0.8:8000")):
            for phase in act.Phase:
                action = act.RouteRequest(route, phase)
                assert wire.encode(action) == wire.encode(action) == wire._write_route(action)

    @pytest.mark.parametrize("phase", list(act.Phase))
    def test_header_metadata_and_cleared_route_cache(self, phase):
        response = encode(act.RouteRequest(ROUTE, phase))
        common = getattr(response, phase.value).response
        assert common.clear_route_cache
        assert set_headers(common.header_mutation) == [(DESTINATION, b"10.0.0.7:8000")]
        assert common.header_mutation.remove_headers == [SERVED, SUBSET]
        assert common.body_mutation is None
        assert response.dynamic_metadata.to_dict() == {LB_NAMESPACE: {DESTINATION: "10.0.0.7:8000"}}
        assert response.mode_override is None

    def test_what_the_director_adds(self):
        route = Route(
            "10.0.0.7:8000,10.0.0.8:8000",
            set_headers=[("x-request-id", "é")],
            remove_headers=["x-secret"],
            metadata={"scores": {"10.0.0.7:8000": 0.5}, DESTINATION: "not this"},
        )
        response = encode(act.RouteRequest(route, act.Phase.HEADERS))
        mutation = response.request_headers.response.header_mutation
        assert set_headers(mutation)[1:] == [("x-request-id", "é".encode())]
        assert mutation.remove_headers[2:] == ["x-secret"]
        assert response.dynamic_metadata.to_dict() == {
            LB_NAMESPACE: {"scores": {"10.0.0.7:8000": 0.5}, DESTINATION: "10.0.0.7:8000,10.0.0.8:8000"}
        }

    def test_a_buffered_body_that_changes_takes_its_length_along(self):
        route = Route("10.0.0.7:8000", body=b"longer")
        common = encode(act.RouteRequest(route, act.Phase.BODY)).request_body.response
        assert common.body_mutation.body == b"longer"
        assert ("content-length", b"6") in set_headers(common.header_mutation)

    def test_a_streamed_body_goes_without_length(self):
        route = Route("10.0.0.7:8000", body=b"longer")
        common = encode(act.RouteRequest(route, act.Phase.HEADERS)).request_headers.response
        assert common.body_mutation is None
        assert [key for key, _ in set_headers(common.header_mutation)] == [DESTINATION]

    def test_a_body_not_to_be_sent_is_switched_off_and_the_rest_kept(self):
        mode = encode(act.RouteRequest(ROUTE, act.Phase.HEADERS, BodyMode.BUFFERED)).mode_override
        assert (mode.request_body_mode.name, mode.response_body_mode.name) == ("NONE", "BUFFERED")
        assert mode.response_header_mode.name == mode.response_trailer_mode.name == "SEND"


class TestOtherReplies:
    @pytest.mark.parametrize(
        ("action", "field"),
        [
            (act.AckRequestHeaders(), "request_headers"),
            (act.AckRequestBody(), "request_body"),
            (act.ForwardRequestTrailers(), "request_trailers"),
            (act.ForwardResponseHeaders(), "response_headers"),
            (act.AckResponseBody(), "response_body"),
            (act.ForwardResponseTrailers(), "response_trailers"),
        ],
    )
    def test_an_acknowledgement_is_an_empty_reply_of_its_kind(self, action, field):
        response = encode(action)
        message = getattr(response, field)
        assert message is not None
        assert bytes(message) == b""
        assert response.mode_override is None

    @pytest.mark.parametrize(
        ("action", "field"),
        [
            (act.ForwardRequestBody(b"data", False), "request_body"),
            (act.ForwardRequestBody(b"", True), "request_body"),
            (act.ForwardResponseBody(b"data", False), "response_body"),
            (act.ForwardResponseBody(b"", True), "response_body"),
        ],
    )
    def test_chunks_are_streamed_responses(self, action, field):
        chunk = getattr(encode(action), field).response.body_mutation.streamed_response
        assert (chunk.body, chunk.end_of_stream) == (action.data, action.end_of_stream)

    def test_response_headers_with_additions_and_another_mode(self):
        response = encode(act.ForwardResponseHeaders([("x-a", "1")], BodyMode.STREAMED))
        assert set_headers(response.response_headers.response.header_mutation) == [("x-a", b"1")]
        assert not response.response_headers.response.clear_route_cache
        assert response.mode_override.response_body_mode.name == "STREAMED"
        assert response.mode_override.response_trailer_mode.name == "SEND"

    def test_a_refusal_carries_status_body_and_reason(self):
        refusal = Refusal(Code.ServiceUnavailable, "nobody", reason="rejected-no-endpoints")
        immediate = encode(act.Reject(refusal)).immediate_response
        assert immediate.status.code.value == 503
        assert immediate.body == refusal.body
        assert set_headers(immediate.headers) == [(key, value.encode()) for key, value in refusal.headers]

    def test_every_reply_has_an_encoder(self):
        assert {type(action) for action in REPLIES} == set(act.Reply.__subclasses__())
        for action in REPLIES:
            assert wire.encode(action)


REPLIES = [
    act.AckRequestHeaders(),
    act.AckRequestBody(),
    act.RouteRequest(ROUTE, act.Phase.BODY),
    act.ForwardRequestBody(b"", True),
    act.ForwardRequestTrailers(),
    act.ForwardResponseHeaders(),
    act.AckResponseBody(),
    act.ForwardResponseBody(b"", True),
    act.ForwardResponseTrailers(),
    act.Reject(Refusal(Code.Internal, "x")),
]
