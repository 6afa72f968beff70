"""Calls made together run together: threads hand in requests, and once all have come they run as one batch."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Request = TypeVar("Request")
Result = TypeVar("Result")


@dataclass
class _Slot(Generic[Request, Result]):
    request: Request
    result: Result | None = None
    error: BaseException | None = None
    done: bool = False


class BatchGroup(Generic[Request, Result]):
    """A batch of known size whose members may also drop out (a cache hit, an error before the model is reached).

    Args:
        size: how many threads take part; each calls `leave` exactly once, when it is through.
        run: answers all requests of the batch, in order. Its error is raised in every member.
    """

    def __init__(self, size: int, run: Callable[[Sequence[Request]], Sequence[Result]]) -> None:
        self._members, self._run = size, run
        self._waiting: list[_Slot[Request, Result]] = []
        self._changed = threading.Condition()

    def submit(self, request: Request) -> Result:
        """Wait until all members have submitted or left, and return this request's result."""
        slot = _Slot[Request, Result](request)
        with self._changed:
            self._waiting.append(slot)
            self._changed.notify_all()
            self._changed.wait_for(lambda: slot.done or self._complete_for(slot))
            batch = [] if slot.done else self._waiting
            if batch:
                self._waiting = []
        if batch:
            self._answer(batch)
        if slot.error is not None:
            raise slot.error
        return slot.result  # type: ignore[return-value]

    def leave(self) -> None:
        """This member will not submit (again)."""
        with self._changed:
            self._members -= 1
            self._changed.notify_all()

    def _complete_for(self, slot: _Slot[Request, Result]) -> bool:
        """Whether everybody is here and `slot`, which came first, is to run the batch."""
        return bool(self._waiting) and self._waiting[0] is slot and len(self._waiting) >= self._members

    def _answer(self, batch: Sequence[_Slot[Request, Result]]) -> None:
        try:
            for slot, result in zip(batch, self._run([slot.request for slot in batch]), strict=True):
                slot.result = result
        except BaseException as error:
            for slot in batch:
                slot.error = error
        with self._changed:
            for slot in batch:
                slot.done = True
            self._changed.notify_all()
