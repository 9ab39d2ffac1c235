"""Envoy bootstraps for a picker without a gateway, and `tierpick envoy-config`, which prints one.

Built from Envoy's own message types, so that a wrong field or value fails here and not in Envoy. Those types are slow
to import and belong to the `demo` extra: they are loaded when a bootstrap is rendered.
"""

from __future__ import annotations

import argparse
import ipaddress
import sys
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from typing import TYPE_CHECKING, Any

import yaml

from epp.routing import DESTINATION, LB_NAMESPACE, SERVED, SUBSET, SUBSET_NAMESPACE

if TYPE_CHECKING:
    from envoy_data_plane.envoy.config.cluster.v3 import Cluster
    from envoy_data_plane.envoy.config.core.v3 import Address, TransportSocket, TypedExtensionConfig
    from envoy_data_plane.envoy.config.endpoint.v3 import ClusterLoadAssignment
    from envoy_data_plane.envoy.config.listener.v3 import Listener
    from envoy_data_plane.envoy.config.route.v3 import RouteConfiguration
    from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import ProcessingMode
    from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import (
        HttpConnectionManager,
        HttpFilter,
    )

_EXT_PROC_SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
_FOREVER = timedelta(0)
_ENGINE_IDLE = timedelta(seconds=3)
"""vLLM closes a connection that was idle for 5 s, and a request sent just then is lost: so we close it first."""
_MANY = 40_000
"""Envoy's default of 1024 requests a cluster is soon used up by long answers."""


class Profile(Enum):
    BUFFERED = "buffered"
    """Three messages a request, whatever its size; answers do not pass through the picker."""
    DUPLEX = "duplex"
    """FULL_DUPLEX_STREAMED, as gateways configure it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BootstrapOptions:
    profile: Profile = Profile.BUFFERED
    listen: str = "0.0.0.0:8081"
    picker: str = "127.0.0.1:9002"
    """`host:port` of ext_proc."""
    secure: bool = True
    """TLS to the picker, whose certificate is not verified."""
    admin_port: int = 19000
    """On loopback only."""
    endpoints: tuple[str, ...] = field(default=())
    """`ip:port` of every engine: Envoy then only sends to these, retries on another if one does not answer, and reports
    which one served. Without, it sends wherever the picker says."""
    retry_resets: bool = False
    """Retry also where an engine breaks the connection before its answer begins. A request that kills engines is then
    tried on several. Needs `endpoints`."""
    fail_open: bool = False
    """Serve without the picker while it is down. Needs `endpoints`."""
    message_timeout: timedelta = timedelta(seconds=60)
    """How long Envoy waits for one reply of the picker; not enforced in the duplex profile."""
    max_body_bytes: int = 64 << 20
    access_log: bool = False

    def __post_init__(self) -> None:
        if self.fail_open and not self.endpoints:
            raise ValueError("to serve without the picker, Envoy must know the endpoints")
        if self.retry_resets and not self.endpoints:
            raise ValueError("to retry on another endpoint, Envoy must know the endpoints")


def render(options: BootstrapOptions) -> dict[str, Any]:
    """The bootstrap as plain values, with Envoy's field names."""
    import betterproto2
    from envoy_data_plane.envoy.config.bootstrap.v3 import Admin, Bootstrap, BootstrapStaticResources

    bootstrap = Bootstrap(
        admin=Admin(address=_address("127.0.0.1", options.admin_port)),
        static_resources=BootstrapStaticResources(
            listeners=[_listener(options)], clusters=[_engines(options), _picker(options)]
        ),
    )
    return bootstrap.to_dict(casing=betterproto2.Casing.SNAKE)


def render_yaml(options: BootstrapOptions) -> str:
    return yaml.safe_dump(render(options), sort_keys=False)


# The listener


def _listener(options: BootstrapOptions) -> Listener:
    from envoy_data_plane.envoy.config.listener.v3 import Filter, FilterChain, Listener

    host, port = _split(options.listen)
    return Listener(
        name="ingress",
        address=_address(host, port),
        per_connection_buffer_limit_bytes=_buffer_limit(options),
        filter_chains=[
            FilterChain(
                filters=[
                    Filter(
                        name="envoy.filters.network.http_connection_manager",
                        typed_config=_any(_connection_manager(options)),
                    )
                ]
            )
        ],
    )


def _buffer_limit(options: BootstrapOptions) -> int:
    """A buffered body must fit; with some room, so that one just too large is answered by the picker, with a reason."""
    return options.max_body_bytes + (1 << 20) if options.profile is Profile.BUFFERED else 1 << 20


