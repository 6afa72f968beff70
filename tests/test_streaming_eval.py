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
from ragkv.policies import StreamingLLM
from ragkv_evals import streaming, streaming_pass
from ragkv_evals import streaming_report as report
from ragkv_evals.cli import app
from ragkv_evals.streaming import Reading, Recomputed, Steps, cut_streams, read_steps, read_streaming, recompute
from ragkv_evals.streaming_pass import StreamingPass
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


IN_PASSES = ("llama", "llama-llama3-rope", "llama-yarn", "mixtral", "qwen3", "phi3", "cohere", "gpt-neox")


@pytest.mark.parametrize("architecture", IN_PASSES)
@pytest.mark.parametrize(("window", "sinks", "pass_tokens"), [(20, 4, 16), (20, 4, 300), (20, 0, 70), (9, 8, 70)])
def test_passes_show_every_token_what_the_streaming_cache_does(
    model_of: ModelOf, monkeypatch: pytest.MonkeyPatch, architecture: str, window: int, sinks: int, pass_tokens: int
) -> None:
    monkeypatch.setattr(streaming, "PASS_TOKENS", pass_tokens)
    model, ids = model_of(architecture), _ids()
    implementation = model.config._attn_implementation
    in_passes = read_streaming(model, ids, window, sinks)
    assert model.config._attn_implementation == implementation
    for row in range(len(ids)):
        steps = read_steps(model, ids[row : row + 1], window, sinks)
        np.testing.assert_allclose(in_passes.nll[row], steps.nll, atol=1e-4)
        assert len(steps.step_s) == ids.shape[1] - 1
        assert steps.cache_bytes[0] == steps.cache_bytes[1]


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


@torch.inference_mode()
def test_attention_elsewhere_than_on_a_cpu(model_of: ModelOf, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = model_of("llama"), _ids()
    expected = read_streaming(model, ids, 20, 4).nll
    monkeypatch.setattr(streaming_pass, "_attention", streaming_pass._plain)
    np.testing.assert_allclose(read_streaming(model, ids, 20, 4).nll, expected, atol=1e-4)


def test_scores_of_rounded_states_are_not_rounded() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (8 * torch.randn(1, 2, 6, 16, generator=generator).bfloat16() for _ in range(3))
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    output, lse = streaming_pass._plain(query, key, value, mask, 0.5)
    scores = (0.5 * query.double() @ key.double().transpose(2, 3)).masked_fill(~mask, -torch.inf)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-5)
    largest = float(value.abs().max())
    torch.testing.assert_close(output.double(), scores.softmax(-1) @ value.double(), rtol=0, atol=largest * 2**-7)


@pytest.mark.parametrize("architecture", ["mistral-sliding", "gemma3", "phi3-longrope", "llama-dynamic-rope"])
def test_models_that_do_not_fit_are_refused_by_name(model_of: ModelOf, architecture: str) -> None:
    model = model_of(architecture)
    with pytest.raises(ConfigError, match=f"{type(model).__name__} cannot be read in passes"):
        read_streaming(model, _ids(), 20, 4)


def test_the_first_pass_holds_all_sinks(model_of: ModelOf) -> None:
    with pytest.raises(ConfigError, match="a first chunk of 3 tokens: must hold the 4 sinks"):
        StreamingPass(model_of("llama"), StreamingLLM(4, 16)).read(_ids()[:, :3])


def _reading(window: int, sinks: int, nll: Any) -> Reading:
    return Reading(window, sinks, np.asarray(nll, float))


def _steps(window: int, nll: Any, steps: Any) -> Steps:
    return Steps(window, 1, np.asarray(nll, float), np.asarray(steps, float), (10, 11))


def test_perplexities_are_those_behind_the_full_window_and_at_the_samples() -> None:
    nll = np.log([[9.0, 9, 2, 8], [9, 9, 8, 2]])
    recomputed = Recomputed(2, [3], np.log([[2.0], [2.0]]).tolist(), [0.3, 0.1, 0.2], [0.01, 0.02, 0.01])
    row = report.row(_reading(2, 1, nll), recomputed)
    assert (row.perplexity, row.perplexity_sampled, row.vs_recompute) == pytest.approx((4, 4, 2))
    assert (row.vs_recompute_low, row.vs_recompute_high) == pytest.approx((1, 4))
    again = report.recompute_row(recomputed)
    assert (again.perplexity, again.ms_per_token, again.speedup) == pytest.approx((2, 200, 20))


def test_a_rise_is_seen_and_noise_is_not() -> None:
    rng = np.random.default_rng(0)
    noise = rng.normal(0, 0.01, 2000)
    noise[::100] += 5  # another program was running
    nll = np.zeros(2000)
    flat = report.steps_row(_steps(2, nll, 1 + noise), _reading(2, 1, [nll + 0.1]))
    rising = report.steps_row(_steps(2, nll, np.linspace(1, 1.5, 2000) + noise), _reading(2, 1, [nll]))
    assert abs(flat.slope_percent) < 3 * flat.slope_error < 1
    assert rising.slope_percent == pytest.approx(50, abs=3)
    assert rising.ms_per_token_late > 1.3 * rising.ms_per_token_early
    assert (flat.tokens, flat.cache_bytes_first, flat.cache_bytes_last) == (2001, 10, 11)
    assert (flat.largest_difference, rising.largest_difference) == pytest.approx((0.1, 0))


def test_the_curve_is_the_mean_over_streams_and_parts() -> None:
    reading = _reading(4, 0, [[1] * 100 + [3] * 100, [3] * 100 + [5] * 100])
    row = report.row(reading, Recomputed(4, [5], [[1.0], [1.0]], [1.0], [1.0]))
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
    command += ["--steps", "60"]
    done = CliRunner().invoke(app, [*command, "--out", str(tmp_path)], catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    result = json.loads(done.stdout)
    assert [(row["window"], row["sinks"]) for row in result["rows"]] == [(24, 0), (24, 4), (32, 0), (32, 4)]
    assert [row["window"] for row in result["recompute"]] == [24, 32]
    assert [(row["window"], row["sinks"], row["tokens"]) for row in result["token_by_token"]] == [
        (24, 4, 60),
        (32, 4, 60),
    ]
    assert all(row["largest_difference"] < 1e-4 for row in result["token_by_token"])
    assert json.loads((tmp_path / "streaming.json").read_text()) == result
    lines = (tmp_path / "streaming.md").read_text().splitlines()
    assert len(lines) == 2 + 4 + 2 + 2
    assert lines[4].startswith("| 24 | token by token, 4 sinks |")
    assert lines[5].startswith("| 24 | recomputation |")
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
    monkeypatch.setattr("ragkv_evals.streaming_command.read_steps", None)
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
        (["--windows", "20,8", "--sinks", "0,8"], ConfigError, "sinks=8: must be"),
        (["--tokens", "40", "--windows", "30"], ConfigError, "streams of 20 tokens: must be at least 32"),
        (["--steps", "30", "--windows", "30"], ConfigError, "--steps of 30 tokens: must be at least 32"),
        (["--tokens", "9000000"], DocumentError, "add a file, or read fewer tokens"),
    ],
)
def test_bad_options_are_refused_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], error: type[Exception], message: str
) -> None:
    monkeypatch.setattr("ragkv_evals.streaming_command.recompute", None)
    command = ["streaming", "--model", str(folder), "--data", str(folder.parent / "book.txt"), "--tokens", "200"]
    with pytest.raises(error, match=message):
        CliRunner().invoke(
            app, [*command, "--streams", "2", "--steps", "90", "--windows", "20", *options], catch_exceptions=False
        )
