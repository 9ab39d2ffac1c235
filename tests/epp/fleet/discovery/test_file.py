"""File discovery: strict about what it reads, calm about what it cannot."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from epp.config.environment import Environment
from epp.config.errors import ConfigError
from epp.config.registry import plugin_types
from epp.fleet.discovery import file as module
from epp.fleet.discovery.file import FileDiscovery, FileDiscoveryParameters, endpoint_specs
from epp.fleet.endpoint import EndpointSpec
from epp.fleet.fleet import Fleet
from epp.telemetry import Telemetry


def entry(n: int, **fields: object) -> dict[str, object]:
    return {"name": f"pod-{n}", "address": f"10.0.0.{n}", "port": "8000", **fields}


def document(*entries: dict[str, object]) -> bytes:
    return json.dumps({"endpoints": entries}).encode()


def problems(content: bytes) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as raised:
        endpoint_specs(content)
    return raised.value.problems


class TestContent:
    def test_llm_ds_fields_in_yaml(self) -> None:
        text = b"endpoints:\n- name: a\n  address: 10.0.0.1\n  port: '8000'\n  labels: {llm-d.ai/role: decode}\n"
        assert endpoint_specs(text) == [
            EndpointSpec("10.0.0.1:8000", "a", namespace="default", labels={"llm-d.ai/role": "decode"})
        ]

    def test_our_fields_and_numbers_for_ports_in_json(self) -> None:
        content = document(
            entry(
                1,
                namespace="prod",
                port=8001,
                rank=1,
                metricsAddress="10.0.0.1:9000",
                kvEventsEndpoint="tcp://10.0.0.1:5558",
                kvReplayEndpoint="tcp://[fd00::1]:5658",
            )
        )
        assert endpoint_specs(content) == [
            EndpointSpec(
                "10.0.0.1:8001",
                "pod-1",
                namespace="prod",
                rank=1,
                metrics_address="10.0.0.1:9000",
                kv_events="tcp://10.0.0.1:5558",
                kv_replay="tcp://[fd00::1]:5658",
            )
        ]

    def test_ipv6_is_spelt_canonically_and_bracketed(self) -> None:
        assert endpoint_specs(document(entry(1, address="FD00:0::1")))[0].address == "[fd00::1]:8000"

    def test_nobody_is_a_valid_fleet(self) -> None:
        assert endpoint_specs(b"endpoints: []") == []

    def test_ranks_of_one_pod_may_share_its_name(self) -> None:
        specs = endpoint_specs(document(entry(1, rank=0), entry(1, rank=1, port=8001)))
        assert [spec.rank for spec in specs] == [0, 1]

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            ({"address": "localhost"}, "endpoints[1].address"),
            ({"address": "10.0.0.1:80"}, "endpoints[1].address"),
            ({"address": "10.0.0.256"}, "endpoints[1].address"),
            ({"address": "0.0.0.0"}, "endpoints[1].address"),
            ({"address": "224.0.0.1"}, "endpoints[1].address"),
            ({"address": "fe80::1%eth0"}, "endpoints[1].address"),
            ({"address": 10}, "endpoints[1].address"),
            ({"port": 0}, "endpoints[1].port"),
            ({"port": "65536"}, "endpoints[1].port"),
            ({"port": "http"}, "endpoints[1].port"),
            ({"port": "٣"}, "endpoints[1].port"),
            ({"port": -1}, "endpoints[1].port"),
            ({"port": 80.5}, "endpoints[1].port"),
            ({"port": "9" * 5000}, "endpoints[1].port"),
            ({"name": ""}, "endpoints[1].name"),
            ({"name": None}, "endpoints[1].name"),
            ({"labels": {"a": 1}}, "endpoints[1].labels"),
            ({"rank": -1}, "endpoints[1].rank"),
            ({"metricsAddress": "metrics.example:9000"}, "endpoints[1].metricsAddress"),
            ({"metricsAddress": "fd00::1:9000"}, "endpoints[1].metricsAddress"),
            ({"kvEventsEndpoint": "10.0.0.1:5557"}, "endpoints[1].kvEventsEndpoint"),
            ({"kvEventsEndpoint": "tcp://pod:5557"}, "endpoints[1].kvEventsEndpoint"),
            ({"kvReplayEndpoint": "ipc:///tmp/x"}, "endpoints[1].kvReplayEndpoint"),
            ({"adress": "10.0.0.2"}, "endpoints[1].adress"),
        ],
    )
    def test_a_bad_entry_is_named_by_index_and_field(self, change: dict[str, object], named: str) -> None:
        (problem,) = problems(document(entry(1), entry(2, **change)))
        assert re.match(re.escape(named) + r"\b", problem)

    def test_every_bad_entry_is_named_at_once(self) -> None:
        content = document(entry(1, address="a"), entry(2), entry(3, port="b"))
        assert [problem.split(":")[0] for problem in problems(content)] == ["endpoints[0].address", "endpoints[2].port"]

    def test_one_address_twice_is_refused(self) -> None:
        (problem,) = problems(document(entry(1), entry(2), entry(2, name="other", port=8000)))
        assert problem.startswith("endpoints[2].address")
        assert "endpoints[1]" in problem

    def test_one_name_twice_is_refused(self) -> None:
        (problem,) = problems(document(entry(1), entry(2, name="pod-1")))
        assert problem.startswith("endpoints[1].name")

    @pytest.mark.parametrize(
        "content",
        [
            b"",
            b"[]",
            b"{}",
            b"endpoints: {}",
            b"endpoints: [",
            b"\xff\xfe",
            b"endpoints: []\nextra: 1",
            b"endpoints: []\nendpoints: []",
            b"endpoints: []\n#" + b"x" * (1 << 20),
        ],
    )
    def test_a_file_of_another_shape_is_refused(self, content: bytes) -> None:
        assert problems(content)


def environment() -> Environment:
    return Environment(Fleet(), Telemetry())


def discovery(path: Path, environment: Environment, **fields: object) -> FileDiscovery:
    return FileDiscovery("file-discovery", FileDiscoveryParameters(path=str(path), **fields), environment)  # type: ignore[arg-type]


def names(fleet: Fleet) -> list[str]:
    return sorted(endpoint.spec.name for endpoint in fleet.endpoints)


def poll_errors(environment: Environment) -> float:
    labels = {"source_type": "file-discovery"}
    return environment.telemetry.registry.get_sample_value("llm_d_epp_datalayer_poll_errors_total", labels) or 0


def test_it_is_known_by_llm_ds_name_and_does_not_watch_unless_told() -> None:
    kind = plugin_types()["file-discovery"]
    assert kind.cls is FileDiscovery
    assert kind.parameters is FileDiscoveryParameters
    assert FileDiscoveryParameters(path="x").watch_file is False


async def test_start_fills_the_fleet(tmp_path: Path) -> None:
    path, env = tmp_path / "endpoints.yaml", environment()
    path.write_bytes(document(entry(1), entry(2)))
    service = discovery(path, env)
    await service.start()
    await service.stop()
    assert names(env.fleet) == ["pod-1", "pod-2"]
    assert env.fleet.synced


async def test_start_fails_on_a_bad_or_absent_file_and_leaves_the_fleet_unsynced(tmp_path: Path) -> None:
    path, env = tmp_path / "endpoints.yaml", environment()
    with pytest.raises(FileNotFoundError):
        await discovery(path, env).start()
    path.write_bytes(document(entry(1, port="x")))
    with pytest.raises(ConfigError, match=r"endpoints\[0\].port"):
        await discovery(path, env).start()
    assert not env.fleet.synced


class Watching:
    def __init__(self, path: Path, env: Environment) -> None:
        self.path = path
        self.env = env

    async def until(self, condition: Callable[[], bool], again: Callable[[], object] = lambda: None) -> None:
        """`again` repeats the change: one made before the watcher stood would else be seen only at the next resync."""
        async with asyncio.timeout(20):
            while not condition():
                again()
                for _ in range(100):
                    await asyncio.sleep(0.01)
                    if condition():
                        return


@asynccontextmanager
async def watching(path: Path) -> AsyncIterator[Watching]:
    env = environment()
    service = discovery(path, env, watch_file=True)
    await service.start()
    try:
        yield Watching(path, env)
    finally:
        async with asyncio.timeout(5):
            await service.stop()


def replace_file(path: Path, content: bytes) -> None:
    """As editors and deployment tools do: write beside, rename over."""
    beside = path.with_suffix(".new")
    beside.write_bytes(content)
    beside.replace(path)


@pytest.fixture
def _notifications_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RESYNC_MS", 60_000)


@pytest.mark.usefixtures("_notifications_only")
async def test_a_rename_over_the_file_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "endpoints.yaml"
    path.write_bytes(document(entry(1)))
    async with watching(path) as w:
        change = document(entry(1), entry(2))
        await w.until(lambda: names(w.env.fleet) == ["pod-1", "pod-2"], lambda: replace_file(path, change))


@pytest.mark.usefixtures("_notifications_only")
async def test_a_config_map_update_is_seen(tmp_path: Path) -> None:
    """The kubelet swaps the link `..data`; the file itself is a link through it and never changes."""

    def publish(version: str, content: bytes) -> None:
        folder = tmp_path / f"..{version}"
        folder.mkdir(exist_ok=True)
        (folder / "endpoints.yaml").write_bytes(content)
        (tmp_path / "..data_tmp").symlink_to(folder.name)
        os.replace(tmp_path / "..data_tmp", tmp_path / "..data")

    publish("v1", document(entry(1)))
    path = tmp_path / "endpoints.yaml"
    path.symlink_to("..data/endpoints.yaml")
    async with watching(path) as w:
        await w.until(lambda: names(w.env.fleet) == ["pod-2"], lambda: publish("v2", document(entry(2))))


@pytest.mark.usefixtures("_notifications_only")
async def test_a_bad_reload_keeps_the_fleet_is_counted_once_and_recovered_from(tmp_path: Path) -> None:
    path = tmp_path / "endpoints.yaml"
    path.write_bytes(document(entry(1)))
    async with watching(path) as w:
        bad = document(entry(1), entry(2, port="x"))
        await w.until(lambda: poll_errors(w.env) > 0, lambda: replace_file(path, bad))
        assert names(w.env.fleet) == ["pod-1"]
        replace_file(path, document(entry(3)))
        await w.until(lambda: names(w.env.fleet) == ["pod-3"])
        assert poll_errors(w.env) == 1


async def test_a_lost_notification_is_made_up_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def deaf(
        *paths: Path, rust_timeout: int, stop_event: asyncio.Event, **options: object
    ) -> AsyncIterator[object]:
        while not stop_event.is_set():
            await asyncio.sleep(rust_timeout / 1000)
            yield set()

    monkeypatch.setattr(module, "_RESYNC_MS", 20)
    monkeypatch.setattr(module, "awatch", deaf)
    path = tmp_path / "endpoints.yaml"
    path.write_bytes(document(entry(1)))
    async with watching(path) as w:
        path.write_bytes(document(entry(2)))
        await w.until(lambda: names(w.env.fleet) == ["pod-2"])


async def test_a_watcher_that_breaks_is_counted_and_set_up_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts: list[str] = []

    async def breaks(*paths: Path, **options: object) -> AsyncIterator[object]:
        attempts.append("watch")
        raise OSError("no more watches")
        yield

    monkeypatch.setattr(module, "_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(module, "awatch", breaks)
    path = tmp_path / "endpoints.yaml"
    path.write_bytes(document(entry(1)))
    async with watching(path) as w:
        await w.until(lambda: len(attempts) >= 3)
        assert poll_errors(w.env) >= 2
