"""Batches whose rows hold different numbers of entries: each row goes on as it does alone, and nothing is padded."""

import pytest
import torch

from conftest import ModelOf
from ragkv.cache import joinable
from ragkv.decode import Decoder
from ragkv.policies import AdaKV, FullKV, Policy, PyramidKV, SnapKV, StreamingLLM
from ragkv.prefill import Prefilled, prefill
from ragkv.rows import side_by_side
from tiny import ARCHITECTURES, random_prompt

ROWS: list[tuple[int, Policy]] = [
    (100, FullKV()),
    (100, SnapKV(40, 8)),
    (61, AdaKV(40, 8)),
    (90, PyramidKV(40, 8)),
    (30, StreamingLLM(3, 20)),
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
            gone = {10: [0, 4], 20: [1, 3]}[step]
            together.keep_rows([i for i, row in enumerate(rows) if row not in gone])
            rows = [row for row in rows if row not in gone]
        together.step([5 + step + row for row in rows])
        for row in rows:
            alone[row].step([5 + step + row])
        expected = torch.cat([alone[row].logits for row in rows])
        torch.testing.assert_close(together.logits, expected, rtol=1e-5, atol=1e-5)


def test_nothing_is_padded_or_copied(model_of: ModelOf) -> None:
    caches = [row.cache for row in read(model_of, "llama")]
    assert not joinable(caches)
    held = [layer.keys.data_ptr() for cache in caches[:2] for layer in cache.layers]  # type: ignore[union-attr]
    lengths = [cache.layers[0].keys.shape[-2] for cache in caches[:2]]  # type: ignore[union-attr]
    joined = side_by_side(caches)
    rows = [layer._rows[row] for row in (0, 1) for layer in joined.layers]  # type: ignore[union-attr]
    assert [row.keys.data_ptr() for row in rows] == held
    assert [row.keys.shape[-2] for row in (rows[0], rows[-1])] == lengths == [100, 40]
    assert not any(cache.layers for cache in caches)


def test_lengths_are_those_of_the_longest_row(model_of: ModelOf) -> None:
    joined = side_by_side([row.cache for row in read(model_of, "llama")])
    assert joined.get_seq_length() == 100
    assert joined.layers[0].get_mask_sizes(1) == (101, 0)
    joined.batch_select_indices(torch.tensor([2, 4]))
    assert joined.get_seq_length() == 61