def _connection_manager(options: BootstrapOptions) -> HttpConnectionManager:
    from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import (
        HttpConnectionManager,
        HttpConnectionManagerUpgradeConfig,
    )

    manager = HttpConnectionManager(
        stat_prefix="ingress",
        use_remote_address=True,
        normalize_path=True,
        stream_idle_timeout=_FOREVER,
        upgrade_configs=[HttpConnectionManagerUpgradeConfig(upgrade_type="websocket")],
        route_config=_routes(options),
        http_filters=[_strip_control_headers(), _ext_proc(options), _router()],
    )
    if options.access_log:
        manager.access_log.append(_access_log())
    return manager


def _routes(options: BootstrapOptions) -> RouteConfiguration:
    from envoy_data_plane.envoy.config.route.v3 import (
        RetryPolicy,
        Route,
        RouteAction,
        RouteConfiguration,
        RouteMatch,
        VirtualHost,
    )

    retry_on = "connect-failure,refused-stream" + (",reset" if options.retry_resets else "")
    retry = RetryPolicy(retry_on=retry_on, num_retries=2) if options.endpoints else None
    action = RouteAction(cluster="engines", timeout=_FOREVER, idle_timeout=_FOREVER, retry_policy=retry)
    route = Route(match=RouteMatch(prefix="/"), route=action)
    return RouteConfiguration(virtual_hosts=[VirtualHost(name="all", domains=["*"], routes=[route])])


def _access_log() -> Any:
    from envoy_data_plane.envoy.config.accesslog.v3 import AccessLog
    from envoy_data_plane.envoy.extensions.access_loggers.stream.v3 import StdoutAccessLog

    return AccessLog(name="envoy.access_loggers.stdout", typed_config=_any(StdoutAccessLog()))


def _strip_control_headers() -> HttpFilter:
    """Before ext_proc: while the picker is down, a client's own destination would be obeyed."""
    from envoy_data_plane.envoy.config.common.mutation_rules.v3 import HeaderMutation as Mutation
    from envoy_data_plane.envoy.extensions.filters.http.header_mutation.v3 import HeaderMutation, Mutations

    removals = [Mutation(remove=name) for name in (DESTINATION, SERVED, SUBSET)]
    return _filter("header_mutation", HeaderMutation(mutations=Mutations(request_mutations=removals)))


def _ext_proc(options: BootstrapOptions) -> HttpFilter:
    from envoy_data_plane.envoy.config.core.v3 import GrpcService, GrpcServiceEnvoyGrpc
    from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import (
        ExternalProcessor,
        MetadataOptions,
        MetadataOptionsMetadataNamespaces,
    )

    namespaces = MetadataOptionsMetadataNamespaces
    return _filter(
        "ext_proc",
        ExternalProcessor(
            grpc_service=GrpcService(envoy_grpc=GrpcServiceEnvoyGrpc(cluster_name="picker")),
            failure_mode_allow=options.fail_open,
            processing_mode=_processing_mode(options.profile),
            allow_mode_override=True,
            message_timeout=options.message_timeout,
            metadata_options=MetadataOptions(
                forwarding_namespaces=namespaces(untyped=[LB_NAMESPACE, SUBSET_NAMESPACE]),
                receiving_namespaces=namespaces(untyped=[LB_NAMESPACE]),
            ),
        ),
    )


def _processing_mode(profile: Profile) -> ProcessingMode:
    from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import (
        ProcessingMode,
        ProcessingModeBodySendMode,
        ProcessingModeHeaderSendMode,
    )

    body, header = ProcessingModeBodySendMode, ProcessingModeHeaderSendMode
    duplex = profile is Profile.DUPLEX
    return ProcessingMode(
        request_header_mode=header.SEND,
        response_header_mode=header.SEND,
        request_body_mode=body.FULL_DUPLEX_STREAMED if duplex else body.BUFFERED,
        response_body_mode=body.FULL_DUPLEX_STREAMED if duplex else body.NONE,
        request_trailer_mode=header.SEND if duplex else header.SKIP,
        response_trailer_mode=header.SEND,
    )


def _router() -> HttpFilter:
    from envoy_data_plane.envoy.extensions.filters.http.router.v3 import Router

    return _filter("router", Router(suppress_envoy_headers=True))


# The clusters


