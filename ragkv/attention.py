"""The attention function that ragkv registers with transformers: it delegates, and lets an observer look on.

A forward pass given `observer=` hands it every layer's post-rotation queries and keys (at KV-head granularity) right
after that layer's attention; without an observer it is plain attention. Nothing global is patched and no module is
hooked: a model uses this function once its attention implementation is set to `implementation_name(...)`.
"""

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from ragkv.errors import ConfigError

BASES = ("sdpa", "flash_attention_2")

_MASKED_QUERIES = 128  # so many at a time: the fewer, the more of their keys are hidden from, or seen by, all of them

States = Tensor | tuple[Tensor, ...] | tuple[tuple[Tensor, ...], ...]
"""Keys or values: of all rows and heads in one, by KV head, or by row and then by KV head."""


class AttentionObserver(Protocol):
    """Called once per attention layer and forward pass, after the layer's attention has been computed."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> None:
        """query: (batch, heads, queries, head_dim); key, value: (batch, kv_heads, keys, head_dim)."""


def implementation_name(base: str) -> str:
    """The registered name of ragkv's attention on top of `base` ("sdpa" or "flash_attention_2")."""
    if base not in BASES:
        raise ConfigError(f"attn_implementation={base!r}: choose one of {', '.join(BASES)}")
    # transformers takes every name that contains "flash" for one of its own kernels.
    return "ragkv_sdpa" if base == "sdpa" else "ragkv_fa2"


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """Causal attention of queries that stand at the end of the keys (bottom-right aligned).

    The part before the queries needs no mask and the queries' own square is plainly causal, so both run on the fast
    kernel and are merged by their log-sum-exp; a mask over all keys would be slower and costs queries x keys bytes.
    In the part before, the heads of a group are rows over their one K/V head, which is then read once.

    Args:
        query: (batch, heads, queries, head_dim).
        key, value: (batch, kv_heads, keys, head_dim), keys > queries.
    """
    batch, heads, new, head_dim = query.shape
    grouped = query.reshape(batch, key.shape[1], -1, head_dim)
    past_out, past_lse = _attention_with_lse(grouped, key[..., :-new, :], value[..., :-new, :], scaling)
    own_key, own_value = (repeat_kv(states[..., -new:, :], heads // key.shape[1]) for states in (key, value))
    self_out, self_lse = _attention_with_lse(query, own_key, own_value, scaling, causal=True)
    return merged(self_out, self_lse, past_out.reshape(self_out.shape), past_lse.reshape(self_lse.shape))


def masked_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Attention under a mask, for some queries at a time; on a CPU only.

    Most keys are seen by all of these, or by none, and need no mask: the former run on the fast kernel and are merged
    with the others by their log-sum-exp, the latter are left out. Of a causal mask that is half of all pairs, of a
    sliding window nearly all.

    Args:
        query: (batch, heads, queries, head_dim).
        key, value: (batch, kv_heads, keys, head_dim), the same head_dim for all.
        mask: (1 or batch, 1 or heads, queries, keys) bool.

    Returns:
        The output, shaped as the queries, and the log of each row's softmax denominator, (batch, heads, queries).
    """
    parts = zip(*(torch.split(each, _MASKED_QUERIES, dim=2) for each in (query, mask)), strict=True)
    outputs, lses = zip(*(_under_mask(some, key, value, seen, scaling) for some, seen in parts), strict=True)
    return torch.cat(outputs, dim=2), torch.cat(lses, dim=2)


def _under_mask(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    by_key, groups = mask.flatten(0, 2), query.shape[1] // key.shape[1]
    common = by_key.all(dim=0)
    common &= common.cumsum(dim=0) > 1  # the first one stays with the others, among which every query then sees one
    others = by_key.any(dim=0) & ~common
    others |= ~others.any()  # only padding sees nothing, and nobody looks at what it gets
    other_key, other_value = (repeat_kv(states[:, :, others], groups) for states in (key, value))
    output, lse = _attention_with_lse(query, other_key, other_value, scaling, mask=mask[..., others])
    if not bool(common.any()):
        return output, lse
    grouped = query.reshape(query.shape[0], key.shape[1], -1, query.shape[-1])
    common_out, common_lse = _attention_with_lse(grouped, key[:, :, common], value[:, :, common], scaling)
    common_out, common_lse = common_out.reshape(output.shape), common_lse.reshape(lse.shape)
    return merged(output, lse, common_out, common_lse), torch.logaddexp(lse, common_lse)


def merged(output: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> Tensor:
    """Attention over two sets of keys, from that over each and the logs of the softmax denominators."""
    share = torch.sigmoid(other_lse - lse).unsqueeze(-1)
    return torch.lerp(output.float(), other.float(), share).to(output.dtype)


def _attention_with_lse(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, *, causal: bool = False, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention output and the log of each row's softmax denominator (batch, heads, queries), in float32.

    Args:
        mask: bool, on a CPU only.
    """
    if query.device.type == "cpu":
        bias = None if mask is None else torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, -torch.inf)
        output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, dropout_p=0.0, is_causal=causal, attn_mask=bias, scale=scaling
        )
    else:
        output, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, None, compute_log_sumexp=True, dropout_p=0.0, is_causal=causal, scale=scaling
        )
        lse = lse[..., : query.shape[-2]]  # the kernel pads rows to a multiple of 32
    return output, lse


