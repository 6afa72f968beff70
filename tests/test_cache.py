"""The cache: logical and physical length, growth, dropping, rolling back, and honest byte counts."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ragkv.cache import CompressibleLayer, compressible, kv_bytes, kv_bytes_allocated, kv_bytes_full, new_cache
from tiny import ARCHITECTURES


def _states(tokens: int, seed: int = 0, rows: int = 1) -> tuple[Tensor, Tensor]:
    keys, values = torch.randn(2, rows, 2, tokens, 4, generator=torch.Generator().manual_seed(seed))
    return keys, values


def _filled(tokens: int, seed: int = 0) -> CompressibleLayer:
    layer = CompressibleLayer()
    layer.update(*_states(tokens, seed))
    return layer


@given(st.lists(st.integers(1, 300), min_size=1, max_size=6))
def test_updates_equal_those_of_transformers(lengths: list[int]) -> None:
    """Also across the boundaries of the buffers, which have 256 slots to spare when they are made."""
    ours, theirs = CompressibleLayer(), DynamicLayer()
    for i, length in enumerate(lengths):
        returned, expected = ours.update(*_states(length, i)), theirs.update(*_states(length, i))
        assert torch.equal(returned[0], expected[0])
        assert torch.equal(returned[1], expected[1])
        assert ours.keys.data_ptr() == returned[0].data_ptr()
    assert ours.get_seq_length() == theirs.get_seq_length() == sum(lengths)
    assert ours.get_mask_sizes(3) == theirs.get_mask_sizes(3)


def test_slices_of_a_projection_are_laid_out_for_the_kernel() -> None:
    projected = [states.transpose(1, 2).contiguous().transpose(1, 2) for states in _states(5)]
    assert not any(states.is_contiguous() for states in projected)
    returned = CompressibleLayer().update(*projected)
    assert all(states.is_contiguous() for states in returned)
    assert all(map(torch.equal, returned, projected))


def test_single_steps_across_the_buffer_boundary() -> None:
    layer = _filled(5)
    expected = _states(5)
    for step in range(600):
        new = _states(1, step)
        layer.update(*new)
        expected = tuple(torch.cat(pair, dim=2) for pair in zip(expected, new, strict=True))
    assert torch.equal(layer.keys, expected[0])
    assert torch.equal(layer.values, expected[1])


def test_a_step_copies_one_token_and_not_the_cache() -> None:
    layer = _filled(50)
    layer.update(*_states(1, 1))
    places = set()
    for step in range(200):
        layer.update(*_states(1, step))
        places.add(layer.keys.data_ptr())
    assert len(places) == 1


def test_keep_drops_the_rest_per_head_and_frees_it() -> None:
    layer = _filled(300)
    keys, values = layer.keys.clone(), layer.values.clone()
    positions = torch.stack([torch.arange(0, 40), torch.arange(100, 140)]).unsqueeze(0)
    layer.keep(positions)
    for head, kept in enumerate((slice(0, 40), slice(100, 140))):
        assert torch.equal(layer.keys[0, head], keys[0, head, kept])
        assert torch.equal(layer.values[0, head], values[0, head, kept])
    assert layer.positions is not None
    assert torch.equal(layer.positions.long(), positions)
    assert layer.keys.untyped_storage().nbytes() == 2 * 40 * 4 * 4
    assert layer.values.untyped_storage().nbytes() == 2 * 40 * 4 * 4
    assert layer.get_seq_length() == 300
    assert layer.get_mask_sizes(3) == (43, 260)


def test_keep_after_chunks_frees_the_buffers_too() -> None:
    layer = _filled(100)
    layer.update(*_states(50, 1))
    layer.keep(torch.arange(10).expand(1, 2, -1))
    held = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in _tensors(layer)}
    assert sum(held.values()) == 2 * (2 * 10 * 4 * 4) + 2 * 10 * 4  # keys, values, and int32 positions


def _tensors(layer: object) -> list[Tensor]:
    values = [*vars(layer).values(), *(item for v in vars(layer).values() if isinstance(v, tuple) for item in v)]
    return [value for value in values if isinstance(value, Tensor)]


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("removed", [1, 7, 60])
def test_rolling_back_and_going_on_equals_never_having_been_there(compress: bool, removed: int) -> None:
    straight, rolled = _filled(240), _filled(240)
    if compress:
        for layer in (straight, rolled):
            layer.keep(torch.arange(0, 240, 3).expand(1, 2, -1))
    rolled.update(*_states(removed, 5))
    rolled.crop(-removed)
    assert rolled.get_seq_length() == straight.get_seq_length()
    assert rolled.get_mask_sizes(1) == straight.get_mask_sizes(1)
    assert torch.equal(rolled.keys, straight.keys)
    for step in range(30):
        straight.update(*_states(1, step))
        rolled.update(*_states(1, step))
    assert torch.equal(rolled.keys, straight.keys)
    assert torch.equal(rolled.values, straight.values)
    rolled.crop(0)
    assert rolled.get_seq_length() == 270
    with pytest.raises(ValueError, match="negative"):
        rolled.crop(3)


@pytest.mark.parametrize("name", ["keys", "values"])
def test_states_replaced_from_outside_are_gone_on_with(name: str) -> None:
    layer = _filled(20)
    layer.update(*_states(3, 1))  # makes the buffers
    replaced = torch.full_like(getattr(layer, name), 7.0)
    setattr(layer, name, replaced.clone())
    layer.update(*_states(2, 2))
    assert torch.equal(getattr(layer, name)[..., :23, :], replaced)
    assert layer.keys.shape == layer.values.shape == (1, 2, 25, 4)


def test_rows_that_stay_are_gone_on_with() -> None:
    layer = CompressibleLayer()
    layer.update(*_states(20, 0, rows=3))
    layer.update(*_states(1, 1, rows=3))
    before = layer.keys.clone()
    layer.batch_select_indices(torch.tensor([0, 2]))
    new = _states(1, 2, rows=2)
    layer.update(*new)
    assert torch.equal(layer.keys, torch.cat([before[[0, 2]], new[0]], dim=2))


def test_reset_forgets_everything() -> None:
    layer = _filled(20)
    layer.update(*_states(3, 1))
    layer.keep(torch.arange(5).expand(1, 2, -1))
    layer.reset()
    assert layer.get_seq_length() == 0
    assert layer.positions is None


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_only_full_attention_layers_are_compressible(name: str) -> None:
    config = ARCHITECTURES[name]()
    kind = "sliding_attention" if name == "mistral-sliding" else "full_attention"
    types = getattr(config, "layer_types", None) or [kind] * config.num_hidden_layers
    cache = new_cache(config)
    assert [i for i, _ in compressible(cache)] == [i for i, kind in enumerate(types) if kind == "full_attention"]
    assert sum(isinstance(layer, DynamicSlidingWindowLayer) for layer in cache.layers) == types.count(
        "sliding_attention"
    )


def test_bytes_are_those_of_the_tensors() -> None:
    cache = new_cache(ARCHITECTURES["gemma3"]())  # sliding, full, sliding; windows of 24
    assert kv_bytes(cache) == kv_bytes_full(cache) == 0
    for layer in range(3):
        cache.update(*_states(100), layer)
    token = 2 * 2 * 4 * 4  # keys and values, heads, head_dim, float32
    assert kv_bytes(cache) == kv_bytes_full(cache) == token * (23 + 100 + 23)
    cache.layers[1].keep(torch.arange(30).expand(1, 2, -1))
    assert kv_bytes(cache) == token * (23 + 30 + 23)
    assert kv_bytes_full(cache) == token * (23 + 100 + 23)


def test_memory_behind_views_counts_once_and_whole() -> None:
    cache, states = new_cache(ARCHITECTURES["llama"]()), torch.zeros(1, 4, 100, 16)
    cache.layers[0].keys, cache.layers[0].values = states[:, :2, :10], states[:, 2:, :10]
    assert kv_bytes(cache) == 2 * 2 * 10 * 16 * 4
    assert kv_bytes_allocated(cache) == states.nbytes
