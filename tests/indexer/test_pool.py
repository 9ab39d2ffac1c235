"""Stores that several publishers share."""

import random
import struct

import pytest

from indexer.index import PrefixIndex
from indexer.match import Prompt, match
from indexer.pool import Standing
from indexer.residency import Residency
from indexer.wire import BlockRemoved, BlocksCleared, BlockStored, Notes, Tier, Tiers

SIZE = 2
STORE = Notes(tiers=Tiers(storage=Tier(pool="store")))


def pack(ids):
    return struct.pack(f"<{len(ids)}I", *ids)


TEXT = list(range(100, 100 + 16 * SIZE))
NAMES = list(range(1, 17))


def stored(blocks, start=0, tier="storage", **changes):
    """Blocks `start` to `blocks` of the text."""
    tokens = pack(TEXT[start * SIZE : blocks * SIZE])
    parent = NAMES[start - 1] if start else None
    return BlockStored(NAMES[start:blocks], parent, tokens, SIZE, tier, **{"extras": {}, **changes})


def placeholder(*numbers, tier="storage"):
    return BlockStored([NAMES[number] for number in numbers], tier=tier)


def removed(*numbers, tier="storage"):
    return BlockRemoved([NAMES[number] for number in numbers], tier)


@pytest.fixture
def fleet(index):
    """Three publishers that know the text's first block from HBM; the first two share a store."""
    pods = [index.publisher(name) for name in "abc"]
    for pod in pods[:2]:
        pod.told(STORE)
    for pod in pods:
        pod.apply([stored(1, tier="gpu")])
    return pods


def runs(pods, blocks=8):
    """Per publisher (HBM, CPU, storage) blocks; one more token keeps the last block eligible for HBM."""
    found = match(pods[0]._index, Prompt(pack([*TEXT[: blocks * SIZE], 1])), pods)
    return list(zip(found.gpu, found.cpu, found.storage, strict=True))


def storage(pods, blocks=8):
    return [found[2] for found in runs(pods, blocks)]


# --- what any of them says


def test_what_one_stores_all_of_them_find(fleet):
    fleet[0].apply([stored(4)])
    assert runs(fleet) == [(1, 0, 3), (1, 0, 3), (1, 0, 0)]


def test_each_continues_it_from_where_its_own_tiers_end(fleet):
    a, b, c = fleet
    a.apply([stored(8), stored(4, tier="gpu")])
    b.apply([stored(3, tier="cpu")])
    c.told(STORE)
    assert runs(fleet) == [(4, 0, 4), (1, 2, 5), (1, 0, 7)]


def test_its_own_cpu_ram_goes_on_where_the_store_has_a_hole(fleet):
    a, b, _ = fleet
    a.apply([stored(3), stored(8, start=5)])
    b.apply([stored(5, tier="cpu")])
    assert runs([a, b]) == [(1, 0, 2), (1, 4, 3)]


def test_each_loads_chunks_of_its_own_size(fleet):
    a, b, _ = fleet
    b.blocks_per_chunk = 3
    a.apply([stored(8)])
    assert storage([a, b]) == [7, 5]


def test_a_block_that_several_store_is_removed_by_any_of_them(fleet):
    a, b, _ = fleet
    for pod in (a, b, a):
        pod.apply([stored(4)])
    assert a.held("storage") == b.held("storage") == 4
    b.apply([removed(2)])
    assert storage([a, b]) == [1, 1]
    a.apply([removed(3), removed(2), removed(3)])
    assert a.held("storage") == b.held("storage") == 2


def test_who_has_said_nothing_of_a_block_may_say_that_it_is_gone(fleet):
    """As a master of the store does, that tells all evictions."""
    a, b, _ = fleet
    a.apply([stored(4), placeholder(5)])
    b.apply([removed(2, 5)])
    assert storage([a, b]) == [1, 1]
    assert (b.removed_blocks, b.skipped_removals) == (2, 0)
    b.apply([stored(6, tier="gpu"), removed(1, 2, 3, 4, 5, tier="gpu"), placeholder(2, 4)])
    assert storage([a, b]) == [4, 4], "the last one is gone, though what it was is known by now"


def test_how_much_is_there_is_at_least_what_one_of_them_says(index, fleet):
    a, b, _ = fleet
    a.apply([stored(4)])
    b.apply([stored(6, start=4)])
    assert a.held("storage") == b.held("storage") == index.blocks("storage") == 4
    a.standing = Standing.DOUBTED
    assert a.held("storage") == b.held("storage") == index.blocks("storage") == 2


def test_what_the_index_forgets_is_forgotten_of_all_of_them(index, fleet):
    a, b, c = fleet
    for pod in fleet:
        pod.apply([stored(4)])
    index.forget_blocks([key for key in list(index.masks) if index.masks[key].bit_count() == 3])
    assert [pod.held("storage") for pod in fleet] == [1, 1, 1]
    assert storage([a, b, c]) == [0, 0, 0]


