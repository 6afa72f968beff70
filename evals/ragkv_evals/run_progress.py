"""What people see of a run: a bar on a terminal, lines elsewhere, and how long it takes, as soon as that is known."""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ragkv_evals.probe import Probe

_LINES = 20  # reports of a whole run where no terminal is


class RunProgress:
    """A context manager whose `watch` a run reports to."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("loading the model", total=None, left="")
        self._estimated = False

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._bar.stop()

    def watch(self, done: int, total: int, seconds: float | None) -> None:
        """Show how far the run is; `seconds` is what the rest will take, None if that is not known yet."""
        left = "" if seconds is None else f"{duration(seconds)} left"
        self._bar.update(self._task, description="answering", completed=done, total=total, left=left)
        if seconds is not None and not self._estimated and done < total:
            self._estimated = True
            self._console.print(f"{total - done} more examples will take about {duration(seconds)}, by the first ones")
        elif not self._console.is_terminal and done % max(1, total // _LINES) == 0:
            self._console.print(f"{done} of {total} examples, {left or 'time not known yet'}")

    def guess(self, probe: Probe, seconds: float) -> None:
        """Show what is known before the first example."""
        self._console.print(
            f"reading the prompts will take about {duration(seconds)}, were all of their tokens as fast as the first "
            f"{probe.read_tokens}; replies come on top of that"
        )


def duration(seconds: float) -> str:
    """Such as "40 s", "12 min" or "3.5 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
