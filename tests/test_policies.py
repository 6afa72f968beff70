"""Policies: bounds that are told in full, budgets, and that every policy does what its name says."""

import itertools
import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import reference
from conftest import ModelOf
from ragkv import policies
from ragkv.cache import compressible
from ragkv.errors import ConfigError
from ragkv.policies import (
    H2O,
    AdaKV,
    FullKV,
    Observation,
    Policy,
    PyramidKV,
    RandomKV,
    SnapKV,
    SplitsBudget,
    StreamingLLM,
)
from ragkv.prefill import prefill
from ragkv.scoring import window_votes
from ragkv.survival import kept_masks, survival
from tiny import COMPRESSIBLE, random_prompt

LENGTH = 120
# Every policy that drops something, with what a KV head must keep of 120 tokens on average. A new policy joins here.
COMPRESSING: list[tuple[Policy, int]] = [
    (SnapKV(48, 8), 48),
    (SnapKV(48, 8, 5, "max"), 48),
    (SnapKV(100), 100),
    (StreamingLLM(4, 28), 32),
    (StreamingLLM(0, 28), 28),
    (H2O(48), 48),
    (H2O(48, 1, "max"), 48),
    (RandomKV(48, 8), 48),
    (PyramidKV(48, 8), 48),
    (AdaKV(48, 8), 48),
]


def test_every_policy_is_in_the_matrix() -> None:
    tried = {type(policy).__name__ for policy, _ in COMPRESSING} | {"FullKV"}
    assert tried == set(policies.__all__) - {"Policy", "Observation", "SplitsBudget"}


@pytest.mark.parametrize("name", COMPRESSIBLE)
@pytest.mark.parametrize(("policy", "budget"), COMPRESSING)
def test_a_policy_drops_what_is_beyond_its_budget(model_of: ModelOf, name: str, policy: Policy, budget: int) -> None:
    """A policy that silently does nothing fails here, as does one that keeps less than it may."""
    prefilled = prefill(model_of(name), random_prompt(LENGTH), policy)
    layers = compressible(prefilled.cache)
    parts = [part for _, layer in layers for part in layer.parts]
    heads = sum(part.keys.shape[1] for part in parts)
    held = sum(s.untyped_storage().nbytes() for part in parts for s in (part.keys, part.values))
    assert held == heads * budget * 2 * parts[0].keys.shape[-1] * 4
    assert all(layer.get_seq_length() == LENGTH for _, layer in layers)
    by_layer = survival(kept_masks(prefilled.cache, LENGTH), [(0, LENGTH)]).kept
    assert sum(map(sum, by_layer)) == heads * budget
    if isinstance(policy, SplitsBudget):
        assert all(sum(counts) == len(counts) * budget for counts in by_layer)
    elif not isinstance(policy, PyramidKV):
        assert {count for counts in by_layer for count in counts} == {budget}
    assert prefilled.kept_tokens == max(map(max, by_layer))


@pytest.mark.parametrize("name", COMPRESSIBLE)
@pytest.mark.parametrize(("policy", "budget"), COMPRESSING)
def test_every_policy_keeps_sorted_positions_and_its_window(
    model_of: ModelOf, name: str, policy: Policy, budget: int
) -> None:
    prefilled = prefill(model_of(name), random_prompt(LENGTH), policy)
    window = list(range(LENGTH - prefilled.window_size, LENGTH))
    for part in (part for _, layer in compressible(prefilled.cache) for part in layer.parts):
        assert part.positions is not None
        for row in part.positions[0].tolist():
            assert row == sorted(set(row))
            assert row[-len(window) :] == window
            assert row[0] >= 0


def test_layers_are_counted_where_there_is_something_to_keep(model_of: ModelOf) -> None:
    """Sliding windows have no budget, so they are no steps of a pyramid."""
    told: list[tuple[int, ...]] = []

    class Told(SnapKV):
        def budget(self, length: int, layer: int, num_layers: int) -> int:
            told.append((length, layer, num_layers))
            return super().budget(length, layer, num_layers)

        def score(self, observation: Observation) -> Tensor:
            told.append((observation.layer, observation.num_layers))
            return super().score(observation)

    for name in ("gemma3", "llama"):
        prefill(model_of(name), random_prompt(LENGTH), Told(48, 8))
    assert told[:2] == [(LENGTH, 0, 1), (0, 1)]
    assert told[2:] == [call for layer in range(3) for call in ((LENGTH, layer, 3), (layer, 3))]


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


