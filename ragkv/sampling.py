"""From one row of logits to the next token, with transformers' own logits processors."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ragkv.config import SamplingParams


class Constraint(Protocol):
    """A grammar that the reply must follow: it masks what may not come next and is told what came."""

    def mask(self, logits: Tensor) -> Tensor:
        """Logits (vocabulary,) with -inf on every token that the grammar does not allow now."""

    def accept(self, token: int) -> None:
        """The token that was chosen."""


class Sampler:
    """Chooses the tokens of one reply. Rows of a batch have one each, so a row draws the same alone or in a batch."""

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int], constraint: Constraint | None = None) -> None:
        self._ids = list(prompt_ids)
        self._constraint = constraint
        self._greedy = params.temperature == 0
        self._processors = _processors(params)
        self._generator: torch.Generator | None = None
        self._seed = params.seed

    def __call__(self, logits: Tensor) -> int:
        """The next token for logits (vocabulary,) of any float dtype."""
        logits = logits.float()
        if self._constraint is not None:
            logits = self._constraint.mask(logits)
        if self._processors:
            ids = torch.tensor([self._ids], device=logits.device)
            logits = self._processors(ids, logits.unsqueeze(0)).squeeze(0)  # type: ignore[arg-type]
        token = int(logits.argmax()) if self._greedy else self._draw(logits)
        self._ids.append(token)
        if self._constraint is not None:
            self._constraint.accept(token)
        return token

    def _draw(self, logits: Tensor) -> int:
        if self._generator is None:
            self._generator = torch.Generator(logits.device)
            self._generator.seed() if self._seed is None else self._generator.manual_seed(self._seed)
        return int(torch.multinomial(logits.softmax(-1), 1, generator=self._generator))


def _processors(params: SamplingParams) -> LogitsProcessorList:
    """The processors that the options ask for, in the order of transformers' generate."""
    chosen = LogitsProcessorList()
    if params.repetition_penalty != 1:
        chosen.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.temperature == 0:
        return chosen
    if params.temperature != 1:
        chosen.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        chosen.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        chosen.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        chosen.append(MinPLogitsWarper(params.min_p))
    return chosen
