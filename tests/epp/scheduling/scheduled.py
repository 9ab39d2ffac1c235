"""A whole decision, for tests that do not mind whether it waits."""

from __future__ import annotations

from epp.scheduling.plugin import Scheduling, SchedulingResult
from epp.scheduling.scheduler import Scheduler


async def schedule(scheduler: Scheduler, scheduling: Scheduling) -> SchedulingResult:
    waiting = scheduler.prepare(scheduling)
    if waiting is not None:
        await waiting
    return scheduler.decide(scheduling)
