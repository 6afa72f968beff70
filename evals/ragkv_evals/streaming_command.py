"""The command `ragkv-eval streaming`."""

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from ragkv.errors import ConfigError, DocumentError
from ragkv.models import LoadedModel, load
from ragkv_evals import streaming_report
from ragkv_evals.config import content_hash
from ragkv_evals.console import console, write_result
from ragkv_evals.extras import need
from ragkv_evals.pieces import Pieces
from ragkv_evals.speed_report import machine
from ragkv_evals.streaming import (
    Progress,
    Recomputed,
    check,
    cut_streams,
    read_steps,
    read_streaming,
    recompute,
    usual_sinks,
)
from ragkv_evals.streaming_report import Recompute, Row, StepsRow


def streaming(
    data: Annotated[list[Path], typer.Option(help="Text files, such as books, to read one after the other.")],
    model: Annotated[str, typer.Option(help="Packaged name, folder, .gguf file or hub id.")] = "smollm2-135m",
    tokens: Annotated[int, typer.Option(min=2, help="Tokens to read, all streams together.")] = 200_000,
    streams: Annotated[int, typer.Option(min=1, help="Parts of the text that are read side by side.")] = 8,
    windows: Annotated[str, typer.Option(help="Tokens in sight, sinks included.")] = "1024,2048",
    sinks: Annotated[str, typer.Option(help="Numbers of sinks; 0 is window attention.")] = "0,1,2,4,8",
    recompute_positions: Annotated[
        int, typer.Option(min=2, help="Positions per stream at which the whole window is also recomputed.")
    ] = 64,
    steps: Annotated[
        int, typer.Option(min=3, help="Tokens of one stream that are also read one by one, for time and memory.")
    ] = 8192,
    device: Annotated[str | None, typer.Option(help="Such as cpu or cuda:0.")] = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16, float16 or float32.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the results; a benchmark that is there is continued.")
    ] = None,
) -> None:
    """Perplexity and time per token over books: window attention, StreamingLLM, and recomputing the window."""
    sizes, numbers = _numbers("windows", windows, 2), _numbers("sinks", sinks, 0)
    need("scipy")
    if out is not None:
        need("matplotlib")
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    loaded = load(model, device=device, dtype=dtype)
    ids = cut_streams(_ids(loaded, data, tokens), streams, loaded.tokenizer("")["input_ids"])
    check(loaded.model, ids, sizes, numbers, steps)
    settings = {
        "model": loaded.name,
        **machine(loaded.model),
        "tokens": ids.numel(),
        "streams": streams,
        "recompute_positions": recompute_positions,
        "steps": steps,
        "data": [file.name for file in data],
        "data_hash": [content_hash(file) for file in data],
    }
    with Pieces(out, settings) as pieces, console.status("") as status:
        measured = [
            _measured(pieces, loaded.model, ids, window, numbers, recompute_positions, steps, status.update)
            for window in sizes
        ]
    again, token_by_token, by_window = zip(*measured, strict=True)
    rows = [row for found in by_window for row in found]
    lines = streaming_report.table(rows, token_by_token, again)
    console.print(streaming_report.rich_table(lines, f"{loaded.name}, {streams} streams of {ids.shape[1]:,} tokens"))
    result = {
        **settings,
        "context_length": loaded.context_length,
        "rows": [asdict(row) for row in rows],
        "token_by_token": [asdict(each) for each in token_by_token],
        "recompute": [asdict(each) for each in again],
    }
    write_result(result, "streaming", out)
    if out is not None:
        (out / "streaming.md").write_text(streaming_report.markdown_table(lines))
        streaming_report.plot(rows, out / "streaming.png", loaded.context_length)


def _measured(
    pieces: Pieces,
    model: PreTrainedModel,
    ids: Tensor,
    window: int,
    sinks: Sequence[int],
    recompute_positions: int,
    steps: int,
    progress: Progress,
) -> tuple[Recompute, StepsRow, list[Row]]:
    """All of one window; what is there from before as it is."""

    def again() -> list[Recomputed]:
        return [recompute(model, ids, window, recompute_positions, progress)]

    def stepwise() -> list[StepsRow]:
        options = model, ids[:1, :steps], window, usual_sinks(window), progress
        return [streaming_report.steps_row(read_steps(*options), read_streaming(*options))]

    (recomputed,) = pieces.once(f"window {window}, recomputed", Recomputed, again)
    (by_token,) = pieces.once(f"window {window}, token by token", StepsRow, stepwise)

    def variant(number: int) -> list[Row]:
        return [streaming_report.row(read_streaming(model, ids, window, number, progress), recomputed)]

    rows = [
        row
        for number in sinks
        for row in pieces.once(f"window {window}, {number} sinks", Row, partial(variant, number))
    ]
    return streaming_report.recompute_row(recomputed), by_token, rows


def _numbers(option: str, text: str, least: int) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < least:
        raise ConfigError(f"--{option}={text!r}: give numbers of at least {least}, separated by commas")
    return numbers


def _ids(loaded: LoadedModel, files: list[Path], count: int) -> list[int]:
    """The first `count` tokens of the files, in their order."""
    ids: list[int] = []
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DocumentError(f"cannot read {file} as text ({error}); give UTF-8 text files") from error
        ids += loaded.tokenizer.encode(text, add_special_tokens=False, verbose=False)
        if len(ids) >= count:
            return ids[:count]
    raise DocumentError(f"--tokens={count}: the files hold {len(ids)} tokens; add a file, or read fewer tokens")
