"""Steps an engine in real time: waits as long as each step takes, publishes its events, hands out its tokens."""

from __future__ import annotations

import asyncio
from typing import Any

from connector.events import Load
from connector.journal import About
from connector.publisher import Publisher
from connector.sim.engine import Engine, Output, Step
from connector.sim.requests import Request

Outputs = asyncio.Queue[Output]


async def cancel(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait until it is over."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


class Runner:
    """One engine, one task. Events of a step are on their way before its tokens are handed out.

    Args:
        about: is told the engine's load.
    """

    def __init__(self, engine: Engine, publisher: Publisher, about: About) -> None:
        self.engine = engine
        self._publisher = publisher
        self._about = about
        self._sinks: dict[Request, Outputs] = {}
        self._wake = asyncio.Event()

    def submit(self, request: Request, outputs: Outputs) -> None:
        """Queue a request; its tokens come on `outputs`. Raises ValueError if it can never run."""
        self.engine.add(request, asyncio.get_running_loop().time())
        self._sinks[request] = outputs
        self._note_load()
        self._wake.set()

    def abort(self, request: Request) -> None:
        """Nobody waits for this request any more; does nothing if it is over."""
        if self._sinks.pop(request, None) is not None:
            self.engine.abort(request)
            self._wake.set()

    def reset_prefix_cache(self, external: bool) -> bool:
        """As the engine's; told at once, where vLLM itself would wait for the next step."""
        done = self.engine.reset_prefix_cache(external)
        if not self.engine.config.plain_events:
            self._publisher.publish(self.engine.take_events())
        return done

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
            self._note_load()
            if events:
                self._publisher.publish(events)
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

    def _note_load(self) -> None:
        engine = self.engine
        self._about.load = Load(engine.waiting_count, engine.running_count, engine.usage)

    def _hand_out(self, output: Output) -> None:
        sink = self._sinks.get(output.request)
        if sink is None:
            return
        sink.put_nowait(output)
        if output.finished:
            del self._sinks[output.request]