def _engines(options: BootstrapOptions) -> Cluster:
    from envoy_data_plane.envoy.config.cluster.v3 import (
        Cluster,
        ClusterDiscoveryType,
        ClusterLbPolicy,
        ClusterOriginalDstLbConfig,
        LoadBalancingPolicy,
        LoadBalancingPolicyPolicy,
    )

    cluster = Cluster(
        name="engines",
        connect_timeout=timedelta(seconds=5),
        circuit_breakers=_circuit_breakers(),
        typed_extension_protocol_options=_http1(idle_timeout=_ENGINE_IDLE),
    )
    if options.endpoints:
        cluster.type = ClusterDiscoveryType.STATIC
        cluster.load_assignment = _load_assignment("engines", options.endpoints)
        cluster.load_balancing_policy = LoadBalancingPolicy(
            policies=[LoadBalancingPolicyPolicy(typed_extension_config=_override_host())]
        )
    else:
        cluster.type = ClusterDiscoveryType.ORIGINAL_DST
        cluster.lb_policy = ClusterLbPolicy.CLUSTER_PROVIDED
        cluster.original_dst_lb_config = ClusterOriginalDstLbConfig(use_http_header=True, http_header_name=DESTINATION)
    return cluster


def _override_host() -> TypedExtensionConfig:
    from envoy_data_plane.envoy.config.cluster.v3 import LoadBalancingPolicy, LoadBalancingPolicyPolicy
    from envoy_data_plane.envoy.config.core.v3 import TypedExtensionConfig
    from envoy_data_plane.envoy.extensions.load_balancing_policies.override_host.v3 import (
        OverrideHost,
        OverrideHostOverrideHostSource,
    )
    from envoy_data_plane.envoy.extensions.load_balancing_policies.round_robin.v3 import RoundRobin
    from envoy_data_plane.envoy.type.metadata.v3 import MetadataKey, MetadataKeyPathSegment

    def key(name: str) -> MetadataKey:
        return MetadataKey(key=LB_NAMESPACE, path=[MetadataKeyPathSegment(key=name)])

    def policy(name: str, config: Any) -> TypedExtensionConfig:
        return TypedExtensionConfig(name=f"envoy.load_balancing_policies.{name}", typed_config=_any(config))

    fallback = LoadBalancingPolicyPolicy(typed_extension_config=policy("round_robin", RoundRobin()))
    return policy(
        "override_host",
        OverrideHost(
            override_host_sources=[OverrideHostOverrideHostSource(metadata=key(DESTINATION))],
            selected_host_key=key(SERVED),
            fallback_policy=LoadBalancingPolicy(policies=[fallback]),
        ),
    )


def _picker(options: BootstrapOptions) -> Cluster:
    from envoy_data_plane.envoy.config.cluster.v3 import Cluster, ClusterCommonLbConfig, ClusterDiscoveryType
    from envoy_data_plane.envoy.config.core.v3 import HealthCheck, HealthCheckGrpcHealthCheck
    from envoy_data_plane.envoy.type.v3 import Percent

    check = HealthCheck(
        timeout=timedelta(seconds=2),
        interval=timedelta(seconds=2 if options.fail_open else 10),
        unhealthy_threshold=1 if options.fail_open else 3,
        healthy_threshold=1,
        grpc_health_check=HealthCheckGrpcHealthCheck(service_name=_EXT_PROC_SERVICE),
    )
    cluster = Cluster(
        name="picker",
        type=ClusterDiscoveryType.STATIC if _is_ip(_split(options.picker)[0]) else ClusterDiscoveryType.STRICT_DNS,
        connect_timeout=timedelta(seconds=5),
        circuit_breakers=_circuit_breakers(),
        health_checks=[check],
        load_assignment=_load_assignment("picker", (options.picker,)),
        typed_extension_protocol_options=_http2(),
        transport_socket=_tls() if options.secure else None,
    )
    if options.fail_open:
        # or Envoy asks a picker that it knows to be down, and the request is lost
        cluster.common_lb_config = ClusterCommonLbConfig(healthy_panic_threshold=Percent(value=0))
    return cluster


def _http1(*, idle_timeout: timedelta) -> dict[str, Any]:
    from envoy_data_plane.envoy.config.core.v3 import Http1ProtocolOptions, HttpProtocolOptions
    from envoy_data_plane.envoy.extensions.upstreams.http.v3 import HttpProtocolOptionsExplicitHttpConfig

    http1 = HttpProtocolOptionsExplicitHttpConfig(http_protocol_options=Http1ProtocolOptions())
    return _protocol(http1, HttpProtocolOptions(idle_timeout=idle_timeout))


def _http2() -> dict[str, Any]:
    from envoy_data_plane.envoy.config.core.v3 import Http2ProtocolOptions
    from envoy_data_plane.envoy.extensions.upstreams.http.v3 import HttpProtocolOptionsExplicitHttpConfig

    return _protocol(HttpProtocolOptionsExplicitHttpConfig(http2_protocol_options=Http2ProtocolOptions()))


