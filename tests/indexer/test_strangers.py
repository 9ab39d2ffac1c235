"""What one publisher says must not touch what is known of another, and nothing of what any of them says is logged."""

from __future__ import annotations

import json
import logging
import struct
from typing import Any

import msgspec
import pytest

from indexer.index import PrefixIndex
from indexer.match import Prompt, match
from indexer.names import MAX_MODELS
from indexer.residency import MAX_OTHER_TIERS, Residency
from indexer.stream import State, Stream

SIZE = 4
MODEL = "m"
PROMPT = list(range(100, 100 + 5 * SIZE))
OTHER = list(range(500, 500 + 5 * SIZE))
HASHES = [11, 12, 13, 14, 15]


class Rim:
    """An outside that never answers."""

    def ask(self, start: int, *, urgent: bool) -> None:
        pass

    def hang_up(self) -> None:
        pass

    def alarm(self, seconds: float | None) -> None:
        pass


class Pod:
    """An engine, as far as its messages go."""

    def __init__(self, index: PrefixIndex, name: str) -> None:
        self.name = name
        self.seq = 0
        self.stream = Stream(lambda: index.publisher(name), Rim(), replayable=False, clock=lambda: 1.0)
        self.stream.connected()

    @property
    def residency(self) -> Residency:
        return self.stream.residency

    def says(self, *events: Any, notes: Any = None, topic: str = "", seq: int | None = None) -> None:
        payload = msgspec.msgpack.encode([0.0, events, 0, *([] if notes is None else [notes])])
        number = self.seq if seq is None else seq
        self.stream.live([(topic or f"kv@{self.name}@{MODEL}").encode(), number.to_bytes(8, "big"), payload])
        self.seq = number + 1


def stored(tokens: list[int], hashes: list[int] = HASHES, **fields: Any) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": None,
        "token_ids": tokens,
        "block_size": SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    } | fields


def removed(hashes: list[int], medium: str = "GPU") -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium}


class Fleet:
    def __init__(self) -> None:
        self.index = PrefixIndex()
        self.honest, self.rogue = Pod(self.index, "honest"), Pod(self.index, "rogue")

    def found(self, tokens: list[int], pod: Pod, model: str = MODEL) -> tuple[int, int, int]:
        prompt = Prompt(struct.pack(f"<{len(tokens)}I", *tokens), model)
        result = match(self.index, prompt, [pod.residency])
        return result.gpu[0], result.cpu[0], result.storage[0]


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


LONGER = [*PROMPT, 1]
"""So that all blocks of the prompt can be found: the last token is always computed."""


@pytest.mark.parametrize("rogue_first", [True, False])
def test_hashes_announced_with_other_tokens_mean_that_only_for_who_says_so(fleet: Fleet, rogue_first: bool) -> None:
    engines = [(fleet.rogue, OTHER), (fleet.honest, PROMPT)]
    for pod, tokens in engines if rogue_first else reversed(engines):
        pod.says(stored(tokens))
    fleet.honest.says({**stored([], HASHES[-1:]), "medium": "CPU"})
    assert fleet.found(LONGER, fleet.honest) == (5, 0, 0)
    assert fleet.found([*OTHER, 1], fleet.honest) == (0, 0, 0)
    fleet.rogue.says(removed(HASHES), {"type": "AllBlocksCleared"})
    assert fleet.found(LONGER, fleet.honest) == (5, 0, 0)
    fleet.honest.says(removed(HASHES[1:]))
    assert fleet.found(LONGER, fleet.honest)[0] == 1


def test_blocks_removed_or_cleared_by_one_stay_with_the_other(fleet: Fleet) -> None:
    for pod in (fleet.honest, fleet.rogue):
        pod.says(stored(PROMPT))
    fleet.rogue.says(removed(HASHES))
    fleet.rogue.says({"type": "AllBlocksCleared", "tiers": ["GPU", "CPU", "STORAGE"]})
    fleet.rogue.says(seq=0, notes={"instance": "another life"})
    assert fleet.found(LONGER, fleet.honest) == (5, 0, 0)
    assert fleet.found(LONGER, fleet.rogue) == (0, 0, 0)


def test_a_pool_is_claimed_by_its_name_only_so_others_are_not_touched(fleet: Fleet) -> None:
    """Who knows the name of a pool speaks for it, as it could write into the store: see SECURITY.md."""
    fleet.honest.says(stored(PROMPT), notes={"instance": "a", "tiers": {"STORAGE": {"pool": "theirs"}}})
    fleet.honest.says(stored(PROMPT, medium="STORAGE"))
    fleet.rogue.says(stored(OTHER), notes={"instance": "b", "tiers": {"STORAGE": {"pool": "mine"}}})
    fleet.rogue.says(stored(OTHER, [21, 22, 23, 24, 25], medium="STORAGE"))
    fleet.honest.says(removed(HASHES))
    assert fleet.found(PROMPT, fleet.honest)[2] == 5
    assert fleet.found(OTHER, fleet.honest) == (0, 0, 0)
    fleet.rogue.says(removed(HASHES, "STORAGE"), {"type": "AllBlocksCleared"})
    assert fleet.found(PROMPT, fleet.honest)[2] == 5


