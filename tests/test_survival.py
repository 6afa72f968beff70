"""Survival: masks against the cache's positions, counts against loops over sets."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conftest import ModelOf
from ragkv.cache import compressible
from ragkv.policies import FullKV, SnapKV, StreamingLLM
from ragkv.prefill import prefill
from ragkv.survival import Survival, kept_masks, survival
from tiny import random_prompt

LENGTH = 100


@pytest.mark.parametrize("name", ["llama", "gemma3", "llama-mqa"])
def test_masks_are_the_positions_of_the_cache(model_of: ModelOf, name: str) -> None:
    cache = prefill(model_of(name), random_prompt(LENGTH), SnapKV(40, 8)).cache
    masks = kept_masks(cache, LENGTH)
    layers = compressible(cache)
    assert len(masks) == len(layers) > 0
    for mask, (_, layer) in zip(masks, layers, strict=True):
        assert layer.positions is not None
        assert [row.nonzero().flatten().tolist() for row in mask] == layer.positions[0].tolist()


def test_a_policy_that_does_nothing_shows(model_of: ModelOf) -> None:
    """Counts per layer and head: those of a budget of 40 against those of everything."""
    model, prompt = model_of("llama"), random_prompt(LENGTH)
    for policy, count in ((SnapKV(40, 8), 40), (FullKV(), LENGTH), (SnapKV(LENGTH, 8), LENGTH)):
        everything = survival(kept_masks(prefill(model, prompt, policy).cache, LENGTH), [(0, LENGTH)])
        assert everything.kept == ((count, count),) * 3
        assert everything.mean_share == count / LENGTH


def test_both_ends_survive_streaming(model_of: ModelOf) -> None:
    masks = kept_masks(prefill(model_of("llama"), random_prompt(LENGTH), StreamingLLM(4, 20)).cache, LENGTH)
    assert survival(masks, [(0, 4), (80, 100)]).mean_share == 1.0
    assert survival(masks, [(4, 80)]) == Survival(76, ((0, 0),) * 3, 0)
    half = survival(masks, [(2, 6)])
    assert (half.kept, half.mean_share, half.any_share) == (((2, 2),) * 3, 0.5, 0.5)


@given(st.data(), st.integers(1, 30))
def test_counts_equal_loops(data: st.DataObject, length: int) -> None:
    """Heads may differ in number by layer; ranges may overlap, be empty, and come in any order."""
    heads = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    kept = [[data.draw(st.sets(st.integers(0, length - 1))) for _ in range(n)] for n in heads]
    ranges = data.draw(st.lists(st.tuples(st.integers(0, length), st.integers(0, length)), max_size=4))
    masks = [torch.tensor([[i in head for i in range(length)] for head in layer]) for layer in kept]
    wanted = {i for start, end in ranges for i in range(start, end)}
    result = survival(masks, ranges)
    assert result.tokens == len(wanted)
    assert result.kept == tuple(tuple(len(head & wanted) for head in layer) for layer in kept)
    anywhere = wanted & set().union(*(head for layer in kept for head in layer))
    assert result.anywhere == len(anywhere)
    entries = [i in head for layer in kept for head in layer for i in wanted]
    assert result.mean_share == pytest.approx(sum(entries) / len(entries) if entries else 0.0)
    assert result.any_share == pytest.approx(len(anywhere) / len(wanted) if wanted else 0.0)
    by_layer = [[i in head for head in layer for i in wanted] for layer in kept]
    assert result.layer_shares == pytest.approx([sum(e) / len(e) if e else 0.0 for e in by_layer])


def test_a_model_of_sliding_windows_has_nothing_to_survive(model_of: ModelOf) -> None:
    masks = kept_masks(prefill(model_of("mistral-sliding"), random_prompt(LENGTH), SnapKV(40, 8)).cache, LENGTH)
    assert masks == []
    with pytest.raises(ValueError, match="no layer with full attention"):
        survival(masks, [(0, 4)])
