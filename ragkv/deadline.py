"""A time limit on a generation: when the time is up it is cancelled, and the caller gets an error, not half a reply."""

import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

from ragkv.errors import Cancelled, ConfigError, ReplyTimeout

T = TypeVar("T")


def limited(
    start: Callable[[threading.Event], Iterator[T]], timeout_s: float | None, cancel: threading.Event | None = None
) -> Iterator[T]:
    """Iterate over what `start` returns for at most `timeout_s` seconds.

    Args:
        start: called with an event; soon after it is set, the iterator should yield a last item, which is thrown away
            if the time is up, or raise `Cancelled`. One that just ends counts as whole.
        timeout_s: seconds from the first item asked for to the last one made; None for no limit.
        cancel: the caller's own way to end the iterator, handed to `start`.

    Raises:
        ConfigError: `timeout_s` is not above 0.
        ReplyTimeout: the time was up before the iterator ended.
    """
    if timeout_s is not None and timeout_s <= 0:
        raise ConfigError(f"timeout={timeout_s}: must be above 0 seconds, or None for no limit")
    cancel = cancel or threading.Event()
    if timeout_s is None:
        yield from start(cancel)
        return
    expired = threading.Event()

    def expire() -> None:
        expired.set()
        cancel.set()

    timer = threading.Timer(timeout_s, expire)
    timer.daemon = True
    timer.start()
    try:
        for item in start(cancel):
            if expired.is_set():
                break
            yield item
        else:
            return
    except Cancelled:
        if not expired.is_set():
            raise
    finally:
        timer.cancel()
    raise ReplyTimeout(
        f"timeout={timeout_s}: the reply was not whole after {timeout_s} s; allow more or lower max_tokens"
    )
