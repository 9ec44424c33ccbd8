"""Whoever asks for what in which order: all of it is sent once, and what failed again at the end."""

from collections import Counter
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from vllm_locust.work import Item, Work

CLASSES = ("Chat", "Completions", "Other")
amounts = st.dictionaries(st.sampled_from(CLASSES), st.integers(0, 40), min_size=1)
ranks = st.integers(1, 7)
chances = st.randoms(use_true_random=False)


def first_of(numbers: dict[str, int]) -> Counter[tuple[str, int]]:
    """Return the requests that there are to be."""
    return Counter((name, index) for name, number in numbers.items() for index in range(number))


def of(items: list[Item]) -> Counter[tuple[str, int]]:
    return Counter((item.user_class, item.index) for item in items)


# Every request once


@given(amounts, ranks, chances)
def test_ranks_together_send_each_request_once_whoever_asks_for_what(
    numbers: dict[str, int], count: int, chance: Random
) -> None:
    works = [Work(rank, count, amounts=numbers) for rank in range(count)]
    left, taken = list(works), []
    while left:
        work = chance.choice(left)
        item = work.take(chance.choice(CLASSES))  # a class of which there may be none helps the others
        if item is None:
            assert work.done
            left.remove(work)
        else:
            assert not work.done
            taken.append(item)
            work.end(item, failed=False)
    assert of(taken) == first_of(numbers)
    assert all(work.take(name) is None for work in works for name in CLASSES)


@given(amounts, ranks)
def test_a_class_sends_its_own_requests_in_their_order_before_it_helps(numbers: dict[str, int], count: int) -> None:
    for rank in range(count):
        work = Work(rank, count, amounts=numbers)
        own = list(range(rank, numbers.get("Chat", 0), count))
        items = [item for _ in own if (item := work.take("Chat")) is not None]
        assert [(item.user_class, item.index) for item in items] == [("Chat", index) for index in own]
        helped = work.take("Chat")
        assert helped is None or helped.user_class != "Chat"


@given(ranks, st.lists(st.sampled_from(CLASSES), max_size=60))
def test_where_there_is_no_end_a_rank_takes_its_stripe_of_each_class(count: int, asked: list[str]) -> None:
    for rank in range(count):
        work = Work(rank, count)
        taken = [work.take(name) for name in asked]
        places = Counter[str]()
        for name, item in zip(asked, taken, strict=True):
            assert item == Item(name, rank + places[name] * count)
            places[name] += 1
        assert work.taken == places
        assert not work.done


# Heirs


@given(amounts, ranks, chances)
def test_heirs_go_on_after_the_last_request_that_was_reported(
    numbers: dict[str, int], count: int, chance: Random
) -> None:
    """What a worker took after its last report may have been sent, and its heir sends it again; nothing is left out."""
    taken, repeated = list[Item](), list[Item]()
    for rank in range(count):
        work, reported, since = Work(rank, count, amounts=numbers), {}, list[Item]()
        while (item := work.take(chance.choice(CLASSES))) is not None:
            taken.append(item)
            since.append(item)
            if chance.random() < 0.3:
                reported, since = dict(work.taken), []
            if chance.random() < 0.1:
                repeated += since
                work, since = Work(rank, count, amounts=numbers, taken=reported), []
                assert work.taken == reported
    assert of(taken) == first_of(numbers) + of(repeated)


def test_an_heir_leaves_what_it_was_told_as_it_is() -> None:
    reported = {"Chat": 2}
    heir = Work(1, 3, taken=reported)
    assert heir.take("Chat") == Item("Chat", 7)
    assert reported == {"Chat": 2}
    assert heir.taken == {"Chat": 3}


@given(amounts, ranks, chances)
def test_an_heir_of_all_that_was_taken_is_done(numbers: dict[str, int], count: int, chance: Random) -> None:
    work = Work(0, count, amounts=numbers)
    while work.take(chance.choice(CLASSES)) is not None:
        pass
    heir = Work(0, count, amounts=numbers, taken=work.taken)
    assert heir.done
    assert heir.take("Chat") is None


@given(ranks, st.lists(st.integers(1, 100), unique=True, max_size=5), st.integers(1, 50))
def test_workers_that_joined_late_have_spaces_of_their_own(count: int, late: list[int], requests: int) -> None:
    works = [Work(rank, count) for rank in range(count)] + [Work(0, count, late=number) for number in late]
    taken = [item.index for work in works for _ in range(requests) if (item := work.take("Chat")) is not None]
    assert len(set(taken)) == len(taken) == requests * len(works)
    assert all(index < 2**63 for index in taken)


# What failed


@given(amounts, st.integers(0, 3), st.integers(1, 4), st.sampled_from([0.0, 0.3, 1.0]), chances)
def test_what_failed_is_asked_again_when_all_else_has_ended_and_no_more_often_than_was_said(
    numbers: dict[str, int], retries: int, users: int, failing: float, chance: Random
) -> None:
    """`done` says when there is nothing left, and not before."""
    work = Work(amounts=numbers, retries=retries)
    asked, failed, in_flight = Counter[tuple[str, int]](), Counter[tuple[str, int]](), list[Item]()
    while True:
        unsent = first_of(numbers) - asked
        due_again = sum(1 for key, times in failed.items() if times == asked[key] and times <= retries)
        assert work.done == (not unsent and not in_flight and not due_again)
        assert work.idle == (not in_flight)
        if work.done:
            break
        asks = not in_flight or (len(in_flight) < users and chance.random() < 0.6)
        item = work.take(chance.choice(CLASSES)) if asks else None
        if item is not None:
            key = (item.user_class, item.index)
            assert item.attempt == asked[key] == failed[key] <= retries  # it is asked again only after it has failed
            assert not item.attempt or not unsent
            assert all(other.attempt == item.attempt for other in in_flight)
            asked[key] += 1
            in_flight.append(item)
        else:
            assert in_flight  # else there was something to take
            ended = in_flight.pop(chance.randrange(len(in_flight)))
            fails = chance.random() < failing
            failed[ended.user_class, ended.index] += fails
            work.end(ended, failed=fails)
    assert set(asked) == set(first_of(numbers))
    assert all(asked[key] == min(failed[key], retries) + 1 for key in asked)
    if failing in (0.0, 1.0):
        assert set(asked.values()) <= {1 + retries * int(failing)}
    assert work.take("Chat") is None


def test_there_is_nothing_to_take_while_others_may_still_fail_and_then_there_is() -> None:
    work = Work(amounts={"Chat": 2}, retries=1)
    first, second = work.take("Chat"), work.take("Chat")
    assert first is not None
    assert second is not None
    work.end(first, failed=True)
    assert work.take("Chat") is None
    assert not work.done
    assert not work.idle
    work.end(second, failed=False)
    assert work.idle
    assert work.take("Chat") == Item("Chat", first.index, attempt=1)
    assert work.take("Chat") is None
