"""One token at a time for a batch of rows, which leave as they finish."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from ragkv.backend import forward
from ragkv.prefill import Prefilled
from ragkv.rows import join


class Decoder:
    """The state of a running generation: cache, next logits, and each row's logical position.

    Attributes:
        logits: (rows, vocabulary) for the next token of every row that is still there.
    """

    def __init__(self, model: PreTrainedModel, prefilled: Sequence[Prefilled]) -> None:
        self._model = model
        self._cache = join([row.cache for row in prefilled])
        self._positions = torch.tensor([[row.length] for row in prefilled], device=model.device)
        self.logits = torch.cat([row.logits for row in prefilled])

    def step(self, tokens: Sequence[int]) -> None:
        """Append one token to every row and compute the logits behind it."""
        ids = torch.tensor(tokens, device=self._model.device).unsqueeze(1)
        self.logits = forward(self._model, ids, self._cache, self._positions)
        self._positions = self._positions + 1

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Drop all rows but these; call it before `step`, whose tokens are then those of the rows kept."""
        index = torch.tensor(rows, device=self._model.device)
        self._cache.batch_select_indices(index)
        self._positions, self.logits = self._positions[index], self.logits[index]
