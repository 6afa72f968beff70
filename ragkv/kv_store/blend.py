"""Read a prompt on joined pieces: the question votes on them, and what it looks at most is computed anew."""

from collections.abc import Sequence
from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ragkv.backend import forward
from ragkv.cache import CompressibleLayer, new_cache
from ragkv.chat import Prompt
from ragkv.errors import ModelError
from ragkv.kv_store.joined import JoinedLayer, Piece, fill_from
from ragkv.policies import Policy, SnapKV
from ragkv.policies.base import tokens_to_read
from ragkv.prefill import LayerCallback, Prefilled, PrefillObserver
from ragkv.scoring import pool_votes, window_votes
from ragkv.selection import Span
from ragkv.streaming.rotation import Rotation, find_rotations

_KERNEL_SIZE = 7
_found_rotations: WeakKeyDictionary[PreTrainedModel, list[Rotation | None] | None] = WeakKeyDictionary()


def read_on_pieces(
    model: PreTrainedModel,
    prompt: Prompt,
    policy: Policy,
    pieces: Sequence[Piece],
    rotations: Sequence[Rotation | None],
    anew: Sequence[Span],
    eligible: Sequence[Span],
    count: int,
    on_layer: LayerCallback | None = None,
) -> Prefilled:
    """Read and compress a prompt of which only some tokens are computed: those that no piece has, and chosen ones.

    Args:
        anew: spans to compute whatever the pieces have.
        eligible: spans of which the `count` tokens with the highest votes are computed, too.
        on_layer: told of the progress of each pass: there are two if anything is voted for.
    """
    window_size = SnapKV().observation_window(prompt.question_tokens)
    fresh = _outside(pieces, len(prompt))
    # What observes is contiguous: its queries are the last ones of the pass.
    needed = max(window_size, tokens_to_read(policy, len(prompt), prompt.question_tokens))
    fresh[max(0, len(prompt) - needed) :] = True
    for start, end in anew:
        fresh[start:end] = True
    if count:
        votes = _votes(model, prompt, pieces, rotations, window_size, on_layer)
        fresh |= best_voted(votes, fresh, eligible, count)
    cache = _joined(model, prompt, pieces, rotations, fresh)
    observer = PrefillObserver(cache, policy, prompt, on_layer)
    read = observer.prefilled(_forward(model, prompt, cache, fresh, observer))
    read.cache_read_tokens = len(prompt) - int(fresh.sum())
    return read


def rotations_of(model: PreTrainedModel) -> list[Rotation | None] | None:
    """How each layer rotates its keys within the original length, found once; None if keys cannot be moved."""
    if model not in _found_rotations:
        full_attention = all(type(layer) is CompressibleLayer for layer in new_cache(model.config).layers)
        try:
            _found_rotations[model] = find_rotations(model) if full_attention else None
        except ModelError:
            _found_rotations[model] = None
    return _found_rotations[model]


def _joined(
    model: PreTrainedModel,
    prompt: Prompt,
    pieces: Sequence[Piece],
    rotations: Sequence[Rotation | None],
    fresh: Tensor,
) -> Cache:
    cache, positions = new_cache(model.config), fresh.nonzero().flatten().to(model.device)
    cache.layers = [
        JoinedLayer(len(prompt), positions, partial(fill_from, pieces, layer, rotation))
        for layer, rotation in enumerate(rotations)
    ]
    return cache


def _forward(
    model: PreTrainedModel, prompt: Prompt, cache: Cache, fresh: Tensor, observer: "PrefillObserver | _Votes"
) -> Tensor:
    """Compute the fresh tokens; each sees every token before it."""
    positions = fresh.nonzero().flatten().to(model.device)
    ids = torch.tensor(prompt.ids, device=model.device)[positions].unsqueeze(0)
    mask = positions.unsqueeze(1) >= torch.arange(len(prompt), device=model.device)
    return forward(model, ids, cache, positions.unsqueeze(0), mask[None, None], observer)


def _votes(
    model: PreTrainedModel,
    prompt: Prompt,
    pieces: Sequence[Piece],
    rotations: Sequence[Rotation | None],
    window_size: int,
    on_layer: LayerCallback | None,
) -> Tensor:
    """What the question looks at on the pieces as they are, in a pass of its own: (tokens up to their end,).

    It is read directly behind them: instructions and examples need not be computed to know what it is about.
    """
    tail = len(prompt) - max(window_size, prompt.question_tokens or 0)
    end = min(tail, max(piece.target + piece.length for piece in pieces))
    brief = Prompt(prompt.ids[:end] + prompt.ids[tail:])
    fresh = _outside(pieces, len(brief))
    fresh[end:] = True
    votes = _Votes(_joined(model, brief, pieces, rotations, fresh), len(brief), window_size, on_layer)
    _forward(model, brief, votes.cache, fresh, votes)
    return votes.total[:end].cpu()


def _outside(pieces: Sequence[Piece], length: int) -> Tensor:
    """Which of so many tokens no piece has, (length,) bool."""
    outside = torch.ones(length, dtype=torch.bool)
    for piece in pieces:
        outside[piece.target : piece.target + piece.length] = False
    return outside


class _Votes:
    """Adds up what the question's tokens look at, over all layers; `total` is (length - window_size,)."""

    def __init__(self, cache: Cache, length: int, window_size: int, on_layer: LayerCallback | None) -> None:
        self.cache, self._window_size, self._on_layer = cache, window_size, on_layer
        self.total = torch.zeros(length - window_size)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> None:
        votes = window_votes(query, key, scaling, self._window_size)
        self.total = self.total.to(key.device) + pool_votes(votes, _KERNEL_SIZE).mean(dim=1)[0]
        self.cache.layers[layer].reset()
        if self._on_layer is not None:
            self._on_layer(layer + 1, len(self.cache))


def best_voted(votes: Tensor, fresh: Tensor, eligible: Sequence[Span], count: int) -> Tensor:
    """Choose so many of the eligible tokens, beside those that are fresh; fewer if there are not as many.

    Args:
        votes: of the first tokens, higher is chosen; those behind them are not.
        fresh: (length,) bool.

    Returns:
        (length,) bool.
    """
    inside = torch.zeros_like(fresh)
    for start, end in eligible:
        inside[start:end] = True
    open_ = (inside & ~fresh)[: len(votes)]
    chosen = torch.zeros_like(fresh)
    chosen[votes.masked_fill(~open_, -torch.inf).topk(min(count, int(open_.sum()))).indices] = True
    return chosen
