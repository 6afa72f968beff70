"""What a memory run says: a row per kind of memory, how much of the gap recall closes, and a table."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from rich.table import Table

from ragkv_evals.memory import KINDS, Asked


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


def gap_closed(found: Sequence[Row]) -> float | None:
    """How much of the F1 on early evidence that the window alone loses to the full history recall wins back."""
    full, window, _, recall = (row.f1_early for row in found)
    if full is None or window is None or recall is None or full == window:
        return None
    return (recall - window) / (full - window)


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
        "gap_closed": gap_closed(found),
        "answers": [asdict(each) for each in asked],
    }
