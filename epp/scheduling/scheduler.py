"""Producers, then profiles as the handler asks for them: one decision.

Waits only where a producer does. Sequential on purpose: a producer may read what an earlier one left.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

from epp.errors import Refusal, no_endpoints
from epp.routing import Outcome
from epp.scheduling.failures import Failures
from epp.scheduling.plugin import Plugin, Producer, ProfileHandler, ProfileResult, Scheduling, SchedulingResult
from epp.scheduling.profile import Profile, ProfileRun, nothing_left

if TYPE_CHECKING:
    from epp.telemetry import Telemetry

_Producer = tuple[Producer, float, Callable[[float], None]]
"""Itself, its timeout in seconds, and who is told what it took."""

PRODUCER_TIMEOUT = 0.4
"""Seconds; llm-d's. A producer with an attribute `produce_timeout` has its own."""


class Scheduler:
    """`plugins` are all instances: those with `picked`, `first_byte` or `finished` are told of a request's life."""

    def __init__(
        self,
        *,
        producers: Sequence[Producer],
        profiles: Sequence[Profile],
        handler: ProfileHandler,
        plugins: Sequence[Plugin],
        telemetry: Telemetry,
        rng: random.Random,
    ) -> None:
        self._failures = Failures(telemetry)
        self._producers: list[_Producer] = [
            (
                producer,
                getattr(producer, "produce_timeout", PRODUCER_TIMEOUT),
                telemetry.plugin_duration("DataProducer", producer.type, producer.name).observe,
            )
            for producer in producers
        ]
        self._runs = {profile.name: ProfileRun(profile, telemetry, self._failures, rng) for profile in profiles}
        self._names = tuple(self._runs)
        self._handler = handler
        self._picked = [plugin for plugin in plugins if hasattr(plugin, "picked")]
        self._first_byte = [plugin for plugin in plugins if hasattr(plugin, "first_byte")]
        self._finished = [plugin for plugin in plugins if hasattr(plugin, "finished")]

    def prepare(self, scheduling: Scheduling) -> Awaitable[None] | None:
        """Let the producers learn what they can, at once (None) or later. `scheduling.endpoints` is not empty.

        Raises:
            Refusal: now, or when awaited.
        """
        return self._produce(scheduling, iter(self._producers))

    def _produce(self, scheduling: Scheduling, producers: Iterator[_Producer]) -> Awaitable[None] | None:
        for current in producers:
            producer, _, observe = current
            before, waiting = perf_counter(), None
            try:
                waiting = producer.produce(scheduling)
            except Refusal:
                raise
            except Exception as error:
                self._failures.note(scheduling, producer, "DataProducer", error)
            if waiting is not None:
                return self._wait(scheduling, producers, current, waiting, before)
            observe(perf_counter() - before)
        return None

    async def _wait(
        self,
        scheduling: Scheduling,
        rest: Iterator[_Producer],
        current: _Producer,
        waiting: Awaitable[None],
        began: float,
    ) -> None:
        producer, timeout, observe = current
        try:
            async with asyncio.timeout(timeout):
                await waiting
        except Refusal:
            raise
        except Exception as error:
            self._failures.note(scheduling, producer, "DataProducer", error)
        observe(perf_counter() - began)
        _leave_out_the_gone(scheduling)
        more = self._produce(scheduling, rest)
        if more is not None:
            await more

    def decide(self, scheduling: Scheduling) -> SchedulingResult:
        """After `prepare`. Raises `Refusal`. Tells no plugin of the choice: see `picked`."""
        results: dict[str, ProfileResult | None] = {}
        refusals: dict[str, Refusal] = {}
        while wanted := self._next(scheduling, results):
            for name in wanted:
                try:
                    results[name] = self._runs[name](scheduling)
                except Refusal as refusal:
                    results[name], refusals[name] = None, refusal
        primary = self._handler.primary(results)
        if results.get(primary) is None:
            raise refusals.get(primary) or nothing_left()
        return SchedulingResult(results, primary)

    def picked(self, scheduling: Scheduling, result: SchedulingResult) -> None:
        """The request is about to go to `result.target`."""
        for plugin in self._picked:
            self._tell(plugin, plugin.picked, "PreRequest", scheduling, result)

    def first_byte(self, scheduling: Scheduling, result: SchedulingResult) -> None:
        for plugin in self._first_byte:
            self._tell(plugin, plugin.first_byte, "ResponseStreaming", scheduling, result)

    def finished(self, scheduling: Scheduling, result: SchedulingResult, outcome: Outcome) -> None:
        """To be called once for every request that `picked` was called for. Never raises."""
        for plugin in self._finished:
            self._tell(plugin, plugin.finished, "ResponseComplete", scheduling, result, outcome)

    def _next(self, scheduling: Scheduling, results: dict[str, ProfileResult | None]) -> list[str]:
        """A profile runs once, whatever the handler says: the loop must end."""
        wanted = self._handler.next_profiles(scheduling, self._names, results)
        return [name for name in wanted if name not in results]

    def _tell(self, plugin: Plugin, tell: Callable[..., Any], point: str, scheduling: Scheduling, *rest: Any) -> None:
        try:
            tell(scheduling, *rest)
        except Exception as error:
            self._failures.note(scheduling, plugin, point, error)


def _leave_out_the_gone(scheduling: Scheduling) -> None:
    """The fleet may have changed while a producer waited."""
    if any(endpoint.gone for endpoint in scheduling.endpoints):
        scheduling.endpoints = [endpoint for endpoint in scheduling.endpoints if not endpoint.gone]
        if not scheduling.endpoints:
            raise no_endpoints()