def test_other_names_are_other_stores(index, fleet):
    a, _, c = fleet
    c.told(Notes(tiers=Tiers(storage=Tier(pool="elsewhere"))))
    a.apply([stored(4)])
    c.apply([stored(2)])
    assert storage(fleet) == [3, 3, 1]
    assert index.blocks("storage") == 6


def test_models_do_not_share_even_if_they_name_the_same_store(index):
    """Engines' hashes do not know the model's name."""
    llama, qwen = index.publisher("a", "llama"), index.publisher("b", "qwen")
    for pod in (llama, qwen):
        pod.told(STORE)
        pod.apply([stored(1, tier="gpu")])
    llama.apply([stored(4)])
    qwen.apply([stored(4, tier="gpu"), removed(1, 2, 3, tier="gpu")])
    assert match(index, Prompt(pack(TEXT), "qwen"), [qwen]).storage == [0]
    qwen.model = "llama"
    assert match(index, Prompt(pack(TEXT), "llama"), [llama, qwen]).storage == [3, 4]


def test_a_tier_that_is_not_told_to_be_shared_is_not_whatever_it_is_named(fleet):
    fleet[0].apply([stored(4, tier="cpu")])
    fleet[2].apply([stored(3)])
    assert runs(fleet) == [(1, 3, 0), (1, 0, 0), (1, 0, 2)]


def test_cpu_ram_may_be_shared_too(fleet):
    a, b, _ = fleet
    for pod in (a, b):
        pod.share("cpu", "dram")
    a.apply([stored(3, tier="cpu")])
    b.apply([stored(5)])
    assert runs([a, b]) == [(1, 2, 2), (1, 2, 2)]


def test_blocks_known_by_hash_only_wait_for_whoever_says_what_they_are(fleet):
    a, b, _ = fleet
    a.apply([placeholder(1, 2, 3), placeholder(1, 2, 3)])
    b.apply([removed(3)])
    assert storage([a, b]) == [0, 0]
    b.apply([stored(4, tier="gpu"), removed(1, 2, 3, tier="gpu")])
    assert storage([a, b]) == [2, 2]
    assert a.parked == 0
    a.apply([removed(2)])
    assert storage([a, b]) == [1, 1]


def test_tokens_that_wait_for_a_parent_find_their_blocks_in_the_store(fleet):
    a, b, _ = fleet
    a.apply([stored(4, start=2)])
    b.apply([stored(2, start=1, tier="gpu"), removed(1, tier="gpu")])
    a.apply([placeholder(1)])
    assert storage([a, b]) == [3, 3]


def test_groups_of_layers_must_all_have_a_block(fleet):
    a, b, _ = fleet
    full = {"kind": "full_attention"}
    a.apply([stored(4, group=0, **full), stored(3, group=1, **full)])
    assert runs([a, b]) == [(0, 0, 3), (1, 0, 2)]  # in the first one's HBM the second group has nothing
    assert b.held("storage") == 3


def test_groups_of_layers_may_have_a_block_by_what_different_publishers_say(fleet):
    a, b, _ = fleet
    full = {"kind": "full_attention"}
    for pod in (a, b):
        pod.apply([stored(1, tier="gpu", group=1, **full)])
    a.apply([stored(4, group=0, **full)])
    b.apply([stored(3, group=1, **full)])
    assert storage([a, b]) == [2, 2]
    b.standing = Standing.DOUBTED
    assert storage([a, b]) == [0, 0]


def test_a_group_of_layers_of_which_nothing_is_there_is_no_reason_to_expect_anything(fleet):
    a, b, _ = fleet
    full = {"kind": "full_attention"}
    for group in range(2):
        b.apply([stored(1, tier="gpu", group=group, **full)])
    a.apply([stored(4, group=0, **full)])
    assert storage([b]) == [0]


def test_who_has_told_nothing_yet_needs_the_groups_that_the_others_need(index):
    a, b = [index.publisher(name) for name in "ab"]
    for pod in (a, b):
        pod.told(STORE)
    full = {"kind": "full_attention", "group": 1}
    a.apply([stored(4, **full)])
    assert storage([a, b]) == [0, 0]  # the first group may be of any kind
    a.apply([stored(4, **full, tier="gpu"), stored(4, group=0, kind="sliding_window", window=9, tier="gpu")])
    assert runs([a, b]) == [(4, 0, 0), (0, 0, 0)]
    a.close()
    assert storage([b]) == [0]


# --- who comes and goes


