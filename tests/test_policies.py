"""Policies: bounds that are told in full, budgets, and that every policy does what its name says."""

import re
from typing import Any

import pytest
import torch

from conftest import ModelOf
from ragkv import policies
from ragkv.cache import compressible
from ragkv.errors import ConfigError
from ragkv.policies import FullKV, Policy, SnapKV, StreamingLLM
from ragkv.prefill import prefill
from tiny import random_prompt

LENGTH = 120
# Every policy that drops something, with what it must keep of 120 tokens. A new policy joins here.
COMPRESSING: list[tuple[Policy, int]] = [
    (SnapKV(48, 8), 48),
    (SnapKV(48, 8, 5, "max"), 48),
    (SnapKV(100), 100),
    (StreamingLLM(4, 28), 32),
    (StreamingLLM(0, 28), 28),
]


def test_every_policy_is_in_the_matrix() -> None:
    tried = {type(policy).__name__ for policy, _ in COMPRESSING} | {"FullKV"}
    assert tried == set(policies.__all__) - {"Policy", "Observation"}


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3"])
@pytest.mark.parametrize(("policy", "budget"), COMPRESSING)
def test_a_policy_drops_what_is_beyond_its_budget(model_of: ModelOf, name: str, policy: Policy, budget: int) -> None:
    """A policy that silently does nothing fails here, as does one that keeps less than it may."""
    prefilled = prefill(model_of(name), random_prompt(LENGTH), policy)
    assert prefilled.kept_tokens == budget
    for _, layer in compressible(prefilled.cache):
        assert layer.keys.shape[-2] == layer.values.shape[-2] == budget
        assert layer.get_seq_length() == LENGTH


def test_full_kv_keeps_everything(model_of: ModelOf) -> None:
    prefilled = prefill(model_of("llama"), random_prompt(LENGTH), FullKV())
    assert prefilled.kept_tokens == LENGTH
    assert prefilled.kv_bytes_kept == prefilled.kv_bytes_full == 3 * 2 * 2 * LENGTH * 16 * 4


@pytest.mark.parametrize(("num_sink_tokens", "window_length"), [(4, 28), (0, 28), (1, 1), (20, 60)])
def test_streaming_llm_keeps_the_first_and_the_last(
    model_of: ModelOf, num_sink_tokens: int, window_length: int
) -> None:
    prefilled = prefill(model_of("llama"), random_prompt(LENGTH), StreamingLLM(num_sink_tokens, window_length))
    expected = [*range(num_sink_tokens), *range(LENGTH - window_length, LENGTH)]
    for _, layer in compressible(prefilled.cache):
        assert layer.positions is not None
        assert layer.positions[0].tolist() == [expected, expected]


def test_snapkv_keeps_what_the_window_looks_at(model_of: ModelOf) -> None:
    """Tokens that are planted to be looked at stay; the most recent ones, which nobody looks at, do not."""
    generator = torch.Generator().manual_seed(0)
    key = 0.1 * torch.randn(1, 1, 64, 16, generator=generator)
    query = torch.ones(1, 2, 8, 16)
    key[:, :, [5, 30]] = 2.0
    observation = policies.Observation(0, 1, query, key, key, 0.25, 8)
    best = SnapKV(16, 8, kernel_size=1).score(observation).topk(2).indices.sort().values
    assert best.tolist() == [[[5, 30]]]
    # With a pool of 5, the neighbours of what is looked at stay as well.
    best = SnapKV(18, 8, kernel_size=5).score(observation).topk(10).indices.sort().values
    assert best.tolist() == [[[3, 4, 5, 6, 7, 28, 29, 30, 31, 32]]]


INVALID: list[tuple[type, dict[str, Any], str]] = [
    (SnapKV, {"window_size": 0}, "window_size=0: must be at least 1, or 'auto'"),
    (SnapKV, {"window_size": -3}, "window_size=-3: must be at least 1"),
    (SnapKV, {"window_size": "wide"}, "window_size='wide': must be at least 1, or 'auto'"),
    (SnapKV, {"max_capacity_prompt": 64}, "max_capacity_prompt=64: must be larger than the observation window"),
    (SnapKV, {"max_capacity_prompt": 64}, "up to 64 tokens); raise it or set a smaller window_size"),
    (SnapKV, {"max_capacity_prompt": 32, "window_size": 32}, "max_capacity_prompt=32: must be larger"),
    (SnapKV, {"kernel_size": 4}, "kernel_size=4: must be an odd number of at least 1 (1 is no pooling)"),
    (SnapKV, {"kernel_size": 0}, "kernel_size=0: must be an odd number"),
    (SnapKV, {"kernel_size": -1}, "kernel_size=-1: must be an odd number"),
    (SnapKV, {"pooling": "mean"}, "pooling='mean': choose one of avg, max"),
    (SnapKV, {"gqa_reduction": "min"}, "gqa_reduction='min': choose one of mean, max, sum"),
    (StreamingLLM, {"num_sink_tokens": -1}, "num_sink_tokens=-1: must be at least 0"),
    (StreamingLLM, {"window_length": 0}, "window_length=0: must be at least 1"),
]


@pytest.mark.parametrize(("policy", "options", "message"), INVALID)
def test_errors_name_the_value_the_bound_and_the_way_out(policy: type, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as raised:
        policy(**options)
    assert isinstance(raised.value, ValueError)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("policy", "accepted"),
    [(SnapKV, {"max_capacity_prompt": 65}), (SnapKV, {"max_capacity_prompt": 2, "window_size": 1, "kernel_size": 1})],
)
def test_bounds_are_inclusive_where_they_say_so(policy: type, accepted: dict[str, Any]) -> None:
    assert policy(**accepted).max_capacity_prompt == accepted["max_capacity_prompt"]


def test_automatic_windows() -> None:
    auto = SnapKV()
    assert [auto.observation_window(n) for n in (None, 1, 16, 40, 64, 900)] == [32, 16, 16, 40, 64, 64]
    assert SnapKV(100, window_size=5).observation_window(50) == 5


@pytest.mark.parametrize("policy", [SnapKV(), StreamingLLM(), FullKV()])
def test_short_prompts_are_within_every_budget(policy: Policy) -> None:
    assert [policy.budget(length, 0, 1) for length in (1, 100, 4096)] == [1, 100, 4096]


def test_policies_are_values() -> None:
    assert SnapKV(100, 8) == SnapKV(100, 8) != SnapKV(101, 8)
    assert hash(StreamingLLM(4, 8)) == hash(StreamingLLM(4, 8))
    with pytest.raises(AttributeError):
        SnapKV().kernel_size = 3  # type: ignore[misc]
