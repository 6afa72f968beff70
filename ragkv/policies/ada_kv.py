"""Ada-KV (arXiv 2407.11550): SnapKV's votes, with the layer's budget split over its KV heads by their scores."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ragkv.errors import ConfigError
from ragkv.policies.snapkv import SnapKV


@dataclass(frozen=True)
class AdaKV(SnapKV):
    """SnapKV whose heads share one budget: those that look at many tokens keep more, those that look at few keep less.

    Every head keeps its own best `safeguard` of the budget; the rest of the layer's entries are the best of all heads
    together (section 3, algorithm 1, with the floor of its published code).

    Attributes:
        max_capacity_prompt: mean over a layer's KV heads of the entries kept, the window included.
        safeguard: part of its even share that every head keeps, 0 to 1; 1 is SnapKV.
    """

    safeguard: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.safeguard <= 1:
            raise ConfigError(f"safeguard={self.safeguard}: must be from 0 to 1 (1 gives every head the same)")

    def head_budgets(self, scores: Tensor, count: int) -> Sequence[int]:
        kv_heads, prefix = scores.shape[1:]
        safe = scores[0].topk(int(self.safeguard * count), dim=-1).indices
        raised = scores[0].scatter(1, safe, torch.inf)
        heads = raised.flatten().topk(kv_heads * count).indices // prefix
        return torch.bincount(heads, minlength=kv_heads).tolist()
