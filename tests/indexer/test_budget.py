"""The index's budget of bytes: what is counted, what is forgotten first, and that forgetting never invents anything."""

import struct
import sys
import time
import tracemalloc
from collections import Counter, deque

import pytest

from indexer.budget import capacity, table_bytes
from indexer.match import Prompt, match
from indexer.order import MAX_ASKED
from indexer.parking import MAX_BLOCKS, MAX_BYTES
from indexer.wire import BlockRemoved, BlocksCleared, BlockStored, Notes, Tier, Tiers
from tests.indexer.test_index import Walk

SIZE = 2
BLOCKS = 16
MIB = 1 << 20


def tokens(prompt, blocks=BLOCKS, start=0):
    return struct.pack(f"<{SIZE * blocks}I", prompt, *range(start * SIZE + 1, (start + blocks) * SIZE))


def names(prompt, blocks=BLOCKS, start=0):
    return [(prompt << 20) + start + number for number in range(blocks)]


def stored(prompt, blocks=BLOCKS, **fields):
    return BlockStored(names(prompt, blocks), None, tokens(prompt, blocks), SIZE, extras={}, **fields)


def removed(prompt, blocks=BLOCKS, tier="gpu", start=0):
    return BlockRemoved(names(prompt, blocks, start), tier)


def prompt(number, blocks=BLOCKS):
    """One token longer than the blocks, so that all of them count."""
    return Prompt(tokens(number, blocks) + bytes(4))


def hit(index, pod, number):
    found = match(index, prompt(number), [pod])
    return found.gpu[0], found.cpu[0], found.storage[0]


def sweep(index):
    for _ in range(100_000):
        if not index.sweep():
            return
    pytest.fail("there is no end to cleaning up")


def said(index):
    return sum(index.memory().values())


# --- what is counted


@pytest.mark.parametrize("entries", [1, 10, 100, 700, 5000, 21_845, 21_846])
def test_a_table_is_never_larger_than_what_is_counted_for_its_entries(entries):
    table, order, largest = {}, deque(), 0
    for number in range(7 * entries + 100):
        table[number] = None
        order.append(number)
        if len(order) > entries:
            del table[order.popleft()]
        largest = max(largest, sys.getsizeof(table))
    assert largest <= table_bytes(entries)
    assert table_bytes(entries) <= 120 * entries + 1000


def fill_with_prompts(index):
    pod = index.publisher("pod")
    for number in range(1500):
        pod.apply([stored(number)])


def fill_for_many(index):
    pods = [index.publisher(str(number)) for number in range(24)]
    for number in range(200):
        for pod in pods:
            pod.apply([stored(number)])


def fill_unevenly(index):
    """No two neighbours are held by the same publishers."""
    pods = [index.publisher(str(number)) for number in range(24)]
    for number in range(200):
        for pod in pods:
            pod.apply([stored(number)])
    for at, pod in enumerate(pods):
        pod.apply([removed(number, 1, start=at % BLOCKS) for number in range(200)])


def fill_with_own_hashes(index):
    fill_with_prompts(index)
    other = index.publisher("other")
    for number in range(1500):
        other.apply([BlockStored([-name for name in names(number + 1)], None, tokens(number), SIZE, extras={})])


def fill_with_copies(index):
    fill_with_prompts(index)
    for pod in index.publishers:
        pod.apply([stored(number) for number in range(1500)])


def fill_with_orphans(index):
    pod = index.publisher("pod")
    for number in range(2000):
        pod.apply([BlockStored(names(number), number, tokens(number), SIZE, extras={5: b"image" * 9})])


def fill_and_ask(index):
    index.budget = 1
    index.sweep()
    fill_with_prompts(index)
    for number in range(1400):
        index.asked(prompt(number).keys(SIZE, next(iter(index.publishers)).root))
        if number % 100 == 99:
            index.order.settle(sys.maxsize)


@pytest.mark.parametrize(
    "fill",
    [
        fill_with_prompts,
        fill_for_many,
        fill_unevenly,
        fill_with_own_hashes,
        fill_with_copies,
        fill_with_orphans,
        fill_and_ask,
    ],
)
def test_no_less_is_said_than_is_taken_and_not_much_more(index, fill):
    tracemalloc.start()
    try:
        fill(index)
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert taken <= said(index) <= 2.2 * taken


def test_the_capacity_of_a_budget_is_in_the_range_of_what_is_measured():
    for budget in (64 * MIB, 1024 * MIB, 2048 * MIB, 4096 * MIB):
        assert 150 < budget / capacity(budget) < 500


# --- keeping to it