def _observation(heads: int, kv_heads: int, length: int, window_size: int) -> Observation:
    generator = torch.Generator().manual_seed(heads)
    query = torch.randn(1, heads, length, 16, generator=generator)
    key = torch.randn(1, kv_heads, length, 16, generator=generator)
    return Observation(1, 3, query, key, key, 0.25, window_size)


@pytest.mark.parametrize("gqa_reduction", ["mean", "max", "sum"])
@pytest.mark.parametrize("window_size", ["half", 3])
def test_h2o_scores_like_the_loops(gqa_reduction: str, window_size: Any) -> None:
    policy = H2O(20, window_size, gqa_reduction)
    observation = _observation(4, 2, 40, policy.observation_window(5))
    assert observation.window_size == (10 if window_size == "half" else 3)
    expected = reference.accumulated(observation.query, observation.key, 0.25, gqa_reduction)
    scores = policy.score(observation)
    torch.testing.assert_close(scores.double(), expected[..., : -observation.window_size], rtol=1e-6, atol=1e-6)


def test_h2o_refuses_what_it_cannot_see(model_of: ModelOf) -> None:
    seen = _observation(4, 2, 40, 10)
    partial = replace(seen, query=seen.query[:, :, -39:])
    with pytest.raises(ConfigError, match="H2O needs the queries of all 40 tokens, not of 39"):
        H2O(20).score(partial)
    prompt = random_prompt(LENGTH)
    with pytest.raises(ConfigError, match="prefill_chunk_size=50: H2O needs the queries of 120 tokens at once"):
        prefill(model_of("llama"), prompt, H2O(48), chunk_size=50)
    prefill(model_of("llama"), prompt, H2O(48), chunk_size=LENGTH - 20)  # one pass, as the window takes more than 20
    whole = prefill(model_of("llama"), prompt, H2O(48), chunk_size=LENGTH)
    assert torch.equal(whole.logits, prefill(model_of("llama"), prompt, H2O(48)).logits)


def test_random_entries_differ_by_head_layer_and_seed_and_by_nothing_else() -> None:
    seen = _observation(4, 2, 200, 8)

    def kept(policy: RandomKV, observation: Observation) -> list[set[int]]:
        return [set(row) for row in policy.score(observation).topk(40).indices[0].tolist()]

    first = kept(RandomKV(48, 8), seen)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    other = replace(seen, query=-seen.query, key=seen.key + 1)  # the text does not matter
    assert kept(RandomKV(48, 8), other) == first
    assert torch.equal(torch.get_rng_state(), state)
    different = [
        *first,
        *kept(RandomKV(48, 8), replace(seen, layer=2)),
        *kept(RandomKV(48, 8, seed=1), seen),
        *kept(RandomKV(48, 8, seed=1), replace(seen, layer=2)),
    ]
    shared = [len(a & b) for a, b in itertools.combinations(different, 2)]
    assert max(shared) < 20  # 40 of 192: 8 by chance
    counts = Counter(i for seed in range(100) for row in kept(RandomKV(48, 8, seed=seed), seen) for i in row)
    assert all(10 < counts[i] < 80 for i in range(192))  # 42 of 200 by chance, with a deviation of 6


@given(st.integers(1, 2000), st.integers(1, 64), st.integers(1, 40), st.integers(1, 40), st.integers(1, 4000))
def test_pyramid_budgets_fall_evenly_and_sum_up(room: int, window: int, beta: int, layers: int, length: int) -> None:
    policy = PyramidKV(window + room, window, beta=beta)
    budgets = [policy.budget(length, layer, layers) for layer in range(layers)]
    if length <= window + room:
        assert budgets == [length] * layers
        return
    assert sum(budgets) == layers * (window + room)
    steps = [a - b for a, b in itertools.pairwise(budgets)]
    assert all(step >= 0 for step in steps)
    assert not steps or max(steps) - min(steps) <= 2
    assert window <= budgets[-1] <= budgets[0] <= length
    if layers > 1 and 2 * room + window <= length:
        assert budgets[-1] == window + room // beta


def test_a_pyramid_of_automatic_windows_leaves_room_for_the_widest() -> None:
    policy = PyramidKV(1024)
    budgets = [policy.budget(9000, layer, 28) for layer in range(28)]
    assert budgets[0] == 64 + 2 * 960 - 48
    assert budgets[-1] == 64 + 48
    assert sum(budgets) == 28 * 1024
    assert [PyramidKV(1024, beta=1).budget(9000, layer, 28) for layer in range(28)] == [1024] * 28


