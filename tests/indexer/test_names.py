"""Names of models and adapters: told apart for as long as they matter, and used up by nobody."""

from __future__ import annotations

import struct

import pytest

from indexer.index import PrefixIndex
from indexer.match import Prompt, match
from indexer.names import MAX_ADAPTERS, MAX_MODELS, NOBODYS
from indexer.residency import MAX_OTHER_TIERS, Residency
from indexer.wire import BlockRemoved, BlocksCleared, BlockStored

SIZE = 4
TEXT = struct.pack(f"<{2 * SIZE + 1}I", *range(2 * SIZE + 1))
LONG = 512


def stored(name: str = "", seed: int = 0) -> BlockStored:
    """The text's two blocks, of an adapter, by hashes of its own."""
    first = 2 * seed + 10**9 * bool(name)
    return BlockStored([first, first + 1], None, TEXT[: 8 * SIZE], SIZE, "gpu", name, extras={})


def found(index: PrefixIndex, model: str, *pods: Residency) -> list[int]:
    return match(index, Prompt(TEXT, model), pods).gpu


def test_two_publishers_that_churn_100_000_names_take_little_and_leave_all_others_theirs(index: PrefixIndex) -> None:
    honest = index.publisher("honest", "base")
    honest.apply([stored(), stored("poet", 1)])
    churning = [index.publisher(name, "base") for name in ("a", "b")]
    for number in range(50_000):
        for side, pod in enumerate(churning):
            name = f"{side}-{number}"
            pod.apply([stored(name, number), *([BlockRemoved([10**9 + 2 * number])] if number % 2 else [])])
            if number % 1000 == 0:
                assert found(index, name, *churning, honest) == [2 * (side == 0), 2 * (side == 1), 0]
                assert found(index, "poet", *churning, honest) == [0, 0, 2]
                assert found(index, "base", *churning, honest) == [0, 0, 2]
    assert len(index.roots) <= MAX_MODELS
    assert index.names.bytes < 2 << 20
    assert [pod.skipped for pod in churning] == [{}, {}]
    honest.apply([stored("lawyer", 2)])
    assert found(index, "lawyer", *churning, honest) == [0, 0, 2]


