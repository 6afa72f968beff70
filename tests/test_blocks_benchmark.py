"""The benchmark of document blocks: modes, pairing and tables. No timing and no quality is judged."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ragkv.cite_grammar import citation_constraint
from ragkv.documents import Document
from ragkv.errors import ConfigError
from ragkv.models import LoadedModel
from ragkv_evals.blocks import SNAPKV
from ragkv_evals.cli import app
from ragkv_evals.paired import Answered, markdown_table, rows
from ragkv_evals.tasks.base import Example
from tiny import tiny_model, tiny_tokenizer


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = LoadedModel(tiny_model("llama"), tiny_tokenizer(), "tiny", 8192, (2,), "sdpa")
    monkeypatch.setattr("ragkv_evals.blocks_command.load", lambda model, device=None: loaded)
    command = ["blocks", "--context-tokens", "2200", "--budget", "128", "--recompute", "0,1,50", "--limit", "1"]
    done = CliRunner().invoke(app, [*command, "--out", str(tmp_path)], catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    modes = ["full", SNAPKV, "blocks, 0% recomputed", "blocks, 100% recomputed", "blocks, 50 tokens recomputed"]
    assert [row["mode"] for row in result["rows"]] == modes
    assert [answer["mode"] for answer in result["answers"]] == modes
    assert [row["examples"] for row in result["rows"]] == [1] * 5
    whole, snapkv, none, everything, some = result["rows"]
    assert (whole["computed_share"], snapkv["computed_share"]) == (1, 1)
    assert none["computed_share"] < some["computed_share"] < 0.7 < everything["computed_share"]
    assert {"f1", "citation_f1"} <= set(snapkv["figures"])
    for first, exact in zip(result["answers"][1::5], result["answers"][3::5], strict=True):
        assert first["reply"] == exact["reply"]  # all recomputed is exact
    assert json.loads((tmp_path / "blocks.json").read_text()) == result
    assert (tmp_path / "blocks.md").read_text().startswith("| mode |")


def test_shared_sets_are_read_once(two_questions: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All questions but the first of a set give no time. Computing all of the blocks anew is exact."""
    loaded = LoadedModel(tiny_model("llama"), tiny_tokenizer(), "tiny", 8192, (2,), "sdpa")
    monkeypatch.setattr("ragkv_evals.blocks_command.load", lambda model, device=None: loaded)
    constrained: list[int] = []

    def constraint(tokenizer: Any, documents: Sequence[Document], eos_token_ids: Any) -> Any:
        constrained.append(len(documents))
        return citation_constraint(tokenizer, documents, eos_token_ids=eos_token_ids)

    monkeypatch.setattr("ragkv_evals.blocks.citation_constraint", constraint)
    command = ["blocks", "--data", str(two_questions), "--context-tokens", "7000", "--recompute", "1"]
    command += ["--shared-sets", "--must-cite"]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    answers = json.loads(done.stdout)["answers"]
    assert [answer["ttft_s"] is None for answer in answers] == [False] * 3 + [True, True, False]
    assert all(answer["computed_tokens"] == answer["prompt_tokens"] for answer in answers if "full" in answer["mode"])
    assert constrained == [6] * 6  # documents of each reply, in two examples of three modes
    for snapkv, exact in zip(answers[1::3], answers[2::3], strict=True):
        assert snapkv["reply"] == exact["reply"]


def test_what_is_kept_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = LoadedModel(tiny_model("llama"), tiny_tokenizer(), "tiny", 8192, (2,), "sdpa")
    monkeypatch.setattr("ragkv_evals.blocks_command.load", lambda model, device=None: loaded)
    command = ["blocks", "--context-tokens", "2200", "--recompute", "0,50", "--limit", "1", "--kv-dir"]
    results = [
        json.loads(CliRunner().invoke(app, [*command, str(tmp_path / folder)], catch_exceptions=False).stdout)
        for folder in ("kv", "kv", "other")
    ]
    once, twice, bare = (result["answers"] for result in results)
    assert [answer["ttft_s"] is None for answer in once] == [False] * 4
    assert [answer["ttft_s"] is None for answer in twice] == [True, True, False, False]
    assert [row["speedup"] is None for row in results[1]["rows"]] == [True] * 4  # SnapKV has no time to compare with
    for answers in (twice, bare):
        assert [answer["reply"] for answer in answers] == [answer["reply"] for answer in once]


def test_a_stopped_benchmark_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = LoadedModel(tiny_model("llama"), tiny_tokenizer(), "tiny", 8192, (2,), "sdpa")
    monkeypatch.setattr("ragkv_evals.blocks_command.load", lambda model, device=None: loaded)
    asked: list[str] = []

    def answer(engine: object, example: Example, *args: object) -> list[Answered]:
        if len(asked) == 2:
            raise KeyboardInterrupt
        asked.append(example.id)
        return [replace(_answered(mode, 0.5, 1.0), example=example.id) for mode in ("full", SNAPKV)]

    monkeypatch.setattr("ragkv_evals.blocks_command.answer", answer)
    command = ["blocks", "--context-tokens", "2200", "--limit", "3", "--out", str(tmp_path)]
    assert CliRunner().invoke(app, command).exit_code != 0
    first, asked[:] = list(asked), []
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    assert (len(first), len(asked), len(set(first + asked))) == (2, 1, 3)
    assert [row["examples"] for row in json.loads(done.stdout)["rows"]] == [3, 3]
    with pytest.raises(ConfigError, match="holds a run with budget=1024, and this one has 256"):
        CliRunner().invoke(app, [*command, "--budget", "256"], catch_exceptions=False)


def _answered(mode: str, f1: float, seconds: float) -> Answered:
    return Answered("a", mode, "", {"f1": f1}, seconds, 100, 25)


def _ten(mode: str, seconds: float, f1: Sequence[float]) -> list[Answered]:
    """Two questions about each of five document sets."""
    return [replace(_answered(mode, each, seconds), example=str(n)) for n, each in enumerate(f1)]


def test_rows_compare_with_snapkv_on_the_same_examples() -> None:
    answered = _ten(SNAPKV, 4.0, [0.5, 1.0] * 5) + _ten("blocks", 0.5, [0.25, 1.0] * 5)
    found = rows(answered, ["f1", "absent"], SNAPKV)
    assert found[1].figures == {"f1": 0.625}
    assert found[1].differences["f1"].value == -0.125
    assert (found[1].speedup, found[1].computed_share) == (8, 0.25)
    assert "| 0.625 (-0.125, -0.200 to -0.050) | 0.5 | 8 | 25% |" in markdown_table(found)


def test_questions_about_one_set_are_drawn_together() -> None:
    answered = _ten(SNAPKV, 4.0, [0.5, 1.0] * 5) + _ten("blocks", 0.5, [0.25, 1.0] * 5)
    sets = {str(n): f"set {n // 2}" for n in range(10)}
    same = rows(answered, ["f1"], SNAPKV, sets)[1].differences["f1"]
    assert (same.low, same.high, same.clusters) == (-0.125, -0.125, 5)  # each set lost as much
    few = [each for each in answered if int(each.example) < 8]
    assert "| 0.625 (-0.125, 4 clusters) |" in markdown_table(rows(few, ["f1"], SNAPKV, sets))


@pytest.mark.parametrize(
    ("recompute", "message"),
    [("", "give shares from 0 to 1"), ("half", "give shares from 0 to 1"), ("0,1.5", "recompute=1.5: must be a share")],
)
def test_bad_shares_are_refused(recompute: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CliRunner().invoke(app, ["blocks", "--recompute", recompute], catch_exceptions=False)
