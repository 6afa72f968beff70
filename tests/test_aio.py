"""Generations for an event loop: items arrive as they are made, and leaving ends the thread's work."""

import asyncio
import threading
from collections.abc import Iterator

import pytest

from ragkv.aio import in_thread


def test_items_arrive_while_the_iterator_goes_on() -> None:
    first_seen = threading.Event()

    def start(cancel: threading.Event) -> Iterator[int]:
        yield 1
        assert first_seen.wait(5), "the first item was held back until the second was asked for"
        yield 2

    async def consume() -> list[int]:
        items = []
        async for item in in_thread(start):
            items.append(item)
            first_seen.set()
        return items

    assert asyncio.run(consume()) == [1, 2]


def test_the_loop_is_free_meanwhile() -> None:
    async def consume() -> int:
        release = threading.Event()
        asyncio.get_running_loop().call_later(0.01, release.set)  # runs only if the loop is not blocked
        items = [item async for item in in_thread(lambda cancel: iter([1 if release.wait(5) else 0]))]
        return items[0]

    assert asyncio.run(consume()) == 1


def test_errors_reach_the_consumer() -> None:
    def start(cancel: threading.Event) -> Iterator[int]:
        yield 1
        raise ValueError("in the thread")

    async def consume() -> None:
        async for _ in in_thread(start):
            pass

    with pytest.raises(ValueError, match="in the thread"):
        asyncio.run(consume())


@pytest.mark.parametrize("how", ["cancel", "break"])
def test_leaving_sets_the_event_and_ends_the_iterator(how: str) -> None:
    made: list[int] = []
    ended = threading.Event()

    def start(cancel: threading.Event) -> Iterator[int]:
        try:
            while not cancel.wait(0.005):
                made.append(len(made))
                yield made[-1]
        finally:
            ended.set()

    async def consume() -> None:
        stream = in_thread(start)
        async for item in stream:
            if item == 2 and how == "break":
                await stream.aclose()  # type: ignore[attr-defined]
                break

    async def cancelled() -> None:
        task = asyncio.create_task(consume())
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled() if how == "cancel" else consume())
    assert ended.wait(5)


def test_last_items_after_a_cancel_from_elsewhere_are_not_lost() -> None:
    def start(cancel: threading.Event) -> Iterator[str]:
        yield "text"
        cancel.set()
        yield "more"
        yield "the end"

    async def consume() -> list[str]:
        return [item async for item in in_thread(start)]

    assert asyncio.run(consume()) == ["text", "more", "the end"]