def test_names_never_run_out_for_those_who_come_while_others_leave(index: PrefixIndex) -> None:
    honest = index.publisher("honest", "base")
    honest.apply([stored("poet", 1)])
    for life in range(3 * MAX_MODELS // MAX_ADAPTERS):
        rogue = index.publisher("rogue", f"model {life}")
        rogue.apply(stored(f"{life} {number}", number) for number in range(MAX_ADAPTERS))
        assert not rogue.skipped
        rogue.close()
    assert len(index.roots) == MAX_MODELS
    assert {"base", "poet", NOBODYS} <= index.roots.keys()
    assert found(index, "poet", honest) == [2]


def test_a_name_that_was_forgotten_is_no_alias_of_the_base_model(index: PrefixIndex) -> None:
    """It is not known any more for an adapter's, so the base model's blocks must not be expected for it."""
    pod, other = index.publisher("pod", "base"), index.publisher("other", "base")
    pod.apply([stored(), stored("first", 1)])
    other.apply([stored()])
    assert found(index, "alias", pod, other) == [2, 2]
    pod.apply(stored(f"later {number}", 2 + number) for number in range(MAX_ADAPTERS))
    crowd(index)
    assert "first" not in index.roots
    assert found(index, "first", pod) == [0]
    assert found(index, "alias", pod, other) == [0, 2]
    assert found(index, "base", pod, other) == found(index, "", pod, other) == [2, 2]
    assert pod.root_for("alias") != pod.root == pod.root_for("") == pod.root_for("base")


def crowd(index: PrefixIndex) -> None:
    """So many names that none is kept but those in use."""
    for number in range(MAX_MODELS):
        assert index.names.root(f"crowd {number}") is not None


def test_a_name_that_comes_back_finds_what_is_still_held_under_it(index: PrefixIndex) -> None:
    pod = index.publisher("pod", "base")
    pod.apply([stored("poet", 1), stored("lawyer", 2)])
    pod.apply(stored(f"later {number}", 3 + number) for number in range(MAX_ADAPTERS))
    crowd(index)
    pod.apply([BlockRemoved([10**9 + 5])])
    assert index.names.root("poet") is not None  # the picker asks for it: an engine lists it
    pod.apply([stored("lawyer", 2)])
    assert (found(index, "poet", pod), found(index, "lawyer", pod)) == ([2], [2])
    pod.apply([BlockRemoved([10**9 + 2, 10**9 + 3])])
    assert found(index, "poet", pod) == [0]


@pytest.mark.parametrize("renewed_while_known", [True, False])
def test_a_name_that_comes_back_as_another_adapter_finds_nothing(index: PrefixIndex, renewed_while_known: bool) -> None:
    pod = index.publisher("pod", "base")
    pod.apply([stored("poet", 1)])
    if renewed_while_known:
        index.renew("poet")
    pod.apply(stored(f"later {number}", 2 + number) for number in range(MAX_ADAPTERS))
    crowd(index)
    assert "poet" not in index.roots
    if not renewed_while_known:
        index.renew("poet")
    assert index.names.root("poet") is not None
    assert found(index, "poet", pod) == [0]
    index.renew("base")
    assert found(index, "base", pod) == [0], "nothing is held"
    pod.apply([stored()])
    assert found(index, "base", pod) == [2], "an adapter's list does not change what a base model is"


def test_a_name_stays_while_any_publisher_uses_it(index: PrefixIndex) -> None:
    one, two = index.publisher("one", "base"), index.publisher("two", "base")
    for pod in (one, two):
        pod.apply([stored("poet", 1), stored("poet", 1)])
    one.close()
    one.model = "other"  # nobody hears it any more
    crowd(index)
    assert {"poet", "base"} <= index.roots.keys()
    two.model = "other"
    crowd(index)
    assert {"poet", "other"} <= index.roots.keys()
    assert "base" not in index.roots
    two.close()
    crowd(index)
    assert index.roots.keys() - {NOBODYS, *(f"crowd {number}" for number in range(MAX_MODELS))} == set()


def test_the_adapters_in_use_are_not_those_that_make_room(index: PrefixIndex) -> None:
    pod = index.publisher("pod", "base")
    for number in range(4 * MAX_ADAPTERS):
        pod.apply([stored("poet", 1), stored(f"once {number}", 2 + number)])
    crowd(index)
    assert "poet" in index.roots


def test_when_all_names_are_in_use_another_is_refused_and_not_taken_for_an_alias(index: PrefixIndex) -> None:
    pods = [index.publisher(str(number), "base") for number in range(MAX_MODELS // MAX_ADAPTERS)]
    for pod in pods:
        pod.apply(stored(f"{pod.name} {number}", number) for number in range(MAX_ADAPTERS))
    assert pods[-1].skipped["too_many_models"] == 2  # of one the base model's name was, and one is nobody's
    late = index.publisher("late", "base")
    late.apply([stored(), stored("poet", 1)])
    assert late.skipped == {"too_many_models": 1}
    assert found(index, "poet", late) == [0]
    assert found(index, "base", late) == [2]


def test_names_take_no_more_than_is_said(index: PrefixIndex) -> None:
    pods = [index.publisher(str(number), "base") for number in range(32)]
    before = index.memory()["publishers"]
    for pod in pods:
        pod.apply(stored(f"{number}".zfill(LONG), number) for number in range(MAX_ADAPTERS))
    taken = index.memory()["publishers"] - before
    assert MAX_ADAPTERS * LONG < taken < 2 << 20


def test_one_publishers_media_leave_room_for_anothers(index: PrefixIndex) -> None:
    rogue, honest = index.publisher("rogue"), index.publisher("honest")
    rogue.apply(BlockStored([number], None, TEXT[: 4 * SIZE], SIZE, f"m{number}", extras={}) for number in range(100))
    assert len(rogue.tiers()) == MAX_OTHER_TIERS
    assert rogue.skipped == {"too_many_tiers": 100 - MAX_OTHER_TIERS}
    honest.apply([BlockStored([1], None, TEXT[: 4 * SIZE], SIZE, "cxl", extras={})])
    assert match(index, Prompt(TEXT), [honest]).other == [1]


@pytest.mark.parametrize("by_a_clear", [True, False])
def test_media_that_are_empty_make_room(index: PrefixIndex, by_a_clear: bool) -> None:
    pod = index.publisher("pod")
    for number in range(3 * MAX_OTHER_TIERS):
        tier = f"m{number}"
        pod.apply([BlockStored([7], None, TEXT[: 4 * SIZE], SIZE, tier, extras={})])
        assert match(index, Prompt(TEXT), [pod]).other == [1]
        pod.apply([BlocksCleared((tier,)) if by_a_clear else BlockRemoved([7], tier)])
    assert not pod.skipped