def _sdpa(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any) -> Tensor:
    queries, keys, groups = query.shape[-2], key.shape[-2], query.shape[1] // key.shape[1]
    if mask is None and queries == 1 < groups:
        return _one_query(query, key, value, kwargs.get("scaling"))
    scaling, on_cpu = kwargs.get("scaling") or 1 / math.sqrt(query.shape[-1]), query.device.type == "cpu"
    if on_cpu and key.shape[-1] != value.shape[-1]:  # the kernel that gives a log-sum-exp does not take these
        if mask is None and 1 < queries < keys:
            mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)[None, None]
    elif mask is None and 1 < queries < keys:
        return causal_attention(query, key, value, scaling).transpose(1, 2).contiguous()
    elif on_cpu and mask is not None and mask.dtype == torch.bool and mask.shape[-2] == queries > 1:
        return masked_attention(query, key, value, mask, scaling)[0].transpose(1, 2).contiguous()
    return sdpa_attention_forward(module, query, key, value, mask, **kwargs)[0]


def _one_query(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """A decoding step without padding: the heads of a group become the rows of one query over their K/V head.

    The kernel then reads keys and values once, where it reads them once per query head otherwise: on a CPU a step over
    16K tokens with seven heads to a group takes a tenth of the time.
    """
    batch, heads, _, head_dim = query.shape
    rows = query.reshape(batch, key.shape[1], -1, head_dim)
    output = F.scaled_dot_product_attention(rows, key, value, scale=scaling)
    return output.reshape(batch, 1, heads, value.shape[-1])


def _flash(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any) -> Tensor:
    if mask is not None:  # of a sliding window, or a caller's own: flash-attn takes no mask
        return _sdpa(module, query, key, value, mask, **kwargs)
    from flash_attn import flash_attn_func  # the optional extra [flash]

    return flash_attn_func(  # type: ignore[no-any-return]
        *(states.transpose(1, 2) for states in (query, key, value)),
        softmax_scale=kwargs.get("scaling"),
        causal=True,
    )


def _observed(base: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, None]]:
    def attend(
        module: nn.Module, query: Tensor, key: States, value: States, mask: Tensor | None, **kwargs: Any
    ) -> Tensor:
        if isinstance(key, Tensor) and isinstance(value, Tensor):
            if mask is not None:  # it may be that of a layer, or a head, which holds more
                mask = mask[..., -key.shape[-2] :]
            return base(module, query, key, value, mask, **kwargs)
        if isinstance(key[0], Tensor):  # by KV head: those of a `ragkv.ragged.RaggedLayer`
            heads = zip(query.chunk(len(key), dim=1), key, value, strict=True)
            return torch.cat([attend(module, *states, mask, **kwargs) for states in heads], dim=2)
        rows = zip(query.chunk(len(key)), key, value, strict=True)  # of a `ragkv.rows.RowsLayer`, which hides nothing
        return torch.cat([attend(module, *states, None, **kwargs) for states in rows])

    def attention(
        module: nn.Module,
        query: Tensor,
        key: States,
        value: States,
        attention_mask: Tensor | None,
        observer: AttentionObserver | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        output = attend(module, query, key, value, attention_mask, **kwargs)
        if observer is not None:
            scaling = kwargs.get("scaling") or 1 / math.sqrt(query.shape[-1])
            observer(int(module.layer_idx), query, key, value, scaling)  # type: ignore[arg-type]
        return output, None

    return attention


def _mask(
    *,
    q_length: int,
    kv_length: int,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    **kwargs: Any,
) -> Tensor | None:
    """No mask where the attention function knows what to do by itself, else transformers' boolean one."""
    padded = attention_mask is not None and not bool(attention_mask[:, kv_offset : kv_offset + kv_length].all())
    if allow_is_causal_skip and mask_function is causal_mask_function and not padded:
        return None
    return sdpa_mask(
        q_length=q_length,
        kv_length=kv_length,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        allow_is_causal_skip=allow_is_causal_skip,
        **kwargs,
    )


for _base, _function in (("sdpa", _sdpa), ("flash_attention_2", _flash)):
    AttentionInterface.register(implementation_name(_base), _observed(_function))
    AttentionMaskInterface.register(implementation_name(_base), _mask)
