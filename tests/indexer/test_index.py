"""The index under everything at once, against a model that keeps a counter per publisher and tier."""

import random
import struct
import tracemalloc
from collections import Counter
from hashlib import sha256
from itertools import product

import pytest

from indexer.index import MAX_RETIRED, PrefixIndex
from indexer.match import Prompt, match
from indexer.wire import BlockRemoved, BlocksCleared, BlockStored

SIZE = 2
TIERS = ("gpu", "cpu", "storage")


def pack(ids):
    return struct.pack(f"<{len(ids)}I", *ids)


def sweep(index):
    while index.sweep():
        pass


def stored(first_token, blocks=4):
    """A prompt that differs from all others in its first token."""
    ids = [first_token, *range(1, blocks * SIZE)]
    return BlockStored([first_token * 100 + i for i in range(blocks)], None, pack(ids), SIZE, extras={})


def run(index, residency, first_token, blocks=4):
    return match(index, Prompt(pack([first_token, *range(1, blocks * SIZE + 1)])), [residency]).gpu[0]


# --- a lane


def test_a_chain_of_keys_is_added_as_its_keys_are_one_by_one():
    index, twin = PrefixIndex(), PrefixIndex()
    lanes = [(index.open_lane(tier), twin.open_lane(tier)) for tier in ("gpu", "cpu")]
    chains = [[7], [1, 2, 3], [2, 3, 4, 5], [7], [9, 1], [1]]
    for count_copies, keys, (together, apart) in product((True, False), chains, lanes):
        before = [index.masks.get(key, 0) for key in keys]
        assert together.add_chain(keys, count_copies=count_copies) == (before if any(before) else [])
        for key in keys:
            apart.add(key, count_copies=count_copies)
        assert index.masks == twin.masks
        assert (together.held, together.surplus) == (apart.held, apart.surplus)


# --- clears and the sweep


def test_a_cleared_lane_is_gone_at_once_and_swept_later():
    index = PrefixIndex()
    pod, other = index.publisher("pod"), index.publisher("other")
    pod.apply([stored(1), stored(2)])
    other.apply([stored(2)])
    pod.clear()
    assert [run(index, pod, 1), run(index, pod, 2), run(index, other, 2)] == [0, 0, 4]
    assert len(index) == 8
    sweep(index)
    assert len(index) == index.known_hashes == 4
    assert set(index.masks.values()) == {other.bits("gpu")}


def test_a_bit_is_given_out_again_only_when_nothing_has_it():
    index = PrefixIndex()
    pod = index.publisher("pod")
    pod.apply([stored(1)])
    old = pod.bits("gpu")
    pod.apply([BlocksCleared(), stored(2)])
    assert pod.bits("gpu") != old
    assert run(index, pod, 1) == 0
    sweep(index)
    pod.apply([BlocksCleared(), stored(3)])
    assert pod.bits("gpu") == old
    assert [run(index, pod, number) for number in (1, 2, 3)] == [0, 0, 4]


def test_a_bit_that_retires_during_a_pass_waits_for_the_next():
    index = PrefixIndex()
    first, second = index.publisher("first"), index.publisher("second")
    for number in range(1000):
        first.apply([stored(number)])
        second.apply([stored(number)])
    first.clear()
    assert index.sweep(1)
    retired = second.bits("gpu")
    second.clear()
    while first.bits("gpu") != retired:
        first.apply([BlocksCleared(("gpu",)), stored(5)])
        index.sweep(1)
    assert len(index) == 4
    assert [run(index, first, number) for number in (5, 7)] == [4, 0]


def test_a_sweep_does_no_more_than_it_is_told():
    index = PrefixIndex()
    pod = index.publisher("pod")
    for number in range(5000):
        pod.apply([stored(number)])
    pod.clear()
    assert index.sweep(1024)
    assert len(index) == 20_000 - 1024


def test_clears_without_a_sweep_do_not_make_masks_grow_for_ever():
    index = PrefixIndex()
    pod, other = index.publisher("pod"), index.publisher("other")
    other.apply([stored(1)])
    for number in range(5 * MAX_RETIRED):
        pod.apply([stored(1), stored(number + 2), BlocksCleared()])
    assert max(mask.bit_length() for mask in index.masks.values()) <= MAX_RETIRED + 3
    assert len(index) <= (MAX_RETIRED + 2) * 4
    assert run(index, other, 1) == 4


def test_publishers_come_and_go_without_a_trace():
    index = PrefixIndex()
    for number in range(300):
        pod = index.publisher(str(number), f"model-{number % 3}")
        pod.apply([stored(number), stored(1)])
        pod.close()
    sweep(index)
    assert len(index) == index.known_hashes == 0
    assert index.blocks("gpu") == 0


def test_names_that_engines_invent_anew_are_swept():
    """An engine with a random hash seed restarts again and again, while another keeps the same blocks."""
    index = PrefixIndex()
    steady = index.publisher("steady")
    steady.apply([stored(1)])
    for number in range(2, 40):
        pod = index.publisher(str(number))
        pod.apply([BlockStored([number * 100 + i for i in range(4)], None, stored(1).tokens, SIZE, extras={})])
        pod.close()
    sweep(index)
    assert index.known_hashes == 4


