"""The streaming benchmark: what it reads, what it makes of the figures, and the command. No timing is judged."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from conftest import ModelOf
from ragkv.errors import ConfigError, DocumentError
from ragkv_evals import streaming_report as report
from ragkv_evals.cli import app
from ragkv_evals.streaming import Reading, Recomputed, cut_streams, read_streaming, recompute
from tiny import plain_model, random_prompt, tiny_tokenizer


def _ids(streams: int = 2, length: int = 100) -> torch.Tensor:
    return cut_streams(random_prompt(streams * length).ids, streams, [1])


def test_streams_are_consecutive_parts() -> None:
    assert cut_streams(range(10), 3, [7]).tolist() == [[7, 0, 1, 2], [7, 3, 4, 5], [7, 6, 7, 8]]


@torch.inference_mode()
def test_while_the_window_is_not_full_all_variants_are_the_plain_model(model_of: ModelOf) -> None:
    model, ids = model_of("llama"), _ids()
    logits = model(ids).logits.log_softmax(-1)
    expected = -logits[:, :-1].gather(2, ids[:, 1:, None]).squeeze(2).numpy()
    for window, sinks in ((200, 4), (200, 0), (20, 4), (20, 0)):
        reading = read_streaming(model, ids, window, sinks)
        assert reading.nll.shape == expected.shape
        np.testing.assert_allclose(reading.nll[:, :window], expected[:, :window], atol=1e-4)
        assert np.allclose(reading.nll, expected, atol=1e-4) == (window == 200)
        assert len(reading.step_s) == ids.shape[1] - 1
        assert reading.cache_bytes[0] == reading.cache_bytes[1]


@torch.inference_mode()
def test_recomputation_sees_the_window_afresh(model_of: ModelOf) -> None:
    model, ids = model_of("llama"), _ids()
    recomputed = recompute(model, ids, 20, 5)
    assert recomputed.positions == [21, 40, 60, 80, 100]
    for column, position in enumerate(recomputed.positions):
        logits = model(ids[:, position - 20 : position]).logits[:, -1].log_softmax(-1)
        expected = -logits.gather(1, ids[:, position, None]).squeeze(1).numpy()
        np.testing.assert_allclose([stream[column] for stream in recomputed.nll], expected, atol=1e-4)
    assert len(recomputed.seconds) == len(recomputed.streaming_seconds) == 5


def _reading(window: int, sinks: int, nll: Any, steps: Any) -> Reading:
    return Reading(window, sinks, np.asarray(nll, float), np.asarray(steps, float), (10, 10))


def test_perplexities_are_those_behind_the_full_window_and_at_the_samples() -> None:
    nll = np.log([[9.0, 9, 2, 8], [9, 9, 8, 2]])
    recomputed = Recomputed(2, [3], np.log([[2.0], [2.0]]).tolist(), [0.3, 0.1, 0.2], [0.01, 0.02, 0.01])
    row = report.row(_reading(2, 1, nll, [1, 1, 1, 1]), recomputed)
    assert (row.perplexity, row.perplexity_sampled, row.vs_recompute) == pytest.approx((4, 4, 2))
    again = report.recompute_row(recomputed)
    assert (again.perplexity, again.ms_per_token, again.speedup) == pytest.approx((2, 200, 20))


def test_a_rise_is_seen_and_noise_is_not() -> None:
    rng = np.random.default_rng(0)
    noise = rng.normal(0, 0.01, 2000)
    noise[::100] += 5  # another program was running
    recomputed = Recomputed(2, [3], [[0.0]], [1.0], [1.0])
    flat = report.row(_reading(2, 1, np.zeros((1, 2000)), 1 + noise), recomputed)
    rising = report.row(_reading(2, 1, np.zeros((1, 2000)), np.linspace(1, 1.5, 2000) + noise), recomputed)
    assert abs(flat.slope_percent) < 3 * flat.slope_error < 1
    assert rising.slope_percent == pytest.approx(50, abs=3)
    assert rising.ms_per_token_late > 1.3 * rising.ms_per_token_early


def test_the_curve_is_the_mean_over_streams_and_parts() -> None:
    reading = _reading(4, 0, [[1] * 100 + [3] * 100, [3] * 100 + [5] * 100], [1] * 200)
    row = report.row(reading, Recomputed(4, [5], [[1.0]], [1.0], [1.0]))
    assert row.variant == "window attention"
    assert (len(row.positions), row.positions[:2]) == (100, [1, 3])
    assert row.log_perplexity == [2.0] * 50 + [4.0] * 50


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("streaming") / "model"
    plain_model("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    (folder.parent / "book.txt").write_text("The quick brown fox names the documents. " * 60)
    return folder


def test_the_command_prints_one_json_object_and_writes_three_files(folder: Path, tmp_path: Path) -> None:
    command = ["streaming", "--model", str(folder), "--data", str(folder.parent / "book.txt"), "--tokens", "200"]
    command += ["--streams", "2", "--windows", "24,32", "--sinks", "0,4", "--recompute-positions", "3"]
    done = CliRunner().invoke(app, [*command, "--out", str(tmp_path)], catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    result = json.loads(done.stdout)
    assert [(row["window"], row["sinks"]) for row in result["rows"]] == [(24, 0), (24, 4), (32, 0), (32, 4)]
    assert [row["window"] for row in result["recompute"]] == [24, 32]
    assert json.loads((tmp_path / "streaming.json").read_text()) == result
    lines = (tmp_path / "streaming.md").read_text().splitlines()
    assert len(lines) == 2 + 4 + 2
    assert lines[4].startswith("| 24 | recomputation |")
    assert (tmp_path / "streaming.png").read_bytes().startswith(b"\x89PNG")


def test_a_stopped_benchmark_goes_on(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["streaming", "--model", str(folder), "--data", str(folder.parent / "book.txt"), "--tokens", "80"]
    command += ["--streams", "2", "--windows", "24", "--recompute-positions", "3", "--out", str(tmp_path)]
    first = CliRunner().invoke(app, [*command, "--sinks", "0"], catch_exceptions=False)
    seen: list[int] = []

    def counted(model: Any, ids: torch.Tensor, window: int, sinks: int, progress: Any) -> Reading:
        seen.append(sinks)
        return read_streaming(model, ids, window, sinks, progress)

    monkeypatch.setattr("ragkv_evals.streaming_command.read_streaming", counted)
    monkeypatch.setattr("ragkv_evals.streaming_command.recompute", None)
    then = CliRunner().invoke(app, [*command, "--sinks", "0,4"], catch_exceptions=False)
    assert seen == [4]
    rows = json.loads(then.stdout)["rows"]
    assert [row["sinks"] for row in rows] == [0, 4]
    assert rows[0] == json.loads(first.stdout)["rows"][0]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (["--windows", "many"], ConfigError, "--windows='many': give numbers of at least 2"),
        (["--sinks", "-1"], ConfigError, "--sinks='-1': give numbers of at least 0"),
        (["--windows", "8", "--sinks", "8"], ConfigError, "sinks=8: must be at least 0 and less than the window of 8"),
        (["--tokens", "40", "--windows", "30"], ConfigError, "must be longer than the window of 30"),
        (["--tokens", "9000000"], DocumentError, "add a file, or read fewer tokens"),
    ],
)
def test_bad_options_are_refused(folder: Path, options: list[str], error: type[Exception], message: str) -> None:
    command = ["streaming", "--model", str(folder), "--data", str(folder.parent / "book.txt"), "--tokens", "200"]
    with pytest.raises(error, match=message):
        CliRunner().invoke(app, [*command, "--streams", "2", *options], catch_exceptions=False)
