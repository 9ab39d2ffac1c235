"""Endpoints given on the command line: `--endpoints=10.0.0.7:8000,[fd00::1]:8000`."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from epp.fleet.endpoint import EndpointSpec
from epp.fleet.fleet import Fleet


class StaticDiscovery:
    """A service that says its piece once. Raises ValueError for what is not `ip:port`: names are not resolved, since a
    destination must not depend on who answers DNS."""

    def __init__(self, addresses: Sequence[str], fleet: Fleet) -> None:
        checked = [_checked(address) for address in addresses]
        self._specs = [EndpointSpec(address=address, name=address) for address in checked]
        self._fleet = fleet

    async def start(self) -> None:
        self._fleet.apply(self._specs)

    async def stop(self) -> None:
        pass


def _checked(address: str) -> str:
    """In its usual spelling. IPv6 must be in brackets, or its last group would be taken for the port."""
    host, _, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    try:
        ip = ipaddress.ip_address(host[1:-1] if bracketed else host)
    except ValueError:
        raise ValueError(f"--endpoints: {address!r} is not ip:port") from None
    if bracketed != (ip.version == 6):
        raise ValueError(f"--endpoints: {address!r}: brackets belong around IPv6, and only there")
    if ip.is_unspecified or ip.is_multicast or "%" in host:
        raise ValueError(f"--endpoints: {address!r} is no address a request can be sent to")
    if not (port.isascii() and port.isdigit() and 0 < int(port[:6]) < 65536):
        raise ValueError(f"--endpoints: {address!r} has no valid port")
    return f"[{ip}]:{int(port)}" if bracketed else f"{ip}:{int(port)}"
