"""The benchmark of reuse: what it asks in which state, and what it makes of the figures. No timing is judged."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from conftest import EngineOf
from ragkv.errors import ConfigError
from ragkv.policies import SnapKV
from ragkv.reply import Stats
from ragkv_evals.cli import app
from ragkv_evals.reuse import MODES, Cell, measure
from ragkv_evals.reuse_command import markdown_table, rows
from tiny import plain_model, random_prompt, tiny_tokenizer

STATS = Stats(600, 1, 2.0, 0.0, 8000, 4000, 100, 32, 0)


def test_each_mode_finds_what_it_should(engine_of: EngineOf) -> None:
    told: list[str] = []
    tokens = random_prompt(800).ids
    cells = measure(engine_of("llama").loaded, lambda length: SnapKV(length // 2), tokens, [520, 700], 2, told.append)
    assert [(cell.length, cell.mode) for cell in cells] == [(length, mode) for length in (520, 700) for mode in MODES]
    for cell in cells:
        reused = (cell.length - 48) // 128 * 128  # all whole blocks of the documents
        stored = cell.length // 128 * 128
        created = {MODES[0]: 0, MODES[1]: stored, MODES[2]: stored - reused, MODES[3]: stored - reused}[cell.mode]
        read = 0 if cell.mode in MODES[:2] else reused
        assert [(s.cache_read_tokens, s.cache_creation_tokens) for s in cell.stats] == [(read, created)] * 2
        assert all(stats.ttft_s > 0 for stats in cell.stats)
    assert told[1:3] == ["repeat 1/2: 520 tokens, no store", "repeat 1/2: 520 tokens, first question"]


def test_rows_compare_with_no_store_at_the_same_length() -> None:
    cells = [
        Cell(mode, length, [replace(STATS, ttft_s=seconds * length) for seconds in times], [2**20, None, 3 * 2**20])
        for length in (1, 2)
        for mode, times in zip(MODES, [(9.0, 6.0, 8.0), (8.0,), (0.5, 2.0, 1.0), (4.0,)], strict=True)
    ]
    found = rows(cells)
    assert [row.speedup for row in found] == [1, 1, 8, 2] * 2
    assert found[6].ttft_s == 2
    assert found[6].all_ttft_s == [1, 4, 2]
    assert found[0].peak_mib == 2
    table = markdown_table(found).splitlines()
    assert table[0].startswith("| tokens | question |")
    assert table[4] == "| 1 | second question, memory | 1 | 8 | 0 | 2 |"


def test_the_command(tmp_path: Path) -> None:
    plain_model("llama").save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    command = ["reuse", "--model", str(tmp_path / "model"), "--lengths", "512,100000", "--budget", "600"]
    done = CliRunner().invoke(
        app, [*command, "--repeats", "1", "--int8", "--out", str(tmp_path / "out")], catch_exceptions=False
    )
    assert done.exit_code == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    assert [row["length"] for row in result["rows"]] == [512] * 4 + [1023] * 4
    assert [row["mode"] for row in result["rows"]] == [*MODES] * 2
    assert result["rows"][7]["cache_read_tokens"] == 896
    assert [(error["length"], error["divergence"] > 0) for error in result["int8"]] == [(512, True), (1023, True)]
    assert json.loads((tmp_path / "out" / "reuse.json").read_text()) == result
    report = (tmp_path / "out" / "reuse.md").read_text()
    assert report.startswith("| tokens |")
    assert "\n512 tokens, K/V of 384 from the disk in eight bits: " in report


@pytest.mark.parametrize("lengths", ["511", "many", "4096,x"])
def test_bad_lengths_are_refused_before_a_model_is_loaded(lengths: str) -> None:
    with pytest.raises(ConfigError, match=f"--lengths='{lengths}': give lengths of at least 512"):
        CliRunner().invoke(app, ["reuse", "--model", "no such", "--lengths", lengths], catch_exceptions=False)
