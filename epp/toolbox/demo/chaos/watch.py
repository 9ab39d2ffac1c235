"""Looks at the picker from outside while it runs: the states of its feeds, and what it decided before it is killed."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from epp.toolbox.demo.chaos.judge import Pick, parse_picks
from epp.toolbox.demo.fleet import fetch_json

LOOK_EVERY_S = 0.03
COLLECT_EVERY_S = 0.3
LIVE = "live"


@dataclass(frozen=True, slots=True)
class Look:
    """At all feeds at once; `feeds` is empty while nobody answers."""

    at: float
    """Monotonic seconds, before the question."""
    feeds: Mapping[str, Mapping[str, Any]]
    """By endpoint."""

    def is_live(self, endpoints: Collection[str], heard_since: float = 0.0) -> bool:
        """Have all of them brought a message since then, and are live?"""
        return all(
            (feed := self.feeds.get(endpoint)) is not None
            and feed["state"] == LIVE
            and feed["heard_seconds_ago"] is not None
            and self.at - feed["heard_seconds_ago"] >= heard_since
            for endpoint in endpoints
        )


def unlike_live(looks: list[Look], endpoint: str, since: float) -> float | None:
    """When a feed was first seen otherwise than live, or not at all; None if it was not."""
    begin = bisect_left(looks, since, key=lambda look: look.at)
    return next((look.at for look in looks[begin:] if not look.is_live([endpoint])), None)


class Watch:
    """Tasks of `run`; what they found in `looks` and `picks`."""

    def __init__(self, http: aiohttp.ClientSession, metrics_url: str) -> None:
        self.looks: list[Look] = []
        self.picks: dict[str, Pick] = {}
        """By request id."""
        self._http = http
        self._url = metrics_url
        self._looked = asyncio.Condition()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._look(), name="feeds")
            group.create_task(self._collect(), name="decisions")

    async def until(self, holds: Callable[[Look], bool]) -> Look:
        """The first look from now on of which it holds."""
        since = time.monotonic()
        async with self._looked:
            await self._looked.wait_for(lambda: self.looks and self.looks[-1].at >= since and holds(self.looks[-1]))
            return self.looks[-1]

    async def until_live(self, endpoints: Collection[str], heard_since: float, within_s: float) -> float | None:
        """When all of them were live again with something heard since then; None if they were not in time."""
        try:
            async with asyncio.timeout(within_s):
                return (await self.until(lambda look: look.is_live(endpoints, heard_since))).at
        except TimeoutError:
            return None

    async def collect(self, limit: int = 200) -> None:
        """The newest decisions; nothing, while nobody answers."""
        try:
            page = await fetch_json(self._http, f"{self._url}/debug/decisions?limit={limit}")
        except (aiohttp.ClientError, TimeoutError):
            return
        self.picks.update(parse_picks(page))

    async def _collect(self) -> None:
        while True:
            await self.collect()
            await asyncio.sleep(COLLECT_EVERY_S)

    async def _look(self) -> None:
        while True:
            at = time.monotonic()
            try:
                page = await fetch_json(self._http, f"{self._url}/debug/feeds")
                feeds = {feed["endpoint"]: feed for feed in page["feeds"]}
            except (aiohttp.ClientError, TimeoutError):
                feeds = {}
            async with self._looked:
                self.looks.append(Look(at, feeds))
                self._looked.notify_all()
            await asyncio.sleep(LOOK_EVERY_S)
