"""Reports: which runs belong together, what charts are drawn from, and a page that loads and runs nothing."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import isnan
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from typer.testing import CliRunner

from ragkv.errors import DocumentError, MissingExtra
from ragkv_evals.cli import app
from ragkv_evals.config import RunConfig
from ragkv_evals.records import Record
from ragkv_evals.report import charts as charts_module
from ragkv_evals.report.charts import charts
from ragkv_evals.report.heatmap import grid
from ragkv_evals.report.page import render
from ragkv_evals.report.study import Study, studies
from ragkv_evals.report.style import COLOURS, family, look
from ragkv_evals.report.worst import worst
from ragkv_evals.run import RunFolder
from ragkv_evals.summary import summarize
from ragkv_evals.tasks import TASKS
from ragkv_evals.tasks.base import Example

CONFIG = RunConfig(
    *("hotpotqa", "dev.jsonl", "hash", "tiny", "float32"),
    context_tokens=(1000,),
    depths=(),
    limit=None,
    seed=0,
    policies=("full", "snapkv:96"),
    max_tokens=8,
    shard=(1, 1),
    prompt_hash="prompt",
)
MACHINE = {
    "device_name": "A <CPU>",
    "threads": 2,
    "versions": {"torch": "2.13", "transformers": "5.24", "ragkv": "0.1.0"},
}


RecordOf = Callable[..., Record]


def write(folder: Path, records: Sequence[Record], **config: Any) -> Path:
    run = RunFolder(folder, replace(CONFIG, **config), MACHINE)
    for record in records:
        run.predictions.append(record)
    run.close()
    return folder


def study(records: Sequence[Record], task: str = "hotpotqa") -> Study:
    return Study(TASKS[task], replace(CONFIG, task=task).to_json(), [MACHINE], records)


def figures(f1: float) -> dict[str, float]:
    return {"f1": f1, "citation_f1": f1, "joint_f1": f1}


@pytest.fixture
def several(record_of: RecordOf) -> list[Record]:
    """Four examples at two lengths under four policies; SnapKV loses most on the last."""
    return [
        record_of(policy, f"q{n}", context_tokens=length, gold=(n + 1,), **figures(1 - lost * n / 4))
        for length in (1000, 2000)
        for policy, lost in (("full", 0.1), ("snapkv:96", 0.5), ("snapkv:256", 0.3), ("h2o:96", 0.9))
        for n in range(4)
    ]


def test_runs_over_the_same_cases_are_one_study(tmp_path: Path, record_of: RecordOf) -> None:
    first = write(tmp_path / "1", [record_of("full", "a", f1=1.0)], shard=(1, 2))
    second = write(tmp_path / "2", [record_of("full", "b", f1=0.0)], shard=(2, 2))
    more = write(
        tmp_path / "3", [record_of("h2o:96", "a", f1=0.5), record_of("full", "a", f1=0.9)], policies=("h2o:96",)
    )
    other = write(tmp_path / "4", [record_of("full", "a", f1=0.2)], prompt_hash="another")
    one, two = studies([first, second, more, other])
    assert [(r.example, r.outcome.policy, r.figures["f1"]) for r in one.records] == [
        ("a", "full", 1.0),
        ("b", "full", 0.0),
        ("a", "h2o:96", 0.5),
    ]
    assert one.policies == ["full", "h2o:96"]
    assert [r.figures["f1"] for r in two.records] == [0.2]
    assert one.machines == [MACHINE]


@pytest.mark.parametrize("option", ["shared_sets", "decode_together", "must_cite"])
def test_runs_over_other_documents_or_replies_are_studies_of_their_own(
    tmp_path: Path, record_of: RecordOf, option: str
) -> None:
    """Else a policy would be paired with the full cache on documents that it never saw."""
    first = write(tmp_path / "1", [record_of("full", "a", f1=1.0)])
    second = write(tmp_path / "2", [record_of("h2o:96", "a", f1=0.5)], **{option: True})
    third = write(tmp_path / "3", [record_of("random:96", "a", f1=0.1)], **{option: True})
    plain, other = studies([first, second, third])
    assert plain.policies == ["full"]
    assert other.policies == ["h2o:96", "random:96"]
    assert (plain.config[option], other.config[option]) == (False, True)


def test_runs_of_earlier_versions_lack_what_these_could_not_do(tmp_path: Path, record_of: RecordOf) -> None:
    folders = [write(tmp_path / n, [record_of("full", n, f1=1.0)]) for n in "ab"]
    config = json.loads((folders[0] / "config.json").read_text())
    for option in ("shared_sets", "decode_together", "must_cite"):
        del config[option]
    (folders[0] / "config.json").write_text(json.dumps(config))
    (one,) = studies(folders)
    assert [record.example for record in one.records] == ["a", "b"]


def test_folders_without_a_run_are_named(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match="nothing holds no run"):
        studies([tmp_path / "nothing"])
    with pytest.raises(DocumentError, match="a run without any prediction"):
        studies([write(tmp_path / "empty", [])])


def test_charts_are_those_that_the_data_can_fill(several: list[Record], record_of: RecordOf) -> None:
    made = list(charts(study(several)))
    assert [chart.name for chart in made] == ["budget-1000", "budget-2000", "length", "costs", "position"]
    assert all(chart.image.startswith(b"\x89PNG") for chart in made)
    one_length = [record for record in several if record.context_tokens == 1000]
    assert [chart.name for chart in charts(study(one_length))] == ["budget-1000", "position"]
    full = [record for record in one_length if record.outcome.policy == "full"]
    assert [chart.name for chart in charts(study(full))] == ["position"]
    needles = [
        record_of(policy, context_tokens=1000, depth=depth, accuracy=depth / 100)
        for depth in (0.0, 50.0)
        for policy in ("full", "snapkv:96")
    ]
    assert [chart.name for chart in charts(study(needles, "needle"))] == ["budget-1000", "depth"]


Curves = dict[str, dict[str, dict[str, list[tuple[float, float]]]]]


@pytest.fixture
def curves(monkeypatch: pytest.MonkeyPatch) -> Callable[[Study], Curves]:
    """By chart, label of the y axis and label of the line: the points that are drawn, to four digits."""
    drawn: list[Figure] = []
    monkeypatch.setattr(charts_module, "png", lambda made: drawn.append(made) or b"")

    def of(shown: Study) -> Curves:
        drawn.clear()
        names = [chart.name for chart in charts(shown)]
        return {
            name: {
                axes.get_ylabel(): {
                    str(line.get_label()): [(round(float(x), 4), round(float(y), 4)) for x, y in line.get_xydata()]
                    for line in axes.lines
                }
                for axes in made.axes
            }
            for name, made in zip(names, drawn, strict=True)
        }

    return of


def test_curves_show_the_means(several: list[Record], curves: Callable[[Study], Curves]) -> None:
    drawn = curves(study(several))
    budget = drawn["budget-1000"]
    assert set(budget) == {"answer F1", "citation F1", "joint F1"}
    # A policy that loses a share of n/4 of example n has a mean of 1 - 1.5/4 of that share.
    assert budget["answer F1"]["snapkv"] == [(96, 0.8125), (256, 0.8875)]
    assert budget["answer F1"]["h2o"] == [(96, 0.6625)]
    assert {y for _, y in budget["answer F1"]["full"]} == {0.9625}
    assert drawn["length"]["answer F1"]["h2o:96"] == [(1000, 0.6625), (2000, 0.6625)]
    # Example n has its gold document n + 1 of four, in the middle of the n-th quarter: fifths 0, 1, 3 and 4.
    assert drawn["position"]["answer F1"]["h2o:96"] == [(10, 1), (30, 0.775), (70, 0.55), (90, 0.325)]
    assert drawn["costs"]["time to first token (shared prefill), s"]["full"] == [(1000, 1), (2000, 1)]
    assert drawn["costs"]["decoding, ms per token"]["full"] == [(1000, 100), (2000, 100)]


def test_costs_are_those_of_records_that_have_them(several: list[Record], curves: Callable[[Study], Curves]) -> None:
    """Of the first question over a document set, where the others found it read."""
    times = {"q0": 8.0, "q1": None, "q2": None, "q3": None}
    shown = [replace(r, outcome=replace(r.outcome, ttft_s=times[r.example])) for r in several]
    drawn = curves(study(shown))["costs"]
    assert drawn["time to first token (shared prefill), s"]["full"] == [(1000, 8), (2000, 8)]


@pytest.mark.parametrize(("examples", "drawn"), [(4, False), (6, True)])
def test_bands_are_drawn_for_enough_clusters(
    record_of: RecordOf, monkeypatch: pytest.MonkeyPatch, examples: int, drawn: bool
) -> None:
    made: list[Figure] = []
    monkeypatch.setattr(charts_module, "png", lambda one: made.append(one) or b"")
    policies = ("full", "snapkv:96", "snapkv:128")
    records = [record_of(policy, f"q{n}", accuracy=n % 2) for policy in policies for n in range(examples)]
    (chart,) = charts(study(records, "lines"))
    (axes,) = made[0].axes
    (band,) = axes.collections
    assert bool(axes.patches) == drawn  # full
    assert bool(band.get_paths()) == drawn  # SnapKV
    assert "there are none for fewer than 5" in chart.caption


def test_a_needle_grid_is_the_mean_of_every_field(record_of: RecordOf) -> None:
    records = [
        record_of("full", str(number), context_tokens=length, depth=depth, accuracy=accuracy)
        for number, (length, depth, accuracy) in enumerate([(1000, 0, 1), (1000, 0, 0), (2000, 0, 1), (1000, 50, 0)])
    ]
    depths, lengths, rows = grid(records, "accuracy")
    assert (depths, lengths) == ([0, 50], [1000, 2000])
    assert rows[0] == [0.5, 1]
    assert rows[1][0] == 0
    assert isnan(rows[1][1])


def test_the_worst_examples_lost_most_and_come_once(several: list[Record]) -> None:
    losses = worst(study(several), "f1")
    assert {loss.record.outcome.policy for loss in losses} == {"h2o:96"}
    assert [(loss.record.example, round(loss.before - loss.after, 3)) for loss in losses] == [
        *[("q3", 0.6)] * 2,  # at either length
        *[("q2", 0.4)] * 2,
        *[("q1", 0.2)] * 2,
    ]  # q0 lost nothing
    assert len(worst(study(several), "f1", most=3)) == 3


def test_equal_losses_are_ordered_by_what_survived(record_of: RecordOf) -> None:
    records = [record_of("full", name, f1=1.0) for name in "ab"]
    records += [record_of("snapkv:96", "a", f1=0.0, survival=0.4), record_of("snapkv:96", "b", f1=0.0, survival=0.1)]
    assert [loss.record.example for loss in worst(study(records), "f1")] == ["b", "a"]


def test_truncation_is_no_loss_of_kept_tokens(record_of: RecordOf) -> None:
    assert worst(study([record_of("full", f1=1.0), record_of("truncate:96", f1=0.0)]), "f1") == []


def test_the_page_loads_and_runs_nothing(several: list[Record], record_of: RecordOf) -> None:
    evil = "<script>alert(1)</script> & [1]"
    records = [*several, record_of("full", "x", f1=1.0, reply=evil), record_of("h2o:96", "x", f1=0.0, reply=evil)]
    shown = study(records)
    page = render([(shown, list(charts(shown)))])
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; [1]" in page
    assert "A &lt;CPU&gt;" in page
    assert not re.findall(r"https?:|//[a-z]|url\(", re.sub(r"base64,[A-Za-z0-9+/=]+", "", page))
    sources = re.findall(r'src="([^"]{22})', page)
    assert len(sources) == 5
    assert set(sources) == {"data:image/png;base64,"}
    assert "default-src 'none'; img-src data:; style-src 'sha256-" in page


def test_the_page_shows_differences_beside_the_papers(several: list[Record]) -> None:
    page = " ".join(render([(study(several), [])]).split())
    # At every length full has a mean of 0.9625, SnapKV at 96 of 0.8125.
    assert "-15.6%" in page
    assert "-2.1% for answer F1, -1.2% for citation F1" in page
    assert '<span class="k9">kept</span>' in page


def test_the_page_says_why_there_is_no_interval(several: list[Record]) -> None:
    page = " ".join(render([(study(several), [])]).split())
    assert page.count("0.812 <small>4 clusters</small>") == 6  # three figures at two lengths
    assert "-15.6% <small>4 clusters</small>" in page
    sets = [replace(record, document_set="one") for record in several]
    assert "0.812 <small>1 cluster</small>" in " ".join(render([(study(sets), [])]).split())
    six = [replace(r, example=f"{r.example}-{n}") for r in several for n in range(2)]
    assert "cluster</small>" not in re.sub(r"\s+", " ", render([(study(six), [])])).replace("clusters", "cluster")


def test_the_page_shows_what_could_not_be_protected(record_of: RecordOf) -> None:
    records = [record_of(policy, f1=1.0) for policy in ("full", "snapkv:96")]
    records[1] = replace(records[1], outcome=replace(records[1].outcome, unprotected_tokens=1742))
    page = render([(study(records), [])])
    assert "<th>unprotected</th>" in page
    assert "<td>1,742</td>" in page


def test_the_page_shows_every_figure_of_bioasq(record_of: RecordOf) -> None:
    """By the kinds of question, macro F1 of the yes/no questions included, which is no mean."""
    asked = {
        "factoid": ((("Srrm4",),), "1. Nova1\n2. Srrm4"),
        "list": ((("Srrm4",), ("Nova1",)), "Srrm4, actin"),
        "yesno": ((("no",),), "yes"),
        "summary": ((("It does not help.",),), "It does help."),
    }
    task, records = TASKS["bioasq"], []
    for kind, (answers, reply) in asked.items():
        example = Example(kind, "?", (), (1,), answers, kind)
        record = record_of("full", kind, reply=reply, **task.score(example, reply))
        records.append(replace(record, kind=kind, answers=answers))
    records.append(replace(records[2], example="another", outcome=replace(records[2].outcome, reply="no")))
    (cell,) = summarize(records, task)
    assert cell["aggregates"] == {"yesno_macro_f1": pytest.approx(1 / 3)}  # "yes" 0, "no" 2/3
    page = " ".join(render([(study(records, "bioasq"), [])]).split())
    shown = {
        "strict accuracy": "0.000",
        "lenient accuracy": "1.000",
        "reciprocal rank": "0.500",
        "list precision": "0.500",
        "list recall": "0.500",
        "list F1": "0.500",
        "ROUGE-2": "0.400",
        "yes/no macro F1": "0.333",
    }
    table = page[page.index("<th>strict accuracy</th>") :]
    names = re.findall("<th>([^<]*)</th>", table[: table.index("</tr>")])
    figures = re.findall(r"<td>(?:(\d\.\d{3})[^/]*</small>|(\d\.\d{3}))</td>", table[: table.index("</tbody>")])
    found = dict(zip(names, ("".join(each) for each in figures), strict=True))
    assert {name: found[name] for name in shown} == shown


def test_variants_of_a_policy_share_its_colour() -> None:
    names = ["full", "snapkv:96", "snapkv:256", "h2o:96"]
    looks = [look(names, name) for name in names]
    assert [one["color"] for one in looks] == [COLOURS[kind] for kind in ("full", "snapkv", "snapkv", "h2o")]
    assert looks[1]["linestyle"] != looks[2]["linestyle"]
    assert family("snapkv:1024,pooling=max,kernel_size=5") == "snapkv, pooling=max, kernel_size=5"


def test_the_command_writes_a_page_and_its_charts(tmp_path: Path, several: list[Record]) -> None:
    run = write(tmp_path / "run", several)
    done = CliRunner().invoke(app, ["report", str(run), "--out", str(tmp_path / "out")], catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    result = json.loads(done.stdout)
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == sorted(result["files"])
    assert result["files"][:2] == ["report.html", "1-hotpotqa-budget-1000.png"]
    assert "</html>" in (tmp_path / "out" / "report.html").read_text()


def test_a_report_without_matplotlib_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ragkv_evals.extras.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"matplotlib is not installed: pip install 'ragkv\[evals\]'"):
        CliRunner().invoke(app, ["report", str(tmp_path), "--out", str(tmp_path)], catch_exceptions=False)
