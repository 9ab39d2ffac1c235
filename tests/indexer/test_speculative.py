import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.speculative import STRIDE, Speculation

A, B = "10.0.0.1:8000", "10.0.0.2:8000"
KEYS = list(range(100, 120))


def run(speculation: Speculation, holder: str, keys: list[int], start: int) -> int:
    return speculation.runs(keys, {holder: 1}, [0, start]).get(1, 0)


def test_a_pick_extends_the_run_of_the_picked_endpoint_only() -> None:
    speculation = Speculation()
    speculation.add("r", A, KEYS[:10], now=0.0)
    assert run(speculation, A, KEYS, 0) == 10
    assert run(speculation, A, KEYS, 4) == 6
    assert run(speculation, A, KEYS, 10) == 0
    assert run(speculation, B, KEYS, 0) == 0


def test_only_what_follows_the_proven_run_need_be_noted() -> None:
    speculation = Speculation()
    speculation.add("r", A, KEYS, now=0.0, start=6)
    assert run(speculation, A, KEYS, 6) == 14
    assert run(speculation, A, KEYS, 0) == 0


def test_each_holder_has_a_run_of_its_own_from_where_its_proven_one_ends() -> None:
    speculation = Speculation()
    speculation.add("r1", A, KEYS[:10], now=0.0)
    speculation.add("r2", B, KEYS, now=0.0, start=5)
    speculation.add("r3", "gone", KEYS, now=0.0)
    columns = {A: 0, B: 2, "idle": 1}
    assert speculation.runs(KEYS, columns, [2, 0, 5]) == {0: 8, 2: 15}
    assert speculation.runs(KEYS, columns, [10, 0, 4]) == {}


@pytest.mark.parametrize("start", [10, 64, 65, 80, 300])
def test_a_long_prompt_noted_from_some_block_on_is_found_from_there(start: int) -> None:
    speculation, keys = Speculation(), list(range(1, 1001))
    speculation.add("r", A, keys, now=0.0, start=start)
    assert run(speculation, A, keys, start) > 1000 - start - STRIDE
    speculation.drop("r")
    assert speculation.keys == 0


def test_another_prompt_with_the_same_beginning_shares_that() -> None:
    speculation = Speculation()
    speculation.add("r", A, KEYS, now=0.0)
    assert run(speculation, A, [*KEYS[:7], 1, 2, 3], 0) == 7


def test_two_requests_are_counted_so_the_end_of_one_leaves_the_other() -> None:
    speculation = Speculation()
    speculation.add("r1", A, KEYS[:10], now=0.0)
    speculation.add("r2", A, KEYS, now=0.0)
    speculation.drop("r2")
    assert run(speculation, A, KEYS, 0) == 10
    speculation.drop("r1")
    assert run(speculation, A, KEYS, 0) == 0
    assert (len(speculation), speculation.keys) == (0, 0)


def test_dropping_twice_or_an_unknown_request_changes_nothing() -> None:
    speculation = Speculation()
    speculation.add("r1", A, KEYS, now=0.0)
    speculation.drop("other")
    speculation.drop("r1")
    speculation.drop("r1")
    assert speculation.keys == 0


def test_notes_expire() -> None:
    speculation = Speculation(time_to_live=2.0)
    speculation.add("r1", A, KEYS[:5], now=0.0)
    speculation.add("r2", B, KEYS, now=1.5)
    speculation.expire(1.9)
    assert run(speculation, A, KEYS, 0) == 5
    speculation.expire(2.0)
    assert run(speculation, A, KEYS, 0) == 0
    assert run(speculation, B, KEYS, 0) == 20


def test_an_endpoint_that_is_gone_has_no_notes() -> None:
    speculation = Speculation()
    speculation.add("r1", A, KEYS, now=0.0)
    speculation.add("r1", B, KEYS[:3], now=0.0)
    speculation.add("r2", A, KEYS, now=0.0)
    speculation.forget(A)
    assert run(speculation, A, KEYS, 0) == 0
    assert run(speculation, B, KEYS, 0) == 3
    assert (len(speculation), speculation.keys) == (1, 3)


def test_there_is_a_limit() -> None:
    speculation = Speculation(max_keys=25)
    speculation.add("r1", A, KEYS, now=0.0)
    speculation.add("r2", B, KEYS, now=0.0)
    assert (speculation.keys, speculation.dropped) == (20, 1)
    assert run(speculation, B, KEYS, 0) == 0


@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "drop", "forget", "expire"]), st.integers(0, 5), st.integers(0, 20)),
        max_size=40,
    )
)
def test_what_is_noted_is_exactly_what_runs(operations: list[tuple[str, int, int]]) -> None:
    speculation, model, now = Speculation(5.0), {}, 0.0
    for operation, number, length in operations:
        now += 1.0
        holder = (A, B)[number % 2]
        if operation == "add":
            speculation.drop(number)
            speculation.add(number, holder, KEYS[:length], now)
            model[number] = (holder, length, now + 5.0)
        elif operation == "drop":
            speculation.drop(number)
            model.pop(number, None)
        elif operation == "forget":
            speculation.forget(holder)
            model = {r: note for r, note in model.items() if note[0] != holder}
        else:
            speculation.expire(now)
            model = {r: note for r, note in model.items() if note[2] > now}
        for each in (A, B):
            longest = max((length for holder, length, _ in model.values() if holder == each), default=0)
            assert run(speculation, each, KEYS, 0) == longest
    assert speculation.keys == sum(length for _, length, _ in model.values())


@pytest.mark.parametrize("shared", [1, 63, 64, 65, 80, 81, 500, 999, 1000])
@pytest.mark.parametrize("start", [0, 10, 64, 70, 300])
def test_a_long_prompt_is_noted_by_samples_and_its_run_is_never_too_long(shared: int, start: int) -> None:
    speculation = Speculation()
    noted = list(range(1, 1001))
    speculation.add("request", "pod", noted, 0.0)
    assert speculation.keys < 130
    asked = noted[:shared] + [-i for i in range(1, 1001 - shared)]
    found = run(speculation, "pod", asked, start)
    assert found <= max(0, shared - start)
    assert found >= max(0, shared - start - STRIDE)
    speculation.drop("request")
    assert (speculation.keys, run(speculation, "pod", asked, start)) == (0, 0)
