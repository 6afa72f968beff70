"""The examples that lost most against the full cache, with what each policy kept of their gold documents."""

from collections.abc import Sequence
from dataclasses import dataclass

from ragkv_evals.records import Record
from ragkv_evals.report.study import Study
from ragkv_evals.variants import FULL, truncates


@dataclass(frozen=True)
class Loss:
    """A reply that is worse than the full cache's: both records, and the figure's values."""

    full: Record
    record: Record
    before: float
    after: float


def worst(study: Study, figure: str, most: int = 12) -> list[Loss]:
    """The largest losses, one for each example; of equal ones those whose gold tokens survived least come first."""
    full = {record.key: record for record in study.records if record.outcome.policy == FULL}
    losses = [
        Loss(full[record.key], record, full[record.key].figures[figure], record.figures[figure])
        for record in study.records
        if record.key in full and figure in record.figures and _compressed(record)
    ]
    losses.sort(key=lambda loss: (loss.after - loss.before, loss.record.outcome.gold_survival or 0.0))
    first: dict[str, Loss] = {}
    for loss in losses:
        if loss.after < loss.before:
            first.setdefault(loss.record.key, loss)
    return list(first.values())[:most]


def _compressed(record: Record) -> bool:
    """Whether its cache was compressed by a policy of ragkv, so that there is something to see."""
    return bool(record.outcome.documents_kept) and not truncates(record.outcome.policy)


def shares(record: Record) -> Sequence[tuple[int, float, bool, bool]]:
    """For every document: its number, the share that was kept, whether it is gold, whether the reply cites it."""
    return [
        (number, share, number in record.gold, number in record.cited)
        for number, share in enumerate(record.outcome.documents_kept, 1)
    ]