@given(st.data(), st.integers(1, 4), st.integers(2, 40), st.sampled_from([0.0, 0.2, 0.5, 1.0]))
def test_ada_budgets_equal_ranking(data: st.DataObject, kv_heads: int, prefix: int, safeguard: float) -> None:
    seed = data.draw(st.integers(0, 2**31))
    scores = torch.rand(1, kv_heads, prefix, generator=torch.Generator().manual_seed(seed)) ** 4
    count = data.draw(st.integers(1, prefix - 1))
    budgets = AdaKV(48, 8, safeguard=safeguard).head_budgets(scores, count)
    assert budgets == reference.head_budgets(scores, count, safeguard)
    assert sum(budgets) == kv_heads * count
    assert min(budgets) >= int(safeguard * count)


def test_ada_keeps_what_is_protected_in_every_head() -> None:
    scores = torch.zeros(1, 2, 30)
    scores[0, 0] = torch.linspace(1, 2, 30)  # the first head has all the attention
    assert AdaKV(48, 8, safeguard=0.0).head_budgets(scores, 10) == [20, 0]
    assert AdaKV(48, 8, safeguard=0.25).head_budgets(scores, 10) == [18, 2]
    scores[..., 10:15] = torch.inf
    assert AdaKV(48, 8, safeguard=0.25).head_budgets(scores, 10) == [15, 5]


@pytest.mark.parametrize("pooling", ["avg", "max"])
def test_a_kernel_of_one_is_no_pooling(pooling: Any) -> None:
    seen = _observation(4, 2, 60, 8)
    votes = window_votes(seen.query, seen.key, 0.25, 8)
    assert torch.equal(SnapKV(30, 8, 1, pooling).score(seen), votes)
    assert not torch.equal(SnapKV(30, 8, 3, pooling).score(seen), votes)


def test_snapkv_keeps_what_the_window_looks_at(model_of: ModelOf) -> None:
    """Tokens that are planted to be looked at stay; the most recent ones, which nobody looks at, do not."""
    generator = torch.Generator().manual_seed(0)
    key = 0.1 * torch.randn(1, 1, 64, 16, generator=generator)
    query = torch.ones(1, 2, 8, 16)
    key[:, :, [5, 30]] = 2.0
    observation = Observation(0, 1, query, key, key, 0.25, 8)
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
    (H2O, {"max_capacity_prompt": 1}, "max_capacity_prompt=1: must be at least 2"),
    (H2O, {"window_size": 0}, "window_size=0: must be at least 1, or 'half'"),
    (H2O, {"window_size": "auto"}, "window_size='auto': must be at least 1, or 'half'"),
    (H2O, {"max_capacity_prompt": 9, "window_size": 9}, "window_size=9: must be smaller than max_capacity_prompt=9"),
    (H2O, {"gqa_reduction": "min"}, "gqa_reduction='min': choose one of mean, max, sum"),
    (RandomKV, {"window_size": 0}, "window_size=0: must be at least 1"),
    (RandomKV, {"max_capacity_prompt": 32}, "max_capacity_prompt=32: must be larger than window_size=32"),
    (RandomKV, {"seed": -1}, "seed=-1: must be at least 0 and below 2**32"),
    (PyramidKV, {"beta": 0}, "beta=0: must be at least 1 (1 gives every layer the same)"),
    (PyramidKV, {"kernel_size": 4}, "kernel_size=4: must be an odd number"),
    (AdaKV, {"safeguard": 1.5}, "safeguard=1.5: must be from 0 to 1 (1 gives every head the same)"),
    (AdaKV, {"safeguard": -0.1}, "safeguard=-0.1: must be from 0 to 1"),
    (AdaKV, {"max_capacity_prompt": 64}, "max_capacity_prompt=64: must be larger than the observation window"),
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


@pytest.mark.parametrize(
    "policy",
    [SnapKV(), StreamingLLM(), FullKV(), H2O(), RandomKV(), PyramidKV(), AdaKV()],
    ids=lambda p: type(p).__name__,
)
def test_short_prompts_are_within_every_budget(policy: Policy) -> None:
    assert [policy.budget(length, 0, 1) for length in (1, 100, 4096)] == [1, 100, 4096]


def test_policies_are_values() -> None:
    assert SnapKV(100, 8) == SnapKV(100, 8) != SnapKV(101, 8)
    assert hash(StreamingLLM(4, 8)) == hash(StreamingLLM(4, 8))
    with pytest.raises(AttributeError):
        SnapKV().kernel_size = 3  # type: ignore[misc]
