import struct

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from indexer.keys import AT_ONCE, MAX_EXTRA, block_key, chain, encode_extras, root_key

ids = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def tokens(values):
    return struct.pack(f"<{len(values)}I", *values)


def test_the_definition():
    text = tokens(range(8))
    first = xxhash.xxh3_64_intdigest(text[:16], root_key("m"))
    second = xxhash.xxh3_64_intdigest(text[16:] + b"extra", first)
    assert root_key("m") == xxhash.xxh3_64_intdigest(b"m")
    assert chain(text, 4, root_key("m"), {1: b"extra"}) == [first, second]


def test_a_partial_block_has_no_key():
    assert chain(tokens(range(7)), 4, 0) == chain(tokens(range(4)), 4, 0)
    assert chain(b"", 4, 0) == chain(tokens(range(3)), 4, 0) == []


@given(ids, st.integers(1, 8), st.integers(0, 2**64 - 1))
def test_a_chain_goes_on_from_its_parent(values, block_size, root):
    whole = chain(tokens(values), block_size, root)
    for cut in range(1, len(whole)):
        head, rest = tokens(values[: cut * block_size]), tokens(values[cut * block_size :])
        begin = chain(head, block_size, root)
        assert whole == begin + chain(rest, block_size, begin[-1])


@given(ids, st.integers(1, 8))
def test_one_block_at_a_time_is_the_same(values, block_size):
    key, keys = 5, []
    for start in range(0, len(values) - block_size + 1, block_size):
        key = block_key(tokens(values[start : start + block_size]), key)
        keys.append(key)
    assert chain(tokens(values), block_size, 5) == keys


@pytest.mark.parametrize("blocks", [1, 2, AT_ONCE - 1, AT_ONCE, AT_ONCE + 1, 2 * AT_ONCE, 3 * AT_ONCE + 1])
@pytest.mark.parametrize("more", [0, 1, 3])
def test_so_it_is_however_many_blocks_there_are(blocks, more):
    extras = {0: b"salt", blocks - 1: b"image"}
    text, size = tokens(range(1000, 1000 + 4 * blocks + more)), 16
    plain, tainted = [5], [5]
    for number in range(blocks):
        block = text[number * size : (number + 1) * size]
        plain.append(block_key(block, plain[-1]))
        tainted.append(block_key(block, tainted[-1], extras.get(number, b"")))
    assert chain(text, 4, 5) == plain[1:]
    assert chain(text, 4, 5, extras) == tainted[1:]


def test_everything_that_tells_blocks_apart_changes_their_key_and_all_after():
    text = tokens(range(12))
    plain = chain(text, 4, root_key("m"))
    for other in (
        chain(text, 4, root_key("other")),
        chain(text, 4, root_key("m"), {0: encode_extras(["salt"])}),
        chain(tokens([9, *range(1, 12)]), 4, root_key("m")),
    ):
        assert not set(plain) & set(other)
    tainted = chain(text, 4, root_key("m"), {1: encode_extras(["image"])})
    assert tainted[0] == plain[0]
    assert not set(tainted[1:]) & set(plain[1:])


def test_extras_tell_form_and_order_apart():
    forms = [["a", "b"], ["b", "a"], ["ab"], [["a", "b"]], [["a", 16]], ["a"], [b"a"], [1]]
    assert len({encode_extras(form) for form in forms}) == len(forms)
    assert encode_extras([("a", 16)]) == encode_extras([["a", 16]])


def test_extras_of_any_length_are_kept_in_a_few_bytes():
    long = ["s" * 1_000_000, "s" * 1_000_001, ["s" * 1_000_000], "t" + "s" * 999_999]
    encoded = {encode_extras([item]) for item in long}
    assert len(encoded) == len(long)
    assert max(map(len, encoded)) <= MAX_EXTRA


def test_names_of_any_text_have_roots():
    assert len({root_key(name) for name in ("", "m", "é", "\ud800")}) == 4
