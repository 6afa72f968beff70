"""Decoding in a batch: the logits of every row are those that it has alone."""

import pytest
import torch

from conftest import ModelOf
from ragkv.decode import Decoder
from ragkv.policies import FullKV, Policy, SnapKV
from ragkv.prefill import prefill
from tiny import ARCHITECTURES, random_prompt

SNAPKV = SnapKV(40, 8)


class ByLayer(SnapKV):
    """A budget that rises and falls with the layers: the mask that transformers makes for all fits one of them."""

    def budget(self, length: int, layer: int, num_layers: int) -> int:
        return min(length, (24, 40, 16)[layer])


BY_LENGTH = ("llama-dynamic-rope", "phi3-longrope")  # rotate a token by the length of its own row; see test_engine
BATCHED = [name for name in ARCHITECTURES if name not in BY_LENGTH]
# Shorter than a sliding window of 24, within the budget, the budget itself, one more, and far beyond.
LENGTHS = (10, 30, 40, 41, 100)


def _alone(model: torch.nn.Module, length: int, policy: Policy, tokens: list[int]) -> list[torch.Tensor]:
    decoder = Decoder(model, [prefill(model, random_prompt(length, seed=length), policy)])
    logits = [decoder.logits]
    for token in tokens:
        decoder.step([token])
        logits.append(decoder.logits)
    return logits


@pytest.mark.parametrize("name", BATCHED)
@pytest.mark.parametrize("policy", [SNAPKV, FullKV(), ByLayer(40, 8)])
@pytest.mark.parametrize("lengths", [LENGTHS, (60, 60), (10, 12), (100, 10), (41, 40)])
def test_rows_of_a_batch_go_on_as_they_would_alone(
    model_of: ModelOf, name: str, policy: Policy, lengths: tuple[int, ...]
) -> None:
    model = model_of(name)
    streams = [list(random_prompt(30, seed=1000 + length).ids) for length in lengths]
    alone = [_alone(model, length, policy, stream) for length, stream in zip(lengths, streams, strict=True)]
    decoder = Decoder(model, [prefill(model, random_prompt(n, seed=n), policy) for n in lengths])
    for step in range(31):
        expected = torch.cat([logits[step] for logits in alone])
        torch.testing.assert_close(decoder.logits, expected, rtol=1e-5, atol=1e-5)
        if step < 30:
            decoder.step([stream[step] for stream in streams])


@pytest.mark.parametrize("name", BATCHED)
def test_rows_that_leave_do_not_disturb_the_others(model_of: ModelOf, name: str) -> None:
    """The longest row leaves first, then the first, until one is left; each at another step."""
    model = model_of(name)
    streams = [list(random_prompt(30, seed=1000 + length).ids) for length in LENGTHS]
    alone = [_alone(model, length, SNAPKV, stream) for length, stream in zip(LENGTHS, streams, strict=True)]
    decoder = Decoder(model, [prefill(model, random_prompt(n, seed=n), SNAPKV) for n in LENGTHS])
    running = list(range(len(LENGTHS)))
    leaving = {3: 4, 6: 0, 7: 2, 20: 3}
    for step in range(30):
        if step in leaving:
            staying = [i for i, row in enumerate(running) if row != leaving[step]]
            decoder.keep_rows(staying)
            running = [running[i] for i in staying]
        expected = torch.cat([alone[row][step] for row in running])
        torch.testing.assert_close(decoder.logits, expected, rtol=1e-5, atol=1e-5)
        decoder.step([streams[row][step] for row in running])
    assert running == [1]


def test_a_batch_is_held_once(model_of: ModelOf) -> None:
    """The rows' own caches are used up: who still holds a `Prefilled` does not hold its entries a second time."""
    model = model_of("llama")
    rows = [prefill(model, random_prompt(length), SNAPKV) for length in (100, 60, 80)]
    Decoder(model, rows)
    assert [len(row.cache.layers) for row in rows[1:]] == [0, 0]
    assert rows[0].cache.layers[0].keys.shape == (3, 2, 40, 16)
