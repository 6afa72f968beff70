"""From scores to the positions that stay: top-k per KV head, protected ones first, always in the order of the text."""

from collections.abc import Sequence

import torch
from torch import Tensor

Span = tuple[int, int]


def select(scores: Tensor, count: int, window_size: int, protected: Sequence[Span] = ()) -> Tensor:
    """Choose `count` positions of the prefix per KV head and add the observation window.

    Args:
        scores: (batch, kv_heads, prefix length), higher stays.
        count: positions of the prefix to keep, at most its length.
        window_size: length of the window behind the prefix, kept whole.
        protected: [start, end) spans of the prompt that are kept whatever their score; together at most `count` long.

    Returns:
        (batch, kv_heads, count + window_size) int64 positions, ascending.
    """
    batch, kv_heads, prefix = scores.shape
    best = protect(scores, protected).topk(count, dim=-1).indices.sort(dim=-1).values
    window = torch.arange(prefix, prefix + window_size, device=scores.device)
    return torch.cat([best, window.expand(batch, kv_heads, -1)], dim=-1)


def protect(scores: Tensor, spans: Sequence[Span]) -> Tensor:
    """Scores (batch, kv_heads, prefix length) that are infinite within these spans."""
    if not spans:
        return scores
    scores = scores.clone()
    for start, end in spans:
        scores[..., start:end] = torch.inf
    return scores


def fit_protected(spans: Sequence[Span], prefix: int, room: int) -> tuple[list[Span], int]:
    """The spans, in the order given, that fit whole into `room` positions of the prefix.

    Returns:
        The spans that fit, and the number of tokens of those that do not.
    """
    fitting: list[Span] = []
    left_out = 0
    for start, end in spans:
        length = max(0, min(end, prefix) - start)
        if length <= room:
            fitting.append((start, end))
            room -= length
        else:
            left_out += length
    return fitting, left_out
