"""What a memory run says: a row per kind of memory, how much of the gap recall closes, and tables."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from rich.table import Table

from ragkv_evals import statistics
from ragkv_evals.memory import Asked
from ragkv_evals.memory_sessions import FULL, KINDS, RECALL, WINDOW

_COMPARED = (FULL, WINDOW, RECALL)


@dataclass(frozen=True)
class Row:
    """One kind of memory; F1 on questions whose evidence had left the window and on the others, None without any."""

    kind: str
    questions: int
    early_questions: int
    f1: float
    f1_early: float | None
    f1_late: float | None
    prefilled_tokens: float


def rows(asked: Sequence[Asked]) -> list[Row]:
    """One row per kind, means over all conversations."""
    return [_row(kind, [each for each in asked if each.kind == kind]) for kind in KINDS]


def _row(kind: str, asked: Sequence[Asked]) -> Row:
    early, late = ([each.f1 for each in asked if each.early is wanted] for wanted in (True, False))
    return Row(
        kind=kind,
        questions=len(asked),
        early_questions=len(early),
        f1=fmean(each.f1 for each in asked),
        f1_early=fmean(early) if early else None,
        f1_late=fmean(late) if late else None,
        prefilled_tokens=fmean(each.prefilled_tokens for each in asked),
    )


@dataclass(frozen=True)
class Gap:
    """F1 on early evidence, paired by question, with 95% bootstrap intervals over the questions.

    Attributes:
        lost: by which the window alone stays behind the full history.
        won: by which recall is ahead of the window alone.
        closed: the share of what is lost that is won; None where the full history is no better than the window.
    """

    questions: int
    lost: statistics.Interval
    won: statistics.Interval
    closed: statistics.Interval | None


def gap(asked: Sequence[Asked]) -> Gap | None:
    """How much recall wins back; None without early questions."""
    full, window, recall = ([each.f1 for each in asked if each.kind == kind and each.early] for kind in _COMPARED)
    if not full:
        return None
    lost, won = statistics.difference(full, window), statistics.difference(recall, window)
    return Gap(len(full), lost, won, _share(recall, full, window) if lost.value > 0 else None)


def _share(recall: Sequence[float], full: Sequence[float], window: Sequence[float]) -> statistics.Interval | None:
    gained, missed = ([one - base for one, base in zip(values, window, strict=True)] for values in (recall, full))
    # A share of the whole is one more than the relative difference to it.
    found = statistics.relative_difference(gained, missed)
    return found and statistics.Interval(found.value + 1, found.low + 1, found.high + 1)


def verdict(asked: Sequence[Asked]) -> str:
    """The gap in a sentence."""
    found = gap(asked)
    if found is None:
        return "No question was about what the window had dropped."
    closed = "" if found.closed is None else f", {_text(found.closed, '.0%')} of it"
    return (
        f"On {found.questions} early questions the window alone loses {_text(found.lost, '.3f')} of F1 to the full "
        f"history, and recall wins back {_text(found.won, '.3f')}{closed}."
    )


def _text(interval: statistics.Interval, form: str) -> str:
    return f"{interval.value:{form}} ({interval.low:{form}} to {interval.high:{form}})"


HEADER = ("memory", "questions", "F1", "F1 early", "F1 late", "tokens read per question")


def lines(found: Sequence[Row]) -> list[tuple[str, ...]]:
    """The lines below `HEADER`."""
    return [
        (
            row.kind,
            f"{row.questions} ({row.early_questions} early)",
            *("" if value is None else f"{value:.3f}" for value in (row.f1, row.f1_early, row.f1_late)),
            f"{row.prefilled_tokens:,.0f}",
        )
        for row in found
    ]


def rich_table(found: Sequence[Row], title: str) -> Table:
    """For a terminal."""
    table = Table(title=title)
    for index, name in enumerate(HEADER):
        table.add_column(name, justify="right" if index else "left")
    for line in lines(found):
        table.add_row(*line)
    return table


def markdown_table(found: Sequence[Row]) -> str:
    """For a README."""
    rules = (":--", *["--:"] * (len(HEADER) - 1))
    return "".join(f"| {' | '.join(line)} |\n" for line in (HEADER, rules, *lines(found)))


def as_json(asked: Sequence[Asked]) -> dict[str, Any]:
    """The figures, and every answer."""
    found = rows(asked)
    return {
        "rows": [asdict(row) for row in found],
        "gap": None if (wide := gap(asked)) is None else asdict(wide),
        "answers": [asdict(each) for each in asked],
    }
