"""A generation for an event loop: decoding runs in a thread of its own, tokens arrive as they are made."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TypeVar

T = TypeVar("T")
_END = object()


async def in_thread(start: Callable[[threading.Event], Iterator[T]]) -> AsyncIterator[T]:
    """Iterate in a thread over what `start` returns, without blocking the event loop.

    Args:
        start: called in the thread with an event; the iterator should end soon after the event is set. It is set when
            the consumer is cancelled or stops iterating, so that decoding ends within a token.

    Raises:
        Whatever the iterator raises, in the consumer.
    """
    loop, cancel, left = asyncio.get_running_loop(), threading.Event(), threading.Event()
    queue: asyncio.Queue[object] = asyncio.Queue()

    def put(item: object) -> None:
        # The loop may be gone when a cancelled generation comes to its end.
        if not loop.is_closed():
            loop.call_soon_threadsafe(queue.put_nowait, item)

    def work() -> None:
        try:
            for item in start(cancel):
                put(item)
                if left.is_set():  # not `cancel`, which others may set and whose last items are wanted
                    break
            put(_END)
        except BaseException as error:  # handed over to the consumer, whatever it is
            put(error)

    threading.Thread(target=work, name="ragkv-decode", daemon=True).start()
    try:
        while (item := await queue.get()) is not _END:
            if isinstance(item, BaseException):
                raise item
            yield item  # type: ignore[misc]
    finally:
        left.set()
        cancel.set()
