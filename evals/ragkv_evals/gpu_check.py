"""What ragkv saves on a GPU, beside plain transformers: models of 8B shape with random weights, within 8 minutes.

Run it by `evals/gpu_check.sh`. It first runs the tests marked `gpu` where pytest is installed, then measures from
short prompts to long ones until its time is up. Progress goes to stderr, one JSON object to stdout.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, MistralConfig, PreTrainedConfig

from ragkv_evals.gpu_claims import claims
from ragkv_evals.gpu_measure import Row, measure, random_model, release


@dataclass(frozen=True)
class Shape:
    """A model to build, its share of the time, and the longest prompt it takes."""

    name: str
    config: PreTrainedConfig
    share: float
    longest: int


@dataclass(frozen=True)
class Plan:
    """What is measured. `claim_length` and the largest batch are where the paper states its speed-up."""

    shapes: Sequence[Shape]
    lengths: Sequence[int]
    budgets: Sequence[int]
    batches: Sequence[int]
    window_size: int
    decode_tokens: int
    claim_length: int
    seconds: float


def full_plan() -> Plan:
    """8B shapes at 4K to 131K tokens; the third is that of LWM-Text-Chat-1M, on which the paper measured."""
    heads: dict[str, Any] = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
    llama3_rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    gqa = {**heads, "intermediate_size": 14336, "num_key_value_heads": 8}
    mha = {**heads, "intermediate_size": 11008, "num_key_value_heads": 32}
    long: dict[str, Any] = {"max_position_embeddings": 131072 + 1024}
    llama = LlamaConfig(vocab_size=128256, rope_parameters=llama3_rope, **gqa, **long)
    mistral = MistralConfig(vocab_size=32768, sliding_window=None, **gqa, **long)
    lwm = LlamaConfig(vocab_size=32000, **mha, **long)
    return Plan(
        shapes=(
            Shape("llama-3.1-8b", llama, 0.4, 131072),
            Shape("mistral-7b", mistral, 0.2, 32768),
            Shape("llama-2-7b (no grouped-query heads)", lwm, 0.4, 131072),
        ),
        lengths=(4096, 8192, 16384, 32768, 65536, 131072),
        budgets=(1024, 2048, 4096),
        batches=(1, 2),
        window_size=32,
        decode_tokens=32,
        claim_length=16384,
        seconds=330,
    )


def tiny_plan() -> Plan:
    """The same steps in seconds on a CPU."""
    size: dict[str, Any] = {"vocab_size": 199, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    config = LlamaConfig(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, **size)
    return Plan((Shape("tiny", config, 1.0, 192),), (96, 192), (32, 48, 64), (1, 2), 16, 3, 192, 3600)


@dataclass
class Clock:
    """Says whether another measurement fits, by what the same one took at a shorter length."""

    ends: float
    took: dict[tuple[str, int], tuple[int, float]] = field(default_factory=dict)

    def fits(self, system: str, length: int, batch: int) -> bool:
        shorter, seconds = self.took.get((system, batch), (length, 0.0))
        # Attention grows with the square of the length, and a first run is a little slower.
        return time.monotonic() + seconds * (length / shorter) ** 2 < self.ends

    def note(self, system: str, length: int, batch: int, seconds: float) -> None:
        self.took[system, batch] = (length, seconds)


SYSTEMS = ("transformers", "ragkv SnapKV", "ragkv FullKV")


def check_shape(shape: Shape, plan: Plan, device: torch.device, seconds: float) -> list[Row]:
    """Measure one model within `seconds`; what does not fit into them is reported as such."""
    clock = Clock(time.monotonic() + seconds)
    model = random_model(shape.config, device, torch.bfloat16)
    rows: list[Row] = []
    exhausted: set[tuple[str, int]] = set()
    for length in (length for length in plan.lengths if length <= shape.longest):
        for batch in plan.batches:
            for system in SYSTEMS:
                if (system, batch) in exhausted:
                    rows.append(Row(system, None, length, batch, "not run: a shorter prompt ran out of memory"))
                    continue
                if not clock.fits(system, length, batch):
                    rows.append(Row(system, None, length, batch, "not run: no time left"))
                    continue
                started = time.monotonic()
                found = measure(model, system, length, batch, plan.budgets, plan.decode_tokens, plan.window_size)
                clock.note(system, length, batch, time.monotonic() - started)
                rows += found
                if any(row.outcome != "ok" for row in found):
                    exhausted.add((system, batch))
                say(f"{shape.name}: {system}, {batch} x {length} tokens: {found[-1].outcome}")
    return rows


def run_gpu_tests(root: Path) -> dict[str, object]:
    """Run the tests marked `gpu`; only files that hold some are collected, since the others need more packages."""
    files = [str(file) for file in sorted((root / "tests").glob("test_*.py")) if "mark.gpu" in file.read_text()]
    missing = [name for name in ("pytest", "hypothesis", "platformdirs") if find_spec(name) is None]
    if missing or not files:
        reason = f"not installed: {', '.join(missing)}" if missing else "no test is marked gpu"
        return {"outcome": "not run", "reason": reason}
    options = ["-q", "-m", "gpu", "-c", "/dev/null", f"--rootdir={root}", "-p", "no:cacheprovider"]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *files], capture_output=True, text=True, timeout=90, check=False
        )
    except subprocess.TimeoutExpired:
        return {"outcome": "failed", "reason": "longer than 90 s"}
    say(done.stdout + done.stderr)
    last = (done.stdout.strip().splitlines() or ["no output"])[-1]
    return {"outcome": "passed" if done.returncode == 0 else "failed", "reason": last}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run(plan: Plan, device: torch.device) -> dict[str, object]:
    """Measure all shapes and sum up."""
    on_gpu = device.type == "cuda"
    memory = torch.cuda.get_device_properties(device).total_memory if on_gpu else None
    report: dict[str, object] = {
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "memory_bytes": memory,
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "plan": {k: v for k, v in asdict(plan).items() if k != "shapes"},
        "how": "transformers reads a batch at once, ragkv prompt by prompt; SnapKV prompts are read once with the "
        "largest budget and then cut to the smaller ones; decode times are medians of a step of the whole batch",
    }
    shapes = {}
    for shape in plan.shapes:
        say(f"{shape.name}: making random weights")
        rows = check_shape(shape, plan, device, plan.seconds * shape.share)
        release()
        shapes[shape.name] = {
            "claims": claims(rows, plan.claim_length, max(plan.batches), memory),
            "rows": [{k: v for k, v in asdict(row).items() if v is not None} for row in rows],
        }
    return {**report, "shapes": shapes}


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed and memory of ragkv beside plain transformers on one GPU.")
    parser.add_argument("--tiny", action="store_true", help="the same code on the CPU with a tiny shape")
    parser.add_argument("--root", type=Path, default=Path.cwd(), help="the clone whose tests are run")
    arguments = parser.parse_args()
    started = time.monotonic()
    if arguments.tiny:
        report = run(tiny_plan(), torch.device("cpu"))
    elif torch.cuda.is_available():
        report = {"tests": run_gpu_tests(arguments.root), **run(full_plan(), torch.device("cuda"))}
    else:
        parser.error("no CUDA device is available; --tiny runs the same code on the CPU")
    print(json.dumps({**report, "seconds": round(time.monotonic() - started, 1)}))


if __name__ == "__main__":
    main()
