"""Sampling: the distributions of transformers' generate, repeatable by seed."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from conftest import ModelOf
from ragkv.config import SamplingParams
from ragkv.errors import ConfigError
from ragkv.sampling import Sampler
from tiny import VOCABULARY, random_prompt

OPTIONS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.05},
    {"temperature": 0.1, "top_k": 5},
    {"temperature": 0.1, "top_p": 0.4},
    {"temperature": 0.1, "min_p": 0.3},
    {"temperature": 0.1, "repetition_penalty": 1.3},
    {"temperature": 0.08, "top_k": 40, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.1},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_draws_equal_those_from_the_scores_of_generate(plain_of: ModelOf, options: dict[str, Any]) -> None:
    """Each step of a reply: a draw from generate's own processed scores equals ours from its raw logits."""
    prompt = random_prompt(30)
    ids = torch.tensor([prompt.ids])
    defaults = {"top_k": 0, "top_p": 1.0, "do_sample": True}
    torch.manual_seed(3)
    output = plain_of("llama").generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=12,
        eos_token_id=None,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        **{**defaults, **options},
    )
    for step, (scores, logits) in enumerate(zip(output.scores, output.logits, strict=True)):
        before = output.sequences[0, : 30 + step].tolist()
        for seed in range(20):
            expected = torch.multinomial(scores[0].softmax(-1), 1, generator=torch.Generator().manual_seed(seed))
            assert Sampler(SamplingParams(**options, seed=seed), before)(logits[0]) == int(expected)


def _draws(params: SamplingParams, logits: Tensor, prompt: tuple[int, ...] = ()) -> list[int]:
    sampler = Sampler(params, prompt)
    return [sampler(logits) for _ in range(200)]


def _logits() -> Tensor:
    return torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(1))


def test_a_seed_repeats_and_another_differs() -> None:
    hot = SamplingParams(temperature=1.0, seed=4)
    assert _draws(hot, _logits()) == _draws(hot, _logits())
    assert _draws(hot, _logits()) != _draws(SamplingParams(temperature=1.0, seed=5), _logits())
    assert _draws(SamplingParams(temperature=1.0), _logits()) != _draws(SamplingParams(temperature=1.0), _logits())


def test_seeded_draws_leave_the_global_generator_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    _draws(SamplingParams(temperature=1.0, seed=4), _logits())
    assert torch.equal(torch.rand(3), expected)


def test_temperature_zero_is_greedy_whatever_the_seed() -> None:
    for seed in (None, 1, 2):
        params = SamplingParams(temperature=0.0, seed=seed, top_k=3, top_p=0.2, min_p=0.5)
        assert set(_draws(params, _logits())) == {int(_logits().argmax())}


def test_top_k_top_p_and_min_p_cut_the_tail() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.04, 0.01]).log()
    every = set(range(5))
    assert set(_draws(SamplingParams(temperature=1.0, seed=0), logits)) >= {0, 1, 2, 3}
    assert set(_draws(SamplingParams(temperature=50.0, seed=0), logits)) == every
    assert set(_draws(SamplingParams(temperature=50.0, top_k=2, seed=0), logits)) == {0, 1}
    assert set(_draws(SamplingParams(temperature=1.0, top_p=0.75, seed=0), logits)) == {0, 1}
    assert set(_draws(SamplingParams(temperature=1.0, min_p=0.25, seed=0), logits)) == {0, 1, 2}


def test_repetition_penalty_counts_the_prompt_and_the_reply() -> None:
    logits = torch.tensor([1.0, 0.9, 0.8, 0.1])
    sampler = Sampler(SamplingParams(repetition_penalty=2.0), [0])
    assert [sampler(logits) for _ in range(3)] == [1, 2, 0]


def test_half_precision_logits_are_widened_first() -> None:
    """2 / 1.3 = 1.5385 is less than 1.5390625, to which bfloat16 would round it."""
    logits = torch.tensor([2.0, 1.5390625]).bfloat16()
    assert Sampler(SamplingParams(repetition_penalty=1.3), [0])(logits) == 1


def test_logits_are_left_as_they_were() -> None:
    logits = _logits()
    before = logits.clone()
    _draws(
        SamplingParams(temperature=0.5, top_k=3, top_p=0.5, min_p=0.1, repetition_penalty=1.5, seed=0), logits, (1, 2)
    )
    assert torch.equal(logits, before)


class OnlyEven:
    """A grammar: even tokens, each once."""

    def __init__(self) -> None:
        self.accepted: list[int] = []

    def mask(self, logits: Tensor) -> Tensor:
        forbidden = torch.arange(len(logits)) % 2 == 1
        forbidden[self.accepted] = True
        return logits.masked_fill(forbidden, -torch.inf)

    def accept(self, token: int) -> None:
        self.accepted.append(token)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_constraints_are_obeyed_and_told(temperature: float) -> None:
    grammar = OnlyEven()
    sampler = Sampler(SamplingParams(temperature=temperature, seed=0), [], grammar)
    tokens = [sampler(_logits()) for _ in range(50)]
    assert tokens == grammar.accepted
    assert len(set(tokens)) == 50
    assert all(token % 2 == 0 for token in tokens)


INVALID = [
    ({"max_tokens": 0}, "max_tokens=0: must be at least 1"),
    ({"temperature": -0.1}, "temperature=-0.1: must be at least 0"),
    ({"temperature": float("nan")}, "temperature=nan: must be at least 0"),
    ({"top_p": 0.0}, "top_p=0.0: must be in (0, 1]"),
    ({"top_p": 1.1}, "top_p=1.1: must be in (0, 1]"),
    ({"top_k": -1}, "top_k=-1: must be at least 0 (0 keeps every token)"),
    ({"min_p": 1.0}, "min_p=1.0: must be in [0, 1)"),
    ({"min_p": -0.5}, "min_p=-0.5: must be in [0, 1)"),
    ({"repetition_penalty": 0.0}, "repetition_penalty=0.0: must be above 0"),
    ({"stop": ["a", ""]}, "stop=['a', '']: must be strings that are not empty"),
]


@pytest.mark.parametrize(("options", "message"), INVALID)
def test_errors_name_the_value_and_the_bound(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        SamplingParams(**options)


def test_one_stop_string_may_come_alone() -> None:
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert hash(SamplingParams(stop=["a"])) == hash(SamplingParams(stop="a"))
