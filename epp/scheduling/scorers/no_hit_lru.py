"""no-hit-lru-scorer: prompts that nobody has cached go around, least recently used endpoint first.

Somebody holds a block of the prompt: 0.5 for all. Otherwise 1 for the first in line down to 0 for the last: endpoints
that never took such a prompt come first, then by the time they last did. Only cold picks move an endpoint back.

Places are counted among the candidates, so endpoints that are gone leave no gaps. Who comes to the address of such a
one never took a prompt. Endpoints that never did are lined up differently in each process, lest several pickers that
start together all begin with the same endpoint.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import count
from typing import Annotated

import msgspec

from epp.config.environment import Environment
from epp.config.registry import Parameters, plugin
from epp.fleet.endpoint import Endpoint
from epp.scheduling.plugin import Scheduling, SchedulingResult
from epp.scheduling.prefix import DEFAULT_PRODUCER, matched_shares

PREFILL = "prefill"
_MASK = (1 << 64) - 1


class NoHitLruParameters(Parameters, frozen=True):
    lru_size: Annotated[int, msgspec.Meta(ge=1)] = 1024
    """Endpoints remembered."""
    prefix_match_info_producer_name: str = ""
    prefix_plugin_type: str = ""
    """Deprecated."""
    prefix_plugin_name: str = ""
    """Deprecated."""


@plugin("no-hit-lru-scorer", NoHitLruParameters)
class NoHitLruScorer:
    name: str
    type: str
    without_effect = ("prefixPluginType", "prefixPluginName")

    def __init__(self, name: str, parameters: NoHitLruParameters, environment: Environment) -> None:
        self._producer = parameters.prefix_match_info_producer_name or DEFAULT_PRODUCER
        self._turns = count(1)
        self._last_turn: OrderedDict[str, int] = OrderedDict()
        self._size = parameters.lru_size
        self._salt = environment.rng.getrandbits(64) | 1
        environment.fleet.subscribe(self)

    def requires(self) -> Sequence[str]:
        return (self._producer,)

    def score(self, scheduling: Scheduling, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        if any(matched_shares(scheduling, self._producer, endpoints)):
            return [0.5] * len(endpoints)
        scheduling.notes[self.name] = True
        last = len(endpoints) - 1
        if not last:
            return [1.0]
        taken = self._last_turn.get
        turns = [taken(endpoint.address) or self._first_turn(endpoint.address) for endpoint in endpoints]
        scores = [0.0] * len(endpoints)
        for place, position in enumerate(sorted(range(len(endpoints)), key=turns.__getitem__)):
            scores[position] = 1.0 - place / last
        return scores

    def picked(self, scheduling: Scheduling, result: SchedulingResult) -> None:
        if not scheduling.notes.get(self.name):
            return
        for profile in (result.target, result.profiles.get(PREFILL)):
            if profile is not None:
                self._take_turn(profile.picked[0].address)

    def endpoint_added(self, endpoint: Endpoint) -> None: ...

    def endpoint_updated(self, endpoint: Endpoint) -> None: ...

    def endpoint_removed(self, endpoint: Endpoint) -> None:
        self._last_turn.pop(endpoint.address, None)

    def _take_turn(self, address: str) -> None:
        self._last_turn[address] = next(self._turns)
        self._last_turn.move_to_end(address)
        if len(self._last_turn) > self._size:
            self._last_turn.popitem(last=False)

    def _first_turn(self, address: str) -> int:
        """Of one that never had its turn: before all others (negative), in an order of this process's own."""
        return (hash(address) * self._salt & _MASK) - _MASK - 1
