"""How much the end of the prompt looks at each earlier token: pure functions of tensors, no model, no cache.

Source: SnapKV, arXiv 2404.14469, section 4 ("voting" and "clustering"); grouped-query heads vote together, so that
what is kept stays at KV-head granularity.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Pooling = Literal["avg", "max"]
GQAReduction = Literal["mean", "max", "sum"]


def window_votes(
    query: Tensor, key: Tensor, scaling: float, window_size: int, gqa_reduction: GQAReduction = "mean"
) -> Tensor:
    """Attention that the observation window gives to every token before it.

    Args:
        query: (batch, heads, queries >= window_size, head_dim), after rotation; the last ones are the window.
        key: (batch, kv_heads, length, head_dim), after rotation.
        scaling: factor of the attention logits, the model's own.
        window_size: number of last queries that vote.
        gqa_reduction: how the query heads of one KV head join their votes.

    Returns:
        (batch, kv_heads, length - window_size) float32: attention summed over the window's rows.
    """
    batch, heads, _, head_dim = query.shape
    kv_heads, length = key.shape[1], key.shape[2]
    window = query[:, :, -window_size:].reshape(batch, kv_heads, -1, head_dim)
    logits = (window @ key.transpose(-1, -2)).float().mul_(scaling)
    logits = logits.view(batch, kv_heads, heads // kv_heads, window_size, length)
    future = torch.ones(window_size, window_size, dtype=torch.bool, device=key.device).triu(1)
    logits[..., length - window_size :].masked_fill_(future, -torch.inf)
    return _reduce(logits.softmax(dim=-1)[..., : length - window_size].sum(dim=-2), gqa_reduction)


def accumulated_attention(
    query: Tensor,
    key: Tensor,
    scaling: float,
    gqa_reduction: GQAReduction = "mean",
    block_bytes: int = 64 * 2**20,
) -> Tensor:
    """Attention that every token receives from all tokens of the prompt together (H2O, arXiv 2306.14048, section 4).

    Args:
        query: (batch, heads, queries, head_dim), after rotation; those of the last tokens, or of all.
        key: (batch, kv_heads, length, head_dim), after rotation.
        block_bytes: memory for the attention of one block of queries; the whole of it grows with length squared.

    Returns:
        (batch, kv_heads, length) float32: causal attention summed over the rows.
    """
    batch, heads, queries, head_dim = query.shape
    kv_heads, length = key.shape[1], key.shape[2]
    grouped = query.reshape(batch, kv_heads, heads // kv_heads, queries, head_dim)
    total = torch.zeros(batch, kv_heads, heads // kv_heads, length, device=query.device)
    bytes_each = 4 + (0 if query.dtype == torch.float32 else query.element_size())  # in float32, and as multiplied
    rows = max(1, block_bytes // (batch * heads * length * bytes_each))
    for start in range(length - queries, length, rows):
        end = min(start + rows, length)
        block = grouped[:, :, :, start - length + queries : end - length + queries].reshape(
            batch, kv_heads, -1, head_dim
        )
        logits = (block @ key[:, :, :end].transpose(-1, -2)).float().mul_(scaling)
        logits = logits.view(batch, kv_heads, -1, end - start, end)
        future = torch.ones(end - start, end - start, dtype=torch.bool, device=key.device).triu(1)
        logits[..., start:].masked_fill_(future, -torch.inf)
        powers = logits.sub_(logits.amax(dim=-1, keepdim=True)).exp_()  # in place: softmax would take as much again
        total[..., :end] += (powers.sum(dim=-1).reciprocal().unsqueeze(-2) @ powers).squeeze(-2)
    return _reduce(total, gqa_reduction)


def _reduce(votes: Tensor, gqa_reduction: GQAReduction) -> Tensor:
    """(batch, kv_heads, group, length) to (batch, kv_heads, length)."""
    if gqa_reduction == "max":
        return votes.amax(dim=2)
    return votes.mean(dim=2) if gqa_reduction == "mean" else votes.sum(dim=2)


def pool_votes(votes: Tensor, kernel_size: int, pooling: Pooling = "avg") -> Tensor:
    """Let neighbours share their votes, so that clusters survive and not single tokens.

    Args:
        votes: (batch, kv_heads, length), not negative.
        kernel_size: odd width of the pool; 1 changes nothing. Beyond both ends the votes count as zero.

    Returns:
        The pooled votes, of the same shape.
    """
    pool = F.avg_pool1d if pooling == "avg" else F.max_pool1d
    return pool(votes, kernel_size, stride=1, padding=kernel_size // 2)