@pytest.mark.parametrize("ends", [Residency.restart, Residency.clear, Residency.close])
def test_with_somebody_ends_what_it_has_said_and_no_more(fleet, ends):
    """Who else is there need not know when that is gone."""
    a, b, c = fleet
    c.told(STORE)
    a.apply([stored(4), placeholder(5)])
    b.apply([stored(3)])
    assert storage([b, c]) == [3, 3]
    ends(a)
    assert storage([b, c]) == [2, 2]
    c.apply([stored(6, tier="gpu"), removed(1, 2, 3, 4, 5, tier="gpu"), placeholder(3, 4)])
    assert storage([b, c]) == [4, 4]


def test_what_nobody_says_any_more_is_not_there(index, fleet):
    a, b, _ = fleet
    a.apply([stored(4)])
    a.close()
    assert storage([b]) == [0]
    b.close()
    later = index.publisher("later")
    later.told(STORE)
    later.apply([stored(1, tier="gpu")])
    assert storage([later]) == [0]


def test_who_joins_finds_what_is_there_even_before_it_stores_anything(index, fleet):
    a, _, _ = fleet
    a.apply([stored(4)])
    fresh = index.publisher("fresh")
    assert fresh.block_size == 0
    fresh.told(STORE)
    assert fresh.block_size == SIZE
    assert runs([fresh]) == [(0, 0, 4)]
    fresh.told(Notes(tiers=Tiers(cpu=Tier())))
    assert runs([fresh]) == [(0, 0, 4)]
    fresh.told(Notes(tiers=Tiers(storage=Tier())))
    assert runs([fresh]) == [(0, 0, 0)]


def test_whose_picture_may_be_outdated_has_no_say_until_it_is_current_again(fleet):
    a, b, _ = fleet
    a.apply([stored(4)])
    b.apply([stored(2)])
    a.standing = Standing.DOUBTED
    assert storage([a, b]) == [1, 1]
    a.apply([stored(6, start=4)])
    a.standing = Standing.CURRENT
    assert storage([a, b]) == [5, 5]


def test_what_it_says_to_be_gone_is_gone_whatever_its_picture_is_worth(fleet):
    """What it missed before has been repaired, or comes late: it is true all the same."""
    a, b, _ = fleet
    b.apply([stored(4)])
    a.standing = Standing.DOUBTED
    a.apply([removed(2)])
    assert storage([a, b]) == [1, 1]
    a.forget()
    assert storage([a, b]) == [0, 0]


@pytest.fixture
def draft(index, fleet):
    """A copy of the first one's picture that is being made beside it."""
    copy = index.publisher("a")
    copy.standing = Standing.DRAFT
    copy.told(STORE)
    copy.apply([stored(1, tier="gpu")])
    return copy


def test_a_copy_that_is_being_made_has_no_say_until_it_has_taken_its_place(fleet, draft):
    a, b, _ = fleet
    a.apply([stored(4)])
    draft.apply([stored(6)])
    assert runs([a, b]) == [(1, 0, 3), (1, 0, 3)]
    a.close()
    draft.standing = Standing.CURRENT
    assert runs([draft, b]) == [(1, 0, 5), (1, 0, 5)]


@pytest.mark.parametrize(
    "tell",
    [
        lambda copy: copy.apply([removed(1, 2, 3)]),
        lambda copy: copy.apply([BlocksCleared(("storage",))]),
        Residency.forget,
        Residency.close,
    ],
    ids=["a removal", "a clear", "a loss", "giving it up"],
)
def test_what_such_a_copy_learns_from_long_ago_is_no_news_of_what_others_have_said_since(fleet, draft, tell):
    a, b, _ = fleet
    for pod in (a, b, draft):
        pod.apply([stored(4), placeholder(5)])
    tell(draft)
    assert storage([a, b]) == [3, 3]
    b.apply([stored(6, tier="gpu"), removed(1, 2, 3, 4, 5, tier="gpu"), placeholder(4)])
    assert storage([a, b]) == [5, 5]


def test_what_others_say_to_be_gone_meanwhile_is_gone_for_such_a_copy_too(fleet, draft):
    a, b, _ = fleet
    draft.apply([stored(4)])
    b.apply([removed(2)])
    a.close()
    draft.standing = Standing.CURRENT
    assert storage([draft, b]) == [1, 1]


def test_a_closed_publisher_joins_nothing(index, fleet):
    a, _, _ = fleet
    a.close()
    a.told(STORE)
    assert not a.shares("storage")


@pytest.mark.parametrize(
    ("tiers", "left"), [(None, 1), (("gpu",), 3), (("gpu", "cpu"), 3), (("storage",), 0), (("gpu", "storage"), 0)]
)
def test_a_clear_empties_the_store_only_if_it_names_it(fleet, tiers, left):
    """One that names no tier ends what its publisher has said."""
    a, b, _ = fleet
    b.apply([stored(2)])
    a.apply([stored(4), BlocksCleared(tiers)])
    assert storage([b]) == [left]
    b.apply([stored(2)])
    assert storage([b]) == [max(left, 1)]


