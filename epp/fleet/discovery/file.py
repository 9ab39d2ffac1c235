"""`file-discovery`: the fleet as a file lists it, re-read when the file changes.

A file is taken whole or not at all: one bad entry fails the start, and later leaves the fleet as it was. Only IP
literals are endpoints, since what a name resolves to may change under our feet to somewhere no operator chose.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import Annotated

import msgspec
from watchfiles import awatch

from epp.config.environment import Environment
from epp.config.errors import ConfigError, Findings
from epp.config.registry import Parameters, plugin
from epp.config.strict import convert
from epp.config.text import MAX_BYTES, parse
from epp.fleet.endpoint import EndpointSpec

logger = logging.getLogger(__name__)

_DEBOUNCE_MS = 200
"""A change must have settled that long; the first change of a burst waits no more than ten times that."""
_RESYNC_MS = 5_000
"""The file is compared with what we have at least that often, should a notification be lost."""
_RETRY_SECONDS = 5.0

_NotEmpty = Annotated[str, msgspec.Meta(min_length=1)]


class FileDiscoveryParameters(Parameters, frozen=True):
    path: str
    watch_file: bool = False


class Entry(msgspec.Struct, forbid_unknown_fields=True, rename="camel", kw_only=True, frozen=True):
    """llm-d's fields, then ours: `rank`, `metricsAddress` (ip:port), `kvEventsEndpoint` and `kvReplayEndpoint`
    (tcp://ip:port)."""

    name: _NotEmpty
    namespace: _NotEmpty = "default"
    address: str
    port: str | int
    labels: dict[str, str] = {}
    rank: Annotated[int, msgspec.Meta(ge=0, le=1023)] = 0
    metrics_address: str = ""
    kv_events_endpoint: str = ""
    kv_replay_endpoint: str = ""


class EndpointsFile(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    endpoints: list[Entry]


@plugin("file-discovery", FileDiscoveryParameters)
class FileDiscovery:
    """A service. `start` raises `ConfigError` or `OSError` where the file cannot be used."""

    name: str
    type: str

    def __init__(self, name: str, parameters: FileDiscoveryParameters, environment: Environment) -> None:
        self.name = name
        self._path = Path(parameters.path)
        self._watches = parameters.watch_file
        self._fleet = environment.fleet
        self._telemetry = environment.telemetry
        self._content: bytes | None = None
        self._task: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()

    async def start(self) -> None:
        await self._load()
        if self._watches:
            self._task = asyncio.create_task(self._watch(), name=f"watch {self._path}")

    async def stop(self) -> None:
        self._stopping.set()
        if self._task is not None:
            await self._task
            self._task = None

    async def _watch(self) -> None:
        while not self._stopping.is_set():
            try:
                async for _ in self._changes():
                    await self._reload()
            except Exception as error:
                self._failed("the endpoints file cannot be watched", error)
                await self._pause(_RETRY_SECONDS)

    def _changes(self) -> AsyncIterator[object]:
        """The folder is watched, not the file: editors rename over it, and a ConfigMap swaps a link beside it."""
        return awatch(
            self._path.parent,
            watch_filter=None,
            debounce=_DEBOUNCE_MS * 10,
            step=_DEBOUNCE_MS,
            stop_event=self._stopping,
            rust_timeout=_RESYNC_MS,
            yield_on_timeout=True,
            recursive=False,
        )

    async def _reload(self) -> None:
        try:
            await self._load()
        except (ConfigError, OSError) as error:
            self._failed("the endpoints file cannot be used; the fleet stays as it was", error)

    async def _load(self) -> None:
        content = await asyncio.to_thread(_read, self._path)
        if content == self._content:
            return
        self._content = content  # also of a bad file, which is reported once and not at every look
        self._fleet.apply(await asyncio.to_thread(endpoint_specs, content))

    def _failed(self, message: str, error: Exception) -> None:
        self._telemetry.poll_failed(self.type)
        logger.error(message, extra={"path": str(self._path), "error": str(error)})

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            pass


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MAX_BYTES + 1)


def endpoint_specs(content: bytes) -> list[EndpointSpec]:
    """YAML or JSON to specs (pure). Raises `ConfigError` that names every bad entry by index and field."""
    if len(content) > MAX_BYTES:
        raise ConfigError([f"the endpoints file is larger than {MAX_BYTES} bytes"])
    try:
        value = parse(content.decode())
    except UnicodeDecodeError as error:
        raise ConfigError([f"the endpoints file is not UTF-8: {error}"]) from error
    findings = Findings()
    document = convert(value, EndpointsFile, "", findings)
    if document is not None:
        findings.errors.extend(_problems(document.endpoints))
    findings.raise_errors()
    assert document is not None
    return [_spec(entry) for entry in document.endpoints]


def _problems(entries: Sequence[Entry]) -> Iterator[str]:
    names: dict[tuple[str, str, int], int] = {}
    addresses: dict[str, int] = {}
    for index, entry in enumerate(entries):
        path = f"endpoints[{index}]"
        bad = list(_bad_fields(entry))
        yield from (f"{path}.{problem}" for problem in bad)
        first = names.setdefault((entry.namespace, entry.name, entry.rank), index)
        if first != index:
            yield f"{path}.name: the same as that of endpoints[{first}]"
        if not bad and (first := addresses.setdefault(_spec(entry).address, index)) != index:
            yield f"{path}.address: with its port the same as that of endpoints[{first}]"


def _bad_fields(entry: Entry) -> Iterator[str]:
    if _ip(entry.address) is None:
        yield f"address: expected an IP address, got {_show(entry.address)}"
    if _port(str(entry.port)) is None:
        yield f"port: expected 1 to 65535, got {_show(entry.port)}"
    if entry.metrics_address and _ip_port(entry.metrics_address) is None:
        yield f"metricsAddress: expected ip:port, got {_show(entry.metrics_address)}"
    for field, endpoint in (("kvEvents", entry.kv_events_endpoint), ("kvReplay", entry.kv_replay_endpoint)):
        if endpoint and not (endpoint.startswith("tcp://") and _ip_port(endpoint.removeprefix("tcp://"))):
            yield f"{field}Endpoint: expected tcp://ip:port, got {_show(endpoint)}"


def _spec(entry: Entry) -> EndpointSpec:
    return EndpointSpec(
        address=f"{_ip(entry.address)}:{int(entry.port)}",
        name=entry.name,
        namespace=entry.namespace,
        labels=entry.labels,
        rank=entry.rank,
        metrics_address=_ip_port(entry.metrics_address) or "",
        kv_events=entry.kv_events_endpoint,
        kv_replay=entry.kv_replay_endpoint,
    )


def _ip(text: str) -> str | None:
    """In its usual spelling, IPv6 in brackets; None where it is no address a request can be sent to."""
    try:
        address = ip_address(text)
    except ValueError:
        return None
    if address.is_unspecified or address.is_multicast or "%" in text:
        return None
    return f"[{address}]" if isinstance(address, IPv6Address) else str(address)


def _port(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and 1 <= int(text[:6]) <= 65535 else None


def _ip_port(text: str) -> str | None:
    host, _, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    address = _ip(host[1:-1] if bracketed else host)
    if address is None or _port(port) is None or address.startswith("[") != bracketed:
        return None
    return f"{address}:{int(port)}"


def _show(value: object) -> str:
    return repr(value)[:60]