def test_an_address_in_the_topic_is_nobodys_but_the_connections(fleet: Fleet) -> None:
    fleet.honest.says(stored(PROMPT))
    fleet.rogue.says(stored(OTHER), topic=f"kv@{fleet.honest.name}@{MODEL}")
    assert fleet.found([*OTHER, 1], fleet.honest) == (0, 0, 0)
    assert fleet.found([*OTHER, 1], fleet.rogue) == (5, 0, 0)


def test_an_engine_that_changes_its_life_at_every_message_confuses_nobody_else(fleet: Fleet) -> None:
    fleet.honest.says(stored(PROMPT))
    for life in range(2000):
        fleet.rogue.says(stored(PROMPT), notes={"instance": f"life {life}"}, seq=life % 3)
    assert fleet.rogue.stream.counters.restarts == 1999
    assert fleet.found(LONGER, fleet.honest) == (5, 0, 0)
    while fleet.index.sweep():
        pass
    fleet.rogue.says({"type": "AllBlocksCleared"}, notes={"instance": "life 1999"})
    assert fleet.index.blocks("gpu") == 5


def test_names_without_end_are_kept_within_bounds_and_the_others_go_on(fleet: Fleet) -> None:
    fleet.honest.says(stored(PROMPT))
    for number in range(MAX_MODELS + 100):
        name = f"name {number}"
        fleet.rogue.says(
            stored(OTHER, lora_name=name, lora_id=number),
            stored(OTHER, medium=name),
            stored(OTHER, group_idx=number, kv_cache_spec_kind="full_attention"),
            notes={"tiers": {name: {"pool": name, "capacity": 1}}},
            topic=f"kv@{fleet.rogue.name}@{name}" if number % 7 == 0 else "",
        )
    assert len(fleet.index.roots) <= MAX_MODELS
    assert len(set(fleet.rogue.residency.tiers())) <= 3 + MAX_OTHER_TIERS
    assert len(fleet.rogue.stream.told.tiers.items()) <= 3 + MAX_OTHER_TIERS
    fleet.honest.says(stored(OTHER, [21, 22, 23, 24, 25]))
    assert fleet.found(LONGER, fleet.honest) == (5, 0, 0)
    assert fleet.found([*OTHER, 1], fleet.honest) == (5, 0, 0)
    fleet.honest.says(stored(OTHER, [31, 32, 33, 34, 35], lora_name="a new name", lora_id=1))
    fleet.honest.says(stored(PROMPT, medium="a new medium"))
    assert fleet.found([*OTHER, 1], fleet.honest, "a new name") == (5, 0, 0)
    assert fleet.honest.residency.held("a new medium") == 5


TOKEN = 1234567
SALT = "a-salt-that-is-secret"
ODD: list[Any] = [
    stored([TOKEN] * SIZE, [1], extra_keys=[[SALT]]),
    stored([TOKEN] * 3, [1], extra_keys=[[SALT]]),
    stored([TOKEN] * SIZE, [1], extra_keys=[[SALT], [SALT]]),
    stored([TOKEN] * SIZE, [1], extra_keys=[{SALT: TOKEN}]),
    stored([TOKEN << 40] * SIZE, [1], extra_keys=[[SALT]]),
    stored([-TOKEN] * SIZE, [1], extra_keys=[[SALT]]),
    stored([TOKEN + 0.5] * SIZE, [1], extra_keys=[[SALT]]),  # type: ignore[list-item]
    stored([str(TOKEN)] * SIZE, [1], extra_keys=[[SALT]]),  # type: ignore[list-item]
    stored([TOKEN] * SIZE, [SALT], extra_keys=[[SALT]]),  # type: ignore[list-item]
    stored([TOKEN] * SIZE, [1], block_size=TOKEN, extra_keys=[[SALT]]),
    stored([TOKEN] * SIZE, [1], lora_id=SALT, extra_keys=[[SALT]]),
    stored([TOKEN] * SIZE, [1], parent_block_hash=SALT, extra_keys=[[SALT]]),
    {"type": SALT, "token_ids": [TOKEN]},
    {"type": "BlockRemoved", "block_hashes": [[SALT, TOKEN]], "medium": "GPU"},
    [SALT, TOKEN],
    TOKEN,
    SALT,
]


def test_neither_tokens_nor_salts_are_logged_or_shown(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.NOTSET)
    for pod in (fleet.honest, fleet.rogue):
        for odd in ODD:
            pod.says(odd)
            pod.says(odd, notes={"instance": [SALT], "load": {"waiting": SALT, "running": TOKEN, "kv_usage": TOKEN}})
            pod.says(odd, notes=SALT)
            pod.stream.live([SALT.encode() * 1000, b"", struct.pack("<I", TOKEN)])
            pod.stream.replay([SALT.encode(), bytes(8), msgspec.msgpack.encode([0.0, [odd]])])
        pod.stream.disconnected("the connection broke")
        assert pod.stream.state is State.LOST
    shown = json.dumps([[pod.stream.reason, msgspec.to_builtins(pod.stream.counters)] for pod in (fleet.honest,)])
    shown += json.dumps(dict(fleet.honest.residency.skipped))
    assert fleet.honest.stream.counters.unreadable or fleet.honest.stream.counters.skipped
    for text in (caplog.text, shown):
        assert str(TOKEN) not in text
        assert SALT not in text
