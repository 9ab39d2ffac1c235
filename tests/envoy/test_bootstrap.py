"""What our own bootstraps promise, with a real Envoy."""

from __future__ import annotations

import asyncio

import pytest

from epp.errors import no_endpoints
from epp.routing import Route
from epp.stream import _warn_unseen_bodies
from epp.toolbox.processes import free_ports
from epp.wire import SERVICE

from .conftest import Profile, ext_proc_index, http_filters, manager

pytestmark = pytest.mark.envoy

DESTINATION = "x-gateway-destination-endpoint"


async def test_tls_to_a_self_signed_picker(start, profile, upstream):
    proxy = await start(profile, secure=True)
    async with proxy.post("/v1/completions", data=b"{}") as response:
        assert response.status == 200
    assert upstream.last[1] == b"{}"


@pytest.mark.parametrize("secure", [False, True])
async def test_the_health_check_of_the_picker_passes(start, secure):
    proxy = await start(secure=secure)
    assert "picker::127.0.0.1" in (clusters := await proxy.admin("/clusters"))
    assert f"picker::127.0.0.1:{proxy.server.port}::health_flags::healthy" in clusters
    assert "picker.health_check.success: 1" in await proxy.admin("/stats?filter=picker.health_check")


async def test_the_health_check_asks_by_the_name_of_the_service(start):
    def refused(bootstrap):
        [check] = bootstrap["static_resources"]["clusters"][1]["health_checks"]
        assert check["grpc_health_check"]["service_name"] == SERVICE
        check["interval"] = check["no_traffic_interval"] = "0.05s"
        check["unhealthy_threshold"] = 1

    proxy = await start(edit=refused)
    proxy.server.health.set_ready(False)
    await proxy.until_picker_is_unhealthy()


class TestControlHeadersOfTheClient:
    async def test_a_destination_is_overwritten(self, start, profile, upstream, other_upstream, director):
        proxy = await start(profile)
        headers = {
            DESTINATION: other_upstream.address,
            f"{DESTINATION}-served": other_upstream.address,
            f"{DESTINATION}-subset": other_upstream.address,
        }
        async with proxy.post("/v1/completions", data=b"{}", headers=headers) as response:
            assert response.status == 200
        [(request, _)] = upstream.requests
        assert request.headers.getall(DESTINATION) == [upstream.address]
        assert f"{DESTINATION}-served" not in request.headers
        assert f"{DESTINATION}-subset" not in request.headers
        assert not other_upstream.requests
        [(_, _, subset)] = director.requests
        assert subset is None

    async def test_none_is_obeyed_while_the_picker_is_down(self, start, profile, other_upstream):
        def open_up(bootstrap):
            http_filters(bootstrap)[ext_proc_index(bootstrap)]["typed_config"]["failure_mode_allow"] = True

        proxy = await start(profile, edit=open_up)
        await proxy.server.stop()
        async with proxy.get("/v1/models", headers={DESTINATION: other_upstream.address}) as response:
            assert response.status == 503
        assert not other_upstream.requests

    async def test_ours_are_removed_even_without_the_filter_before_us(self, start, profile, upstream):
        proxy = await start(profile, edit=lambda bootstrap: http_filters(bootstrap).pop(0))
        headers = {DESTINATION: "127.0.0.1:1", f"{DESTINATION}-served": "x", f"{DESTINATION}-subset": "x"}
        async with proxy.post("/v1/completions", data=b"{}", headers=headers) as response:
            assert response.status == 200
        request, _ = upstream.last
        assert request.headers.getall(DESTINATION) == [upstream.address]
        assert f"{DESTINATION}-served" not in request.headers
        assert f"{DESTINATION}-subset" not in request.headers


def hint(value):
    """Adds the filter that stands in for a gateway's subset hint."""

    def edit(bootstrap):
        http_filters(bootstrap).insert(
            ext_proc_index(bootstrap),
            {
                "name": "envoy.filters.http.set_metadata",
                "typed_config": {
                    "@type": "type.googleapis.com/envoy.extensions.filters.http.set_metadata.v3.Config",
                    "metadata": [
                        {
                            "metadata_namespace": "envoy.lb.subset_hint",
                            "value": {"x-gateway-destination-endpoint-subset": value},
                        }
                    ],
                },
            },
        )

    return edit


@pytest.mark.parametrize(
    ("value", "subset"),
    [(["127.0.0.1:8001"], ("127.0.0.1:8001",)), ("10.0.0.1:1, 10.0.0.2:2", ("10.0.0.1:1", "10.0.0.2:2")), ([], ())],
)
@pytest.mark.parametrize("body", [b"{}", None])
async def test_a_subset_hint_reaches_the_director(start, profile, director, value, subset, body):
    async def refuse(*_):
        raise no_endpoints()

    director.picks = refuse
    proxy = await start(profile, edit=hint(value))
    async with proxy.post("/v1/completions", data=body) as response:
        assert response.status == 503
    assert director.requests[0][2] == subset