def test_what_is_said_stays_within_the_budget(index):
    index.budget = 8 * MIB
    pods = [index.publisher(str(number)) for number in range(4)]
    for number in range(6000):
        pods[number % 4].apply([stored(number)])
        if number % 50 == 0:
            sweep(index)
            assert said(index) <= index.budget
    assert index.forgotten > 30_000
    assert len(index) + index.forgotten == 6000 * BLOCKS
    assert len(index) > capacity(8 * MIB, 4) // 2
    assert index.known_hashes <= len(index) + 2 * (1 << 15)
    assert sum(pod.held("gpu") for pod in pods) == len(index)


def test_a_flood_between_two_sweeps_does_not_outgrow_the_budget(index, pod):
    index.budget = 8 * MIB
    sweep(index)
    for number in range(6000):
        pod.apply([stored(number)])
        if number == 1500:
            index.sweep()
    assert len(index) < 1.5 * capacity(8 * MIB, 1)


def test_without_a_budget_nothing_is_forgotten(index, pod):
    pod.apply([stored(number) for number in range(3000)])
    sweep(index)
    assert (len(index), index.forgotten) == (3000 * BLOCKS, 0)


def test_below_the_budget_nothing_is_forgotten(index, pod):
    index.budget = 64 * MIB
    for number in range(1000):
        pod.apply([stored(number)])
        index.sweep()
    assert (len(index), index.forgotten) == (1000 * BLOCKS, 0)


def test_a_publisher_that_gives_the_same_blocks_ever_new_names_is_forgotten_alone(index, pod):
    index.budget = 16 * MIB
    honest = index.publisher("honest")
    honest.apply([stored(number) for number in range(100)])
    for number in range(1, 10_000):
        pod.apply([BlockStored([-name for name in names(number)], None, tokens(0), SIZE, extras={})])
        if number % 50 == 0:
            sweep(index)
    assert said(index) <= index.budget
    assert honest.held("gpu") == 100 * BLOCKS


# --- in which order


def fill_slowly(index, pod, count, ask=()):
    for number in range(count):
        pod.apply([stored(number)])
        for wanted in ask:
            match(index, prompt(wanted), [pod])
        if number % 10 == 0:
            sweep(index)


def test_the_oldest_are_forgotten_first(index, pod):
    index.budget = 4 * MIB
    fill_slowly(index, pod, 3000)
    kept = [hit(index, pod, number)[0] > 0 for number in range(3000)]
    first = kept.index(True)
    assert first > 1000
    assert all(kept[first:])


def test_what_is_asked_for_all_the_time_outlives_what_is_newer(index, pod):
    index.budget = 4 * MIB
    fill_slowly(index, pod, 3000, ask=[0, 3])
    assert [hit(index, pod, number)[0] for number in (0, 1, 2, 3)] == [BLOCKS, 0, 0, BLOCKS]


def test_looking_something_up_changes_no_order(index, pod):
    index.budget = 1
    index.sweep()
    pod.apply([stored(number) for number in range(10)])
    before = list(index.masks)
    for number in (3, 1, 4):
        match(index, prompt(number), [pod])
    assert list(index.masks) == before


def test_the_tail_of_a_prompt_goes_before_its_head(index, pod):
    index.budget = 4 * MIB
    pod.apply([stored(1, blocks=20_000)])
    index._memory.weigh(index.budget)
    match(index, prompt(1, 20_000), [pod])
    sweep(index)
    assert 1000 < len(index) < 19_000
    assert match(index, prompt(1, 20_000), [pod]).gpu[0] == len(index)


def test_of_the_oldest_those_in_more_places_stay(index, pod):
    others = [index.publisher(str(number)) for number in range(3)]
    for number in range(30):
        pod.apply([stored(number)])
        if number % 3 == 0:
            others[0].apply([stored(number)])
    index.make_room()
    assert [number for number in range(30) if hit(index, pod, number)[0]] == list(range(0, 30, 3))


def test_of_the_oldest_those_in_hbm_stay(index, pod):
    for number in range(30):
        pod.apply([stored(number, tier="cpu" if number % 3 else "gpu")])
    index.make_room()
    assert [number for number in range(30) if any(hit(index, pod, number))] == list(range(0, 30, 3))


