"""After a fault, one request after another: what the picker predicts of the engine that was struck, and what it has.

Each probe is asked through Envoy. Where the picker sent it elsewhere, the same is then asked of the engine that was
struck, directly: what was predicted of that one is known from the decision, and nothing has happened to it since.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from epp.toolbox.demo.chaos.engines import Mortal
from epp.toolbox.demo.chaos.judge import Pick, Probe
from epp.toolbox.demo.chaos.stage import Stage
from epp.toolbox.demo.chaos.talk import TURN_WORDS, Traffic
from epp.toolbox.demo.chaos.watch import Watch
from epp.toolbox.demo.drive import Call, Client
from epp.toolbox.demo.traffic import History, Style, prose

MAX_TOKENS = 8


async def probe(
    stage: Stage, watch: Watch, traffic: Traffic, client: Client, engine: Mortal, name: str, rng: random.Random
) -> list[Probe]:
    """While nothing else is asked. Failures of direct requests are in the probes, others in the client's calls too."""
    direct = Client(stage.http, f"http://{engine.address}", client.model, lambda call: None)
    probes = []
    for number, history in enumerate(_questions(traffic, engine.name, rng)):
        await stage.until_quiet()
        call = await client.ask(f"{name}-{number}", history, MAX_TOKENS, stream=False)
        await watch.collect()
        pick = watch.picks.get(call.id)
        probes.append(_of_picked(call, pick))
        if call.served != engine.name:
            await stage.until_quiet()
            again = await direct.ask(f"{call.id}-direct", history, MAX_TOKENS, stream=False)
            predicted = pick.everywhere.get(engine.name) if pick else None
            probes.append(Probe(again.id, engine.name, predicted, again.cached_tokens))
    return probes


def _of_picked(call: Call, pick: Pick | None) -> Probe:
    is_comparable = pick is not None and pick.live and pick.prediction.pod == call.served
    return Probe(call.id, call.served, pick.prediction.cached if pick and is_comparable else None, call.cached_tokens)


def _questions(traffic: Traffic, engine: str, rng: random.Random) -> Iterator[History]:
    """What the engine answered last, once more; what it answered earlier, and what anyone did, continued; a new one."""
    said = list(traffic.said)
    its_own = [each for each in said if each.served == engine] or said
    if its_own:
        yield its_own[-1].asked_again()
        yield rng.choice(its_own).continued(_turn(rng))
        yield rng.choice(said).continued(_turn(rng))
    yield History(Style.TEXT, _turn(rng), [_turn(rng)])


def _turn(rng: random.Random) -> str:
    return prose(rng, rng.randint(*TURN_WORDS))
