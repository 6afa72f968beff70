"""How charts look: one colour for each kind of policy, everywhere."""

import re
from collections.abc import Sequence
from io import BytesIO

from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK, SOFT, LINE = "#1c1b19", "#6f6b63", "#e4e0d8"
COLOURS = {
    "full": "#1c1b19",
    "snapkv": "#1f6fb2",
    "adakv": "#7a4fb5",
    "pyramidkv": "#0b8a6a",
    "h2o": "#d1741c",
    "streaming": "#b23a48",
    "random": "#8b857b",
    "truncate": "#a08400",
}
_MARKERS = "osD^vP*X"
_STYLES = ("-", "--", ":", "-.")

NAMES = {
    "f1": "answer F1",
    "em": "exact match",
    "citation_f1": "citation F1",
    "citation_precision": "citation precision",
    "citation_recall": "citation recall",
    "joint_f1": "joint F1",
    "score": "BioASQ score",
    "mrr": "reciprocal rank",
    "list_f1": "list F1",
    "rouge_2": "ROUGE-2",
    "rouge_su4": "ROUGE-SU4",
    "yesno_macro_f1": "yes/no macro F1",
}


def title(figure: str) -> str:
    """A figure's name for people."""
    return NAMES.get(figure, figure.replace("_", " "))


def family(policy: str) -> str:
    """The policy without its number of entries: "snapkv:1024,pooling=max" is "snapkv, pooling=max"."""
    return ", ".join([_kind(policy), *policy.split(",")[1:]])


def look(names: Sequence[str], one: str) -> dict[str, str]:
    """Colour by the kind of policy; line and marker tell the names of one kind apart."""
    kind = _kind(one)
    number = [name for name in names if _kind(name) == kind].index(one)
    return {
        "color": COLOURS.get(kind, SOFT),
        "linestyle": _STYLES[number % len(_STYLES)],
        "marker": _MARKERS[number % len(_MARKERS)],
    }


def _kind(name: str) -> str:
    return re.split("[:,]", name)[0]


def figure(columns: int, rows: int = 1, width: float = 4.6, height: float = 3.4) -> tuple[Figure, list[Axes]]:
    """An empty figure and its axes, row by row."""
    made = Figure(figsize=(width * columns, height * rows), layout="constrained", dpi=120)
    axes = made.subplots(rows, columns, squeeze=False)
    for one in axes.flat:
        one.spines[["top", "right"]].set_visible(False)
        one.spines[["left", "bottom"]].set_color(SOFT)
        one.tick_params(colors=SOFT, labelsize=8)
        one.grid(color=LINE, linewidth=0.8)
        one.set_axisbelow(True)
    return made, list(axes.flat)


def legend(made: Figure, axes: Axes) -> None:
    """One legend beside all axes, for the lines of these."""
    made.legend(*axes.get_legend_handles_labels(), loc="outside right upper", fontsize=8, frameon=False)


def png(made: Figure) -> bytes:
    """The figure as a PNG."""
    out = BytesIO()
    made.savefig(out, format="png")
    return out.getvalue()
