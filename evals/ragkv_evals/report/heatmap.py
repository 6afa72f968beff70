"""Needle heatmaps: one for each policy, depth down, length across."""

import math
from collections.abc import Sequence
from statistics import fmean

from ragkv_evals.records import Record
from ragkv_evals.report.study import Study
from ragkv_evals.report.style import figure, png

_COLUMNS = 3


def grid(records: Sequence[Record], figure_name: str) -> tuple[list[float], list[int], list[list[float]]]:
    """Depths, lengths and the mean figure of every pair, NaN where there is no record."""
    depths = sorted({record.depth for record in records if record.depth is not None})
    lengths = sorted({record.context_tokens or 0 for record in records})
    cells: dict[tuple[float | None, int], list[float]] = {}
    for record in records:
        cells.setdefault((record.depth, record.context_tokens or 0), []).append(record.figures[figure_name])
    rows = [[fmean(cells.get((depth, length), [math.nan])) for length in lengths] for depth in depths]
    return depths, lengths, rows


def heatmaps(study: Study, figure_name: str) -> bytes:
    """A PNG with one map for each policy, the share written into every field."""
    columns = min(_COLUMNS, len(study.policies))
    made, axes = figure(columns, math.ceil(len(study.policies) / columns), width=4.2, height=2.8)
    for policy, one in zip(study.policies, axes, strict=False):
        depths, lengths, rows = grid([r for r in study.records if r.outcome.policy == policy], figure_name)
        one.imshow(rows, cmap="viridis", vmin=0, vmax=1, aspect="auto")
        one.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
        one.set_yticks(range(len(depths)), [f"{depth:g}%" for depth in depths])
        one.set(title=policy, xlabel="tokens", ylabel="depth")
        one.grid(visible=False)
        for y, row in enumerate(rows):
            for x, share in enumerate(row):
                shown = "" if math.isnan(share) else f"{share:.2f}"
                one.text(x, y, shown, color="white" if share < 0.6 else "black", ha="center", va="center", fontsize=8)
    for one in axes[len(study.policies) :]:
        one.set_visible(False)
    return png(made)
