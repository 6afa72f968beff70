"""What only a GPU can show: flash-attention against sdpa, batches, and bytes on the device. Run with `-m gpu`."""

import importlib.util

import pytest
import torch

from ragkv.attention import causal_attention, implementation_name
from ragkv.cache import compressible
from ragkv.decode import Decoder
from ragkv.policies import FullKV, Policy, SnapKV, StreamingLLM
from ragkv.prefill import Prefilled, prefill
from tiny import COMPRESSIBLE, random_prompt, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
needs_flash = pytest.mark.skipif(importlib.util.find_spec("flash_attn") is None, reason="needs ragkv[flash]")

SNAPKV = SnapKV(40, 8)
LENGTHS = (10, 30, 40, 41, 100)
BATCHED = [name for name in COMPRESSIBLE if name not in ("llama-dynamic-rope", "phi3-longrope")]
# Rounding to bfloat16 moves the logits of these models by up to 0.013 (seen on a CPU); they spread by 0.16.
BFLOAT16 = {"rtol": 0, "atol": 0.02}


def _model(name: str, base: str, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    model = tiny_model(name, dtype).to("cuda")
    model.set_attn_implementation(implementation_name(base))
    return model


def _logits(
    model: torch.nn.Module, prompts: tuple[int, ...], policy: Policy, chunk_size: int | None = None
) -> torch.Tensor:
    """Logits (steps, rows, vocabulary) of ten given tokens behind the prompts."""
    rows = [prefill(model, random_prompt(n, seed=n), policy, chunk_size=chunk_size) for n in prompts]
    decoder, steps = Decoder(model, rows), []
    for step in range(10):
        steps.append(decoder.logits.float().cpu())
        decoder.step([random_prompt(10, seed=1000 + n).ids[step] for n in prompts])
    return torch.stack(steps)


@needs_flash
@pytest.mark.parametrize("name", COMPRESSIBLE)
@pytest.mark.parametrize("length", [30, 100])
def test_flash_attention_equals_sdpa(name: str, length: int) -> None:
    sdpa, flash = _model(name, "sdpa"), _model(name, "flash_attention_2")
    torch.testing.assert_close(_logits(flash, (length,), FullKV()), _logits(sdpa, (length,), FullKV()), **BFLOAT16)


@needs_flash
def test_flash_attention_in_chunks_equals_one_pass() -> None:
    flash = _model("llama", "flash_attention_2")
    whole = _logits(flash, (100,), FullKV())
    for chunk_size in (1, 33, 99):
        torch.testing.assert_close(_logits(flash, (100,), FullKV(), chunk_size), whole, **BFLOAT16)


@needs_flash
def test_padded_batches_of_flash_attention_equal_their_rows() -> None:
    flash = _model("llama", "flash_attention_2")
    together = _logits(flash, LENGTHS, SNAPKV)
    for row, length in enumerate(LENGTHS):
        torch.testing.assert_close(together[:, row], _logits(flash, (length,), SNAPKV)[:, 0], **BFLOAT16)


@pytest.mark.parametrize("name", BATCHED)
def test_batches_equal_their_rows(name: str) -> None:
    model = _model(name, "sdpa", torch.float32)
    together = _logits(model, LENGTHS, SNAPKV)
    for row, length in enumerate(LENGTHS):
        torch.testing.assert_close(together[:, row], _logits(model, (length,), SNAPKV)[:, 0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", BATCHED)
@pytest.mark.parametrize("chunk_size", [None, 33])
def test_the_device_keeps_what_the_cpu_keeps(name: str, chunk_size: int | None) -> None:
    on_device = prefill(_model(name, "sdpa", torch.float32), random_prompt(100), SNAPKV, chunk_size=chunk_size)
    on_cpu = prefill(tiny_model(name), random_prompt(100), SNAPKV, chunk_size=chunk_size)
    torch.testing.assert_close(on_device.logits.cpu(), on_cpu.logits, rtol=1e-4, atol=1e-4)
    for (_, layer), (_, expected) in zip(compressible(on_device.cache), compressible(on_cpu.cache), strict=True):
        assert layer.positions is not None
        assert torch.equal(layer.positions.cpu(), expected.positions)


@pytest.mark.parametrize(("queries", "keys"), [(5, 6), (5, 70), (33, 64), (100, 513)])
def test_merged_halves_equal_masked_attention(queries: int, keys: int) -> None:
    generator = torch.Generator().manual_seed(keys)
    query = torch.randn(2, 6, queries, 16, generator=generator).cuda()
    key, value = torch.randn(2, 2, 3, keys, 16, generator=generator).cuda()
    mask = torch.ones(queries, keys, dtype=torch.bool, device="cuda").tril(keys - queries)
    each = [states.repeat_interleave(2, dim=1) for states in (key, value)]
    expected = torch.nn.functional.scaled_dot_product_attention(query, *each, attn_mask=mask, scale=0.4)
    torch.testing.assert_close(causal_attention(query, key, value, 0.4), expected, rtol=1e-4, atol=1e-4)


def _held(prefilled: Prefilled) -> int:
    states = (s for layer in prefilled.cache.layers for s in (layer.keys, layer.values))
    return sum(s.untyped_storage().nbytes() for s in states)


def test_the_device_frees_what_is_dropped() -> None:
    """Memory of the device after a prefill: what the budget holds, and not what the prompt had."""
    model, prompt = _model("llama", "sdpa"), random_prompt(1000)
    prefill(model, prompt, SNAPKV)  # so that kernels have allocated what they keep
    before = torch.cuda.memory_allocated()
    prefilled = prefill(model, prompt, SNAPKV)
    grown = torch.cuda.memory_allocated() - before
    token = 3 * 2 * 2 * 16 * 2  # layers, keys and values, KV heads, head_dim, bytes of bfloat16
    assert _held(prefilled) == prefilled.kv_bytes_kept == 40 * token
    assert prefilled.kv_bytes_full == 1000 * token
    blocks = 512 * (3 * 3 + 4)  # the device rounds each tensor up to 512 bytes: keys, values, positions; logits and ids
    assert 40 * token <= grown <= 40 * token + 3 * 2 * 40 * 4 + 2 * 320 + blocks


def test_one_layer_at_a_time_holds_its_whole_prompt() -> None:
    """The peak of a compressing prefill is lower than that of a full one, by the layers that are not there."""
    model, prompt = _model("llama-mha", "sdpa"), random_prompt(1000)

    def peak(policy: Policy) -> int:
        prefill(model, prompt, policy)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        prefill(model, prompt, policy)
        return torch.cuda.max_memory_allocated() - before

    layer = 2 * 4 * 1000 * 16 * 2
    # StreamingLLM, because the votes of SnapKV over a tiny layer are as large as the layer.
    assert peak(FullKV()) - peak(StreamingLLM(4, 36)) >= layer
