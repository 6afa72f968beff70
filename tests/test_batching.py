"""Requests of several threads become one batch; members may leave, and errors reach all."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from ragkv.batching import BatchGroup


def run_members(group: BatchGroup[int, int], members: Sequence[Callable[[], object]]) -> list[object]:
    """Each member in a thread of its own, leaving at its end; results or errors in order."""

    def member(work: Callable[[], object]) -> object:
        try:
            return work()
        except ValueError as error:
            return error
        finally:
            group.leave()

    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(member, members, timeout=10))


def test_all_requests_run_as_one_batch() -> None:
    batches: list[list[int]] = []

    def run(requests: Sequence[int]) -> list[int]:
        batches.append(sorted(requests))
        return [10 * request for request in requests]

    group = BatchGroup(4, run)
    results = run_members(group, [lambda n=n: group.submit(n) for n in range(4)])  # type: ignore[misc]
    assert results == [0, 10, 20, 30]
    assert batches == [[0, 1, 2, 3]]


def test_members_that_leave_are_not_waited_for() -> None:
    group: BatchGroup[int, int] = BatchGroup(3, lambda requests: [-request for request in requests])
    submitted = threading.Event()

    def late_leaver() -> str:
        assert submitted.wait(5)
        return "from the cache"

    def submit(n: int) -> int:
        submitted.set()
        return group.submit(n)

    assert run_members(group, [lambda: submit(1), late_leaver, lambda: submit(2)]) == [-1, "from the cache", -2]


def test_a_member_may_submit_again() -> None:
    sizes: list[int] = []

    def run(requests: Sequence[int]) -> list[int]:
        sizes.append(len(requests))
        return [request + 1 for request in requests]

    group = BatchGroup(2, run)
    assert run_members(group, [lambda: group.submit(group.submit(0)), lambda: group.submit(5)]) == [2, 6]
    assert sizes == [2, 1]


def test_an_error_is_raised_in_every_member() -> None:
    def run(requests: Sequence[int]) -> list[int]:
        raise ValueError(f"no room for {len(requests)}")

    group = BatchGroup(3, run)
    errors = run_members(group, [lambda n=n: group.submit(n) for n in range(3)])  # type: ignore[misc]
    assert [str(error) for error in errors] == ["no room for 3"] * 3


def test_a_short_answer_is_an_error() -> None:
    group: BatchGroup[int, int] = BatchGroup(1, lambda requests: [])
    with pytest.raises(ValueError, match="shorter"):
        group.submit(1)
