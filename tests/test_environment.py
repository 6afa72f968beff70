"""What `ragkv info` finds, and what it advises for machines that are not this one."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ragkv.environment import Environment, usable_cpus

LAPTOP = Environment(
    python="3.11.7",
    system="Linux x86_64",
    device="cpu",
    device_name="A CPU",
    dtype="bfloat16",
    native_bfloat16=True,
    attn_implementation="sdpa",
    memory_bytes=16_000_000_000,
    memory_available_bytes=None,
    cpus=8,
    threads=8,
    thread_limits={},
    nvidia_driver=False,
    versions={"torch": "2.13.0", "flash-attn": None},
    cache_folder="cache",
    cache_bytes={"models": 5_000_000_000, "gguf": 0, "indexes": 1_000},
    cache_free_bytes=60_000_000_000,
    fetched_models=("smollm2-135m",),
)
SERVER = replace(LAPTOP, device="cuda:0", device_name="A GPU", nvidia_driver=True)


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        (LAPTOP, None),
        (replace(LAPTOP, nvidia_driver=True), "CUDA build"),
        (replace(LAPTOP, native_bfloat16=False, dtype="float32"), "emulates bfloat16"),
        (replace(LAPTOP, threads=64), "OMP_NUM_THREADS=8"),
        (replace(LAPTOP, threads=2, thread_limits={"OMP_NUM_THREADS": "2"}), "2 of 8 CPUs"),
        (replace(LAPTOP, threads=4), None),  # one thread for each physical core is what torch should do
        (SERVER, "pip install 'ragkv[flash]'"),
        (replace(SERVER, versions={"flash-attn": "2.8"}), None),
        (replace(SERVER, threads=64, versions={"flash-attn": "2.8"}), None),
        (replace(SERVER, native_bfloat16=False, dtype="float32"), "emulates bfloat16"),
    ],
)
def test_advice_names_what_would_be_faster(environment: Environment, words: str | None) -> None:
    advice = list(environment.advice())
    if words is None:
        assert advice == []
    else:
        assert len(advice) == 1
        assert words in advice[0]


def test_rows_are_for_people() -> None:
    rows = dict(LAPTOP.rows())
    assert rows["device"] == "cpu (A CPU)"
    assert rows["memory"] == "16.0 GB, unknown available"
    assert rows["flash-attn"] == "not installed"
    assert rows["cache"] == "cache (models 5.0 GB, gguf 0 bytes, indexes 1.0 kB; 60.0 GB free)"


def test_detect_finds_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAGKV_HOME", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "models" / "mine").mkdir(parents=True)
    (tmp_path / "models" / "mine" / "weights").write_bytes(b"12345")
    found = Environment.detect()
    assert found.cache_bytes == {"models": 5, "gguf": 0, "indexes": 0}
    assert (found.cache_folder, found.fetched_models) == (str(tmp_path), ())
    assert found.versions["torch"] == torch.__version__
    assert found.thread_limits["OMP_NUM_THREADS"] == "1"
    assert found.memory_bytes is None or found.memory_bytes > (found.memory_available_bytes or 0) >= 0
    assert json.loads(json.dumps(found.to_json()))["advice"] == list(found.advice())


def test_a_cache_folder_that_does_not_exist_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAGKV_HOME", str(tmp_path / "not" / "yet"))
    found = Environment.detect()
    assert found.cache_free_bytes > 0
    assert set(found.cache_bytes.values()) == {0}
    assert not (tmp_path / "not").exists()


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("max 100000", 8), ("150000 100000", 2), ("5000 100000", 1), ("9900000 100000", 8), ("?", 8)],
)
def test_a_container_quota_bounds_the_cpus(quota: str, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(Path, "read_text", lambda self: quota)
    assert usable_cpus() == expected
