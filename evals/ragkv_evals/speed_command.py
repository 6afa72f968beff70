"""The commands `ragkv-eval speed` and `ragkv-eval peers`."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import PreTrainedModel
from transformers.utils import logging

from ragkv.errors import ConfigError
from ragkv.models import LoadedModel, load, resolve
from ragkv_evals import speed_report
from ragkv_evals.console import console, write_result
from ragkv_evals.first_layers import first_layers
from ragkv_evals.long_text import long_text
from ragkv_evals.peers.environment import Peer, PeerProcess, find, install
from ragkv_evals.speed import KERNEL_SIZE, WINDOW_SIZE, PeerVariant, Variant, in_process_variants, measure


def speed(
    model: Annotated[str, typer.Option(help="Packaged name, folder, .gguf file or hub id.")] = "qwen2.5-coder-0.5b",
    lengths: Annotated[str, typer.Option(help="Prompt lengths in tokens.")] = "2048,8192,16384,32768",
    budget: Annotated[int, typer.Option(help="Entries kept per KV head; half of a prompt that is no longer.")] = 2048,
    decode_tokens: Annotated[int, typer.Option(min=1, help="Tokens decoded after each prompt.")] = 32,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds over all variants; medians are reported.")] = 3,
    peers: Annotated[str, typer.Option(help="Also measure these, each in its own environment: kvpress.")] = "",
    layers: Annotated[
        int | None,
        typer.Option(help="Only the model's first layers: the same ratios in less time.", show_default="all"),
    ] = None,
    text: Annotated[Path | None, typer.Option(help="Text file to read instead of the bundled sample.")] = None,
    device: Annotated[str | None, typer.Option(help="Such as cpu or cuda:0.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for speed.json and speed.md.")] = None,
) -> None:
    """Prefill and decoding speed of plain transformers, ragkv's full cache, SnapKV and peers, in one run."""
    wanted = _lengths(lengths, budget)
    found = [find(name.strip()) for name in peers.split(",") if name.strip()]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    with ExitStack() as stack:
        folder = resolve(model) if layers is None else stack.enter_context(first_layers(resolve(model), layers))
        loaded = load(model if layers is None else folder, device=device)
        # The longest prompt leaves room for the tokens decoded behind it.
        fitting = sorted({min(length, loaded.context_length - decode_tokens) for length in wanted})
        tokens = long_text(loaded.tokenizer, fitting[-1] + decode_tokens, text)
        beside, versions = stack.enter_context(_peer_variants(found, loaded, folder))
        status = stack.enter_context(console.status(""))
        variants = [*in_process_variants(loaded.model, loaded.attn_implementation), *beside]
        cells = measure(variants, tokens, fitting, budget, decode_tokens, repeats, status.update)
    name = loaded.name if layers is None else f"{model}, first {layers} layers"
    settings = {
        "model": name,
        "attn_implementation": loaded.attn_implementation,
        "decode_tokens": decode_tokens,
        "repeats": repeats,
        "window_size": WINDOW_SIZE,
        "kernel_size": KERNEL_SIZE,
        **speed_report.machine(loaded.model),
        "peer_versions": versions,
    }
    console.print(speed_report.rich_table(cells, f"{name}, medians of {repeats} repeats"))
    write_result(speed_report.as_json(cells, settings), "speed", out)
    if out is not None:
        (out / "speed.md").write_text(speed_report.markdown_table(cells))


def peers(names: Annotated[list[str], typer.Argument(help="Which ones: kvpress.")]) -> None:
    """Install the systems that ragkv is measured against, each into an environment of its own."""
    for peer in [find(name) for name in names]:
        _install(peer)
        console.print(f"{peer.name} is installed")


def _lengths(text: str, budget: int) -> list[int]:
    try:
        lengths = [int(part) for part in text.split(",")]
    except ValueError:
        lengths = []
    shortest = 4 * WINDOW_SIZE  # half of it must hold more than the observation window
    if not lengths or min(lengths) < shortest:
        raise ConfigError(f"--lengths={text!r}: give lengths of at least {shortest}, such as 2048,8192")
    if budget <= WINDOW_SIZE:
        raise ConfigError(f"--budget={budget}: must be larger than the observation window of {WINDOW_SIZE} tokens")
    return lengths


def _install(peer: Peer) -> Path:
    with console.status(f"installing {peer.name} ({', '.join(peer.requirements)})"):
        return install(peer)


@contextmanager
def _peer_variants(
    peers: list[Peer], loaded: LoadedModel, folder: str
) -> Iterator[tuple[list[Variant], dict[str, dict[str, str]]]]:
    """Start the peers on the same model; yields them and the versions they run."""
    options = _peer_options(loaded.model)
    processes: dict[str, PeerProcess] = {}
    try:
        for peer in peers:
            processes[peer.name] = PeerProcess(peer, _install(peer), folder, options)
        variants: list[Variant] = [PeerVariant(f"{name} SnapKV", process) for name, process in processes.items()]
        yield variants, {name: process.versions for name, process in processes.items()}
    finally:
        for process in processes.values():
            process.close()


def _peer_options(model: PreTrainedModel) -> dict[str, object]:
    return {
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "threads": torch.get_num_threads(),
        "window_size": WINDOW_SIZE,
        "kernel_size": KERNEL_SIZE,
    }
