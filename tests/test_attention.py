"""The attention function: exact in every shape that prefill and decoding give it, and visible to an observer."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conftest import ModelOf
from ragkv import attention
from ragkv.attention import causal_attention, implementation_name
from ragkv.backend import forward
from ragkv.cache import new_cache
from ragkv.errors import ConfigError
from tiny import ARCHITECTURES, random_prompt


def _bottom_right(queries: int, keys: int) -> Tensor:
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)


def _states(queries: int, keys: int, seed: int, group: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    query = 2 * torch.randn(2, 3 * group, queries, 16, generator=generator)
    key, value = torch.randn(2, 2, 3, keys, 16, generator=generator)
    return query, key, value


SHAPES = [(1, 2), (2, 3), (5, 6), (5, 70), (33, 64), (64, 65), (100, 513)]


@pytest.mark.parametrize(("queries", "keys"), SHAPES)
def test_merged_halves_equal_masked_attention(queries: int, keys: int) -> None:
    query, key, value = _states(queries, keys, keys)
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=_bottom_right(queries, keys), scale=0.4)
    torch.testing.assert_close(causal_attention(query, key, value, 0.4), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("queries", "keys"), SHAPES)
def test_heads_of_a_group_share_their_keys(queries: int, keys: int) -> None:
    """Logits of up to 20 are rounded to 2^-20 in float32, and values are up to 5."""
    query, key, value = _states(queries, keys, keys, group=2)
    exact = [query.double(), *(states.double().repeat_interleave(2, dim=1) for states in (key, value))]
    expected = F.scaled_dot_product_attention(*exact, attn_mask=_bottom_right(queries, keys), scale=0.4)
    torch.testing.assert_close(causal_attention(query, key, value, 0.4).double(), expected, rtol=0, atol=5 * 2**-20)


@pytest.mark.parametrize(("queries", "keys"), SHAPES)
def test_merged_halves_in_bfloat16(queries: int, keys: int) -> None:
    """Probabilities, either half and their mixture are rounded once each, by up to 2^-9 of the largest value."""
    query, key, value = (states.bfloat16() for states in _states(queries, keys, keys))
    exact = F.scaled_dot_product_attention(
        query.float(), key.float(), value.float(), attn_mask=_bottom_right(queries, keys), scale=0.4
    )
    merged = causal_attention(query, key, value, 0.4)
    assert merged.dtype == torch.bfloat16
    torch.testing.assert_close(merged.float(), exact, rtol=0, atol=float(value.abs().max()) * 2**-7)


def test_merging_survives_logits_that_overflow_exponentials() -> None:
    query, key, value = _states(4, 12, 0)
    query = query * 500
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=_bottom_right(4, 12), scale=1.0)
    torch.testing.assert_close(causal_attention(query, key, value, 1.0), expected, rtol=1e-5, atol=1e-5)


def _scattered(queries: int, keys: int, window: int) -> Tensor:
    """The mask of tokens that are computed anew here and there: each sees itself and what stands shortly before it."""
    places = torch.randperm(keys, generator=torch.Generator().manual_seed(keys))[:queries].sort().values
    distance = places.unsqueeze(1) - torch.arange(keys)
    return ((distance >= 0) & (distance < window))[None, None]


@pytest.mark.parametrize("window", [200, 40, 9])
@pytest.mark.parametrize("at_once", [1, 16, 64])
def test_attention_under_a_mask(monkeypatch: pytest.MonkeyPatch, window: int, at_once: int) -> None:
    """Only what some of the queries see and others do not runs under a mask; what none of them sees is not computed."""
    monkeypatch.setattr(attention, "_MASKED_QUERIES", at_once)
    query, key, value = _states(50, 200, 1, group=2)
    mask = _scattered(50, 200, window).repeat(2, 1, 1, 1)
    mask[1] &= torch.arange(200) >= 20  # what this row would see alone is padding
    computed: list[tuple[int, int]] = []
    plain = attention._attention_with_lse

    def counted(query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        computed.append((key.shape[-2], 0 if "mask" in kwargs else key.shape[-2]))
        return plain(query, key, *args, **kwargs)

    monkeypatch.setattr(attention, "_attention_with_lse", counted)
    found = attention._sdpa(nn.Module(), query, key, value, mask, scaling=0.4)
    exact = [query.double(), *(states.double().repeat_interleave(2, dim=1) for states in (key, value))]
    expected = F.scaled_dot_product_attention(*exact, attn_mask=mask, scale=0.4).transpose(1, 2)
    seeing = mask.any(dim=-1)[:, 0]
    torch.testing.assert_close(found[seeing].double(), expected[seeing], rtol=0, atol=5 * 2**-20)
    lse = (0.4 * exact[0] @ exact[1].transpose(2, 3)).masked_fill(~mask, -torch.inf).logsumexp(-1).transpose(1, 2)
    found_lse = attention.masked_attention(query, key, value, mask, 0.4)[1].transpose(1, 2).double()
    torch.testing.assert_close(found_lse[seeing], lse[seeing], rtol=0, atol=5 * 2**-20)
    del computed[len(computed) // 2 :]
    parts = mask.flatten(0, 1).split(at_once, dim=1)
    assert sum(n for n, _ in computed) == sum(int(part.flatten(0, 1).any(dim=0).sum()) for part in parts)
    alike = sum(max(0, int(part.flatten(0, 1).all(dim=0).sum()) - 1) for part in parts)
    assert sum(n for _, n in computed) == alike


def test_attention_under_a_mask_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded as merged halves are."""
    monkeypatch.setattr(attention, "_MASKED_QUERIES", 16)
    query, key, value = (states.bfloat16() for states in _states(50, 200, 1, group=2))
    mask = _scattered(50, 200, 200)
    found = attention._sdpa(nn.Module(), query, key, value, mask, scaling=0.4)
    exact = [query.float(), *(states.float().repeat_interleave(2, dim=1) for states in (key, value))]
    expected = F.scaled_dot_product_attention(*exact, attn_mask=mask, scale=0.4).transpose(1, 2)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=float(value.abs().max()) * 2**-7)


