from __future__ import annotations

import pytest

from connector.events import AllBlocksCleared, BlockRemoved
from connector.sim.blocks import Block, BlockPool
from connector.sim.hashing import BlockHash, external_hash


def name(text: str) -> BlockHash:
    return BlockHash(text.encode().rjust(32))


def hold(pool: BlockPool, text: str) -> list[Block]:
    """Take a block per letter and make it addressable by that letter."""
    blocks = pool.take(len(text))
    pool.cache(blocks, map(name, text))
    return blocks


def removed(pool: BlockPool) -> str:
    """The letters of the removals so far, in order."""
    letters = {external_hash(name(letter)): letter for letter in "abcdefghij"}
    return "".join(letters[event.block_hashes[0]] for event in pool.events if isinstance(event, BlockRemoved))


def test_one_block_is_the_null_block() -> None:
    assert BlockPool(5).free_count == 4


def test_a_freed_block_can_be_hit_until_it_is_taken_again() -> None:
    pool = BlockPool(4)
    pool.free(reversed(hold(pool, "ab")))
    assert len(pool.hits([name("a"), name("b"), name("c")], limit=9)) == 2
    pool.take(2)
    assert (len(pool.hits([name("a"), name("b")], limit=9)), removed(pool)) == (1, "b")


def test_the_tail_of_what_was_freed_first_is_evicted_first() -> None:
    pool = BlockPool(7)
    first, second = hold(pool, "abc"), hold(pool, "def")
    pool.free(reversed(first))
    pool.free(reversed(second))
    pool.take(5)
    assert removed(pool) == "cbafe"


def test_blocks_without_a_hash_are_reused_before_all_others_in_the_order_they_were_freed() -> None:
    pool = BlockPool(6)
    kept = hold(pool, "a")
    plain = pool.take(2)
    pool.free([*plain, *kept])
    assert pool.take(2) == plain


def test_a_hit_takes_the_block_out_of_the_queue_and_back_to_its_end() -> None:
    pool = BlockPool(4)
    a, b, _ = hold(pool, "abc")
    pool.free([a, b])
    pool.touch([a])
    assert pool.free_count == 1
    pool.free([a])
    pool.take(2)
    assert removed(pool) == "ba"


def test_shared_blocks_stay_until_the_last_user_frees_them() -> None:
    pool = BlockPool(3)
    blocks = hold(pool, "a")
    pool.touch(blocks)
    pool.free(blocks)
    assert pool.free_count == 1
    pool.free(blocks)
    assert pool.free_count == 2


def test_each_copy_of_a_hash_is_removed_on_its_own_and_the_oldest_is_hit_first() -> None:
    pool = BlockPool(3)
    first, second = hold(pool, "a"), hold(pool, "a")
    assert pool.hits([name("a")], limit=1) == first
    assert pool.residency()[external_hash(name("a"))] == 2
    pool.free(first)
    pool.take(1)
    assert (pool.hits([name("a")], limit=1), removed(pool)) == (second, "a")


def test_hits_stop_at_the_limit_and_at_the_first_gap() -> None:
    pool = BlockPool(5)
    hold(pool, "ac")
    assert len(pool.hits([name("a"), name("b"), name("c")], limit=9)) == 1
    assert pool.hits([name("a")], limit=0) == []


def test_clearing_forgets_everything_but_only_when_nobody_holds_a_block() -> None:
    pool = BlockPool(4)
    blocks = hold(pool, "ab")
    assert not pool.clear()
    pool.free(reversed(blocks))
    assert pool.clear()
    assert not pool.residency()
    pool.take(3)
    assert pool.events == [AllBlocksCleared(["GPU"])]


def test_usage_is_the_share_that_requests_hold() -> None:
    pool = BlockPool(5)
    pool.free(hold(pool, "a"))
    pool.take(1)
    assert pool.usage == pytest.approx(0.25)
