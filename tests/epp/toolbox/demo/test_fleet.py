"""What the demo tells the picker about its engines is what the picker reads, and how it knows that it has read it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from epp.fleet.discovery.file import endpoint_specs
from epp.toolbox.demo import fleet
from epp.toolbox.demo.fleet import HOST, Engine, until_quiet, write_endpoints
from epp.toolbox.processes import PartFailed


def test_file_discovery_reads_addresses_names_and_event_sockets(tmp_path: Path) -> None:
    path = tmp_path / "endpoints.yaml"
    write_endpoints(path, [Engine("sim-0", "127.0.0.1:8000", "tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558")])
    [spec] = endpoint_specs(path.read_bytes())
    assert (spec.name, spec.address) == ("sim-0", "127.0.0.1:8000")
    assert (spec.kv_events, spec.kv_replay) == ("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558")


class Feeds:
    """The picker's page of feeds: one scripted (state, last sequence number) a look, the last one for ever."""

    def __init__(self, *looks: tuple[str, int]) -> None:
        self.looks = list(looks)

    async def page(self, request: web.Request) -> web.Response:
        state, seq = self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]
        feed = {"events": "tcp://127.0.0.1:5557", "state": state, "last_seq": seq}
        return web.json_response({"feeds": [feed]})


@asynccontextmanager
async def picker_with(feeds: Feeds) -> AsyncIterator[tuple[aiohttp.ClientSession, int]]:
    app = web.Application()
    app.router.add_get("/debug/feeds", feeds.page)
    async with TestServer(app, host=HOST) as server, aiohttp.ClientSession() as http:
        assert server.port is not None
        yield http, server.port


async def test_the_picker_is_quiet_once_all_feeds_are_live_and_bring_nothing_new() -> None:
    feeds = Feeds(("live", 1), ("live", 2), ("syncing", 2), ("syncing", 2), ("live", 2), ("live", 3), ("live", 3))
    async with picker_with(feeds) as (http, port):
        await until_quiet(http, port)
    assert feeds.looks == [("live", 3)]


async def test_a_picker_that_never_gets_quiet_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "READY_S", 0.1)
    async with picker_with(Feeds(("lost", 1))) as (http, port):
        with pytest.raises(PartFailed, match=r"picker: its event feeds were not quiet for 0\.1 s"):
            await until_quiet(http, port)
