"""Options by name: each becomes what it says, wrong names and values are errors, nothing is loaded early."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from ragkv import options, registry
from ragkv.config import SamplingParams
from ragkv.document_blocks import DocumentBlocks
from ragkv.errors import ConfigError
from ragkv.kv_store import DISK_BYTES
from ragkv.options import OPTION_NAMES, ChatOptions, check_names
from ragkv.policies import FullKV, SnapKV, StreamingLLM


def test_defaults_are_those_of_the_core() -> None:
    assert ChatOptions().sampling() == SamplingParams()
    assert ChatOptions().kv_policy() == SnapKV()


def test_sampling() -> None:
    values: dict[str, Any] = {
        "max_tokens": 3,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 4,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "seed": 5,
        "stop": ("x",),
    }
    assert set(values) == {field.name for field in fields(SamplingParams)}
    assert ChatOptions(**values).sampling() == SamplingParams(**values)


@pytest.mark.parametrize(
    ("values", "policy"),
    [
        ({"window_size": 16, "kernel_size": 5, "pooling": "max"}, SnapKV(100, 16, 5, "max")),
        ({"policy": "full"}, FullKV()),
        ({"policy": "streaming"}, StreamingLLM(4, 96)),
    ],
)
def test_policies(values: dict[str, Any], policy: object) -> None:
    assert ChatOptions(max_capacity_prompt=100, **values).kv_policy() == policy


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"policy": "snap"}, "policy='snap': choose one of snapkv, full, streaming"),
        ({"policy": "streaming", "max_capacity_prompt": 4}, "max_capacity_prompt=4: must be larger than the 4 sink"),
        ({"top_p": 0}, "top_p=0"),
        ({"context_tokens": 0}, "context_tokens=0"),
        ({"kv_memory_bytes": -1}, "kv_memory_bytes=-1: must be at least 0"),
        ({"kv_disk_bytes": -1}, "kv_disk_bytes=-1: must be at least 0"),
        ({"kv_disk_dtype": "int4"}, "kv_disk_dtype='int4': choose one of model, int8"),
    ],
)
def test_values_out_of_bounds(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ChatOptions(**values)


def test_override() -> None:
    changed = ChatOptions(seed=3).override(max_tokens=7, seed=None)
    assert changed == ChatOptions(seed=3, max_tokens=7)
    with pytest.raises(ConfigError, match="a call has no option 'max_token': did you mean 'max_tokens'"):
        ChatOptions().override(max_token=7)
    with pytest.raises(ConfigError, match="max_tokens=0"):
        ChatOptions().override(max_tokens=0)


def test_check_names_lists_all_where_none_is_near() -> None:
    with pytest.raises(ConfigError, match="X has no option 'zzz': there are model, stop"):
        check_names(["model", "zzz"], ["stop", "model"], "X")
    check_names(OPTION_NAMES, OPTION_NAMES, "X")


def test_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    class Loaded:
        model = None
        tokenizer = None

    def shared_model(model: str, **kwargs: Any) -> Loaded:
        asked.append({"model": model, **kwargs})
        return Loaded()

    monkeypatch.setattr(options, "shared_model", shared_model)
    engine = ChatOptions(model="m", dtype="float32", device="cpu", policy="full").engine()
    assert asked == [{"model": "m", "device": "cpu", "dtype": torch.float32, "attn_implementation": None}]
    assert engine.policy == FullKV()
    assert engine.store is not None
    with pytest.raises(ConfigError, match="dtype='float7'"):
        ChatOptions(dtype="float7").engine()


def test_stores_are_the_processs_own_or_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(registry, "_stores", {})
    folder = str(tmp_path)
    asked = {"kv_memory_bytes": 10**6, "kv_dir": folder, "kv_disk_bytes": 10**7}
    for namespace in ("", "tenant"):
        store = ChatOptions(**asked, namespace=namespace).kv_store()
        assert store is not None
        assert (store.namespace, store.max_bytes) == (namespace, 10**7)
    ChatOptions(kv_memory_bytes=0, kv_dir=folder, kv_disk_dtype="int8").kv_store()
    assert list(registry._stores) == [
        (10**6, folder, 10**7, "model"),
        (0, folder, DISK_BYTES, "int8"),
    ]
    for nothing in ({"kv_memory_bytes": 0}, {"kv_memory_bytes": 0, "kv_dir": folder, "kv_disk_bytes": 0}):
        assert ChatOptions(**nothing).kv_store() is None


def test_document_blocks() -> None:
    assert ChatOptions().blocks() is None
    assert ChatOptions(recompute=0.5).blocks() == DocumentBlocks(0.5)
    assert ChatOptions(kv_memory_bytes=0, kv_dir="kv", recompute=768).blocks() == DocumentBlocks()
    with pytest.raises(ConfigError, match=r"recompute=1\.5: must be a share"):
        ChatOptions(recompute=1.5)
    with pytest.raises(ConfigError, match="recompute=768 joins documents whose K/V are kept, and nothing is: set kv_m"):
        ChatOptions(kv_memory_bytes=0, recompute=768)
