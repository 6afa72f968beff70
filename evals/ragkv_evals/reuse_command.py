"""The command `ragkv-eval reuse`, and what its figures say."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from rich.table import Table
from transformers.utils import logging

from ragkv.errors import ConfigError
from ragkv.models import load
from ragkv.policies import Policy, SnapKV
from ragkv_evals.console import console, write_result
from ragkv_evals.int8_error import QUESTIONS, int8_error
from ragkv_evals.long_text import long_text
from ragkv_evals.reuse import MODES, QUESTION_TOKENS, Cell, measure
from ragkv_evals.speed_report import machine

SHORTEST = 512


@dataclass(frozen=True)
class Row:
    """One mode at one length.

    Attributes:
        speedup: time to first token without a store, over that of this mode.
        peak_mib: most memory in use, weights included; None where the system does not tell.
    """

    length: int
    mode: str
    ttft_s: float
    speedup: float
    cache_read_tokens: int
    cache_creation_tokens: int
    peak_mib: float | None
    all_ttft_s: list[float]


def reuse(
    model: Annotated[str, typer.Option(help="Packaged name, folder, .gguf file or hub id.")] = "qwen2.5-coder-0.5b",
    lengths: Annotated[str, typer.Option(help="Prompt lengths in tokens, questions included.")] = "4096,16384",
    budget: Annotated[int, typer.Option(help="Entries kept per KV head; half of a prompt that is no longer.")] = 4096,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds over all modes; medians are reported.")] = 3,
    text: Annotated[Path | None, typer.Option(help="Text file to read instead of the bundled sample.")] = None,
    int8: Annotated[bool, typer.Option("--int8", help="Also what K/V in eight bits on the disk do to logits.")] = False,
    device: Annotated[str | None, typer.Option(help="Such as cpu or cuda:0.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for reuse.json and reuse.md.")] = None,
) -> None:
    """Time to the first token of questions about the same documents, without a store, from memory and from disk."""
    wanted = _lengths(lengths)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    loaded = load(model, device=device)
    fitting = sorted({min(length, loaded.context_length - 1) for length in wanted})
    spare = QUESTIONS if int8 else 2
    tokens = long_text(loaded.tokenizer, fitting[-1] + spare * QUESTION_TOKENS, text)

    def policy(length: int) -> Policy:
        return SnapKV(max_capacity_prompt=budget if length > budget else length // 2)

    with console.status("") as status:
        cells = measure(loaded, policy, tokens, fitting, repeats, status.update)
        status.update("K/V in eight bits")
        errors = [int8_error(loaded, tokens, length) for length in fitting] if int8 else []
    found = rows(cells)
    console.print(rich_table(found, f"{loaded.name}, medians of {repeats} repeats"))
    for error in errors:
        console.print(str(error))
    settings = {"model": loaded.name, "budget": budget, "repeats": repeats, **machine(loaded.model)}
    measured = {"rows": [asdict(row) for row in found], "int8": [asdict(error) for error in errors]}
    write_result({**settings, **measured}, "reuse", out)
    if out is not None:
        (out / "reuse.md").write_text(markdown_table(found) + "".join(f"\n{error}\n" for error in errors))


def _lengths(text: str) -> list[int]:
    try:
        lengths = [int(part) for part in text.split(",")]
    except ValueError:
        lengths = []
    if not lengths or min(lengths) < SHORTEST:
        raise ConfigError(f"--lengths={text!r}: give lengths of at least {SHORTEST}, such as 4096,16384")
    return lengths


def rows(cells: Sequence[Cell]) -> list[Row]:
    """One row per cell, in the order of the cells."""
    baseline = {cell.length: cell.ttft_s for cell in cells if cell.mode == MODES[0]}
    return [_row(cell, baseline[cell.length]) for cell in cells]


def _row(cell: Cell, baseline_s: float) -> Row:
    peaks = [peak for peak in cell.peak_bytes if peak is not None]
    return Row(
        length=cell.length,
        mode=cell.mode,
        ttft_s=cell.ttft_s,
        speedup=baseline_s / cell.ttft_s,
        cache_read_tokens=cell.stats[-1].cache_read_tokens,
        cache_creation_tokens=cell.stats[-1].cache_creation_tokens,
        peak_mib=median(peaks) / 2**20 if peaks else None,
        all_ttft_s=[stats.ttft_s for stats in cell.stats],
    )


HEADER = ("tokens", "question", "first token s", "speed-up", "tokens reused", "peak MiB")


def _texts(row: Row) -> tuple[str, ...]:
    peak = "" if row.peak_mib is None else f"{row.peak_mib:.0f}"
    return (str(row.length), row.mode, f"{row.ttft_s:.3g}", f"{row.speedup:.3g}", str(row.cache_read_tokens), peak)


def rich_table(found: Sequence[Row], title: str) -> Table:
    """For a terminal."""
    table = Table(title=title)
    for index, name in enumerate(HEADER):
        table.add_column(name, justify="left" if index == 1 else "right")
    for row in found:
        table.add_row(*_texts(row), end_section=row.mode == MODES[-1])
    return table


def markdown_table(found: Sequence[Row]) -> str:
    """For a README."""
    lines = [HEADER, ("--:", ":--", *["--:"] * (len(HEADER) - 2)), *map(_texts, found)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
