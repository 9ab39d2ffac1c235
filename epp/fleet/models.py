"""Asks every engine for its list of models, seldom: when it appears, every minute, and sooner if a request named a
model that no list has. One that does not answer, or has no such page, is nothing special.

What a list means is `epp.fleet.model_names`' affair. Requests never wait for one.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp

from epp.fleet.endpoint import Endpoint
from epp.fleet.fetch import client, fetch, found_nobody
from epp.fleet.fleet import Fleet
from epp.fleet.model_names import ModelNames, read_models
from epp.fleet.tasks import EndpointTasks

logger = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class ModelSettings:
    scheme: str = "http"
    path: str = "/v1/models"
    insecure_skip_verify: bool = True
    interval: float = 60.0
    """Seconds between two questions to one endpoint."""
    shortest: float = 10.0
    """The same, where a list may be out of date or the endpoint did not answer at all."""
    timeout: float = 5.0
    max_bytes: int = 1 << 20
    concurrency: int = 16
    """Questions under way at any one time, over all endpoints."""


class ModelWatcher:
    """A service: `start` subscribes to the fleet, `stop` ends every question under way."""

    def __init__(
        self,
        fleet: Fleet,
        names: ModelNames,
        settings: ModelSettings = ModelSettings(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self._fleet = fleet
        self._names = names
        self._clock = clock
        self._tasks = EndpointTasks("models of")
        self._places = asyncio.Semaphore(settings.concurrency)
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        self._session = client(self.settings.timeout, "application/json", verify=not self.settings.insecure_skip_verify)
        self._fleet.subscribe(self)

    async def stop(self) -> None:
        await self._tasks.end_all()
        if self._session is not None:
            await self._session.close()
            self._session = None

    def endpoint_added(self, endpoint: Endpoint) -> None:
        if self._session is None:
            return
        self._names.asked(endpoint)
        self._tasks.begin(endpoint, self._watch(endpoint, self._session))

    def endpoint_removed(self, endpoint: Endpoint) -> None:
        self._tasks.end(endpoint)
        self._names.forget(endpoint)

    def endpoint_updated(self, endpoint: Endpoint) -> None:
        """Nothing of it is used here."""

    async def _watch(self, endpoint: Endpoint, session: aiohttp.ClientSession) -> None:
        is_there, missed, due = False, 0, 0.0
        while True:
            if not is_there or self._names.missed != missed or self._clock() >= due:
                missed = self._names.missed
                is_there = await self._ask(endpoint, session)
                due = self._clock() + self.settings.interval * random.uniform(0.7, 1.0)  # not all of a fleet at once
            await asyncio.sleep(self.settings.shortest)

    async def _ask(self, endpoint: Endpoint, session: aiohttp.ClientSession) -> bool:
        """Did it answer, in whatever way?"""
        url = f"{self.settings.scheme}://{endpoint.address}{self.settings.path}"
        try:
            async with self._places:
                page = await fetch(session, url, self.settings.max_bytes)
            self._names.listed(endpoint, read_models(page))
        except Exception as error:  # nothing special: engines need not have this page
            self._names.failed(endpoint)
            logger.debug("no list of models", extra={"endpoint": endpoint.address, "error": str(error)[:200]})
            return not found_nobody(error)
        return True
