from __future__ import annotations

from connector.events import BlockRemoved, BlockStored
from connector.sim.hashing import BlockHash
from connector.sim.tiers import Lookup, Tier


def name(letter: str) -> BlockHash:
    return BlockHash(letter.encode())


def names(letters: str) -> list[BlockHash]:
    return [name(letter) for letter in letters]


def announcement(letter: str) -> BlockStored:
    return BlockStored([ord(letter)], None, [], 4, None, "CPU", None)


def tier_with(letters: str, capacity: int) -> Tier:
    """A tier that holds these chunks, admitted in this order and readable."""
    tier = Tier("CPU", capacity)
    assert tier.make_room(len(letters), ())
    for letter in letters:
        tier.admit(name(letter), announcement(letter))
    tier.complete(names(letters))
    tier.take_events()
    return tier


def held(tier: Tier) -> str:
    return "".join(letter for letter in "abcdefg" if tier.lookup(name(letter)) is not Lookup.MISS)


def test_a_chunk_is_pending_until_it_is_complete_and_said_to_be_stored_only_then() -> None:
    tier = Tier("CPU", 2)
    tier.admit(name("a"), announcement("a"))
    assert (tier.lookup(name("a")), tier.take_events(), tier.residency()) == (Lookup.PENDING, [], {})
    tier.complete(names("a"))
    assert (tier.lookup(name("a")), tier.residency()) == (Lookup.HIT, {ord("a"): 1})
    assert [type(event) for event in tier.take_events()] == [BlockStored]


def test_the_chunk_admitted_first_goes_first_and_one_event_names_all_that_go() -> None:
    tier = tier_with("abc", capacity=3)
    assert tier.make_room(2, ())
    assert held(tier) == "c"
    assert tier.take_events() == [BlockRemoved([ord("a"), ord("b")], "CPU", group_idx=0)]


def test_when_a_request_ends_its_tail_becomes_older_than_its_head() -> None:
    tier = tier_with("abcd", capacity=4)
    tier.refresh(names("abc"))
    tier.make_room(1, ())
    tier.make_room(2, ())
    assert held(tier) == "ab"


def test_pinned_pending_and_protected_chunks_are_spared() -> None:
    tier = tier_with("abc", capacity=4)
    tier.admit(name("d"), announcement("d"))
    tier.pin(names("a"))
    assert tier.make_room(1, protected=names("b"))
    assert held(tier) == "abd"
    assert not tier.make_room(3, protected=names("b"))
    assert held(tier) == "abd"
    tier.unpin(names("a"))
    assert tier.make_room(2, protected=names("b"))
    assert held(tier) == "bd"


def test_without_a_capacity_nothing_is_ever_removed() -> None:
    tier = Tier("STORAGE", None, locality="LOCAL")
    for letter in "abcdefg":
        assert tier.make_room(1, ())
        tier.admit(name(letter), announcement(letter))
    assert held(tier) == "abcdefg"


def test_events_carry_the_medium_and_locality_of_the_tier() -> None:
    tier = Tier("STORAGE", 1, locality="LOCAL")
    tier.admit(name("a"), announcement("a"))
    tier.complete(names("a"))
    tier.make_room(1, ())
    assert [(event.medium, event.locality) for event in tier.take_events()] == [("STORAGE", "LOCAL")] * 2
