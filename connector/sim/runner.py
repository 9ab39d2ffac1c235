"""Steps an engine in real time: waits as long as each step takes, publishes its events, hands out its tokens."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from connector.sim.engine import Engine, Output, Step
from connector.sim.events import encode_batch
from connector.sim.publisher import Publisher
from connector.sim.requests import Request

Outputs = asyncio.Queue[Output]


async def cancel(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait until it is over."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


class Runner:
    """One engine, one task. Events of a step are on the wire before its tokens are handed out."""

    def __init__(self, engine: Engine, publisher: Publisher) -> None:
        self.engine = engine
        self._publisher = publisher
        self._sinks: dict[Request, Outputs] = {}
        self._wake = asyncio.Event()

    def submit(self, request: Request, outputs: Outputs) -> None:
        """Queue a request; its tokens come on `outputs`. Raises ValueError if it can never run."""
        self.engine.add(request, asyncio.get_running_loop().time())
        self._sinks[request] = outputs
        self._wake.set()

    def abort(self, request: Request) -> None:
        """Nobody waits for this request any more; does nothing if it is over."""
        if self._sinks.pop(request, None) is not None:
            self.engine.abort(request)
            self._wake.set()

    async def run(self) -> None:
        """Step for ever."""
        clock = asyncio.get_running_loop().time
        while True:
            if not self.engine.has_work:
                await self._sleep_until_woken(None)
            began = clock()
            step = self.engine.begin_step(began)
            await self._let_pass(step, began + step.seconds - clock())
            outputs, events = self.engine.end_step(step, clock())
            if events:
                self._publisher.publish(encode_batch(events, at=time.time()))
            for output in outputs:
                self._hand_out(output)

    async def _let_pass(self, step: Step, seconds: float) -> None:
        """A step that only waits for copies is cut short by a new request; one that computes is not."""
        if step.scheduled or seconds <= 0:
            await asyncio.sleep(max(seconds, 0))
        else:
            await self._sleep_until_woken(seconds)

    async def _sleep_until_woken(self, seconds: float | None) -> None:
        self._wake.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            pass

    def _hand_out(self, output: Output) -> None:
        sink = self._sinks.get(output.request)
        if sink is None:
            return
        sink.put_nowait(output)
        if output.finished:
            del self._sinks[output.request]
