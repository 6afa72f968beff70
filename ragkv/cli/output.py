"""What people see: stderr through rich, progress bars, sizes; nothing that a document holds can steer the terminal."""

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_IN_BYTES = ("download", "verify", "convert")


def printable(text: str) -> str:
    """The text without control characters other than newline and tab, hence without escape sequences."""
    return _CONTROL.sub("", text)


def one_line(text: str) -> str:
    """The text fit for a row of a list."""
    return printable(" ".join(text.split()))


def stderr() -> Console:
    """A console on today's stderr."""
    return Console(stderr=True, highlight=False)


def say(text: str, style: str = "") -> None:
    """One line on stderr, never wrapped, so that scripts can read it."""
    stderr().print(Text(f"ragkv: {one_line(text)}", style), soft_wrap=True)


def write(text: str) -> None:
    """Text on stdout, at once; control characters only where no terminal is."""
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def trimmed(pieces: Iterable[str]) -> Iterator[str]:
    """The pieces of a text without the white space at its two ends."""
    held_back, started = "", False
    for piece in pieces:
        text = held_back + (piece if started else piece.lstrip())
        visible = text.rstrip()
        held_back, started = text[len(visible) :], started or bool(visible)
        if visible:
            yield visible


class ProgressBars:
    """A `ragkv.progress.Progress` that draws a bar for each stage on a terminal, and a line for each elsewhere.

    A context manager; `stop` ends it early, before other output.
    """

    def __init__(self) -> None:
        self._console = stderr()
        self._bars = Progress(
            SpinnerColumn(finished_text="[green]✓"),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[amount]}", markup=False),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._running: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.stop()

    def stop(self) -> None:
        """Leave the bars as they are."""
        self._bars.stop()

    def __call__(self, description: str, done: int, total: int) -> None:
        task = self._task(description, total)
        amount = f"{decimal(done)} of {decimal(total)}" if description in _IN_BYTES else f"{done:,} of {total:,}"
        self._bars.update(task, completed=done, total=total, amount=amount)
        if done >= total:
            del self._running[description]

    def stage(self, description: str) -> Callable[[int, int], None]:
        """The progress of one stage as a callback that takes (done, total)."""
        return lambda done, total: self(description, done, total)

    @contextmanager
    def waiting(self, description: str) -> Iterator[None]:
        """A bar without an end, for what reports no progress."""
        task = self._task(description, None)
        yield
        self._bars.update(task, completed=1, total=1)
        del self._running[description]

    def _task(self, description: str, total: int | None) -> TaskID:
        if description not in self._running:
            self._running[description] = self._bars.add_task(description, total=total, amount="")
            if not self._console.is_terminal:
                say(f"{description} ...")
        return self._running[description]