class TestKnownEndpoints:
    async def test_the_metadata_decides_and_who_served_comes_back(
        self, start, profile, upstream, other_upstream, director
    ):
        proxy = await start(profile, endpoints=(other_upstream.address, upstream.address))
        for _ in range(3):
            async with proxy.post("/v1/completions", data=b"{}") as response:
                assert response.status == 200
        assert len(upstream.requests) == 3
        assert [response.served for response in director.responses] == [upstream.address] * 3

    async def test_the_next_of_a_list_takes_over_from_a_dead_one(self, start, profile, upstream, director):
        dead = f"127.0.0.1:{free_ports(1)[0]}"

        async def both(*_):
            return Route(f"{dead},{upstream.address}")

        director.picks = both
        proxy = await start(profile, endpoints=(dead, upstream.address))
        async with proxy.post("/v1/completions", data=b"{}") as response:
            assert response.status == 200
        assert [response.served for response in director.responses] == [upstream.address]

    async def test_fail_open_serves_without_the_picker(self, start, profile, upstream):
        proxy = await start(profile, endpoints=(upstream.address,), fail_open=True, edit=_check_often)
        await proxy.server.stop()
        await proxy.until_picker_is_unhealthy()
        async with proxy.post("/v1/completions", data=b"{}") as response:
            assert response.status == 200


def _check_often(bootstrap):
    [check] = bootstrap["static_resources"]["clusters"][1]["health_checks"]
    check["interval"] = check["no_traffic_interval"] = "0.1s"


async def test_the_metadata_alone_is_enough_for_an_original_destination(start, profile, upstream):
    def by_metadata(bootstrap):
        bootstrap["static_resources"]["clusters"][0]["original_dst_lb_config"] = {
            "metadata_key": {"key": "envoy.lb", "path": [{"key": DESTINATION}]}
        }

    proxy = await start(profile, edit=by_metadata)
    async with proxy.post("/v1/completions", data=b"{}") as response:
        assert response.status == 200
    assert len(upstream.requests) == 1


async def test_request_trailers_pass(start, profile, upstream, director):
    def allow_trailers(bootstrap):
        manager(bootstrap)["http_protocol_options"] = {"enable_trailers": True}

    proxy = await start(profile, edit=allow_trailers)
    host, port = proxy.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\ntrailer: x-sum\r\n\r\n"
        b"4\r\nbody\r\n0\r\nx-sum: 1\r\n\r\n"
    )
    status = await asyncio.wait_for(reader.readline(), 5)
    writer.close()
    await writer.wait_closed()
    assert b"200" in status
    assert director.requests[0][1] == upstream.last[1] == b"body"


async def test_a_data_plane_in_a_mode_that_cannot_work_fails_with_a_name(start, director, caplog):
    def streamed(bootstrap):
        mode = http_filters(bootstrap)[ext_proc_index(bootstrap)]["typed_config"]["processing_mode"]
        mode["request_body_mode"] = "STREAMED"

    proxy = await start(edit=streamed)
    async with proxy.post("/v1/completions", data=b"{}") as response:
        assert response.status == 500
    assert "request body mode STREAMED: use BUFFERED or FULL_DUPLEX_STREAMED" in caplog.text


async def test_a_data_plane_that_sends_no_bodies_is_served_by_headers_alone(start, director, upstream, caplog):
    def unsent(bootstrap):
        mode = http_filters(bootstrap)[ext_proc_index(bootstrap)]["typed_config"]["processing_mode"]
        mode["request_body_mode"] = "NONE"

    _warn_unseen_bodies.cache_clear()
    proxy = await start(Profile.BUFFERED, edit=unsent)
    for _ in range(2):
        async with proxy.post("/v1/completions", data=b"unseen") as response:
            assert response.status == 200
        assert (director.requests[-1][1], upstream.last[1]) == (b"", b"unseen")
    assert caplog.text.count("set request_body_mode") == 1


async def test_response_trailers_and_buffered_answers_of_a_foreign_configuration(start, director, upstream):
    def buffered(bootstrap):
        config = http_filters(bootstrap)[ext_proc_index(bootstrap)]["typed_config"]
        config["processing_mode"]["response_body_mode"] = "BUFFERED"

    proxy = await start(Profile.BUFFERED, edit=buffered)
    async with proxy.post("/sse", data=b"{}") as response:
        assert (await response.read()).endswith(b"[DONE]\n\n")


async def test_idle_connections_are_closed_before_the_engine_closes_them(start, profile, upstream):
    proxy = await start(profile)
    async with proxy.post("/v1/completions", data=b"{}") as response:
        assert response.status == 200
    [(request, _)] = upstream.requests
    assert request.transport is not None
    async with asyncio.timeout(4.5):  # vLLM waits 5 s
        while request.transport is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_a_stream_that_pauses_is_not_idle(start, profile, upstream):
    upstream.release.clear()
    proxy = await start(profile)
    async with proxy.post("/sse", data=b"{}") as response:
        await response.content.readuntil(b"data: 2\n\n")
        await asyncio.sleep(4)
        upstream.release.set()
        assert (await response.content.read()).endswith(b"data: [DONE]\n\n")
