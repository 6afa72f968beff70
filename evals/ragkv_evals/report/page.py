"""The report as one HTML page that needs nothing from outside: charts are inside it, and nothing is ever loaded.

Whatever comes from data or models is escaped by jinja2; a content security policy stands behind that.
"""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from rich.filesize import decimal

from ragkv.explain_page import LEVELS, level
from ragkv_evals.report.charts import Chart
from ragkv_evals.report.study import Study
from ragkv_evals.report.style import title
from ragkv_evals.report.worst import shares, worst
from ragkv_evals.statistics import FEWEST_CLUSTERS
from ragkv_evals.summary import summarize

# What the SnapKV paper reports for its cited answers on Command-R, relative to the full cache.
PAPER = {"f1": -0.021, "citation_f1": -0.012, "score": 0.054}


def render(sections: Sequence[tuple[Study, Sequence[Chart]]]) -> str:
    """The page: a section for each study."""
    environment = Environment(
        loader=ChoiceLoader([PackageLoader("ragkv_evals"), PackageLoader("ragkv")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(bytes=decimal, level=level, title=title, percent=percent, interval=interval)
    css = environment.get_template("report.css").render()
    digest = base64.b64encode(hashlib.sha256(css.encode()).digest()).decode()
    return environment.get_template("report.html").render(
        style_hash=f"sha256-{digest}",
        sections=[_section(study, charts) for study, charts in sections],
        levels=range(LEVELS + 1),
        paper=PAPER,
        fewest=FEWEST_CLUSTERS,
    )


def _section(study: Study, charts: Sequence[Chart]) -> dict[str, Any]:
    losses = [(loss, shares(loss.record)) for loss in worst(study, study.task.headline[0])]
    cells = summarize(study.records, study.task)
    names = dict.fromkeys(name for cell in cells for name in (*cell["figures"], *cell["aggregates"]))
    return {
        "study": study,
        "cells": cells,
        "others": [name for name in names if name not in study.task.headline],
        "charts": [(chart, base64.b64encode(chart.image).decode()) for chart in charts],
        "losses": losses,
        "examples": len({record.key for record in study.records}),
    }


def percent(share: float) -> str:
    """Such as "-1.2%"."""
    return f"{100 * share:+.1f}%"


def interval(found: Mapping[str, Any], as_percent: bool = False) -> str:
    """The bounds, such as "0.41 to 0.52", or why there are none."""
    if found["low"] is None:
        return f"{found['clusters']} cluster{'s' if found['clusters'] > 1 else ''}"
    if as_percent:
        return f"{percent(found['low'])} to {percent(found['high'])}"
    return f"{found['low']:.2f} to {found['high']:.2f}"
