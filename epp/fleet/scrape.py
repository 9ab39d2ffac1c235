"""Asks every engine for its load, gently: one request at a time to each, spread over the interval, bounded in time and
size. An endpoint that fails keeps its last figures, is asked less and less often, and concerns no other endpoint. One
that streams its load is asked seldom, for what else the answer tells: that it answers at all.

What a page means is `epp.fleet.engine_metrics`' affair.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import aiohttp

from epp.fleet.endpoint import Endpoint
from epp.fleet.engine_metrics import engine_of, read_load
from epp.fleet.fetch import FetchError, client, fetch, found_nobody
from epp.fleet.fleet import Fleet
from epp.fleet.tasks import EndpointTasks

logger = logging.getLogger(__name__)

SOURCE_TYPE = "metrics-data-source"
EXTRACTOR_TYPE = "core-metrics-extractor"

_GOLDEN = 0.618033988749895
_LONGEST_ERROR = 200
_REFUSALS = 2
"""In a row, after which an endpoint is taken for dead; one alone may be a restart that is already over."""


@dataclass(slots=True, frozen=True)
class ScrapeSettings:
    interval: float = 1.0
    """Seconds between two scrapes of one endpoint."""
    scheme: str = "http"
    path: str = "/metrics"
    port: int = 0
    """Where engines serve metrics, on the endpoint's own IP; 0 = where the endpoint says."""
    insecure_skip_verify: bool = True
    """With https: accept any certificate, as pods carry self-signed ones."""
    max_bytes: int = 4 << 20
    concurrency: int = 32
    """Scrapes under way at any one time, over all endpoints."""
    longest_pause: float = 10.0
    """Seconds between two attempts at an endpoint that keeps failing, or that streams its load."""

    @property
    def timeout(self) -> float:
        """Seconds for one scrape: a busy engine answers late, one that hangs must not hold a place for long."""
        return min(max(2 * self.interval, 1.0), 10.0)

    def url(self, endpoint: Endpoint) -> str:
        return f"{self.scheme}://{self._where(endpoint)}{self.path}"

    def asks_itself(self, endpoint: Endpoint) -> bool:
        """Are its metrics served by the port that serves its requests?"""
        return self._where(endpoint) == endpoint.address

    def _where(self, endpoint: Endpoint) -> str:
        where = endpoint.spec.metrics_address or endpoint.address
        return f"{where.rpartition(':')[0]}:{self.port}" if self.port else where


@dataclass(slots=True)
class ScrapeState:
    """What an operator wants to know of the scrapes of one endpoint."""

    scrapes: int = 0
    failures: int = 0
    failures_in_a_row: int = 0
    refused_in_a_row: int = 0
    """Of these, the last ones that found nobody listening."""
    last_error: str = ""
    """Of the last attempt; "" after a success."""
    missing: tuple[str, ...] = ()
    """Figures the last good page lacked though engines of its type show them."""
    page_bytes: int = 0


class ScrapeCounters(Protocol):
    """The part of `Telemetry` that counts failures."""

    def poll_failed(self, source_type: str) -> None: ...

    def extract_failed(self, source_type: str, extractor_type: str) -> None: ...


