"""Batches out of prompts that were read one by one: each row goes on as it does alone, and nothing is padded."""

import pytest
import torch
from transformers.cache_utils import Cache, DynamicSlidingWindowLayer

from conftest import ModelOf
from ragkv.cache import CompressibleLayer, kv_bytes, new_cache
from ragkv.decode import Decoder
from ragkv.policies import AdaKV, FullKV, Policy, PyramidKV, SnapKV, StreamingLLM
from ragkv.prefill import Prefilled, prefill
from ragkv.rows import RowsLayer, join
from tiny import ARCHITECTURES, random_prompt

ROWS: list[tuple[int, Policy]] = [
    (100, FullKV()),
    (100, SnapKV(40, 8)),
    (61, AdaKV(40, 8)),
    (90, PyramidKV(40, 8)),
    (30, StreamingLLM(3, 20)),
    (10, SnapKV(40, 8)),  # shorter than any window
]


def read(model_of: ModelOf, name: str) -> list[Prefilled]:
    return [prefill(model_of(name), random_prompt(n, seed=n), policy) for n, policy in ROWS]


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if "dynamic" not in name and "longrope" not in name])
def test_every_row_goes_on_as_it_does_alone(model_of: ModelOf, name: str) -> None:
    alone = [Decoder(model_of(name), [row]) for row in read(model_of, name)]
    together = Decoder(model_of(name), read(model_of, name))
    rows = list(range(len(ROWS)))
    for step in range(30):
        if step in (10, 20):  # the first and the last leave, and then all others but one
            gone = {10: [0, 4], 20: [1, 3, 5]}[step]
            together.keep_rows([i for i, row in enumerate(rows) if row not in gone])
            rows = [row for row in rows if row not in gone]
        together.step([5 + step + row for row in rows])
        for row in rows:
            alone[row].step([5 + step + row])
        expected = torch.cat([alone[row].logits for row in rows])
        torch.testing.assert_close(together.logits, expected, rtol=1e-5, atol=1e-5)


def _cache_of(tokens: int, kept: int | None = None) -> Cache:
    """Layers with a sliding window of 24, with full attention, and with a sliding window again."""
    cache = new_cache(ARCHITECTURES["gemma3"]())
    for layer in range(3):
        cache.update(*torch.randn(2, 1, 2, tokens, 4, generator=torch.Generator().manual_seed(tokens)), layer)
    if kept is not None:
        cache.layers[1].keep(torch.arange(tokens - kept, tokens).expand(1, 2, -1))  # type: ignore[union-attr]
    return cache


def test_layers_that_are_alike_are_stacked_and_all_others_stay_as_they_are() -> None:
    rows = [_cache_of(100, 50), _cache_of(30), _cache_of(60, 50)]
    held = [[layer.keys for layer in cache.layers] for cache in rows]  # type: ignore[union-attr]
    joined = join(rows)
    first, full, last = joined.layers
    assert [type(layer) for layer in joined.layers] == [DynamicSlidingWindowLayer, RowsLayer, DynamicSlidingWindowLayer]
    for row in range(3):
        assert torch.equal(first.keys[row], held[row][0][0])  # type: ignore[union-attr, index]
        assert torch.equal(last.keys[row], held[row][2][0])  # type: ignore[union-attr, index]
    assert all(part.keys is keys[1] for part, keys in zip(full.parts, held, strict=True))  # type: ignore[union-attr]
    assert [layer.get_mask_sizes(1) for layer in joined.layers] == [(24, 77), (51, 50), (24, 77)]
    assert joined.get_seq_length() == 100
    joined.batch_select_indices(torch.tensor([1, 2]))
    assert [part.keys.shape[-2] for part in full.parts] == [30, 50]  # type: ignore[union-attr]
    assert joined.layers[1].get_seq_length() == 60


def test_rows_of_one_number_of_entries_are_stacked_whatever_their_length() -> None:
    joined = join([_cache_of(100, 40), _cache_of(40), _cache_of(60, 40)])
    full = joined.layers[1]
    assert type(full) is CompressibleLayer
    assert full.keys.shape == (3, 2, 40, 4)
    assert full.get_mask_sizes(1) == (41, 60)


def test_joining_leaves_no_second_copy() -> None:
    rows = [_cache_of(40), _cache_of(60), _cache_of(50)]
    joined = join(rows)
    assert kv_bytes(joined) == sum(2 * 2 * 4 * 4 * n for n in (40, 60, 50, *6 * [23]))
    assert [kv_bytes(cache) for cache in rows[1:]] == [0, 0]


def test_one_row_is_left_alone() -> None:
    cache = _cache_of(40)
    assert join([cache]) is cache
    assert len(cache.layers) == 3
