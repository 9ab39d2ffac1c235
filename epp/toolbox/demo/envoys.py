"""The demo's two Envoys: one asks the picker, one spreads requests over the engines in turn. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from epp.toolbox.bootstrap import BootstrapOptions, render

_HOST = "127.0.0.1"
_MANAGER = "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
_ROUTER = "envoy.extensions.filters.http.router.v3.Router"


def picker_bootstrap(listen_port: int, admin_port: int, picker_port: int) -> dict[str, Any]:
    """The standalone bootstrap, with one addition: the ids by which clients know their requests reach the picker."""
    bootstrap = render(
        BootstrapOptions(
            listen=f"{_HOST}:{listen_port}", picker=f"{_HOST}:{picker_port}", secure=False, admin_port=admin_port
        )
    )
    return _keeping_request_ids(bootstrap)


def resilient_bootstrap(listen_port: int, admin_port: int, picker_port: int, engines: Sequence[str]) -> dict[str, Any]:
    """As an operator has it who wants no request to fail: Envoy knows the engines, tries another one where one breaks
    off before it has answered, and serves without the picker while that is down."""
    bootstrap = render(
        BootstrapOptions(
            listen=f"{_HOST}:{listen_port}",
            picker=f"{_HOST}:{picker_port}",
            secure=False,
            admin_port=admin_port,
            endpoints=tuple(engines),
            retry_resets=True,
            fail_open=True,
        )
    )
    return _keeping_request_ids(bootstrap)


def _keeping_request_ids(bootstrap: dict[str, Any]) -> dict[str, Any]:
    [listener] = bootstrap["static_resources"]["listeners"]
    [manager] = listener["filter_chains"][0]["filters"]
    manager["typed_config"]["preserve_external_request_id"] = True
    return bootstrap


def round_robin_bootstrap(listen_port: int, admin_port: int, engines: Sequence[str]) -> dict[str, Any]:
    """`engines` are `ip:port`. No ext_proc, no retries, no timeout: a request fails where its engine fails it."""
    cluster = {
        "name": "engines",
        "type": "STATIC",
        "lb_policy": "ROUND_ROBIN",
        "load_assignment": {
            "cluster_name": "engines",
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": _address(engine)}} for engine in engines]}],
        },
    }
    return {
        "admin": {"address": _address(f"{_HOST}:{admin_port}")},
        "static_resources": {
            "listeners": [
                {
                    "name": "ingress",
                    "address": _address(f"{_HOST}:{listen_port}"),
                    "filter_chains": [{"filters": [_connection_manager()]}],
                }
            ],
            "clusters": [cluster],
        },
    }


def _connection_manager() -> dict[str, Any]:
    route = {"match": {"prefix": "/"}, "route": {"cluster": "engines", "timeout": "0s"}}
    return {
        "name": "envoy.filters.network.http_connection_manager",
        "typed_config": {
            "@type": f"type.googleapis.com/{_MANAGER}",
            "stat_prefix": "ingress",
            "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
            "http_filters": [
                {
                    "name": "envoy.filters.http.router",
                    "typed_config": {"@type": f"type.googleapis.com/{_ROUTER}"},
                }
            ],
        },
    }


def _address(address: str) -> dict[str, Any]:
    host, port = address.rsplit(":", 1)
    return {"socket_address": {"address": host, "port_value": int(port)}}