def test_requests_that_wait_to_be_counted_are_bounded(index, pod):
    index.budget = 1
    index.sweep()
    pod.apply([stored(0)])
    for _ in range(2 * MAX_ASKED // BLOCKS):
        match(index, prompt(0), [pod])
    assert index.order.held <= MAX_ASKED


# --- what comes after


def forget(index, pod, number, blocks=range(BLOCKS)):
    keys = prompt(number).keys(SIZE, pod.root)
    index.forget_blocks([keys[block] for block in blocks if keys[block] in index.masks])


def test_a_forgotten_block_is_held_by_nobody_and_its_removal_is_no_news(index, pod):
    other = index.publisher("other")
    for holder in (pod, other):
        holder.apply([stored(1), stored(1, tier="cpu")])
    forget(index, pod, 1)
    sweep(index)
    assert [hit(index, holder, 1) for holder in (pod, other)] == [(0, 0, 0)] * 2
    assert [holder.held(tier) for holder in (pod, other) for tier in ("gpu", "cpu")] == [0] * 4
    pod.apply([removed(1), stored(1)])
    other.apply([removed(1, tier="cpu")])
    assert [hit(index, holder, 1) for holder in (pod, other)] == [(BLOCKS, 0, 0), (0, 0, 0)]


def test_copies_of_a_forgotten_block_are_forgotten_too(index, pod):
    pod.apply([stored(1), stored(1), stored(1)])
    forget(index, pod, 1)
    pod.apply([stored(1), removed(1)])
    assert (hit(index, pod, 1), pod.held("gpu")) == ((0, 0, 0), 0)


def test_a_shared_store_forgets_for_all(index, pod):
    other = index.publisher("other")
    for member in (pod, other):
        member.told(Notes(tiers=Tiers(storage=Tier(pool="nfs"))))
    pod.apply([stored(1, tier="storage")])
    other.apply([stored(2, tier="storage")])
    forget(index, pod, 1)
    assert [hit(index, member, number) for member in (pod, other) for number in (1, 2)] == [
        (0, 0, 0),
        (0, 0, BLOCKS),
    ] * 2
    assert pod.held("storage") == BLOCKS


def test_hashes_of_forgotten_blocks_are_forgotten_too_and_those_of_others_are_not(index, pod):
    index.budget = 4 * MIB
    fill_slowly(index, pod, 5000)
    assert len(index) <= index.known_hashes < 2 * len(index) + 2 * (1 << 15)
    pod.apply([removed(number) for number in range(5000)])
    assert len(index) == pod.held("gpu") == 0


def test_a_child_of_a_forgotten_block_waits_until_its_parent_is_told_again(index, pod):
    pod.apply([stored(1)])
    forget(index, pod, 1)
    sweep(index)
    index._hashes[""].forget_unused(names(1))
    child = BlockStored(names(1, 2, BLOCKS), names(1)[-1], tokens(1, BLOCKS + 2)[-16:], SIZE, extras={})
    pod.apply([child])
    assert (pod.parked, hit(index, pod, 1)) == (2, (0, 0, 0))
    pod.apply([stored(1)])
    assert pod.parked == 0
    assert match(index, prompt(1, BLOCKS + 2), [pod]).gpu[0] == BLOCKS + 2


def test_a_load_is_not_expected_where_a_forgotten_block_may_make_it_too_short(index, pod):
    """vLLM takes nothing from below HBM unless it gains a whole chunk."""
    pod.blocks_per_chunk = 8
    pod.apply([stored(1, blocks=12), stored(1, tier="cpu")])
    assert hit(index, pod, 1) == (12, 0, 0)
    forget(index, pod, 1, [5])
    assert sum(hit(index, pod, 1)) <= 12
    pod.apply([BlocksCleared(), stored(1, blocks=5), stored(1, tier="cpu")])
    assert sum(hit(index, pod, 1)) == 16


def test_a_clear_during_a_round_of_forgetting_leaves_nothing_wrong(index, pod):
    index.budget = 4 * MIB
    other = index.publisher("other")
    for number in range(1200):
        pod.apply([stored(number)])
        other.apply([stored(number)])
    assert index.sweep(1)
    pod.clear()
    pod.apply([stored(0)])
    sweep(index)
    assert (pod.held("gpu"), hit(index, pod, 0)[0]) == (BLOCKS, BLOCKS)
    assert other.held("gpu") == sum(bool(mask & other.bits("gpu")) for mask in index.masks.values())


class Forgetting(Walk):
    """Beside its model, which forgets nothing."""

    def sweep(self, number, model, pod):
        known = list(self.index.masks)
        self.index.forget_blocks(self.rng.sample(known, self.rng.randrange(len(known) // 2 + 1)))
        self.index.sweep(1)

    def check(self):
        ids, salt = self.text()
        found = match(self.index, Prompt(struct.pack(f"<{len(ids)}I", *ids), salt=salt), self.pods)
        for i, model in enumerate(self.models):
            gpu, cpu, storage = model.expected(ids, salt)
            assert found.gpu[i] <= gpu
            assert found.blocks(i) <= gpu + cpu + storage
            for tier, held in model.held.items():
                assert self.pods[i].held(tier) <= sum(count > 0 for count in held.values())
        counted = Counter(bit for mask in self.index.masks.values() for bit in self.index.lanes if mask & bit)
        assert counted == Counter({bit: lane.held for bit, lane in self.index.lanes.items() if lane.held})


@pytest.mark.parametrize("seed", range(25))
def test_forgetting_at_any_moment_never_makes_a_prediction_too_high(seed):
    walk = Forgetting(seed)
    for _ in range(250):
        walk.step()
        walk.check()
    for pod in walk.pods:
        pod.close()
    sweep(walk.index)
    assert len(walk.index) == walk.index.known_hashes == 0


def test_a_large_publisher_leaves_without_anybody_waiting_for_it(index):
    """Neither its departure, nor an arrival in the middle of cleaning up, nor a slice of that takes long."""
    large = index.publisher("large")
    large.apply(stored(number, blocks=1024) for number in range(200))
    started = time.process_time()
    large.close()
    closed = time.process_time() - started
    index.sweep()  # makes a list of all keys
    slices = []
    for number in range(10):
        started = time.process_time()
        index.publisher(str(number)).apply([stored(number)])
        assert index.sweep()
        slices.append(time.process_time() - started)
    assert closed < 0.01
    assert min(slices) < 0.01


# --- late joiners and orphans


def orphan(number, blocks=64):
    """A child whose parent is never told."""
    return BlockStored(names(number, blocks), -number - 1, tokens(number, blocks), SIZE, extras={})


def test_orphans_take_bounded_memory_and_the_oldest_make_room(index, pod):
    pod.apply(orphan(number) for number in range(1_000_000 // 64))
    assert pod.parked == MAX_BLOCKS
    assert index.memory()["parking"] < 8 * MIB
    assert pod.dropped >= 2 * (1_000_000 - MAX_BLOCKS) - 128  # the claims and the tokens
    assert pod.counted()["dropped"] == pod.dropped
    assert (len(index), index.known_hashes) == (0, 0)


def test_orphans_are_bounded_in_bytes_however_large_a_block_is(index, pod):
    large = MAX_BYTES // 16
    for number in range(64):
        pod.apply([BlockStored([number], -number - 1, bytes(large), large // 4, extras={})])
    assert index.memory()["parking"] < 1.1 * MAX_BYTES


def test_the_orphans_of_all_publishers_keep_to_their_part_of_the_budget(index):
    index.budget = 64 * MIB
    pods = [index.publisher(str(number)) for number in range(8)]
    for pod in pods:
        pod.apply([orphan(number) for number in range(MAX_BLOCKS // 64)])
        pod.apply([stored(10**6 + number) for number in range(500)])
    sweep(index)
    assert index.memory()["parking"] <= index.budget // 8
    assert all(pod.parked for pod in pods)
    assert len(index) == 500 * BLOCKS


def test_children_that_come_before_their_parents_are_joined_in_any_order(index, pod):
    """A prompt in pieces of four blocks, the last piece first, among orphans that never find a parent."""
    pieces = [
        BlockStored(
            names(1, 4, start),
            names(1)[start - 1] if start else None,
            tokens(1)[start * 4 * SIZE : (start + 4) * 4 * SIZE],
            SIZE,
            extras={},
        )
        for start in range(0, BLOCKS, 4)
    ]
    for at, piece in enumerate(reversed(pieces)):
        pod.apply([orphan(10 + at), piece])
    assert hit(index, pod, 1) == (BLOCKS, 0, 0)
    assert pod.parked == 4 * 64


def test_a_late_joiner_knows_the_newest_orphans_once_the_parents_are_told(index, pod):
    """Its parent's event was lost, and comes again with a snapshot."""
    for number in range(3 * MAX_BLOCKS // BLOCKS):
        whole = stored(number, blocks=2 * BLOCKS)
        half = len(whole.tokens) // 2
        pod.apply([BlockStored(whole.hashes[BLOCKS:], whole.hashes[BLOCKS - 1], whole.tokens[half:], SIZE, extras={})])
    newest = 3 * MAX_BLOCKS // BLOCKS - 1
    pod.apply([stored(0), stored(newest)])
    assert match(index, prompt(newest, 2 * BLOCKS), [pod]).gpu[0] == 2 * BLOCKS
    assert match(index, prompt(0, 2 * BLOCKS), [pod]).gpu[0] == BLOCKS


def test_what_a_lane_claims_goes_with_it(index, pod):
    pod.apply([orphan(1), BlockStored([7, 8], tier="cpu")])
    pod.clear(["gpu"])
    assert pod.parked == 2
    pod.clear(["cpu"])
    assert pod.parked == 0
