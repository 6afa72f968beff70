"""One measurement on a device: read random prompts, decode given tokens, and note times and bytes.

Imports only the core of ragkv, torch and transformers. Running out of memory is a result, not an error.
"""

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from ragkv.attention import implementation_name
from ragkv.backend import forward, prepare
from ragkv.cache import compressible, kv_bytes
from ragkv.chat import Prompt
from ragkv.policies import FullKV, Policy, SnapKV
from ragkv.prefill import prefill
from ragkv.rows import join

BASE = "sdpa"


@dataclass(frozen=True)
class Row:
    """One system at one length and batch size.

    Attributes:
        system: "transformers", "ragkv FullKV" or "ragkv SnapKV".
        budget: entries kept per KV head, None for a full cache.
        outcome: "ok", or where memory ran out.
        prefill_s: seconds to read all prompts of the batch.
        peak_bytes: most memory allocated on the device since before the prefill, weights included (CUDA only).
        decode_peak_bytes: the same while decoding.
        kv_bytes: bytes of keys and values held while decoding.
    """

    system: str
    budget: int | None
    length: int
    batch: int
    outcome: str = "ok"
    prefill_s: float | None = None
    decode_ms_per_token: float | None = None
    peak_bytes: int | None = None
    decode_peak_bytes: int | None = None
    kv_bytes: int | None = None


def random_model(config: PreTrainedConfig, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """A model with random weights, made on the device and ready for ragkv."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device), torch.no_grad():
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    finally:
        torch.set_default_dtype(before)
    model.train(False).requires_grad_(False)
    prepare(model, BASE)
    return model


def release() -> None:
    """Give back memory that nobody holds any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def measure(
    model: PreTrainedModel,
    system: str,
    length: int,
    batch: int,
    budgets: Sequence[int],
    decode_tokens: int,
    window_size: int,
) -> list[Row]:
    """Read `batch` random prompts of `length` tokens and decode.

    Args:
        budgets: for "ragkv SnapKV": the prompts are read once, with the largest, and the kept entries are then cut to
            each smaller one (which of them stay matters neither for speed nor for bytes). Others ignore it.

    Returns:
        One row per budget, or one.
    """
    release()
    chosen: list[int | None] = sorted(budgets, reverse=True) if system == "ragkv SnapKV" else [None]  # type: ignore[assignment]
    out_of_memory = [Row(system, budget, length, batch, "out of memory in prefill") for budget in chosen]
    ids = torch.randint(3, model.config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(length))
    started = _now(model)
    try:
        cache = _read(model, ids, system, chosen[0], window_size)
    except torch.OutOfMemoryError:
        return out_of_memory
    prefill_s, prefill_peak = _now(model) - started, _peak(model)
    rows: list[Row] = []
    for budget in chosen:
        if budget is not None:
            _cut(cache, budget)
        release()
        held = kv_bytes(cache)
        try:
            ms = _decode(model, cache, length + len(rows) * decode_tokens, batch, decode_tokens)
        except torch.OutOfMemoryError:
            rows.append(Row(system, budget, length, batch, "out of memory in decoding", prefill_s, None, prefill_peak))
            break
        peak = _peak(model)
        highest = None if prefill_peak is None or peak is None else max(prefill_peak, peak)
        rows.append(Row(system, budget, length, batch, "ok", prefill_s, ms, highest, peak, held))
    return rows


def _read(model: PreTrainedModel, ids: torch.Tensor, system: str, budget: int | None, window_size: int) -> Cache:
    """Transformers reads the batch at once; ragkv reads prompt by prompt and joins what it keeps of them."""
    if system == "transformers":
        model.set_attn_implementation(BASE)
        cache = DynamicCache(config=model.config)
        positions = torch.arange(ids.shape[1], device=model.device).expand(ids.shape[0], -1)
        forward(model, ids.to(model.device), cache, positions)
        return cache
    model.set_attn_implementation(implementation_name(BASE))
    policy: Policy = FullKV() if budget is None else SnapKV(max_capacity_prompt=budget, window_size=window_size)
    return join([prefill(model, Prompt(tuple(row)), policy).cache for row in ids.tolist()])


def _cut(cache: Cache, budget: int) -> None:
    """Keep the first `budget` entries."""
    for _, layer in compressible(cache):
        kept = torch.arange(min(budget, layer.keys.shape[2]), device=layer.keys.device)
        layer.keep(kept.expand(*layer.keys.shape[:2], -1))


def _decode(model: PreTrainedModel, cache: Cache, length: int, batch: int, tokens: int) -> float:
    """Median milliseconds per step of the batch; the first step, which may compile or grow buffers, does not count."""
    seconds = []
    for step in range(tokens):
        ids = torch.full((batch, 1), 3 + step, device=model.device)
        positions = torch.full((batch, 1), length + step, device=model.device)
        started = _now(model)
        forward(model, ids, cache, positions)
        seconds.append(_now(model) - started)
    return 1000 * median(seconds[1:])


def _now(model: PreTrainedModel) -> float:
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _peak(model: PreTrainedModel) -> int | None:
    return torch.cuda.max_memory_allocated() if model.device.type == "cuda" else None
