"""One token at a time for a batch of rows, which leave as they finish.

Rows whose entries line up share one cache, padded on the left; any others keep their own layers, side by side.
"""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from ragkv.backend import forward
from ragkv.cache import join, joinable
from ragkv.prefill import Prefilled
from ragkv.rows import side_by_side


class Decoder:
    """The state of a running generation: cache, next logits, and each row's logical position.

    Attributes:
        logits: (rows, vocabulary) for the next token of every row that is still there.
    """

    def __init__(self, model: PreTrainedModel, prefilled: Sequence[Prefilled]) -> None:
        self._model = model
        caches = [row.cache for row in prefilled]
        self._cache, mask = join(caches) if joinable(caches) else (side_by_side(caches), None)
        self._mask = None if mask is None else mask.to(model.device)
        self._positions = torch.tensor([[row.length] for row in prefilled], device=model.device)
        self.logits = torch.cat([row.logits for row in prefilled])

    def step(self, tokens: Sequence[int]) -> None:
        """Append one token to every row and compute the logits behind it."""
        ids = torch.tensor(tokens, device=self._model.device).unsqueeze(1)
        if self._mask is not None:
            self._mask = torch.cat([self._mask, self._mask.new_ones(len(tokens), 1)], dim=1)
        self.logits = forward(self._model, ids, self._cache, self._positions, self._mask)
        self._positions = self._positions + 1

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Drop all rows but these; call it before `step`, whose tokens are then those of the rows kept."""
        index = torch.tensor(rows, device=self._model.device)
        self._cache.batch_select_indices(index)
        self._positions, self.logits = self._positions[index], self.logits[index]
        self._mask = None if self._mask is None else self._mask[index]
