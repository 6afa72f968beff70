import threading
import time
from collections.abc import Iterator

import pytest

from ragkv.deadline import limited
from ragkv.errors import Cancelled, ConfigError, ReplyTimeout


def ticks(cancel: threading.Event) -> Iterator[int]:
    """Counts until it is cancelled, and says so, but never above a hundred."""
    for count in range(100):
        if cancel.is_set():
            yield -1
            return
        yield count
        time.sleep(0.01)


def test_what_ends_in_time_is_whole() -> None:
    assert list(limited(lambda _: iter([1, 2]), timeout_s=60)) == [1, 2]
    assert list(limited(lambda _: iter([1, 2]), timeout_s=None)) == [1, 2]


def test_time_that_is_up_is_an_error_after_what_was_made() -> None:
    seen: list[int] = []
    with pytest.raises(ReplyTimeout, match=r"timeout=0\.05"):
        seen += limited(ticks, timeout_s=0.05)
    stream = limited(ticks, timeout_s=0.05)
    assert [next(stream), next(stream)] == [0, 1]
    stream.close()  # type: ignore[attr-defined]
    with pytest.raises(TimeoutError):
        list(limited(ticks, timeout_s=0.05))


def test_a_reader_may_take_its_time_with_the_last_item() -> None:
    read = []
    for item in limited(lambda _: iter([1]), timeout_s=0.02):
        time.sleep(0.05)
        read.append(item)
    assert read == [1]


def test_time_that_is_up_before_the_first_item() -> None:
    def reading(cancel: threading.Event) -> Iterator[int]:
        cancel.wait(10)
        raise Cancelled("while reading")
        yield

    with pytest.raises(ReplyTimeout):
        list(limited(reading, timeout_s=0.02))


def test_the_caller_may_cancel_too_and_then_it_is_no_timeout() -> None:
    cancel = threading.Event()
    seen = []
    for count in limited(ticks, 60, cancel):
        seen.append(count)
        if count == 2:
            cancel.set()
    assert seen == [0, 1, 2, -1]

    def cancelled(_: threading.Event) -> Iterator[int]:
        raise Cancelled("by the caller")
        yield

    with pytest.raises(Cancelled):
        list(limited(cancelled, 60, cancel))


def test_an_error_is_passed_on_and_no_timer_is_left() -> None:
    def failing(_: threading.Event) -> Iterator[int]:
        yield 1
        raise KeyError("mine")

    with pytest.raises(KeyError):
        list(limited(failing, timeout_s=60))
    time.sleep(0.05)
    assert not [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]


def test_no_time_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="timeout=0"):
        next(limited(ticks, timeout_s=0))
