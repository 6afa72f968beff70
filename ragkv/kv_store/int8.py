"""K/V in eight bits: each head's vector of each token is scaled so that its largest number is 127."""

import torch
from torch import Tensor


def to_int8(states: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers (kv_heads, tokens, head_dim) as int8, and the scales (kv_heads, tokens, 1) float32 that restore them."""
    scale = states.float().abs().amax(dim=-1, keepdim=True) / 127
    numbers = states.float() / scale.clamp(min=torch.finfo(torch.float32).tiny)
    return numbers.round().to(torch.int8), scale


def from_int8(numbers: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """What `to_int8` was given, each number within half a scale (and the rounding of the dtype)."""
    return (numbers.float() * scale).to(dtype)
