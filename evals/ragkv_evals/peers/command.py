"""`ragkv-eval compare-peers`: the same examples through ragkv and other systems, as one run like any other."""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated

import torch
import typer

from ragkv.cli.engines import check_model, quieten
from ragkv.cli.options import DEFAULT_MODEL
from ragkv.engine import Engine
from ragkv.errors import ConfigError
from ragkv.models import load, resolve
from ragkv.packaged import PACKAGED, gguf_path
from ragkv_evals.answering import Answering
from ragkv_evals.config import RunConfig, content_hash, dtype_name, machine, prompt_hash
from ragkv_evals.console import console
from ragkv_evals.data_source import locate
from ragkv_evals.extras import need
from ragkv_evals.long_text import SAMPLE
from ragkv_evals.peers.answerer import PeerAnswerer
from ragkv_evals.peers.environment import PEERS, Peer, PeerProcess, install
from ragkv_evals.peers.generators import Generator, Piped, Transformers
from ragkv_evals.peers.llama_server import PROGRAM, LlamaServer
from ragkv_evals.results_folder import check_folder
from ragkv_evals.run import RunFolder, run
from ragkv_evals.run_progress import RunProgress
from ragkv_evals.speed import KERNEL_SIZE, WINDOW_SIZE
from ragkv_evals.task_command import conclude
from ragkv_evals.tasks import TASKS

_HERE = Path(__file__).parent
KVPRESS = Peer("kvpress", PEERS["kvpress"].requirements, _HERE / "kvpress_generate.py")
OPENVINO = Peer("openvino", ("openvino-genai==2026.4.1",), _HERE / "openvino_generate.py", needs_torch=False)
CHOICES = ("transformers", "kvpress", "openvino", "llama.cpp")


def compare_peers(
    out: Annotated[Path, typer.Option(help="The run's folder; a run that is there is continued.")],
    task: Annotated[str, typer.Option(help="What is asked.")] = "hotpotqa",
    data: Annotated[
        str | None, typer.Option(help="The data file, or hub:ORG/NAME/FILE.", show_default="bundled")
    ] = None,
    model: Annotated[str, typer.Option(help="Packaged name, folder, .gguf file or hub id.")] = DEFAULT_MODEL,
    peers: Annotated[str, typer.Option(help=f"Which of {', '.join(CHOICES)}.")] = "transformers,kvpress",
    budget: Annotated[int, typer.Option(min=64, help="Entries kept per KV head by all that compress.")] = 1024,
    context_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the prompts.")] = 4096,
    limit: Annotated[int, typer.Option(min=1, help="Cases to draw.")] = 10,
    seed: Annotated[int, typer.Option(help="Fixes everything that is drawn.")] = 0,
    dtype: Annotated[str | None, typer.Option(help="bfloat16, float16 or float32.", show_default="fastest")] = None,
) -> None:
    """Answer the same examples with ragkv and other systems: quality and speed, on a CPU."""
    need("scipy")
    wanted = [name.strip() for name in peers.split(",") if name.strip()]
    _check(task, wanted, model)
    found = locate(data)
    cases, source = TASKS[task].open(found), found or SAMPLE
    config = RunConfig(
        task=task,
        data=source.name,
        data_hash=content_hash(source),
        model=model,
        dtype=dtype_name("cpu", dtype),
        context_tokens=(context_tokens,) if TASKS[task].has_layout else (),
        depths=TASKS[task].depths,
        limit=limit,
        seed=seed,
        policies=("full", f"snapkv:{budget}", *(name for peer in wanted for name in _names(peer, budget))),
        max_tokens=TASKS[task].max_tokens,
        shard=(1, 1),
        prompt_hash=prompt_hash(TASKS[task].prompt, TASKS[task].hints),
    )
    check_folder(out, config.to_json())
    check_model(model)
    quieten()
    with RunProgress(console) as progress:
        engine = Engine(load(model, device="cpu", dtype=config.dtype))
        with _started(wanted, engine, model, config, budget) as (generators, versions):
            answering = Answering(TASKS[task], cases, PeerAnswerer(engine, generators), config)
            answering.check()
            folder = RunFolder(out, config, {**machine(), "peers": versions})
            records = run(cases.ids, folder, answering.spread, progress.watch, guess=progress.guess)
    conclude(records, TASKS[task], config, out)


def _names(peer: str, budget: int) -> tuple[str, ...]:
    """What stands for a peer among the policies."""
    return {
        "transformers": ("transformers",),
        "kvpress": (f"kvpress:{budget}",),
        "openvino": ("openvino", f"openvino:{budget}"),
        "llama.cpp": ("llama.cpp",),
    }[peer]


def _check(task: str, wanted: list[str], model: str) -> None:
    if task not in TASKS:
        raise ConfigError(f"--task {task!r}: choose one of {', '.join(TASKS)}")
    for peer in wanted:
        if peer not in CHOICES:
            raise ConfigError(f"no peer is named {peer!r}: choose one of {', '.join(CHOICES)}")
        if peer in ("openvino", "llama.cpp") and model not in PACKAGED and Path(model).suffix != ".gguf":
            raise ConfigError(f"{peer} reads .gguf files: give --model one, or a packaged name")
    if "llama.cpp" in wanted and shutil.which(PROGRAM) is None:
        raise ConfigError(f"no {PROGRAM} is on the PATH: install llama.cpp, or leave it out of --peers")


@contextmanager
def _started(
    wanted: list[str], engine: Engine, model: str, config: RunConfig, budget: int
) -> Iterator[tuple[dict[str, Generator], dict[str, dict[str, str]]]]:
    """The peers by their names among the policies, ready to answer, and the versions that they run."""
    generators: dict[str, Generator] = {}
    versions: dict[str, dict[str, str]] = {}
    eos, threads = list(engine.loaded.eos_token_ids), torch.get_num_threads()
    with ExitStack() as stack:

        def start(peer: Peer, name: str, source: str, **options: object) -> PeerProcess:
            with console.status(f"installing and starting {peer.name}"):
                process = PeerProcess(peer, install(peer), source, {"threads": threads, "eos": eos, **options})
            stack.callback(process.close)
            versions[name] = process.versions
            return process

        for name in (name for peer in wanted for name in _names(peer, budget)):
            if name == "transformers":
                generators[name] = Transformers(engine.model, engine.loaded.attn_implementation, eos)
            elif name == "llama.cpp":
                program, longest = str(shutil.which(PROGRAM)), max(config.context_tokens, default=0)
                server = LlamaServer(program, _gguf(model), (longest or 32_768) + config.max_tokens, threads)
                stack.callback(server.close)
                generators[name] = server
            elif name.startswith("kvpress"):
                press = {"window_size": WINDOW_SIZE, "kernel_size": KERNEL_SIZE}
                options = {"dtype": config.dtype, "device": "cpu", **press}
                generators[name] = Piped(start(KVPRESS, name, resolve(model), **options), budget=budget)
            else:
                kept = budget if ":" in name else None
                generators[name] = Piped(start(OPENVINO, name, str(_gguf(model)), budget=kept))
        yield generators, versions


def _gguf(model: str) -> Path:
    if model not in PACKAGED:
        return Path(model)
    resolve(model)
    return gguf_path(model) or Path(PACKAGED[model].file_name)
