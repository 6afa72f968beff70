"""The summary of a run for a terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from ragkv_evals.tasks.base import Task


def summary_table(cells: Sequence[Mapping[str, Any]], task: Task) -> Table:
    """One row for each length and policy: the task's headline figures, and what they cost."""
    table = Table(title=task.name)
    for name in ("tokens", "policy", "examples", *task.headline, "agreement", "kept", "gold kept", "tokens/s"):
        table.add_column(name, justify="left" if name == "policy" else "right")
    last: object = None
    for number, cell in enumerate(cells):
        if number and cell["context_tokens"] != last:
            table.add_section()
        last = cell["context_tokens"]
        table.add_row(
            str(last or round(cell["prompt_tokens"])),
            cell["policy"],
            str(cell["examples"]),
            *(_figure(cell["figures"].get(name)) for name in task.headline),
            _number(cell["agreement"]),
            _number(cell["kept_tokens"], 0),
            _number(cell["gold_survival"]),
            _number(cell["decode_tokens_per_s"], 1),
        )
    return table


def _figure(figure: Mapping[str, float] | None) -> str:
    return "" if figure is None else f"{figure['value']:.3f}"


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"
