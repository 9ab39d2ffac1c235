"""Endpoints from the command line."""

from __future__ import annotations

import pytest

from epp.fleet.discovery.static import StaticDiscovery
from epp.fleet.fleet import Fleet


async def test_the_fleet_is_what_was_said() -> None:
    fleet = Fleet()
    discovery = StaticDiscovery(["10.0.0.7:8000", "[FD00::0001]:08000"], fleet)
    assert not fleet.synced
    await discovery.start()
    assert [endpoint.address for endpoint in fleet.endpoints] == ["10.0.0.7:8000", "[fd00::1]:8000"]
    assert [endpoint.spec.name for endpoint in fleet.endpoints] == ["10.0.0.7:8000", "[fd00::1]:8000"]
    assert fleet.synced
    await discovery.stop()
    assert len(fleet.endpoints) == 2


async def test_one_said_twice_is_one() -> None:
    fleet = Fleet()
    await StaticDiscovery(["10.0.0.7:8000", "10.0.0.7:8000"], fleet).start()
    assert len(fleet.endpoints) == 1


@pytest.mark.parametrize(
    "address",
    [
        "",
        "10.0.0.7",
        "10.0.0.7:",
        "10.0.0.7:0",
        "10.0.0.7:65536",
        "10.0.0.7:http",
        "10.0.0.7:８０",
        "10.0.0.7:" + "9" * 5000,
        "engine-0:8000",
        "http://10.0.0.7:8000",
        "[10.0.0.7]:8000",
        "fd00::1:8000",
        "[fd00::1]",
        "[fe80::1%eth0]:8000",
        "0.0.0.0:8000",
        "[::]:8000",
        "224.0.0.1:8000",
    ],
)
def test_what_is_no_address_is_refused_by_name(address: str) -> None:
    with pytest.raises(ValueError, match="--endpoints: ") as caught:
        StaticDiscovery(["10.0.0.8:8000", address], Fleet())
    assert repr(address) in str(caught.value)
