"""`ragkv explain`: one HTML page that shows what the KV cache kept of the documents, question by question."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ragkv.cli import options
from ragkv.cli.engines import check_model, load_engine, quieten
from ragkv.cli.output import ProgressBars, write
from ragkv.cli.sources import check_paths, open_index, retrieve
from ragkv.errors import ConfigError

if TYPE_CHECKING:
    from ragkv.options import ChatOptions


def explain(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar='PATH... "QUESTION"...',
            help="Files and folders, or one saved index; then one or more questions, each in quotes.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option(help="The page to write; one that is there is replaced.")] = Path("explain.html"),
    context_tokens: options.ContextTokensOption = options.CONTEXT_TOKENS,
    skip_unreadable: options.SkipUnreadableOption = False,
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
    max_tokens: options.MaxTokensOption = options.MAX_TOKENS,
) -> None:
    """Write a page that shows which words of the documents each question kept.

    The documents are the same for all questions: the best for each, with an equal share of --context-tokens.
    """
    paths, questions = split_arguments(arguments)
    check_out(out)
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
        context_tokens=context_tokens,
        max_tokens=max_tokens,
    )
    page = _page(paths, questions, chosen, skip_unreadable=skip_unreadable)
    try:
        out.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}: choose another file") from error
    write(f"{out}\n")


def _page(paths: Sequence[str], questions: Sequence[str], chosen: "ChatOptions", *, skip_unreadable: bool) -> str:
    check_model(chosen.model)
    quieten()
    from ragkv.explain import explain as explain_question
    from ragkv.explain_page import render

    with ProgressBars() as progress:
        index = open_index(paths, progress, skip_unreadable=skip_unreadable)
        engine = load_engine(chosen, progress)
        documents = retrieve(index, questions, engine.tokenizer, chosen.context_tokens or 0)
        explanations = []
        for number, question in enumerate(questions, 1):
            stage = progress.stage(f"prefill for question {number}")
            explanations.append(explain_question(engine, question, documents, chosen.sampling(), on_layer=stage))
    return render(explanations, documents, model=engine.loaded.name, policy=str(engine.policy))


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The paths and the questions: the first argument is a path, as is every other that exists or looks like one.

    Raises:
        ConfigError: there is no question, or an empty one.
    """
    paths = [arguments[0]]
    for argument in arguments[1:]:
        if not options.is_path(argument):
            break
        paths.append(argument)
    questions = list(arguments[len(paths) :])
    if not questions:
        raise ConfigError("no question: put one or more behind the paths, each in quotes")
    for question in questions:
        options.check_question(question)
    return paths, questions


def check_out(out: Path) -> None:
    """Raise a ConfigError if the page cannot be written there, before anything slow happens."""
    if out.is_dir():
        raise ConfigError(f"--out {out} is a folder: name a file in it, such as {out / 'explain.html'}")
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"--out {out}: there is no folder {out.absolute().parent}: create it, or choose another")