def test_blocks_counts_what_publishers_hold():
    index = PrefixIndex()
    for name in "abc":
        index.publisher(name).apply([stored(1)])
    assert (index.blocks("gpu"), index.blocks("cpu"), len(index)) == (12, 0, 4)


# --- memory


def test_a_block_with_64_holders_costs_less_than_300_bytes_in_all():
    index = PrefixIndex()
    pods = [index.publisher(str(number)) for number in range(64)]
    rng = random.Random(1)
    tracemalloc.start()
    try:
        for _ in range(64):
            ids = [rng.randrange(150_000) for _ in range(32 * SIZE)]
            event = BlockStored([rng.getrandbits(64) for _ in range(32)], None, pack(ids), SIZE, extras={})
            for pod in pods:
                pod.apply([event])
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(index) == 64 * 32
    assert used / len(index) < 300


# --- a random walk beside a model


class Model:
    """What one publisher holds: tier → Counter of blocks, a block being (salt, all tokens up to its end)."""

    def __init__(self, seed, chunk):
        self.seed = seed
        self.chunk = chunk
        self.held = {tier: Counter() for tier in TIERS}

    def name(self, block):
        return int.from_bytes(sha256(repr((self.seed, block)).encode()).digest()[:8])

    def expected(self, ids, salt):
        blocks = [(salt, tuple(ids[: end + SIZE])) for end in range(0, len(ids) - SIZE + 1, SIZE)]
        gpu = 0
        while gpu < (len(ids) - 1) // SIZE and self.held["gpu"][blocks[gpu]]:
            gpu += 1
        gained = Counter()
        for start in range(gpu // self.chunk * self.chunk, len(blocks) - self.chunk + 1, self.chunk):
            last = blocks[start + self.chunk - 1]
            tier = next((tier for tier in TIERS[1:] if self.held[tier][last]), None)
            if tier is None:
                break
            gained[tier] += start + self.chunk - max(start, gpu)
        if gained.total() < self.chunk:
            gained.clear()
        return gpu, gained["cpu"], gained["storage"]


class Walk:
    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.index = PrefixIndex()
        # The first two agree on hashes; the third names blocks its own way.
        self.models = [Model(0, 1), Model(0, 2), Model(1, 4)]
        self.pods = [self.open(number) for number in range(3)]

    def open(self, number):
        pod = self.index.publisher(str(number))
        pod.blocks_per_chunk = self.models[number].chunk
        return pod

    def text(self):
        length = self.rng.randrange(0, 17)
        return [self.rng.randrange(2) for _ in range(length)], self.rng.choice(["", "", "tenant"])

    def step(self):
        number = self.rng.randrange(3)
        action = self.rng.choices(
            [self.store, self.store_by_hash, self.remove, self.clear, self.reopen, self.sweep],
            [30, 20, 40, 2, 1, 3],
        )[0]
        action(number, self.models[number], self.pods[number])

    def store(self, number, model, pod):
        ids, salt = self.text()
        blocks = [(salt, tuple(ids[: end + SIZE])) for end in range(0, len(ids) - SIZE + 1, SIZE)]
        if blocks:
            extras = {0: Prompt(b"", salt=salt).extras[0]} if salt else {}
            whole = ids[: len(blocks) * SIZE]
            pod.apply([BlockStored([model.name(block) for block in blocks], None, pack(whole), SIZE, extras=extras)])
            model.held["gpu"].update(blocks)

    def store_by_hash(self, number, model, pod):
        known = [block for held in model.held.values() for block in held.elements()]
        if known:
            block, tier = self.rng.choice(known), self.rng.choice(TIERS)
            pod.apply([BlockStored([model.name(block)], tier=tier)])
            model.held[tier][block] += 1

    def remove(self, number, model, pod):
        tier = self.rng.choice(TIERS)
        known = list(model.held[tier].elements())
        blocks = self.rng.sample(known, min(len(known), self.rng.randrange(4)))
        pod.apply([BlockRemoved([*(model.name(block) for block in blocks), 12345], tier)])
        model.held[tier].subtract(blocks)

    def clear(self, number, model, pod):
        tiers = self.rng.choice([None, ("gpu",), ("gpu", "cpu"), ("storage",)])
        pod.apply([BlocksCleared(tiers)])
        for tier in tiers or TIERS:
            model.held[tier].clear()

    def reopen(self, number, model, pod):
        pod.close()
        self.pods[number] = self.open(number)
        for held in model.held.values():
            held.clear()

    def sweep(self, number, model, pod):
        self.index.sweep(1)

    def check(self):
        ids, salt = self.text()
        found = match(self.index, Prompt(pack(ids), salt=salt), self.pods)
        for i, model in enumerate(self.models):
            assert (found.gpu[i], found.cpu[i], found.storage[i]) == model.expected(ids, salt)
            for tier in TIERS:
                assert self.pods[i].held(tier) == sum(count > 0 for count in model.held[tier].values())


@pytest.mark.parametrize("seed", range(25))
def test_the_index_agrees_with_counting_whatever_happens(seed):
    walk = Walk(seed)
    for _ in range(250):
        walk.step()
        walk.check()
    for pod in walk.pods:
        pod.close()
    sweep(walk.index)
    assert len(walk.index) == walk.index.known_hashes == 0
