from __future__ import annotations

from collections.abc import Callable

import pytest

from epp.exchange import actions as act
from epp.exchange import events as ev
from epp.exchange.machine import Exchange

Play = Callable[..., list[act.Action]]


@pytest.fixture
def exchange() -> Exchange:
    return Exchange()


@pytest.fixture
def play(exchange: Exchange) -> Play:
    """Feeds events in order; gives the actions of the last."""

    def play(*events: ev.Event) -> list[act.Action]:
        actions: list[act.Action] = []
        for event in events:
            actions = list(exchange.receive(event))
        return actions

    return play
