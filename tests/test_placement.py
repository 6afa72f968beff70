"""Device, dtype and attention follow the machine, unless the caller says otherwise."""

import importlib.util

import pytest
import torch

from ragkv import placement
from ragkv.errors import ConfigError, MissingExtra
from ragkv.placement import choose_attention, choose_device, choose_dtype

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 1)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An x86 machine without bfloat16, CUDA or flash-attn; a test adds what it is about."""
    monkeypatch.setattr(placement.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    return monkeypatch


def test_device(machine: pytest.MonkeyPatch) -> None:
    assert choose_device() == CPU
    assert choose_device("meta") == torch.device("meta")
    with pytest.raises(ConfigError, match="'cuda:1': torch sees no CUDA"):
        choose_device("cuda:1")
    with pytest.raises(ConfigError, match="'gpu' is no torch device"):
        choose_device("gpu")
    machine.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device() == torch.device("cuda")
    assert choose_device("cpu") == CPU


@pytest.mark.parametrize("check", ["_is_avx512_bf16_supported", "_is_amx_tile_supported"])
def test_dtype_on_x86(machine: pytest.MonkeyPatch, check: str) -> None:
    assert choose_dtype(CPU) == torch.float32
    machine.setattr(torch.cpu, check, lambda: True)
    assert choose_dtype(CPU) == torch.bfloat16
    assert choose_dtype(CPU, "float32") == torch.float32
    assert choose_dtype(CPU, torch.float16) == torch.float16


def test_dtype_on_x86_with_an_older_torch(machine: pytest.MonkeyPatch) -> None:
    machine.delattr(torch.cpu, "_is_avx512_bf16_supported")
    machine.delattr(torch.cpu, "_is_amx_tile_supported")
    assert choose_dtype(CPU) == torch.float32


@pytest.mark.parametrize("supported", [False, True])
def test_dtype_on_arm(machine: pytest.MonkeyPatch, supported: bool) -> None:
    machine.setattr(placement.platform, "machine", lambda: "arm64")
    machine.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: supported, raising=False)
    assert choose_dtype(CPU) == (torch.bfloat16 if supported else torch.float32)


@pytest.mark.parametrize(("capability", "dtype"), [((7, 5), torch.float32), ((9, 0), torch.bfloat16)])
def test_dtype_on_cuda(machine: pytest.MonkeyPatch, capability: tuple[int, int], dtype: torch.dtype) -> None:
    machine.setattr(torch.cuda, "get_device_capability", lambda device: capability if device == CUDA else None)
    assert choose_dtype(CUDA) == dtype


@pytest.mark.parametrize("dtype", ["half", "int8", torch.int8, ""])
def test_dtype_that_cannot_be(dtype: str | torch.dtype) -> None:
    with pytest.raises(ConfigError, match="must be one of bfloat16, float16, float32"):
        choose_dtype(CPU, dtype)


def test_attention(machine: pytest.MonkeyPatch) -> None:
    half, single = torch.bfloat16, torch.float32
    assert choose_attention(CUDA, half) == "sdpa"
    with pytest.raises(MissingExtra, match=r"pip install 'ragkv\[flash\]'"):
        choose_attention(CUDA, half, "flash_attention_2")
    with pytest.raises(ConfigError, match="must be one of sdpa, flash_attention_2"):
        choose_attention(CPU, half, "flash")
    machine.setattr(importlib.util, "find_spec", lambda name: object() if name == "flash_attn" else None)
    assert choose_attention(CUDA, half) == "flash_attention_2"
    assert choose_attention(CUDA, half, "sdpa") == "sdpa"
    assert choose_attention(CUDA, single) == choose_attention(CPU, half) == "sdpa"
    for device, dtype in ((CUDA, single), (CPU, half)):
        with pytest.raises(ConfigError, match="needs a CUDA device and bfloat16 or float16"):
            choose_attention(device, dtype, "flash_attention_2")
