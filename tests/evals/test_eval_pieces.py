"""Pieces of a benchmark: made once, kept through a kill, and never taken from another benchmark."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from ragkv.errors import ConfigError, DocumentError
from ragkv_evals.pieces import Pieces

SETTINGS = {"model": "m", "shares": [0.5]}


@dataclass(frozen=True)
class Row:
    value: int
    text: str = "line\u2028separator"


@dataclass(frozen=True)
class Other:
    value: int
    more: int


def _never() -> list[Row]:
    raise AssertionError("this piece is there")


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_piece_is_made_once(tmp_path: Path, in_memory: bool) -> None:
    pieces = Pieces(None if in_memory else tmp_path / "out", SETTINGS)
    assert pieces.once("a", Row, lambda: [Row(1), Row(2)]) == [Row(1), Row(2)]
    assert pieces.once("a", Row, _never) == [Row(1), Row(2)]
    assert pieces.once("b", Row, list) == []
    assert (tmp_path / "out").exists() != in_memory


def test_what_a_kill_cut_off_is_made_again(tmp_path: Path) -> None:
    Pieces(tmp_path, SETTINGS).once("a", Row, lambda: [Row(1)])
    with (tmp_path / "pieces.jsonl").open("a") as file:
        file.write('{"piece": "b", "rows": [{"val')
    again = Pieces(tmp_path, SETTINGS)
    assert again.once("a", Row, _never) == [Row(1)]
    assert again.once("b", Row, lambda: [Row(3)]) == [Row(3)]
    lines = (tmp_path / "pieces.jsonl").read_text().split("\n")
    assert [json.loads(line)["piece"] for line in lines[:-1]] == ["a", "b"]
    del again
    assert Pieces(tmp_path, SETTINGS).once("b", Row, _never) == [Row(3)]


def test_nothing_is_kept_of_a_piece_that_failed(tmp_path: Path) -> None:
    pieces = Pieces(tmp_path, SETTINGS)
    with pytest.raises(AssertionError):
        pieces.once("a", Row, _never)
    assert pieces.once("a", Row, lambda: [Row(1)]) == [Row(1)]


def test_one_process_at_a_time_has_a_folder(tmp_path: Path) -> None:
    with Pieces(tmp_path, SETTINGS) as pieces:
        with pytest.raises(ConfigError, match="is in use by another run"):
            Pieces(tmp_path, SETTINGS)
        pieces.once("a", Row, lambda: [Row(1)])
    with Pieces(tmp_path, SETTINGS) as pieces:
        assert pieces.once("a", Row, _never) == [Row(1)]


def test_another_benchmark_is_refused(tmp_path: Path) -> None:
    Pieces(tmp_path, SETTINGS).once("a", Row, lambda: [Row(1)])
    with pytest.raises(ConfigError, match="holds a run with model='m', and this one has 'n'"):
        Pieces(tmp_path, {**SETTINGS, "model": "n"})
    with pytest.raises(DocumentError, match="no results of this version"):
        Pieces(tmp_path, SETTINGS).once("a", Other, _never)
    with pytest.raises(ConfigError, match=r"holds a run with shares=\[0.5\], and this one has None"):
        Pieces(tmp_path, {"model": "m"})
    for line in ("[1]\n", "no json\n", '{"piece": "a"}\n'):
        (tmp_path / "pieces.jsonl").write_text(line)
        with pytest.raises(DocumentError, match="use another --out folder"):
            Pieces(tmp_path, SETTINGS)
    (tmp_path / "config.json").write_text("")
    with pytest.raises(DocumentError, match=r"config.json: no JSON"):
        Pieces(tmp_path, SETTINGS)