class Scraper:
    """A service: `start` subscribes to the fleet, `stop` ends every scrape under way."""

    def __init__(
        self,
        fleet: Fleet,
        counters: ScrapeCounters,
        settings: ScrapeSettings = ScrapeSettings(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self._fleet = fleet
        self._counters = counters
        self._clock = clock
        self._states: dict[Endpoint, ScrapeState] = {}
        self._tasks = EndpointTasks("scrape")
        self._places = asyncio.Semaphore(settings.concurrency)
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        self._session = client(
            self.settings.timeout,
            "text/plain;version=0.0.4",
            verify=not self.settings.insecure_skip_verify,
            idle=self.settings.longest_pause + self.settings.interval,
        )
        self._fleet.subscribe(self)

    async def stop(self) -> None:
        await self._tasks.end_all()
        if self._session is not None:
            await self._session.close()
            self._session = None

    def state(self, endpoint: Endpoint) -> ScrapeState | None:
        return self._states.get(endpoint)

    def endpoint_added(self, endpoint: Endpoint) -> None:
        if self._session is None:
            return
        self._states[endpoint] = ScrapeState()
        self._tasks.begin(endpoint, self._watch(endpoint))

    def endpoint_removed(self, endpoint: Endpoint) -> None:
        self._states.pop(endpoint, None)
        self._tasks.end(endpoint)

    def endpoint_updated(self, endpoint: Endpoint) -> None:
        """The next scrape reads the new spec."""

    async def _watch(self, endpoint: Endpoint) -> None:
        state = self._states[endpoint]
        await asyncio.sleep(_phase(endpoint.slot) * self.settings.interval)
        due = self._clock()
        while True:
            await self._scrape(endpoint, state)
            # an engine that takes longer than the interval is not asked again at once, nor more often later
            now = self._clock()
            due = max(due + self._pause(state), now + self.settings.interval / 2)
            await asyncio.sleep(due - now)
            while self._is_spared(endpoint, state, since=now):
                due += self.settings.interval
                await asyncio.sleep(self.settings.interval)

    def _is_spared(self, endpoint: Endpoint, state: ScrapeState, since: float) -> bool:
        """It streams its load, and was not asked so long ago. When its stream ends, it is asked at once: whether it is
        still there is what matters then."""
        now = self._clock()
        return (
            now < endpoint.load.streamed_until
            and now < since + self.settings.longest_pause
            and not state.refused_in_a_row
        )

    def _pause(self, state: ScrapeState) -> float:
        if state.refused_in_a_row:
            return self.settings.interval  # nobody is there to be spared, and who comes back is wanted soon
        doublings = min(state.failures_in_a_row, 10)
        return max(min(self.settings.interval * 2.0**doublings, self.settings.longest_pause), self.settings.interval)

    async def _scrape(self, endpoint: Endpoint, state: ScrapeState) -> None:
        state.scrapes += 1
        try:
            assert self._session is not None
            async with self._places:
                page = await fetch(self._session, self.settings.url(endpoint), self.settings.max_bytes)
            self._read(endpoint, state, page)
        except Exception as error:  # whatever it is, it concerns this endpoint alone
            self._failed(endpoint, state, error)

    def _read(self, endpoint: Endpoint, state: ScrapeState, page: bytes) -> None:
        spec = endpoint.spec
        reading = read_load(page, engine_of(spec.labels), endpoint.load, spec.rank, self._clock())
        endpoint.load = reading.load
        if reading.missing:
            self._counters.extract_failed(SOURCE_TYPE, EXTRACTOR_TYPE)
        if reading.missing and reading.missing != state.missing:
            logger.warning(
                "an engine does not show its load", extra={"endpoint": endpoint.address, "missing": reading.missing}
            )
        state.missing = reading.missing
        state.page_bytes = len(page)
        if state.failures_in_a_row:
            logger.info("scrapes succeed again", extra={"endpoint": endpoint.address})
        state.failures_in_a_row, state.last_error = 0, ""
        self._answered(endpoint, state)

    # What an attempt says of the endpoint itself, if its metrics are on the port that serves requests.

    def _refused(self, endpoint: Endpoint, state: ScrapeState) -> None:
        state.refused_in_a_row += 1
        if state.refused_in_a_row >= _REFUSALS and self.settings.asks_itself(endpoint):
            self._fleet.reached(endpoint, False)

    def _answered(self, endpoint: Endpoint, state: ScrapeState) -> None:
        """In whatever way: somebody is there."""
        state.refused_in_a_row = 0
        self._fleet.reached(endpoint, True)

    def _failed(self, endpoint: Endpoint, state: ScrapeState, error: Exception) -> None:
        self._counters.poll_failed(SOURCE_TYPE)
        state.failures += 1
        state.failures_in_a_row += 1
        if found_nobody(error):
            self._refused(endpoint, state)
        elif isinstance(error, FetchError):
            self._answered(endpoint, state)
        state.last_error = (str(error) or type(error).__name__)[:_LONGEST_ERROR]
        if state.failures_in_a_row == 1:
            logger.warning("a scrape failed", extra={"endpoint": endpoint.address, "error": state.last_error})


def _phase(slot: int) -> float:
    """In [0, 1): multiples of the golden ratio spread any number of dense slots evenly."""
    return slot * _GOLDEN % 1.0
