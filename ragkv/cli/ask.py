"""`ragkv ask`: the cited answer on stdout as it is made, sources and costs on stderr; or one JSON object."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ragkv.cli import options
from ragkv.cli.engines import check_model, load_engine, quieten
from ragkv.cli.output import ProgressBars, trimmed, write
from ragkv.cli.report import report
from ragkv.cli.sources import check_paths, open_index, retrieve
from ragkv.errors import PromptTooLong

if TYPE_CHECKING:
    from ragkv.answer import Answer, AnswerChunk, Overflow
    from ragkv.options import ChatOptions


def ask(
    paths: options.PathsArgument,
    question: Annotated[str, typer.Argument(help="What to answer, in quotes.", show_default=False)],
    context_tokens: options.ContextTokensOption = options.CONTEXT_TOKENS,
    on_overflow: Annotated[
        Literal["error", "drop_documents"],
        typer.Option(help="If the prompt is longer than the model's context: stop, or leave out the worst documents."),
    ] = "error",
    skip_unreadable: options.SkipUnreadableOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    model: options.ModelOption = options.DEFAULT_MODEL,
    dtype: options.DTypeOption = None,
    device: options.DeviceOption = None,
    policy: options.PolicyOption = "snapkv",
    max_capacity_prompt: options.CapacityOption = None,
    window_size: options.WindowSizeOption = None,
    kernel_size: options.KernelSizeOption = None,
    pooling: options.PoolingOption = None,
    kv_dir: options.KVDirOption = None,
    kv_disk_bytes: options.KVDiskBytesOption = None,
    recompute: options.RecomputeOption = None,
    must_cite: options.MustCiteOption = False,
    max_tokens: options.MaxTokensOption = options.MAX_TOKENS,
    temperature: options.TemperatureOption = 0.0,
    seed: options.SeedOption = None,
) -> None:
    """Answer a question from documents, and cite them."""
    options.check_question(question)
    options.check_recompute(recompute, kv_dir)
    check_paths(paths)
    chosen = options.chosen(
        policy,
        model=model,
        dtype=dtype,
        device=device,
        max_capacity_prompt=max_capacity_prompt,
        window_size=window_size,
        kernel_size=kernel_size,
        pooling=pooling,
        kv_dir=kv_dir,
        kv_disk_bytes=kv_disk_bytes,
        kv_memory_bytes=0,  # one question: what it read is of use to another process alone
        context_tokens=context_tokens,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
    )
    chunks = _chunks(
        paths,
        question,
        chosen,
        skip_unreadable=skip_unreadable,
        on_overflow=on_overflow,
        recompute=recompute,
        must_cite=must_cite,
    )
    if as_json:
        write(json.dumps(to_json(_last(chunks), model)) + "\n")
    else:
        report(_shown(chunks))


def _chunks(
    paths: Sequence[str],
    question: str,
    chosen: "ChatOptions",
    *,
    skip_unreadable: bool,
    on_overflow: "Overflow",
    recompute: float | None,
    must_cite: bool,
) -> "Iterator[AnswerChunk]":
    """The answer as it is made; on return the prompt has been read and the progress bars are done."""
    check_model(chosen.model)
    quieten()
    from ragkv.answer import stream_answer
    from ragkv.document_blocks import DocumentBlocks

    with ProgressBars() as progress:
        index = open_index(paths, progress, skip_unreadable=skip_unreadable)
        engine = load_engine(chosen, progress)
        documents = retrieve(index, [question], engine.tokenizer, chosen.context_tokens or 0)
        chunks = stream_answer(
            engine,
            question,
            documents,
            chosen.sampling(),
            on_overflow=on_overflow,
            blocks=None if recompute is None else DocumentBlocks(recompute),
            must_cite=must_cite,
            on_layer=progress.stage("prefill"),
        )
        try:
            first = next(chunks)
        except PromptTooLong as error:
            raise PromptTooLong(f"{error} (--context-tokens, --max-tokens, --on-overflow drop_documents)") from error
    return chain([first], chunks)


def _last(chunks: "Iterable[AnswerChunk]") -> "Answer":
    return next(chunk.answer for chunk in chunks if chunk.answer is not None)


def _shown(chunks: "Iterable[AnswerChunk]") -> "Answer":
    """The whole answer, written to stdout on the way."""
    answers: list[Answer] = []

    def texts() -> Iterator[str]:
        for chunk in chunks:
            yield chunk.text
            if chunk.answer is not None:
                answers.append(chunk.answer)

    for text in trimmed(texts()):
        write(text)
    write("\n")
    return answers[0]


def to_json(answer: "Answer", model: str) -> dict[str, Any]:
    """The answer as a JSON object; documents without their texts, numbered as they are cited."""
    numbered = list(enumerate(answer.documents, 1))
    return {
        "answer": answer.text,
        "citations": list(answer.citations),
        "invalid_citations": list(answer.invalid_citations),
        "documents": [
            {
                "number": number,
                "id": document.id,
                "title": document.title,
                "source": document.source,
                "cited": number in answer.citations,
                "metadata": dict(document.metadata),
            }
            for number, document in numbered
        ],
        "dropped_documents": [document.id for document in answer.dropped_documents],
        "model": model,
        "stats": {**asdict(answer.stats), "finish_reason": answer.finish_reason},
    }
