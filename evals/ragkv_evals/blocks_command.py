"""The command `ragkv-eval blocks`."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from transformers.utils import logging

from ragkv.cli.options import DEFAULT_MODEL
from ragkv.document_blocks import DocumentBlocks
from ragkv.engine import Engine
from ragkv.errors import ConfigError
from ragkv.kv_store import KVStore
from ragkv.models import load
from ragkv.policies import SnapKV
from ragkv_evals.answering import SHARED_BYTES, WHOLE_PROMPTS, set_name
from ragkv_evals.blocks import SNAPKV, answer
from ragkv_evals.config import content_hash, prompt_hash
from ragkv_evals.console import console, write_result
from ragkv_evals.extras import need
from ragkv_evals.long_text import SAMPLE
from ragkv_evals.paired import Answered, markdown_table, rich_table, rows
from ragkv_evals.pieces import Pieces
from ragkv_evals.prompts import PromptCounter
from ragkv_evals.speed_report import machine
from ragkv_evals.tasks.base import Example, Layout
from ragkv_evals.tasks.hotpotqa import HOTPOTQA
from ragkv_evals.tasks.question import drawn


def blocks(
    data: Annotated[Path | None, typer.Option(help="HotpotQA questions as JSON lines.", show_default="bundled")] = None,
    model: Annotated[str, typer.Option(help="Packaged name, folder, .gguf file or hub id.")] = DEFAULT_MODEL,
    context_tokens: Annotated[int, typer.Option(min=512, help="Tokens of each prompt.")] = 4096,
    budget: Annotated[int, typer.Option(help="Entries kept per KV head.")] = 1024,
    recompute: Annotated[
        str, typer.Option(help="Numbers of the documents' tokens to compute anew, or, from 0 to 1, shares of them.")
    ] = "0,768",
    first_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens at each document's beginning to compute anew in any case.")
    ] = DocumentBlocks().first_tokens,
    limit: Annotated[int, typer.Option(min=1, help="Questions to draw.")] = 50,
    seed: Annotated[int, typer.Option(help="Fixes what is drawn.")] = 0,
    shared_sets: Annotated[
        bool, typer.Option("--shared-sets", help="Questions share document sets, each of which is read once.")
    ] = False,
    must_cite: Annotated[bool, typer.Option("--must-cite", help="Hold replies to the form of a cited answer.")] = False,
    kv_dir: Annotated[
        Path | None,
        typer.Option(help="Keep what is read in this folder: the next benchmark on the same documents begins there."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="Such as cpu or cuda:0.", show_default="GPU if any")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the results; a benchmark that is there is continued.")
    ] = None,
) -> None:
    """F1, citation F1 and time to first token on joined blocks of documents, against SnapKV on the whole prompt."""
    variants = [DocumentBlocks(number, first_tokens) for number in _numbers(recompute)]
    need("scipy")
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    cases = HOTPOTQA.open(data)
    loaded = load(model, device=device)
    layout = Layout(context_tokens, None, seed, PromptCounter(loaded.tokenizer), shared_sets)
    engine = Engine(loaded, SnapKV(budget), store=KVStore(SHARED_BYTES, kv_dir, namespace="documents"))
    whole_prompts = KVStore(SHARED_BYTES, kv_dir, namespace=WHOLE_PROMPTS) if shared_sets or kv_dir else None
    settings = {
        "model": loaded.name,
        **machine(loaded.model),
        "data_hash": content_hash(data or SAMPLE),
        "context_tokens": context_tokens,
        "budget": budget,
        "recompute": [each.recompute for each in variants],
        "first_tokens": first_tokens,
        "limit": limit,
        "seed": seed,
        "shared_sets": shared_sets,
        "must_cite": must_cite,
        "prompt_hash": prompt_hash(HOTPOTQA.prompt),
    }
    answers: list[Answered] = []
    sets: dict[str, str] = {}
    with Pieces(out, settings) as pieces, console.status("") as status:
        for done, index in enumerate(drawn(len(cases.ids), seed)[:limit], 1):
            status.update(f"question {done}/{min(limit, len(cases.ids))}")
            example = cases.build(index, layout)
            sets[example.id] = set_name(example.documents)

            def ask(example: Example = example) -> list[Answered]:
                return answer(engine, example, HOTPOTQA.score, variants, HOTPOTQA.max_tokens, whole_prompts, must_cite)

            answers += pieces.once(example.id, Answered, ask)
    found = rows(answers, HOTPOTQA.headline, SNAPKV, sets)
    console.print(rich_table(found, f"{loaded.name}, {context_tokens} tokens, {found[0].examples} questions"))
    result = {
        **settings,
        "rows": [asdict(row) for row in found],
        "answers": [asdict(each) for each in answers],
    }
    write_result(result, "blocks", out)
    if out is not None:
        (out / "blocks.md").write_text(markdown_table(found))


def _numbers(text: str) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers:
        raise ConfigError(f"--recompute={text!r}: give shares from 0 to 1 or numbers of tokens, such as 0,0.25,768")
    return numbers
