from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import yaml

from epp.toolbox import bootstrap
from epp.toolbox.bootstrap import BootstrapOptions, Profile, render

CONFIG = Path(__file__).parents[3] / "config" / "envoy"


@pytest.mark.parametrize("profile", list(Profile), ids=lambda profile: profile.value)
def test_the_ready_files_are_what_is_rendered(profile):
    text = (CONFIG / f"standalone-{profile.value}.yaml").read_text()
    assert text.startswith(f"# tierpick envoy-config --profile {profile.value}\n")
    assert yaml.safe_load(text) == render(BootstrapOptions(profile=profile))


def run(*arguments):
    parser = argparse.ArgumentParser()
    bootstrap.add_parser(parser.add_subparsers())
    parsed = parser.parse_args(["envoy-config", *arguments])
    return parsed.run(parsed)


def test_the_command_prints_yaml(capsys):
    assert run("--listen", "[::1]:80", "--picker", "epp.ns.svc:9002", "--plaintext", "--access-log") == 0
    rendered = yaml.safe_load(capsys.readouterr().out)
    [listener] = rendered["static_resources"]["listeners"]
    assert listener["address"]["socket_address"] == {"address": "::1", "port_value": 80}
    _, picker = rendered["static_resources"]["clusters"]
    assert picker["type"] == "STRICT_DNS"
    assert "transport_socket" not in picker
    assert listener["filter_chains"][0]["filters"][0]["typed_config"]["access_log"]


def test_the_admin_interface_is_on_loopback_only():
    assert render(BootstrapOptions())["admin"]["address"]["socket_address"]["address"] == "127.0.0.1"


def test_a_body_up_to_the_limit_fits_envoys_buffer():
    [listener] = render(BootstrapOptions(max_body_bytes=1 << 30))["static_resources"]["listeners"]
    assert listener["per_connection_buffer_limit_bytes"] > 1 << 30


def test_fail_open_needs_endpoints(capsys):
    assert run("--fail-open") == 2
    assert "endpoints" in capsys.readouterr().err


def test_retries_need_endpoints(capsys):
    assert run("--retry-resets") == 2
    assert "endpoints" in capsys.readouterr().err


@pytest.mark.parametrize("retry_resets", [False, True])
def test_a_broken_connection_is_retried_only_on_request(retry_resets):
    rendered = render(BootstrapOptions(endpoints=("10.0.0.1:8000",), retry_resets=retry_resets))
    [listener] = rendered["static_resources"]["listeners"]
    [manager] = listener["filter_chains"][0]["filters"]
    [host] = manager["typed_config"]["route_config"]["virtual_hosts"]
    conditions = host["routes"][0]["route"]["retry_policy"]["retry_on"].split(",")
    assert "connect-failure" in conditions
    assert ("reset" in conditions) == retry_resets


@pytest.mark.parametrize("address", ["8081", "host", ":1", "host:http"])
def test_a_bad_address_is_refused(address, capsys):
    with pytest.raises(SystemExit):
        run("--listen", address)
    assert f"{address!r} is not host:port" in capsys.readouterr().err