def test_who_lost_messages_takes_everybodys_word_for_the_store_back(fleet):
    """Among them may have been removals."""
    a, b, _ = fleet
    a.apply([stored(4), placeholder(5)])
    b.forget()
    assert runs([a, b]) == [(1, 0, 0), (0, 0, 0)]
    a.apply([stored(6, tier="gpu"), removed(1, 2, 3, 4, 5, tier="gpu")])
    assert storage([a]) == [0]
    a.apply([stored(3)])
    assert storage([a]) == [2]


def test_a_publisher_that_turns_out_to_be_of_another_model_takes_its_word_for_the_store_back(fleet):
    """Nobody would take back there what it has said: it speaks of another store from now on."""
    first, second, _ = fleet
    first.apply([stored(4)])
    second.apply([stored(2)])
    assert storage(fleet)[1] == 3
    first.model = "another"
    assert storage([second]) == [1]


def test_a_store_that_never_says_what_it_evicts_does_not_make_the_index_grow_for_ever(index, fleet, monkeypatch):
    monkeypatch.setattr("indexer.residency.MAX_HELD", 10)
    a, b, _ = fleet
    for number in range(100):
        a.apply([BlockStored([1000 + number], None, pack([number, 7]), SIZE, "storage", extras={})])
    assert a.skipped == {"too_many_blocks": 9}
    assert a.held("storage") == b.held("storage") == 1
    assert runs([a, b]) == [(1, 0, 0)] * 2
    while index.sweep():
        pass
    assert len(index) == 2


def test_publishers_of_stores_come_and_go_without_a_trace(index):
    for number in range(100):
        pods = [index.publisher("x"), index.publisher("y")]
        for pod in pods:
            pod.told(Notes(tiers=Tiers(storage=Tier(pool=f"store-{number % 3}"))))
            pod.apply([stored(4), placeholder(9)])
        for pod in pods:
            pod.close()
    while index.sweep():
        pass
    assert len(index) == index.known_hashes == index.blocks("storage") == 0


# --- a random walk beside a model


def test_the_index_agrees_with_sets_of_what_each_of_them_says():
    rng = random.Random(5)
    index = PrefixIndex()
    pods = [index.publisher(str(number)) for number in range(4)]
    pods[0].apply([stored(16, tier="gpu"), removed(*range(16), tier="gpu")])  # teaches the hashes
    chunks = [1, 2, 1, 3]
    said = [{"gpu": set(), "cpu": set(), "storage": set()} for _ in pods]

    def begin(i):
        if i < 3:
            pods[i].told(STORE)
        pods[i].blocks_per_chunk = chunks[i]
        pods[i].apply([stored(1, tier="gpu"), removed(0, tier="gpu")])

    def held(i):
        if i == 3:
            return said[i]
        current = [said[j]["storage"] for j in range(3) if pods[j].standing is Standing.CURRENT]
        return {**said[i], "storage": set().union(*current)}

    def happen(i):
        tier, first = rng.choice(["gpu", "cpu", "storage"]), rng.randrange(16)
        numbers = range(first, min(16, first + rng.randrange(1, 9)))
        shared = tier == "storage" and i < 3
        what = rng.random()
        if what < 0.55:
            new = [number for number in numbers if shared or number not in said[i][tier]]  # there it changes nothing
            pods[i].apply([placeholder(*new, tier=tier)])
            said[i][tier].update(new)
        elif what < 0.95:
            pods[i].apply([removed(*numbers, tier=tier)])
            for member in said[:3] if shared else [said[i]]:
                member[tier].difference_update(numbers)
        elif what < 0.97:
            pods[i].standing = rng.choice([Standing.CURRENT, Standing.CURRENT, Standing.DOUBTED])
        else:
            pods[i].restart()
            if what > 0.99:
                pods[i].close()
                pods[i] = index.publisher(str(i))
            begin(i)
            for blocks in said[i].values():
                blocks.clear()

    for i in range(4):
        begin(i)
    for _ in range(3000):
        happen(rng.randrange(4))
        assert runs(pods, blocks=16) == [expected(held(i), chunk) for i, chunk in enumerate(chunks)]


def expected(held, chunk):
    gpu = next(number for number in range(17) if number not in held["gpu"])
    gained = {"cpu": 0, "storage": 0}
    for start in range(gpu // chunk * chunk, 16 - chunk + 1, chunk):
        tier = next((tier for tier in gained if start + chunk - 1 in held[tier]), None)
        if tier is None:
            break
        gained[tier] += start + chunk - max(start, gpu)
    if sum(gained.values()) < chunk:
        gained = dict.fromkeys(gained, 0)
    return gpu, gained["cpu"], gained["storage"]
