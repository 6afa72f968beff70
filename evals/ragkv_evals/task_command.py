"""`ragkv-eval TASK`: one command for each task, all with the same options."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from ragkv.cli.engines import check_model, quieten
from ragkv.cli.options import DEFAULT_MODEL
from ragkv.errors import ConfigError
from ragkv_evals.answering import Answering
from ragkv_evals.config import RunConfig, content_hash, dtype_name, machine, prompt_hash
from ragkv_evals.console import console, write_result
from ragkv_evals.data_source import locate
from ragkv_evals.extras import need
from ragkv_evals.long_text import SAMPLE
from ragkv_evals.ray_run import RayWorkers
from ragkv_evals.records import Record
from ragkv_evals.results_folder import check_folder
from ragkv_evals.run import RunFolder, run
from ragkv_evals.run_progress import RunProgress
from ragkv_evals.summary import summarize
from ragkv_evals.summary_table import summary_table
from ragkv_evals.tasks.base import Task
from ragkv_evals.variants import split_names, truncates


def command_for(task: Task) -> Callable[..., None]:
    """The command that runs this task."""

    def command(
        out: Annotated[Path, typer.Option(help="The run's folder; a run that is there is continued.")],
        data: Annotated[
            str | None,
            typer.Option(help="The data file, or folder of texts; or hub:ORG/NAME/FILE.", show_default="bundled"),
        ] = None,
        model: Annotated[str, typer.Option(help="Packaged name, folder, .gguf file or hub id.")] = DEFAULT_MODEL,
        policies: Annotated[
            str, typer.Option(help="What is compared, such as full,snapkv:1024,pooling=max,truncate:1024.")
        ] = "full,snapkv:1024",
        context_tokens: Annotated[
            str, typer.Option(help="Tokens of the prompts, such as 4096,8192.", show_default="the cases' own texts")
        ] = "",
        depths: Annotated[
            str, typer.Option(help="Where the gold texts stand, in percent, such as 0,50,100.", show_default="drawn")
        ] = ",".join(f"{depth:g}" for depth in task.depths),
        limit: Annotated[int | None, typer.Option(min=1, help="Cases to draw.", show_default="all")] = None,
        seed: Annotated[int, typer.Option(help="Fixes everything that is drawn.")] = 0,
        max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of a reply.")] = task.max_tokens,
        shard: Annotated[str, typer.Option(help="Only the i-th of n parts of the cases, as i/n.")] = "1/1",
        dtype: Annotated[str | None, typer.Option(help="bfloat16, float16 or float32.", show_default="fastest")] = None,
        device: Annotated[str | None, typer.Option(help="Such as cpu or cuda:0.", show_default="GPU if any")] = None,
        shared_sets: Annotated[
            bool, typer.Option("--shared-sets", help="Questions share document sets, each of which is read once.")
        ] = False,
        decode_together: Annotated[
            bool,
            typer.Option(
                "--decode-together", help="All policies of an example as one batch: fast, but no decode speeds."
            ),
        ] = False,
        must_cite: Annotated[
            bool, typer.Option("--must-cite", help="Hold replies to the form of the prompt by a grammar.")
        ] = False,
        kv_dir: Annotated[
            Path | None,
            typer.Option(help="Keep what is read in this folder: prompts that begin with the same texts begin there."),
        ] = None,
        ray: Annotated[bool, typer.Option("--ray", help="Spread the run over a Ray cluster.")] = False,
        ray_workers: Annotated[
            int | None, typer.Option(min=1, help="Workers on it.", show_default="one per GPU, or per machine")
        ] = None,
    ) -> None:
        names, places = split_names(policies), parse_numbers("--depths", depths)
        lengths = tuple(map(int, parse_numbers("--context-tokens", context_tokens)))
        _check_layout(task, names, lengths, places, shared_sets)
        _check_must_cite(task, must_cite)
        need("scipy")
        if ray:
            need("ray")
        found = locate(data)
        cases, source = task.open(found), found or SAMPLE
        config = RunConfig(
            task=task.name,
            data=source.name,
            data_hash=content_hash(source),
            model=model,
            dtype=dtype_name(device, dtype),
            context_tokens=lengths,
            depths=places,
            limit=limit,
            seed=seed,
            policies=names,
            max_tokens=max_tokens,
            shard=parse_shard(shard),
            prompt_hash=prompt_hash(task.prompt, task.hints),
            shared_sets=shared_sets,
            decode_together=decode_together,
            must_cite=must_cite,
        )
        check_folder(out, config.to_json())
        check_model(model)
        quieten()
        load = partial(Answering.load, cases, config, device, kv_dir)
        with RunProgress(console) as progress, ExitStack() as stack:
            answering = stack.enter_context(RayWorkers(load, ray_workers)) if ray else load()
            documents = answering.check()
            # Claimed only now: a folder whose configuration cannot be run would refuse the one that can.
            folder = RunFolder(out, config, machine())
            shared = documents if shared_sets and not ray else {}  # workers read the sets in any order
            records = run(cases.ids, folder, answering.spread, progress.watch, shared, progress.guess)
        conclude(records, task, config, out)

    command.__doc__ = task.help
    return command


def conclude(records: Sequence[Record], task: Task, config: RunConfig, out: Path) -> None:
    """Show what a run found, write metrics.json, and print it as one JSON object."""
    cells = summarize(records, task)
    console.print(summary_table(cells, task))
    write_result({"config": config.to_json(), "cells": cells}, "metrics", out)


def _check_layout(
    task: Task, names: tuple[str, ...], lengths: tuple[int, ...], depths: tuple[float, ...], shared_sets: bool
) -> None:
    if shared_sets and (not task.has_documents or not lengths or depths):
        raise ConfigError(
            "--shared-sets puts the documents of several questions into one prompt: it needs a task with documents and "
            "--context-tokens, and no --depths"
        )
    if not task.has_layout and (lengths or depths):
        raise ConfigError(
            f"--context-tokens and --depths mean nothing to {task.name}, whose file fixes both: leave them out"
        )
    if any(not 0 <= depth <= 100 for depth in depths):
        raise ConfigError(f"--depths {depths}: must be between 0 and 100 percent")
    if not task.has_documents and any(map(truncates, names)):
        raise ConfigError(f"truncate leaves out documents, and {task.name} has none: name other --policies")


def _check_must_cite(task: Task, must_cite: bool) -> None:
    if must_cite and not task.has_documents:
        raise ConfigError(f"--must-cite: {task.name} has no documents to cite; leave it out")


def parse_numbers(option: str, text: str) -> tuple[float, ...]:
    """The numbers in a list such as "0,50,100".

    Raises:
        ConfigError: a part is no number.
    """
    try:
        return tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise ConfigError(f"{option} {text!r}: give numbers with commas between") from error


def parse_shard(text: str) -> tuple[int, int]:
    """The i and n of "i/n".

    Raises:
        ConfigError: it is not of that form, or i is not between 1 and n.
    """
    first, _, of = text.partition("/")
    if not (first.isdigit() and of.isdigit() and 1 <= int(first) <= int(of)):
        raise ConfigError(f"--shard {text!r}: give i/n with i from 1 to n, such as 2/4")
    return int(first), int(of)
