"""The measured error of K/V in eight bits, against a model that is handed rounded K/V by hand."""

import pytest
import torch
from torch.nn.functional import kl_div
from transformers import DynamicCache, PreTrainedModel

from conftest import EngineOf
from ragkv_evals.int8_error import QUESTIONS, int8_error
from ragkv_evals.reuse import QUESTION_TOKENS
from tiny import plain_model, random_prompt


@pytest.mark.parametrize("length", [560, 680])  # whole blocks end with the documents, and within the question
def test_the_error_is_that_of_rounding_what_was_read_from_the_disk(engine_of: EngineOf, length: int) -> None:
    tokens = random_prompt(length + QUESTIONS * QUESTION_TOKENS).ids
    found = int8_error(engine_of("llama").loaded, tokens, length)
    model, documents = plain_model("llama"), length - QUESTION_TOKENS
    assert found.length == length
    assert found.cache_read_tokens == length // 128 * 128
    divergences, same = [], 0
    for start in range(documents, documents + QUESTIONS * QUESTION_TOKENS, QUESTION_TOKENS):
        ids = torch.tensor([[*tokens[:documents], *tokens[start : start + QUESTION_TOKENS]]])
        exact = model(ids).logits[0, -1].double().log_softmax(-1)
        rounded = _behind_rounded(model, ids, found.cache_read_tokens).double().log_softmax(-1)
        divergences.append(float(kl_div(rounded, exact, reduction="sum", log_target=True)))
        same += int(exact.argmax() == rounded.argmax())
    assert found.divergence == pytest.approx(sum(divergences) / QUESTIONS, rel=0.02)
    assert found.largest_divergence == pytest.approx(max(divergences), rel=0.02)
    assert found.same_token == same / QUESTIONS
    assert found.divergence > 0


def _behind_rounded(model: PreTrainedModel, ids: torch.Tensor, reused: int) -> torch.Tensor:
    """Logits of the last token, with every vector of the first `reused` tokens in steps of 1/127 of its largest."""
    cache = DynamicCache(config=model.config)
    model(ids[:, :reused], past_key_values=cache)
    for layer in cache.layers:
        for states in (layer.keys, layer.values):
            step = states.abs().amax(dim=-1, keepdim=True) / 127
            states.copy_((states / step).round() * step)
    return model(ids[:, reused:], past_key_values=cache).logits[0, -1]
