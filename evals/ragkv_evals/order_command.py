"""The command `ragkv-eval order`."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from transformers.utils import logging

from ragkv.cli.options import DEFAULT_MODEL
from ragkv.embedding import SentenceTransformerEmbedder
from ragkv.models import load
from ragkv_evals.console import console, write_result
from ragkv_evals.extras import need
from ragkv_evals.order import AS_RANKED, answers, index_of
from ragkv_evals.paired import markdown_table, rich_table, rows
from ragkv_evals.speed_report import machine
from ragkv_evals.tasks import hotpotqa
from ragkv_evals.tasks.question import drawn


def order(
    data: Annotated[Path | None, typer.Option(help="HotpotQA questions as JSON lines.", show_default="bundled")] = None,
    model: Annotated[str, typer.Option(help="Packaged name, folder, .gguf file or hub id.")] = DEFAULT_MODEL,
    top_k: Annotated[int, typer.Option(min=1, help="Passages retrieved for each question.")] = 10,
    budget: Annotated[int, typer.Option(help="Entries kept per KV head.")] = 1024,
    limit: Annotated[int, typer.Option(min=1, help="Questions to draw.")] = 50,
    own_passages: Annotated[
        bool,
        typer.Option(
            "--own-passages", help="Retrieve from the passages of the drawn questions alone, so that more are shared."
        ),
    ] = False,
    kv_memory_bytes: Annotated[int, typer.Option(min=1, help="Of K/V that each order keeps.")] = 2 * 2**30,
    seed: Annotated[int, typer.Option(help="Fixes what is drawn.")] = 0,
    device: Annotated[str | None, typer.Option(help="Such as cpu or cuda:0.", show_default="GPU if any")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for order.json and order.md.")] = None,
) -> None:
    """F1, citation F1 and tokens read with retrieved documents as ranked, and popular ones first."""
    need("scipy")
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    every = hotpotqa.load(data)
    questions = [every[i] for i in drawn(len(every), seed)[:limit]]
    with console.status("indexing") as status:
        index = index_of(questions if own_passages else every, SentenceTransformerEmbedder(device=device))
        loaded = load(model, device=device)

        def notify(done: int) -> None:
            status.update(f"question {done + 1}/{len(questions)}")

        found = list(answers(loaded, questions, index, top_k, budget, kv_memory_bytes, notify))
    table = rows(found, hotpotqa.HOTPOTQA.headline, AS_RANKED)
    console.print(rich_table(table, f"{loaded.name}, {top_k} of {len(index):,} passages, {len(questions)} questions"))
    settings = {
        "model": loaded.name,
        "top_k": top_k,
        "passages": len(index),
        "own_passages": own_passages,
        "budget": budget,
        "kv_memory_bytes": kv_memory_bytes,
        "seed": seed,
        **machine(loaded.model),
    }
    lines = [asdict(each) for each in found]
    write_result({**settings, "rows": [asdict(row) for row in table], "answers": lines}, "order", out)
    if out is not None:
        (out / "order.md").write_text(markdown_table(table))
