"""`ragkv-eval TASK` from the command line to the run folder, on a tiny model."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from ragkv.errors import ConfigError, DocumentError, MissingExtra, PromptTooLong
from ragkv_evals.cli import app
from ragkv_evals.config import prompt_hash
from ragkv_evals.extras import need
from ragkv_evals.tasks import TASKS
from ragkv_evals.variants import split_names


def ragkv_eval(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


def test_a_run_of_hotpotqa(tmp_path: Path, model: str) -> None:
    command = ["hotpotqa", "--model", model, "--context-tokens", 5000, "--limit", 2, "--max-tokens", 4]
    command += ["--policies", "full,snapkv:256,pooling=max,streaming:256,truncate:3000", "--out", tmp_path]
    done = ragkv_eval(*command)
    assert done.exit_code == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert json.loads((tmp_path / "metrics.json").read_text()) == result
    names = ["full", "snapkv:256,pooling=max", "streaming:256", "truncate:3000"]
    assert result["config"]["policies"] == names
    assert [cell["policy"] for cell in result["cells"]] == names
    assert [cell["kept_tokens"] for cell in result["cells"][1:3]] == [256, 256]
    assert result["cells"][0]["agreement"] == 1
    assert 4000 < result["cells"][0]["prompt_tokens"] <= 5000
    assert "1 more examples will take about" in done.stderr
    before = (tmp_path / "predictions.jsonl").read_text()
    again = ragkv_eval(*command)
    assert (tmp_path / "predictions.jsonl").read_text() == before  # nothing was left to do
    assert json.loads(again.stdout.splitlines()[-1]) == result
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert environment["versions"]["torch"]
    assert "cache_folder" not in environment


@pytest.mark.parametrize("shared", [(), ("--shared-sets",)])
def test_examples_that_cannot_be_built_are_known_before_the_first_is_answered(
    tmp_path: Path, model: str, two_questions: Path, shared: tuple[str, ...]
) -> None:
    command = ["hotpotqa", "--data", two_questions, "--model", model, "--context-tokens", "7000,600", *shared]
    with pytest.raises(DocumentError, match="--context-tokens 600"):
        ragkv_eval(*command, "--max-tokens", 2, "--out", tmp_path / "out")
    assert not (tmp_path / "out" / "predictions.jsonl").exists()


def test_a_run_over_shared_sets(tmp_path: Path, model: str, two_questions: Path) -> None:
    command = ["hotpotqa", "--data", two_questions, "--model", model, "--max-tokens", 2, "--shared-sets"]
    done = ragkv_eval(*command, "--context-tokens", 7000, "--policies", "full,snapkv:256", "--out", tmp_path / "out")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["config"]["shared_sets"] is True
    assert (
        "more examples will take" not in done.stderr
    )  # the second goes on with the set; nobody knows how fast that is
    records = [json.loads(line) for line in (tmp_path / "out" / "predictions.jsonl").read_text().splitlines()]
    assert [len(record["outcome"]["documents_kept"]) for record in records] == [6] * 4
    assert len({tuple(record["gold"]) for record in records}) == 2


def test_a_run_of_lines_takes_the_lengths_of_its_file(tmp_path: Path, model: str) -> None:
    lines = [f"line a-{n}: REGISTER_CONTENT is <{n}>\n" for n in range(20)]
    prompt = "Record:\n\n" + "".join(lines) + "\nNow the record is over. What is in line a-3?"
    row = {"prompt": prompt, "expected_number": 3, "correct_line": lines[3], "num_lines": 20}
    (tmp_path / "lines.jsonl").write_text(json.dumps(row))
    command = ["lines", "--data", tmp_path / "lines.jsonl", "--model", model, "--max-tokens", 2]
    done = ragkv_eval(*command, "--policies", "full,snapkv:96,window_size=16", "--out", tmp_path / "out")
    assert done.exit_code == 0, done.stderr
    cells = json.loads(done.stdout)["cells"]
    assert [(cell["context_tokens"], list(cell["figures"])) for cell in cells] == [(None, ["accuracy"])] * 2
    assert cells[1]["gold_survival"] < 1


def test_a_needle_grid(tmp_path: Path, model: str) -> None:
    (tmp_path / "book.txt").write_text("\n\n".join(f"Paragraph {n} of the book." for n in range(200)))
    command = ["needle", "--data", tmp_path / "book.txt", "--model", model, "--max-tokens", 2, "--limit", 1]
    command += ["--context-tokens", "400,600", "--depths", "0,50", "--policies", "full", "--out", tmp_path / "out"]
    done = ragkv_eval(*command)
    assert done.exit_code == 0, done.stderr
    records = [json.loads(line) for line in (tmp_path / "out" / "predictions.jsonl").read_text().splitlines()]
    assert [(r["context_tokens"], r["depth"]) for r in records] == [(400, 0), (400, 50), (600, 0), (600, 50)]
    assert [cell["examples"] for cell in json.loads(done.stdout)["cells"]] == [2, 2]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["hotpotqa", "--policies", "snapvk:96"], ConfigError, "did you mean 'snapkv'"),
        (["hotpotqa", "--policies", "full,full"], ConfigError, "stands there twice"),
        (["hotpotqa", "--policies", " ,"], ConfigError, "name at least one"),
        (["hotpotqa", "--context-tokens", "4096,many"], ConfigError, "--context-tokens '4096,many': give numbers"),
        (["hotpotqa", "--depths", "0,101"], ConfigError, "must be between 0 and 100 percent"),
        (["hotpotqa", "--shard", "3/2"], ConfigError, "--shard '3/2': give i/n with i from 1 to n"),
        (["hotpotqa", "--shard", "1"], ConfigError, "--shard '1': give i/n"),
        (["hotpotqa", "--data", "no such file"], DocumentError, "cannot be read .* Leave --data out"),
        (["lines", "--context-tokens", "4096"], ConfigError, "mean nothing to lines"),
        (["needle", "--policies", "truncate:1024"], ConfigError, "truncate leaves out documents, and needle has none"),
        (["hotpotqa", "--shared-sets"], ConfigError, "--shared-sets puts the documents of several"),
        (["needle", "--shared-sets", "--context-tokens", "4096"], ConfigError, "it needs a task with documents"),
        (["bioasq"], DocumentError, "--data is missing. Register at"),
    ],
)
def test_bad_options_are_refused_before_a_model_is_loaded(
    tmp_path: Path, arguments: list[str], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        ragkv_eval(*arguments, "--model", "no such model", "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_lengths_that_the_model_cannot_read_are_refused_at_once(tmp_path: Path, model: str) -> None:
    with pytest.raises(
        PromptTooLong, match="--context-tokens 8192 and --max-tokens 64 do not fit into the 8192 tokens"
    ):
        ragkv_eval("hotpotqa", "--model", model, "--context-tokens", "4096,8192", "--out", tmp_path / "out")


def test_policy_names_are_brought_into_one_form() -> None:
    assert split_names("full, snapkv:4096,kernel_size=7,pooling=max,truncate:512") == (
        "full",
        "snapkv:4096,pooling=max",
        "truncate:512",
    )


def test_every_task_is_a_command() -> None:
    shown = ragkv_eval("--help").stdout
    assert all(f" {name} " in shown for name in TASKS)


def test_a_missing_package_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ragkv_evals.extras.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"scipy is not installed: pip install 'ragkv\[evals\]'"):
        need("scipy")


def test_tasks_with_prompts_of_their_own_are_told_apart() -> None:
    assert prompt_hash(TASKS["citation"].prompt) != prompt_hash(TASKS["hotpotqa"].prompt)