def _protocol(version: Any, common: Any = None) -> dict[str, Any]:
    from envoy_data_plane.envoy.extensions.upstreams.http.v3 import HttpProtocolOptions

    options = HttpProtocolOptions(explicit_http_config=version, common_http_protocol_options=common)
    return {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": _any(options)}


def _tls() -> TransportSocket:
    from envoy_data_plane.envoy.config.core.v3 import TransportSocket
    from envoy_data_plane.envoy.extensions.transport_sockets.tls.v3 import CommonTlsContext, UpstreamTlsContext

    context = UpstreamTlsContext(common_tls_context=CommonTlsContext(alpn_protocols=["h2"]))
    return TransportSocket(name="envoy.transport_sockets.tls", typed_config=_any(context))


def _circuit_breakers() -> Any:
    from envoy_data_plane.envoy.config.cluster.v3 import CircuitBreakers, CircuitBreakersThresholds

    thresholds = CircuitBreakersThresholds(
        max_connections=_MANY, max_pending_requests=_MANY, max_requests=_MANY, max_retries=1024
    )
    return CircuitBreakers(thresholds=[thresholds])


# Parts of parts


def _load_assignment(cluster: str, addresses: tuple[str, ...]) -> ClusterLoadAssignment:
    from envoy_data_plane.envoy.config.endpoint.v3 import (
        ClusterLoadAssignment,
        Endpoint,
        LbEndpoint,
        LocalityLbEndpoints,
    )

    endpoints = [LbEndpoint(endpoint=Endpoint(address=_address(*_split(address)))) for address in addresses]
    return ClusterLoadAssignment(cluster_name=cluster, endpoints=[LocalityLbEndpoints(lb_endpoints=endpoints)])


def _address(host: str, port: int) -> Address:
    from envoy_data_plane.envoy.config.core.v3 import Address, SocketAddress

    return Address(socket_address=SocketAddress(address=host, port_value=port))


def _filter(name: str, config: Any) -> HttpFilter:
    from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import HttpFilter

    return HttpFilter(name=f"envoy.filters.http.{name}", typed_config=_any(config))


def _any(message: Any) -> Any:
    from envoy_data_plane.google.protobuf import Any as Packed

    return Packed.pack(message)


def _split(address: str) -> tuple[str, int]:
    """Raises ValueError unless it is `host:port` (IPv6 in brackets)."""
    host, separator, port = address.rpartition(":")
    if not (separator and host and port.isdecimal()):
        raise ValueError(f"{address!r} is not host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


# The command


def add_parser(subparsers: Any) -> None:
    defaults = BootstrapOptions()
    parser = subparsers.add_parser(
        "envoy-config",
        help="print an Envoy bootstrap",
        description="Print an Envoy bootstrap (YAML) that asks a picker where to send each request.",
    )
    parser.add_argument("--profile", choices=[profile.value for profile in Profile], default=defaults.profile.value)
    parser.add_argument("--listen", type=_checked, default=defaults.listen, metavar="HOST:PORT")
    parser.add_argument("--picker", type=_checked, default=defaults.picker, metavar="HOST:PORT")
    parser.add_argument("--plaintext", action="store_true", help="the picker runs with --secure-serving=false")
    parser.add_argument("--admin-port", type=int, default=defaults.admin_port)
    parser.add_argument(
        "--endpoint", type=_checked, action="append", default=[], metavar="IP:PORT", help="an engine; repeatable"
    )
    parser.add_argument(
        "--retry-resets", action="store_true", help="try another engine where one breaks off before its answer begins"
    )
    parser.add_argument("--fail-open", action="store_true", help="serve without the picker while it is down")
    parser.add_argument("--message-timeout", type=float, default=60.0, metavar="SECONDS")
    parser.add_argument("--max-body-bytes", type=int, default=defaults.max_body_bytes)
    parser.add_argument("--access-log", action="store_true", help="to standard output")
    parser.set_defaults(run=run)


def _checked(address: str) -> str:
    try:
        _split(address)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return address


def run(args: argparse.Namespace) -> int:
    try:
        options = _options(args)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(render_yaml(options), end="")
    return 0


def _options(args: argparse.Namespace) -> BootstrapOptions:
    return BootstrapOptions(
        profile=Profile(args.profile),
        listen=args.listen,
        picker=args.picker,
        secure=not args.plaintext,
        admin_port=args.admin_port,
        endpoints=tuple(args.endpoint),
        retry_resets=args.retry_resets,
        fail_open=args.fail_open,
        message_timeout=timedelta(seconds=args.message_timeout),
        max_body_bytes=args.max_body_bytes,
        access_log=args.access_log,
    )
