"""Votes and pooling against python loops."""

import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import reference
from conftest import ModelOf
from ragkv.backend import forward
from ragkv.cache import compressible, new_cache
from ragkv.policies import Observation, SnapKV
from ragkv.scoring import accumulated_attention, pool_votes, window_votes
from tiny import COMPRESSIBLE, random_prompt, tiny_model

HEADS = [(4, 4), (4, 2), (6, 2), (4, 1)]  # query heads, KV heads: MHA, two GQA ratios, MQA
BFLOAT16_ROUNDING = 2**-9  # largest relative error of rounding to 8 significant bits


def _states(
    heads: int, kv_heads: int, queries: int, keys: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(heads * 100 + kv_heads)
    query = torch.randn(2, heads, queries, 8, generator=generator)
    return query.to(dtype), torch.randn(2, kv_heads, keys, 8, generator=generator).to(dtype)


@pytest.mark.parametrize("gqa_reduction", ["mean", "max", "sum"])
@pytest.mark.parametrize("window_size", [1, 5, 16])
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_votes_equal_the_loops(heads: int, kv_heads: int, window_size: int, gqa_reduction: str) -> None:
    query, key = _states(heads, kv_heads, 30, 30)
    votes = window_votes(query, key, 0.7, window_size, gqa_reduction)
    expected = reference.votes(query, key, 0.7, window_size, gqa_reduction)
    assert votes.dtype == torch.float32
    torch.testing.assert_close(votes.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("gqa_reduction", ["mean", "max", "sum"])
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_votes_in_bfloat16_are_off_by_the_rounding_of_the_logits(heads: int, kv_heads: int, gqa_reduction: str) -> None:
    """A rounded logit x is off by |x| * 2^-9, so a share is off by a factor of at most exp(2 * largest |x| * 2^-9)."""
    query, key = _states(heads, kv_heads, 24, 40, torch.bfloat16)
    votes = window_votes(query, key, 0.5, 8, gqa_reduction)
    expected = reference.votes(query.double(), key.double(), 0.5, 8, gqa_reduction)
    repeated = key.double().repeat_interleave(heads // kv_heads, 1)
    largest = float((query.double() @ repeated.transpose(-1, -2) * 0.5).abs().max())
    assert votes.dtype == torch.float32
    torch.testing.assert_close(votes.double(), expected, rtol=math.expm1(2 * largest * BFLOAT16_ROUNDING), atol=1e-6)


def test_only_the_last_queries_vote() -> None:
    query, key = _states(4, 2, 30, 30)
    assert torch.equal(window_votes(query, key, 1.0, 8), window_votes(query[:, :, -8:], key, 1.0, 8))


@pytest.mark.parametrize("gqa_reduction", ["mean", "max", "sum"])
@pytest.mark.parametrize("block_bytes", [1, 4 * 2 * 4 * 30 * 7, 2**20])
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_accumulated_attention_equals_the_loops(
    heads: int, kv_heads: int, block_bytes: int, gqa_reduction: str
) -> None:
    """In blocks of one query, of some (not a divisor of the length), and of all."""
    query, key = _states(heads, kv_heads, 30, 30)
    votes = accumulated_attention(query, key, 0.7, gqa_reduction, block_bytes)
    expected = reference.accumulated(query, key, 0.7, gqa_reduction)
    assert votes.dtype == torch.float32
    torch.testing.assert_close(votes.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("first", [1, 13, 29])
def test_accumulated_attention_adds_up(first: int) -> None:
    """The votes of the last queries, and those of a prompt's beginning by itself, are those of the whole prompt."""
    query, key = _states(6, 2, 30, 30)
    last = accumulated_attention(query[:, :, first:], key, 0.7, block_bytes=3000)
    last[..., :first] += accumulated_attention(query[:, :, :first], key[:, :, :first], 0.7)
    torch.testing.assert_close(last.double(), reference.accumulated(query, key, 0.7), rtol=1e-6, atol=1e-6)


def test_accumulated_attention_in_bfloat16_is_off_by_the_rounding_of_the_logits() -> None:
    query, key = _states(6, 2, 40, 40, torch.bfloat16)
    logits = query.double() @ key.double().repeat_interleave(3, 1).transpose(-1, -2) * 0.5
    tolerance = math.expm1(2 * float(logits.abs().max()) * BFLOAT16_ROUNDING)
    expected = reference.accumulated(query.double(), key.double(), 0.5)
    votes = accumulated_attention(query, key, 0.5, block_bytes=10_000)
    torch.testing.assert_close(votes.double(), expected, rtol=tolerance, atol=1e-6)


class _Largest(TorchDispatchMode):
    """Remembers the bytes of the largest tensor that any operation returned."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.nbytes = max(self.nbytes, result.untyped_storage().nbytes())
        return result


def test_accumulated_attention_stays_within_its_block() -> None:
    query, key = _states(4, 2, 600, 600)
    whole = 2 * 4 * 600 * 600 * 4
    with _Largest() as largest:
        accumulated_attention(query, key, 0.7, block_bytes=whole // 10)
    assert largest.nbytes <= whole // 10
    with _Largest() as largest:
        accumulated_attention(query, key, 0.7, block_bytes=whole)
    assert largest.nbytes == whole


@pytest.mark.parametrize("pooling", ["avg", "max"])
@pytest.mark.parametrize("kernel_size", [1, 3, 7, 13])
@pytest.mark.parametrize("length", [5, 40])
def test_pooling_equals_the_loops(pooling: str, kernel_size: int, length: int) -> None:
    votes = torch.rand(2, 3, length, generator=torch.Generator().manual_seed(length))
    pooled = pool_votes(votes, kernel_size, pooling)
    torch.testing.assert_close(pooled, reference.pool(votes, kernel_size, pooling), rtol=1e-6, atol=1e-6)


def _observations(model: torch.nn.Module, length: int, window_size: int) -> list[Observation]:
    """What an observer sees of each compressible layer when the model reads a prompt."""
    seen: list[Observation] = []
    cache = new_cache(model.config)
    layers = dict(compressible(cache))

    def observer(layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> None:
        if layer in layers:
            seen.append(Observation(layer, len(cache), query, key, value, scaling, window_size))

    ids = torch.tensor([random_prompt(length).ids])
    forward(model, ids, cache, torch.arange(length).unsqueeze(0), observer=observer)
    assert len(seen) == len(layers) > 0
    return seen


@pytest.mark.parametrize("name", COMPRESSIBLE)
@pytest.mark.parametrize(
    ("pooling", "kernel_size", "gqa_reduction"), [("avg", 7, "mean"), ("max", 5, "max"), ("avg", 1, "sum")]
)
def test_snapkv_scores_every_architecture_like_the_loops(
    model_of: ModelOf, name: str, pooling: str, kernel_size: int, gqa_reduction: str
) -> None:
    policy = SnapKV(30, 8, kernel_size, pooling, gqa_reduction)
    for seen in _observations(model_of(name), 48, 8):
        scaling = getattr(model_of(name).config, "query_pre_attn_scalar", seen.query.shape[-1]) ** -0.5
        expected = reference.pool(
            reference.votes(seen.query, seen.key, scaling, 8, gqa_reduction), kernel_size, pooling
        )
        torch.testing.assert_close(policy.score(seen).double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", COMPRESSIBLE)
def test_snapkv_scores_bfloat16_models_within_rounding(name: str) -> None:
    for seen in _observations(tiny_model(name, torch.bfloat16), 40, 8):
        expected = reference.pool(reference.votes(seen.query.double(), seen.key.double(), seen.scaling, 8), 7, "avg")
        group = seen.query.shape[1] // seen.key.shape[1]
        logits = seen.query.double() @ seen.key.double().repeat_interleave(group, 1).transpose(-1, -2) * seen.scaling
        tolerance = math.expm1(2 * float(logits.abs().max()) * BFLOAT16_ROUNDING)
        torch.testing.assert_close(SnapKV(30, 8).score(seen).double(), expected, rtol=tolerance, atol=1e-6)
