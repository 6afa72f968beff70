"""The slow, obvious routes that fast code is compared with: python loops, and a full cache under per-head masks."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.masking_utils import eager_mask

from ragkv.backend import _cache_argument


def votes(query: Tensor, key: Tensor, scaling: float, window_size: int, gqa_reduction: str = "mean") -> Tensor:
    """`ragkv.scoring.window_votes` as loops over python floats; (batch, kv_heads, prefix) float64."""
    batch, heads, queries, _ = query.shape
    kv_heads, length = key.shape[1], key.shape[2]
    group, prefix = heads // kv_heads, length - window_size
    reduce = {"mean": lambda numbers: sum(numbers) / len(numbers), "max": max, "sum": sum}[gqa_reduction]
    result = torch.zeros(batch, kv_heads, prefix, dtype=torch.float64)
    for b in range(batch):
        for kv_head in range(kv_heads):
            keys = key[b, kv_head].tolist()
            by_head = []
            for head in range(kv_head * group, (kv_head + 1) * group):
                total = [0.0] * prefix
                for row in range(window_size):
                    asking = query[b, head, queries - window_size + row].tolist()
                    shares = _softmax([scaling * _dot(asking, k) for k in keys[: prefix + row + 1]])
                    total = [t + share for t, share in zip(total, shares[:prefix], strict=True)]
                by_head.append(total)
            for position in range(prefix):
                result[b, kv_head, position] = reduce([total[position] for total in by_head])
    return result


def accumulated(query: Tensor, key: Tensor, scaling: float, gqa_reduction: str = "mean") -> Tensor:
    """`ragkv.scoring.accumulated_attention` as loops over python floats; (batch, kv_heads, length) float64."""
    batch, heads, length, _ = query.shape
    group = heads // key.shape[1]
    by_head = torch.zeros(batch, heads, length, dtype=torch.float64)
    for b in range(batch):
        for head in range(heads):
            keys = key[b, head // group].tolist()
            for row in range(length):
                asking = query[b, head, row].tolist()
                shares = _softmax([scaling * _dot(asking, k) for k in keys[: row + 1]])
                by_head[b, head, : row + 1] += torch.tensor(shares, dtype=torch.float64)
    grouped = by_head.view(batch, -1, group, length)
    return {"mean": grouped.mean(2), "max": grouped.amax(2), "sum": grouped.sum(2)}[gqa_reduction]


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def _softmax(logits: Sequence[float]) -> list[float]:
    highest = max(logits)
    powers = [math.exp(logit - highest) for logit in logits]
    return [power / sum(powers) for power in powers]


def pool(scores: Tensor, kernel_size: int, pooling: str) -> Tensor:
    """`ragkv.scoring.pool_votes`: the mean over kernel_size neighbours (zero beyond the ends), or their maximum."""
    result = scores.clone()
    half = kernel_size // 2
    for b, h, i in torch.cartesian_prod(*(torch.arange(n) for n in scores.shape)).tolist():
        near = scores[b, h, max(0, i - half) : i + half + 1].tolist()
        result[b, h, i] = max(near) if pooling == "max" else sum(near) / kernel_size
    return result


def select(scores: Tensor, count: int, window_size: int, protected: Sequence[tuple[int, int]] = ()) -> Tensor:
    """`ragkv.selection.select` by sorting (is it protected, its score) pairs."""
    batch, kv_heads, prefix = scores.shape
    result = torch.empty(batch, kv_heads, count + window_size, dtype=torch.int64)
    for b in range(batch):
        for h in range(kv_heads):
            row = scores[b, h].tolist()
            ranked = sorted(
                range(prefix),
                key=lambda i: (any(start <= i < end for start, end in protected), row[i]),
                reverse=True,
            )
            kept = sorted(ranked[:count]) + list(range(prefix, prefix + window_size))
            result[b, h] = torch.tensor(kept)
    return result


def head_budgets(scores: Tensor, count: int, safeguard: float) -> list[int]:
    """`AdaKV.head_budgets` by ranking (score, head) pairs; scores (1, kv_heads, prefix)."""
    safe = int(safeguard * count)
    ranked = [sorted(row, reverse=True) for row in scores[0].tolist()]
    contested = sorted(((score, head) for head, row in enumerate(ranked) for score in row[safe:]), reverse=True)
    winners = [head for _, head in contested[: (count - safe) * len(ranked)]]
    return [safe + winners.count(head) for head in range(len(ranked))]


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    hidden: dict[int, Tensor] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Eager attention over a full cache. hidden: per layer, (kv_heads, keys) bool, True where nobody may look."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    logits = query @ key.transpose(-1, -2) * scaling
    if attention_mask is not None:
        logits = logits + attention_mask
    for head, evicted in enumerate(() if hidden is None else hidden.get(module.layer_idx, ())):
        positions = evicted.nonzero().flatten()
        logits[:, head * group : (head + 1) * group, :, positions] = -torch.inf
    return (logits.softmax(-1, dtype=torch.float32).to(value.dtype) @ value).transpose(1, 2).contiguous(), None


AttentionInterface.register("reference", _attention)
AttentionMaskInterface.register("reference", eager_mask)


@torch.inference_mode()
def continue_masked(
    model: PreTrainedModel, prompt: Sequence[int], kept: dict[int, Sequence[Tensor]], steps: Sequence[Sequence[int]]
) -> list[Tensor]:
    """Logits of every step behind a prompt, on a full cache of which each head sees only what it kept.

    Args:
        model: untouched by ragkv; its attention is the reference for this call.
        kept: per layer and KV head, (kept,) positions of the prompt; a layer that is left out sees everything.
        steps: tokens of each forward pass after the prompt's.

    Returns:
        Logits (tokens, vocabulary) of the prompt's last token and then of each step.
    """
    implementation = model.config._attn_implementation
    model.set_attn_implementation("reference")
    cache = DynamicCache(config=model.config)
    hidden = {}
    for layer, positions in kept.items():
        hidden[layer] = torch.ones(len(positions), len(prompt), dtype=torch.bool)
        for head, row in enumerate(positions):
            hidden[layer][head, row.long()] = False
    logits = [run(model, prompt, cache, 0)[-1:]]
    seen = len(prompt)
    for tokens in steps:
        logits.append(run(model, tokens, cache, seen, hidden=hidden))
        seen += len(tokens)
    model.set_attn_implementation(implementation)
    return logits


def greedy(
    model: PreTrainedModel, prompt: Sequence[int], max_tokens: int, eos: int | list[int] | None = None
) -> list[int]:
    """What transformers' generate writes behind a prompt."""
    ids = torch.tensor([list(prompt)])
    model.generation_config.eos_token_id = eos
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, pad_token_id=0
    )
    return output[0, len(prompt) :].tolist()


@torch.inference_mode()
def run(model: PreTrainedModel, tokens: Sequence[int], cache: Any, seen: int, **options: Any) -> Tensor:
    """Logits (tokens, vocabulary) of one forward pass of one row that appends to a cache which has seen `seen`."""
    positions = torch.arange(seen, seen + len(tokens)).unsqueeze(0)
    options[_cache_argument(model)] = cache
    return model(input_ids=torch.tensor([list(tokens)]), position_ids=positions, use_cache=True, **options).logits[0]
