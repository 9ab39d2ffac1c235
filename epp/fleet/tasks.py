"""One task for each endpoint of the fleet, as long as the endpoint is there."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

from epp.fleet.endpoint import Endpoint


class EndpointTasks:
    def __init__(self, purpose: str) -> None:
        """`purpose` names the tasks, for whoever looks at them."""
        self._purpose = purpose
        self._tasks: dict[Endpoint, asyncio.Task[None]] = {}

    def begin(self, endpoint: Endpoint, work: Coroutine[None, None, None]) -> None:
        self._tasks[endpoint] = asyncio.create_task(work, name=f"{self._purpose} {endpoint.address}")

    def end(self, endpoint: Endpoint) -> None:
        task = self._tasks.pop(endpoint, None)
        if task is not None:
            task.cancel()

    async def end_all(self) -> None:
        """Returns when they have ended."""
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
