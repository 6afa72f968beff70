"""The command `ragkv-eval memory`."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from transformers.utils import logging

from ragkv.embedding import SentenceTransformerEmbedder
from ragkv.engine import Engine
from ragkv.models import load
from ragkv_evals import memory_report
from ragkv_evals.config import content_hash
from ragkv_evals.console import console, write_result
from ragkv_evals.extras import need
from ragkv_evals.memory import Asked, ask_all
from ragkv_evals.memory_data import read_conversations
from ragkv_evals.memory_lengths import with_early_questions
from ragkv_evals.memory_sessions import Setup
from ragkv_evals.pieces import Pieces
from ragkv_evals.speed_report import machine


def memory(
    data: Annotated[Path, typer.Option(help="JSON lines of LoCoMo or of tau-bench trajectories.")],
    model: Annotated[str, typer.Option(help="Packaged name, folder, .gguf file or hub id.")] = "qwen2.5-coder-1.5b",
    conversations: Annotated[int | None, typer.Option(min=1, help="How many to look at; all if left out.")] = None,
    questions: Annotated[
        int,
        typer.Option(min=1, help="Questions per conversation, a seeded sample, half of them early if possible."),
    ] = 20,
    window_length: Annotated[
        int,
        typer.Option(
            min=1,
            help="Tokens that streaming remembers, system message included; 1900 for tau-bench, where that has 1270.",
        ),
    ] = 4092,
    recall_tokens: Annotated[int, typer.Option(min=1, help="Most tokens that are recalled for a question.")] = 512,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 32,
    device: Annotated[str | None, typer.Option(help="Such as cpu or cuda:0.")] = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16, float16 or float32.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the results; a benchmark that is there is continued.")
    ] = None,
) -> None:
    """Answers after long conversations: full history, window only, streaming, and streaming with recall."""
    all_read = read_conversations(data, conversations)
    need("scipy")
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    engine = Engine(load(model, device=device, dtype=dtype))
    setup, context = Setup(window_length, recall_tokens, max_tokens, questions), engine.loaded.context_length
    read = with_early_questions(engine.tokenizer, all_read, setup.capacity, context, max_tokens)
    settings = {
        "model": engine.loaded.name,
        **machine(engine.model),
        "data": data.name,
        "data_hash": content_hash(data),
        **asdict(setup),
    }
    embedder, asked = SentenceTransformerEmbedder(), list[Asked]()
    with Pieces(out, settings) as pieces, console.status("") as status:
        for number, conversation in enumerate(read):

            def once(piece: str, ask: Callable[[], list[Asked]], number: int = number) -> list[Asked]:
                return pieces.once(f"{number} {piece}", Asked, ask)  # conversations may share a name

            asked += ask_all(engine, embedder, conversation, setup, once, status.update)
    found = memory_report.rows(asked)
    console.print(memory_report.rich_table(found, f"{engine.loaded.name}, {data.name}"), memory_report.verdict(asked))
    result = {
        **settings,
        "conversations_looked_at": len(all_read),
        "conversations": len(read),
        **memory_report.as_json(asked),
    }
    write_result(result, "memory", out)
    if out is not None:
        (out / "memory.md").write_text(f"{memory_report.markdown_table(found)}\n{memory_report.verdict(asked)}\n")
