"""The speed benchmark: what it measures, in which order, and what it makes of the figures. No timing is judged."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from conftest import ModelOf
from ragkv.errors import ConfigError, DocumentError
from ragkv_evals.cli import app
from ragkv_evals.first_layers import first_layers
from ragkv_evals.long_text import long_text
from ragkv_evals.peers.environment import Peer, PeerError, PeerProcess, find
from ragkv_evals.speed import Cell, PeerVariant, Read, in_process_variants, measure
from ragkv_evals.speed_report import as_json, markdown_table, ratios, rows
from tiny import plain_model, tiny_tokenizer

ECHO_PEER = """
import json, sys
print(json.dumps({"echo": "1.0"}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if request.get("token") == 13:
        sys.exit(3)
    kept = request.get("budget", 0)
    print(json.dumps({"seconds": 0.5, "kv_bytes_full": 100, "kv_bytes_kept": kept, "seen": request}), flush=True)
"""


@dataclass
class Scripted:
    """A variant whose times are given; it writes down what it is asked."""

    name: str
    prefill_s: float
    step_s: float
    log: list[tuple[str, str, int, int]]
    compresses: bool = False
    steps: list[int] = field(default_factory=list)

    def read(self, ids: Sequence[int], budget: int) -> Read:
        self.log.append(("read", self.name, len(ids), budget))

        def step(token: int) -> float:
            self.log.append(("step", self.name, len(ids), token))
            return self.step_s

        share = 0.01 * self.prefill_s if self.compresses else None
        return Read(self.prefill_s, share, 8 * len(ids), 8 * (budget if self.compresses else len(ids)), step)


def _scripted(log: list[tuple[str, str, int, int]]) -> list[Scripted]:
    return [
        Scripted("transformers", 1.0, 0.030, log),
        Scripted("ragkv FullKV", 1.1, 0.024, log),
        Scripted("ragkv SnapKV", 1.25, 0.020, log, compresses=True),
        Scripted("kvpress SnapKV", 2.5, 0.025, log, compresses=True),
    ]


def test_variants_take_turns_on_the_same_tokens() -> None:
    log: list[tuple[str, str, int, int]] = []
    measure(_scripted(log)[:2], range(1000), [300, 600], budget=400, decode_tokens=2, repeats=2)
    plain, full = "transformers", "ragkv FullKV"
    warm_up = [entry for name in (plain, full) for entry in (("read", name, 256, 64), ("step", name, 256, 0))]
    # A prompt that is no longer than the budget keeps half of itself.
    # Who begins changes from length to length, from step to step and from repeat to repeat.
    first = [("read", plain, 300, 150), ("read", full, 300, 150), ("read", full, 600, 400), ("read", plain, 600, 400)]
    decoding = [
        *(("step", name, 300, 300) for name in (plain, full)),
        *(("step", name, 600, 600) for name in (full, plain)),
        *(("step", name, 300, 301) for name in (full, plain)),
        *(("step", name, 600, 601) for name in (plain, full)),
    ]
    second = [first[1], first[0], first[3], first[2]]
    assert log == [*warm_up, *first, *decoding, *second, *decoding]


def test_ratios_are_those_of_the_medians() -> None:
    cells = measure(_scripted([]), range(9000), [2048, 8192], budget=2048, decode_tokens=2, repeats=1)
    short, long = ratios(cells)
    assert (short.length, long.length) == (2048, 8192)
    assert long.prefill_ratio == pytest.approx(0.8)
    assert long.snapkv_overhead == pytest.approx(0.01)
    assert (long.decode_speedup, long.decode_speedup_vs_full) == (pytest.approx(1.5), pytest.approx(1.2))
    assert long.decode_vs_shortest == pytest.approx(1.0)
    assert (short.kv_bytes_ratio, long.kv_bytes_ratio) == (0.5, 0.25)
    assert long.prefill_vs_peer == {"kvpress SnapKV": pytest.approx(2.0)}
    assert long.decode_vs_peer == {"kvpress SnapKV": pytest.approx(1.25)}


def test_one_slow_repeat_does_not_move_the_median() -> None:
    cell = Cell(_scripted([])[0], range(10), 8, 4)
    cell.reads = [Read(seconds, None, 1, 1, float) for seconds in (2.0, 90.0, 4.0)]
    cell.step_s = [0.01, 0.02, 5.0]
    assert (rows([cell])[0].prefill_tokens_per_s, rows([cell])[0].decode_ms_per_token) == (2.0, 20.0)
    assert rows([cell])[0].prefill_s == [2.0, 90.0, 4.0]


def test_tables_have_one_line_per_cell() -> None:
    cells = measure(_scripted([]), range(400), [300], budget=100, decode_tokens=1, repeats=1)
    lines = markdown_table(cells).splitlines()
    assert len(lines) == 2 + len(cells)
    assert lines[2] == "| 300 | transformers | 300 | 300 | 30.0 | 0.0 |"
    assert lines[4] == "| 300 | ragkv SnapKV | 100 | 240 | 20.0 | 0.0 |"


def test_real_variants_keep_what_the_budget_says(model_of: ModelOf) -> None:
    variants = in_process_variants(model_of("llama"), "sdpa")
    tokens = [3 + i % 190 for i in range(340)]
    cells = measure(variants, tokens, [128, 320], budget=160, decode_tokens=2, repeats=1)
    per_entry = 2 * 3 * 2 * 16 * 4  # K and V, three layers, two KV heads of 16 numbers, float32
    held = {(row.variant, row.length): row.kv_bytes_kept // per_entry for row in rows(cells)}
    assert held == {
        **{(name, length): length for name in ("transformers", "ragkv FullKV") for length in (128, 320)},
        ("ragkv SnapKV", 128): 64,
        ("ragkv SnapKV", 320): 160,
    }
    overhead = {ratio.length: ratio.snapkv_overhead for ratio in ratios(cells)}
    assert all(0 < share < 1 for share in overhead.values())


def test_all_full_caches_give_the_same_logits(model_of: ModelOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variants differ in speed only: teacher-forced steps stand at the same positions in all of them."""
    model, seen = model_of("llama"), dict[str, list[torch.Tensor]]()
    plain, full, _ = in_process_variants(model, "sdpa")
    for variant in (plain, full):
        logits = seen.setdefault(variant.name, [])
        hook = model.lm_head.register_forward_hook(lambda module, args, output, kept=logits: kept.append(output))
        read = variant.read([3 + i % 190 for i in range(100)], 50)
        for token in (7, 8, 9):
            read.step(token)
        hook.remove()
    assert len(seen["transformers"]) == 4
    torch.testing.assert_close(seen["transformers"], seen["ragkv FullKV"], rtol=0, atol=1e-5)


@pytest.fixture
def echo(tmp_path: Path) -> Callable[[], PeerProcess]:
    script = tmp_path / "peer.py"
    script.write_text(ECHO_PEER)
    return lambda: PeerProcess(Peer("echo", (), script), Path(sys.executable), "model", {})


def test_a_peer_answers_over_a_pipe(echo: Callable[[], PeerProcess]) -> None:
    process = echo()
    assert process.versions == {"echo": "1.0"}
    read = PeerVariant("echo SnapKV", process).read([5, 6, 7], 2)
    assert (read.seconds, read.kv_bytes_full, read.kv_bytes_kept) == (0.5, 100, 2)
    assert read.step(9) == 0.5
    assert process.ask(op="step", length=3, token=4)["seen"] == {"op": "step", "length": 3, "token": 4}
    process.close()
    with pytest.raises(ValueError, match="closed file"):
        process.ask(op="step", length=3, token=4)


def test_a_peer_that_stops_is_named(echo: Callable[[], PeerProcess]) -> None:
    process = echo()
    with pytest.raises(PeerError, match="echo stopped with exit code 3"):
        process.ask(op="step", length=3, token=13)
    process.close()


def test_unknown_peers_are_refused() -> None:
    with pytest.raises(ConfigError, match="no peer is named 'llama': choose one of kvpress"):
        find("llama")


def test_long_text_is_exact_seeded_and_shuffled_anew_each_round(tmp_path: Path) -> None:
    tokenizer, source = tiny_tokenizer(), tmp_path / "text.txt"
    source.write_text("\n\n".join(f"paragraph {number}" for number in range(20)))
    ids = long_text(tokenizer, 2000, source)
    assert len(ids) == 2000
    assert ids == long_text(tokenizer, 2000, source)
    assert ids != long_text(tokenizer, 2000, source, seed=1)
    read = tokenizer.decode(ids).split("\n\n")
    assert sorted(read[:20]) == sorted(read[20:40]) == sorted(f"paragraph {number}" for number in range(20))
    assert read[:20] != read[20:40]


def test_the_bundled_sample_is_real_text() -> None:
    text = tiny_tokenizer().decode(long_text(tiny_tokenizer(), 5000))
    assert text.count(" the ") > 10


@pytest.mark.parametrize(("content", "message"), [(b"", "is empty"), (b"\xff\xfe\x00", "as text")])
def test_unusable_text_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    source = tmp_path / "text.txt"
    source.write_bytes(content)
    with pytest.raises(DocumentError, match=message):
        long_text(tiny_tokenizer(), 10, source)


def test_the_command_prints_one_json_object_and_writes_both_files(tmp_path: Path) -> None:
    plain_model("llama").save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    command = ["speed", "--model", str(tmp_path / "model"), "--lengths", "128,100000", "--budget", "160"]
    command += ["--decode-tokens", "2", "--repeats", "1", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    # The longest prompt is cut to what the model's context of 1024 leaves beside the decoded tokens.
    assert [ratio["length"] for ratio in result["ratios"]] == [128, 1022]
    assert [row["variant"] for row in result["rows"][:3]] == ["transformers", "ragkv FullKV", "ragkv SnapKV"]
    assert json.loads((tmp_path / "out" / "speed.json").read_text()) == result
    assert (tmp_path / "out" / "speed.md").read_text().startswith("| tokens |")


def test_a_model_can_be_cut_to_its_first_layers(tmp_path: Path) -> None:
    plain_model("llama").save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    command = ["speed", "--model", str(tmp_path / "model"), "--lengths", "128", "--decode-tokens", "2"]
    whole, cut = (
        json.loads(CliRunner().invoke(app, [*command, "--repeats", "1", *options], catch_exceptions=False).stdout)
        for options in ([], ["--layers", "2"])
    )
    assert cut["model"] == f"{tmp_path / 'model'}, first 2 layers"
    assert [3 * row["kv_bytes_full"] for row in cut["rows"]] == [2 * row["kv_bytes_full"] for row in whole["rows"]]
    with pytest.raises(ConfigError, match="--layers=4: the model has 3"):
        CliRunner().invoke(app, [*command, "--layers", "4"], catch_exceptions=False)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_the_first_layers_are_those_of_the_model(tmp_path: Path, name: str) -> None:
    model = plain_model(name)
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with first_layers(str(tmp_path), 2) as folder:
        cut = AutoModelForCausalLM.from_pretrained(folder)
    assert not Path(folder).exists()
    assert cut.config.num_hidden_layers == 2
    kept, every = cut.state_dict(), model.state_dict()
    assert kept.keys() == {name for name in every if "layers.2" not in name}
    assert all(torch.equal(kept[name], every[name]) for name in kept)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lengths", "2048,many"], "--lengths='2048,many': give lengths of at least 128"),
        (["--lengths", "64"], "--lengths='64': give lengths of at least 128"),
        (["--budget", "32"], "--budget=32: must be larger than the observation window of 32 tokens"),
        (["--peers", "kvpres"], "no peer is named 'kvpres'"),
    ],
)
def test_bad_options_are_refused_before_a_model_is_loaded(options: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CliRunner().invoke(app, ["speed", "--model", "no such model", *options], catch_exceptions=False)


def test_the_report_holds_settings_rows_and_ratios() -> None:
    cells = measure(_scripted([]), range(400), [300], budget=100, decode_tokens=1, repeats=1)
    report = as_json(cells, {"model": "tiny"})
    assert list(report) == ["model", "rows", "ratios"]
    assert json.loads(json.dumps(report)) == report
