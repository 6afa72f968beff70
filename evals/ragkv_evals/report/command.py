"""`ragkv-eval report`: one page and its charts out of the folders of runs."""

from pathlib import Path
from typing import Annotated

import typer

from ragkv_evals.console import write_result
from ragkv_evals.extras import need


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs; those over the same cases are shown together.")],
    out: Annotated[Path, typer.Option(help="Folder for report.html and the charts.")],
) -> None:
    """Make one self-contained HTML page, and PNGs, out of runs."""
    for package in ("matplotlib", "scipy"):
        need(package)
    from ragkv_evals.report.charts import charts
    from ragkv_evals.report.page import render
    from ragkv_evals.report.study import studies

    sections = [(study, list(charts(study))) for study in studies(runs)]
    page = render(sections)
    out.mkdir(parents=True, exist_ok=True)
    (out / "report.html").write_text(page, encoding="utf-8")
    files = ["report.html"]
    for number, (study, made) in enumerate(sections, 1):
        for chart in made:
            files.append(f"{number}-{study.config['task']}-{chart.name}.png")
            (out / files[-1]).write_bytes(chart.image)
    write_result({"out": str(out), "files": files, "studies": [study.config for study, _ in sections]}, "report")
