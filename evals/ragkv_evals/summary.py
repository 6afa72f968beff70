"""What a run's records say: figures by length and policy with confidence intervals, and paired differences to full."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from statistics import fmean, median
from typing import Any

from ragkv_evals import statistics
from ragkv_evals.records import Outcome, Record
from ragkv_evals.tasks.base import Row, Task
from ragkv_evals.variants import FULL

Cell = tuple[int | None, str]


def summarize(records: Iterable[Record], task: Task) -> list[dict[str, Any]]:
    """One object for each length and policy, in the order of the records."""
    cells: dict[Cell, list[Record]] = defaultdict(list)
    for record in records:
        cells[record.context_tokens, record.outcome.policy].append(record)
    return [_cell(length, name, group, cells.get((length, FULL), []), task) for (length, name), group in cells.items()]


def _cell(
    length: int | None, name: str, records: Sequence[Record], full: Sequence[Record], task: Task
) -> dict[str, Any]:
    rows = [Row(record.kind, record.answers, record.outcome.reply) for record in records]
    return {
        "context_tokens": length,
        "policy": name,
        "examples": len(records),
        "figures": {figure: asdict(estimate(records, figure)) for figure in figure_names(records)},
        "aggregates": dict(task.aggregate(rows)),
        "versus_full": {} if name == FULL else versus(records, full),
        "agreement": _mean(records, lambda record: record.agreement),
        **_costs(records),
    }


def figure_names(records: Iterable[Record]) -> list[str]:
    """All figures that any record has, in order of first mention."""
    return list(dict.fromkeys(figure for record in records for figure in record.figures))


def values(records: Iterable[Record], figure: str) -> list[float]:
    """The figure of those records that have it."""
    return [record.figures[figure] for record in records if figure in record.figures]


def estimate(records: Iterable[Record], figure: str) -> statistics.Estimate:
    """The mean of the figure over those records that have it."""
    having = [record for record in records if figure in record.figures]
    return statistics.clustered_mean([r.figures[figure] for r in having], [r.cluster for r in having])


def pairs(records: Iterable[Record], full: Iterable[Record], figure: str) -> tuple[list[float], list[float], list[str]]:
    """The figure of the examples that both have, in one order, and the clusters of these."""
    ours, theirs = ({r.key: r for r in group if figure in r.figures} for group in (records, full))
    both = [(ours[key], theirs[key]) for key in ours if key in theirs]
    return [r.figures[figure] for r, _ in both], [f.figures[figure] for _, f in both], [f.cluster for _, f in both]


def versus(records: Sequence[Record], full: Sequence[Record]) -> dict[str, Any]:
    """Differences to the full cache on the same examples, in figures and relative to full."""
    found: dict[str, Any] = {}
    for figure in figure_names(records):
        ours, theirs, clusters = pairs(records, full, figure)
        if ours:
            relative = statistics.clustered_relative_difference(ours, theirs, clusters)
            found[figure] = {
                "examples": len(ours),
                "difference": asdict(statistics.clustered_difference(ours, theirs, clusters)),
                "relative": None if relative is None else asdict(relative),
            }
    return found


def _costs(records: Sequence[Record]) -> dict[str, Any]:
    def middle(value: Callable[[Outcome], float | None]) -> float | None:
        found = [number for record in records if (number := value(record.outcome)) is not None]
        return median(found) if found else None

    peaks = [record.outcome.peak_memory_bytes for record in records]
    reasons = [record.outcome.finish_reason for record in records]
    return {
        "gold_survival": _mean(records, lambda record: record.outcome.gold_survival),
        "answer_survival": _mean(records, lambda record: record.outcome.answer_survival),
        "prompt_tokens": middle(lambda outcome: outcome.prompt_tokens),
        "kept_tokens": middle(lambda outcome: outcome.kept_tokens),
        "unprotected_tokens": middle(lambda outcome: outcome.unprotected_tokens),
        "ttft_s": middle(lambda outcome: outcome.ttft_s),
        "decode_tokens_per_s": middle(lambda outcome: outcome.decode_tokens_per_s),
        "kv_bytes_full": middle(lambda outcome: outcome.kv_bytes_full),
        "kv_bytes_kept": middle(lambda outcome: outcome.kv_bytes_kept),
        "peak_memory_bytes": max((peak for peak in peaks if peak is not None), default=None),
        "finish_reasons": {reason: reasons.count(reason) for reason in dict.fromkeys(reasons)},
    }


def _mean(records: Iterable[Record], value: Callable[[Record], float | None]) -> float | None:
    found = [number for record in records if (number := value(record)) is not None]
    return fmean(found) if found else None
