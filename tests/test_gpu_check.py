import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ragkv_evals.gpu_check import Clock, full_plan, tiny_plan
from ragkv_evals.gpu_claims import claims
from ragkv_evals.gpu_measure import Row, measure, random_model

ROOT = Path(__file__).parent.parent
ABSENT = ("faiss", "sentence_transformers", "typer", "rich", "platformdirs", "pypdf", "bs4", "gguf")
BARE_CLONE = f"""
import importlib.metadata, runpy, sys
sys.modules.update(dict.fromkeys({ABSENT!r}))
installed = importlib.metadata.version
def version(name):
    if name == "ragkv":
        raise importlib.metadata.PackageNotFoundError(name)
    return installed(name)
importlib.metadata.version = version
runpy.run_module("ragkv_evals.gpu_check", run_name="__main__")
"""
PER_ENTRY = 2 * 2 * 2 * 16 * 2  # K and V, two layers, two KV heads of 16 numbers, bfloat16


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    command = ["bash", str(ROOT / "evals" / "gpu_check.sh"), "--tiny"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_the_script_measures_every_system_length_batch_and_budget(report: dict[str, Any]) -> None:
    rows = report["shapes"]["tiny"]["rows"]
    seen = {(row["system"], row["length"], row["batch"], row.get("budget")) for row in rows}
    both = [(length, batch) for length in (96, 192) for batch in (1, 2)]
    assert seen == {
        *((system, *at, None) for system in ("transformers", "ragkv FullKV") for at in both),
        *(("ragkv SnapKV", *at, budget) for budget in (32, 48, 64) for at in both),
    }
    assert {row["outcome"] for row in rows} == {"ok"}
    assert all(row["decode_ms_per_token"] > 0 and row["prefill_s"] > 0 for row in rows)


def test_bytes_held_while_decoding_are_those_of_the_budget(report: dict[str, Any]) -> None:
    for row in report["shapes"]["tiny"]["rows"]:
        assert row["kv_bytes"] == row["batch"] * row.get("budget", row["length"]) * PER_ENTRY


def test_a_bare_clone_needs_only_torch_and_transformers() -> None:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "evals")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", BARE_CLONE, "--tiny"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["device"] == "cpu"


def test_out_of_memory_is_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = tiny_plan()
    model = random_model(plan.shapes[0].config, torch.device("cpu"), torch.bfloat16)

    def exhausted(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr("ragkv_evals.gpu_measure.prefill", exhausted)
    rows = measure(model, "ragkv SnapKV", 96, 1, plan.budgets, plan.decode_tokens, plan.window_size)
    assert [(row.budget, row.outcome) for row in rows] == [(b, "out of memory in prefill") for b in (64, 48, 32)]


def test_random_weights_are_made_in_the_wanted_dtype_and_give_finite_logits() -> None:
    model = random_model(tiny_plan().shapes[0].config, torch.device("cpu"), torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert torch.get_default_dtype() == torch.float32
    assert bool(model(torch.tensor([[5, 6, 7]])).logits.isfinite().all())


def test_claims_compare_with_transformers() -> None:
    gib = 2**30
    rows = [
        Row("transformers", None, 16384, 2, "ok", 1.0, 36.0),
        Row("ragkv SnapKV", 1024, 16384, 2, "ok", 1.0, 10.0),
        *(Row("transformers", None, n * 1024, 1, "ok", 1.0, 1.0, (16 + n) * gib) for n in (8, 16)),
        *(Row("ragkv SnapKV", 4096, n * 1024, 1, "ok", 1.0, 1.0, 16 * gib + n * gib // 8) for n in (8, 16)),
        Row("transformers", None, 32 * 1024, 1, "out of memory in prefill"),
    ]
    found: Any = claims(rows, 16384, 2, None)
    assert found["decode_speedup"] == {"ragkv SnapKV 1024": pytest.approx(3.6)}
    assert found["longest_prompt_measured"] == {"transformers": 16384, "ragkv SnapKV": 16384}
    at_80 = found["longest_prompt_extrapolated"]["80 GiB"]
    assert at_80 == {"transformers": 64 * 1024, "ragkv SnapKV": 512 * 1024, "ratio": pytest.approx(8.0)}


def test_a_measurement_that_would_take_too_long_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.monotonic", lambda: 100.0)
    clock = Clock(ends=110.0)
    clock.note("transformers", 4096, 1, 3.0)
    assert clock.fits("transformers", 4096, 1)
    assert not clock.fits("transformers", 8192, 1)  # 12 s
    assert clock.fits("ragkv SnapKV", 131072, 1)  # never seen


def test_the_full_plan_has_the_shapes_it_names() -> None:
    parameters = []
    for shape in full_plan().shapes:
        with torch.device("meta"):
            from transformers import AutoModelForCausalLM

            model = AutoModelForCausalLM.from_config(shape.config)
        parameters.append(round(sum(p.numel() for p in model.parameters()) / 1e8))
    assert parameters == [80, 72, 67]  # hundreds of millions: Llama-3.1-8B, Mistral-7B-v0.3, Llama-2-7B