@pytest.mark.parametrize(("queries", "keys"), [(5, 70), (2, 3), (50, 50)])
def test_values_of_another_size_are_attended_by_the_end_of_a_prompt(queries: int, keys: int) -> None:
    """As in chunks, or behind a stored prefix."""
    query, key, value = _states(queries, keys, 1)
    found = attention._sdpa(nn.Module(), query, key, value[..., :8], None, scaling=0.4)
    causal = {"attn_mask": _bottom_right(queries, keys), "scale": 0.4}
    expected = F.scaled_dot_product_attention(query, key, value[..., :8], **causal)
    torch.testing.assert_close(found, expected.transpose(1, 2), rtol=1e-6, atol=1e-6)


def test_values_of_another_size_are_attended_under_a_mask() -> None:
    """The kernel that merging needs does not take them; transformers' own does."""
    query, key, value = _states(50, 200, 1)
    mask, module = _scattered(50, 200, 200), nn.Module()
    found = attention._sdpa(module, query, key, value[..., :8], mask, scaling=0.4)
    expected = F.scaled_dot_product_attention(query, key, value[..., :8], attn_mask=mask, scale=0.4)
    torch.testing.assert_close(found, expected.transpose(1, 2), rtol=1e-6, atol=1e-6)


def test_queries_that_see_nothing_do_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of left padding, in a batch of a caller's own: their output is never used."""
    monkeypatch.setattr(attention, "_MASKED_QUERIES", 2)
    query, key, value = _states(6, 6, 1)
    mask = _bottom_right(6, 6)[None, None] & (torch.arange(6) >= 3)
    found = attention._sdpa(nn.Module(), query, key, value, mask, scaling=0.4)
    real = (states[..., 3:, :] for states in (query, key, value))
    expected = F.scaled_dot_product_attention(*real, is_causal=True, scale=0.4)
    torch.testing.assert_close(found[:, 3:], expected.transpose(1, 2), rtol=1e-6, atol=1e-6)


def test_unknown_implementations_are_refused_by_name() -> None:
    assert implementation_name("sdpa") != implementation_name("flash_attention_2")
    with pytest.raises(ConfigError, match=r"attn_implementation='flex': choose one of sdpa, flash_attention_2"):
        implementation_name("flex")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_equal_those_of_transformers(model_of: ModelOf, plain_of: ModelOf, name: str) -> None:
    ids = torch.tensor([random_prompt(60).ids])
    positions = torch.arange(60).unsqueeze(0)
    with torch.inference_mode():
        expected = plain_of(name)(ids).logits[:, -1]
    logits = forward(model_of(name), ids, new_cache(model_of(name).config), positions)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_observer_sees_each_layer_once_and_changes_nothing(model_of: ModelOf, name: str) -> None:
    model = model_of(name)
    ids, positions = torch.tensor([random_prompt(40).ids]), torch.arange(40).unsqueeze(0)
    seen: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []

    def observer(layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> None:
        assert key.shape == value.shape
        seen.append((layer, tuple(query.shape), tuple(key.shape)))

    cache = new_cache(model.config)
    observed = forward(model, ids, cache, positions, observer=observer)
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    expected = [
        (layer, (1, config.num_attention_heads, 40, head_dim), (1, kv_heads, 40, head_dim))
        for layer in range(config.num_hidden_layers)
    ]
    assert seen == expected
    assert torch.equal(forward(model, ids, new_cache(model.config), positions), observed)
    assert len(seen) == len(expected)  # the pass without an observer told nobody


def test_padding_is_masked(model_of: ModelOf) -> None:
    """Rows that are padded on the left give the logits that they give alone."""
    model, prompt = model_of("llama"), random_prompt(20)
    alone = forward(model, torch.tensor([prompt.ids]), new_cache(model.config), torch.arange(20).unsqueeze(0))
    ids = torch.tensor([(7,) * 12 + prompt.ids])
    mask = torch.arange(32).unsqueeze(0) >= 12
    padded = forward(model, ids, new_cache(model.config), (torch.arange(32) - 12).clamp(0).unsqueeze(0), mask)
    torch.testing.assert_close(padded, alone, rtol=1e-5, atol=1e-5)
    unmasked = forward(model, ids, new_cache(model.config), (torch.arange(32) - 12).clamp(0).unsqueeze(0))
    assert not torch.allclose(unmasked, alone, atol=1e-3)
