"""`ragkv-eval TASK` from the command line to the run folder, on a tiny model."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from ragkv.chat import encode_chat
from ragkv.errors import ConfigError, DocumentError, MissingExtra, PromptTooLong
from ragkv.prompt import CitePrompt
from ragkv_evals import task_command
from ragkv_evals.cli import app
from ragkv_evals.config import prompt_hash
from ragkv_evals.extras import need
from ragkv_evals.prompts import PromptCounter, encode
from ragkv_evals.records import read
from ragkv_evals.results_folder import claim
from ragkv_evals.tasks import TASKS
from ragkv_evals.tasks.base import Layout
from ragkv_evals.variants import split_names
from tiny import tiny_tokenizer


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
    assert "were all of their tokens as fast as the first 512;" in " ".join(done.stderr.split())
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


def test_what_a_run_has_read_is_kept_for_the_next(tmp_path: Path, model: str) -> None:
    """A case of the needle has one haystack at all depths and lengths; no reply changes."""
    (tmp_path / "book.txt").write_text("\n\n".join(f"Paragraph {n} of the book." for n in range(200)))
    command = ["needle", "--data", tmp_path / "book.txt", "--model", model, "--max-tokens", 2, "--limit", 1]
    command += ["--context-tokens", "800,1200", "--depths", "0,50,100", "--policies", "full,snapkv:96"]
    runs = {}
    for name in ("alone", "first", "next"):
        options = [] if name == "alone" else ["--kv-dir", tmp_path / "kv"]
        done = ragkv_eval(*command, "--dtype", "float32", *options, "--out", tmp_path / name)
        assert done.exit_code == 0, done.stderr
        runs[name] = read(tmp_path / name / "predictions.jsonl")
    said = {name: [(r.key, r.outcome.policy, r.outcome.reply) for r in records] for name, records in runs.items()}
    assert said["first"] == said["next"] == said["alone"]
    for one, other in ((runs["alone"], runs["first"]), (runs["alone"], runs["next"])):
        kept = [r.outcome.documents_kept for r in one]
        assert [r.outcome.documents_kept for r in other] == [pytest.approx(each) for each in kept]
    timed = {name: [r.outcome.ttft_s is not None for r in records[::2]] for name, records in runs.items()}
    assert timed["alone"] == [True] * 6
    assert timed["first"] == [True, True, False, False, False, False]  # all the others begin as one before
    assert timed["next"] == [False] * 6


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["hotpotqa", "--policies", "snapvk:96"], ConfigError, "did you mean 'snapkv'"),
        (["hotpotqa", "--policies", "full,full"], ConfigError, "stands there twice"),
        (["hotpotqa", "--policies", " ,"], ConfigError, "name at least one"),
        (["hotpotqa", "--policies", "streaming:96,protect=nothing"], ConfigError, "protects nothing in any case"),
        (["hotpotqa", "--policies", "snapkv:96,protect=all"], ConfigError, "snapkv has no option 'protect'"),
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
    # The folder is free for lengths that it can read, as it is after an example that cannot be built.
    with pytest.raises(DocumentError, match="--context-tokens 600"):
        ragkv_eval("hotpotqa", "--model", model, "--context-tokens", "4096,600", "--out", tmp_path / "out")
    done = ragkv_eval(
        *("hotpotqa", "--model", model, "--context-tokens", "3500", "--limit", 1, "--max-tokens", 2),
        *("--policies", "full", "--out", tmp_path / "out"),
    )
    assert done.exit_code == 0, done.stderr


def test_a_folder_with_another_run_is_refused_before_a_model_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"task": "needle"}))
    with pytest.raises(ConfigError, match="holds a run with task='needle'"):
        ragkv_eval("hotpotqa", "--model", "no such model", "--out", tmp_path)
    lock = claim(tmp_path / "busy", {})
    with pytest.raises(ConfigError, match="busy is in use by another run"):
        ragkv_eval("hotpotqa", "--model", "no such model", "--out", tmp_path / "busy")
    lock.release()


def test_what_a_cluster_cannot_build_leaves_the_folder_free(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing(nullcontext[None]):
        """Workers of which the first cannot build an example."""

        def __init__(self, load: object, workers: int | None) -> None:
            super().__init__()

        def __enter__(self) -> Any:
            return self

        def check(self) -> None:
            raise DocumentError("question 7 does not fit")

    monkeypatch.setattr(task_command, "RayWorkers", Refusing)
    with pytest.raises(DocumentError, match="question 7 does not fit"):
        ragkv_eval("hotpotqa", "--model", model, "--ray", "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_policy_names_are_brought_into_one_form() -> None:
    assert split_names("full, snapkv:4096,kernel_size=7,pooling=max,truncate:512") == (
        "full",
        "snapkv:4096,pooling=max",
        "truncate:512",
    )
    assert split_names("h2o:96,protect=nothing,gqa_reduction=max,h2o:96") == (
        "h2o:96,gqa_reduction=max,protect=nothing",
        "h2o:96",
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


def test_what_is_said_behind_a_question_is_part_of_the_prompt() -> None:
    prompt, hints = TASKS["bioasq"].prompt, TASKS["bioasq"].hints
    assert hints["yesno"] == "Answer yes or no."
    assert len({prompt_hash(prompt), prompt_hash(prompt, hints), prompt_hash(prompt, {**hints, "yesno": "Yes?"})}) == 3
    assert prompt_hash(prompt, {}) == prompt_hash(prompt)


def test_prompts_are_those_of_the_product() -> None:
    """The same texts, and the same token ids as `ragkv.answer.ask` reads."""
    for name in ("hotpotqa", "musique", "bioasq"):
        assert TASKS[name].prompt == CitePrompt()
    example = TASKS["hotpotqa"].open(None).build(3, Layout(None, None, 0, PromptCounter(tiny_tokenizer())))
    product = encode_chat(tiny_tokenizer(), CitePrompt().messages(example.question, example.documents))
    assert encode(tiny_tokenizer(), example) == product
