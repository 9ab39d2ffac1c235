from indexer.sequence import Gap, SequenceTracker, Verdict


def tracker(*seqs: int) -> SequenceTracker:
    numbers = SequenceTracker()
    for seq in seqs:
        numbers.receive(seq)
        numbers.accept(seq)
    return numbers


def test_numbers_in_order_are_applied() -> None:
    numbers = tracker(0, 1, 2)
    assert numbers.receive(3) is Verdict.APPLY
    assert numbers.complete


def test_the_first_number_may_be_any_but_then_the_picture_is_not_complete() -> None:
    numbers = SequenceTracker()
    assert numbers.receive(500) is Verdict.APPLY
    numbers.accept(500)
    assert (numbers.since, numbers.last, numbers.complete) == (500, 500, False)


def test_a_skip_is_a_gap_until_it_is_accounted_for() -> None:
    numbers = tracker(0, 1)
    assert numbers.receive(5) == Gap(2, 4)
    assert Gap(2, 4).batches == 3
    assert numbers.receive(6) == Gap(2, 5)
    numbers.accept(6)
    assert numbers.receive(7) is Verdict.APPLY
    assert numbers.since == 6


def test_the_same_number_again_is_a_duplicate_and_a_lower_one_a_restart() -> None:
    numbers = tracker(0, 1, 2)
    assert numbers.receive(2) is Verdict.DUPLICATE
    assert numbers.receive(1) is Verdict.RESTART


def test_live_numbers_that_a_replay_has_brought_already_are_duplicates() -> None:
    numbers = tracker(0, 1)
    assert numbers.receive(4) == Gap(2, 3)
    for seq in (2, 3, 4, 5, 6):
        assert numbers.replayed(seq) is Verdict.APPLY
        numbers.accept(seq)
    assert numbers.receive(5) is Verdict.DUPLICATE
    assert numbers.receive(6) is Verdict.DUPLICATE
    assert numbers.receive(7) is Verdict.APPLY


def test_a_replay_may_repeat_and_may_have_holes() -> None:
    numbers = tracker(0, 1, 2)
    assert numbers.replayed(1) is Verdict.DUPLICATE
    assert numbers.replayed(4) == Gap(3, 3)


def test_after_a_broken_connection_only_the_next_number_proves_the_same_life() -> None:
    numbers = tracker(0, 1, 2)
    numbers.doubt()
    assert numbers.receive(2) is Verdict.RESTART
    numbers.doubt()
    assert numbers.receive(3) is Verdict.APPLY


def test_what_was_thrown_away_no_longer_counts() -> None:
    numbers = tracker(0, 1, 2)
    numbers.skip_to(3)
    assert not numbers.complete
    assert numbers.receive(3) is Verdict.APPLY
    numbers.accept(3)
    assert numbers.since == 3


def test_a_snapshot_accounts_for_all_numbers_up_to_its_own() -> None:
    numbers = SequenceTracker()
    numbers.accept_all(7)
    assert (numbers.complete, numbers.last) == (True, 7)
    assert numbers.receive(5) is Verdict.DUPLICATE
    assert numbers.receive(8) is Verdict.APPLY
    assert numbers.receive(10) == Gap(8, 9)


def test_a_publisher_that_has_published_nothing_is_known_completely() -> None:
    numbers = SequenceTracker()
    numbers.skip_to(0)
    assert numbers.complete
    assert numbers.receive(0) is Verdict.APPLY
    assert numbers.receive(2) == Gap(0, 1)


def test_a_rebuilt_picture_takes_over_what_was_heard_live() -> None:
    heard, rebuilt = tracker(3, 4, 5), tracker(0, 1, 2, 3, 4, 5, 6, 7)
    rebuilt.succeed(heard)
    assert rebuilt.receive(6) is Verdict.DUPLICATE
    assert rebuilt.receive(5) is Verdict.RESTART


def test_a_rebuilt_picture_that_ends_lower_is_of_a_new_life() -> None:
    heard, rebuilt = tracker(90, 91), tracker(0, 1, 2)
    rebuilt.succeed(heard)
    assert rebuilt.receive(2) is Verdict.DUPLICATE
    assert rebuilt.receive(3) is Verdict.APPLY
