"""The gate through which traffic goes, and what is remembered of it."""

from __future__ import annotations

import asyncio

from epp.toolbox.demo.chaos.talk import Gate, Said
from epp.toolbox.demo.traffic import History, Style


async def test_a_closed_gate_waits_for_those_inside_and_keeps_others_out() -> None:
    gate, order, leave = Gate(), list[str](), asyncio.Event()

    async def ask() -> None:
        await gate.opened()
        with gate.inside():
            order.append("asked")
            await leave.wait()
            order.append("answered")

    async def probe() -> None:
        async with gate.closed():
            order.append("alone")
            late = asyncio.create_task(ask())
            await asyncio.sleep(0)
            order.append("still alone")
        await late

    async with asyncio.TaskGroup() as group, asyncio.timeout(5):
        group.create_task(ask())
        await asyncio.sleep(0)
        group.create_task(probe())
        await asyncio.sleep(0)
        leave.set()
    assert order == ["asked", "answered", "alone", "still alone", "asked", "answered"]


def test_what_was_said_can_be_asked_again_and_continued_without_changing_it() -> None:
    said = Said(History(Style.TEXT, "opening", ["question"]), " answer", "sim-0")
    assert said.asked_again().rendered() == "opening\n\nquestion"
    assert said.continued("more").rendered() == "opening\n\nquestion answer\n\nmore"
    assert said.history.said == ["question"]
