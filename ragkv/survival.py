"""Which tokens of a prompt survived in which KV heads: the diagnostic that explains what a compression lost.

From the cache right after a prefill to masks; from masks and [start, end) ranges of the prompt to counts and shares.
Layers of sliding windows are left out: no policy reaches them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ragkv.cache import CompressibleLayer, compressible


def kept_masks(cache: Cache, length: int) -> list[Tensor]:
    """Per layer with full attention, (kv_heads, length) bool: is the token kept? For a prompt of `length` tokens."""
    return [torch.cat([_kept_mask(part, length) for part in layer.parts]) for _, layer in compressible(cache)]


def _kept_mask(layer: CompressibleLayer, length: int) -> Tensor:
    if layer.positions is None:
        return torch.ones(layer.keys.shape[1], length, dtype=torch.bool)
    kept = torch.zeros(layer.keys.shape[1], length, dtype=torch.bool)
    return kept.scatter_(1, layer.positions[0].long().cpu(), True)


@dataclass(frozen=True)
class Survival:
    """What is left of some of a prompt's tokens.

    Attributes:
        tokens: how many tokens it is about.
        kept: how many of them each KV head kept, by layer.
        anywhere: how many of them at least one head of any layer kept.
    """

    tokens: int
    kept: tuple[tuple[int, ...], ...]
    anywhere: int

    @property
    def layer_shares(self) -> tuple[float, ...]:
        """Share of the tokens' entries that each layer kept, 0 to 1."""
        return tuple(_share(sum(heads), self.tokens * len(heads)) for heads in self.kept)

    @property
    def mean_share(self) -> float:
        """Share of the tokens' entries that were kept over all layers and heads."""
        heads = [count for layer in self.kept for count in layer]
        return _share(sum(heads), self.tokens * len(heads))

    @property
    def any_share(self) -> float:
        """Share of the tokens that at least one head of any layer kept."""
        return _share(self.anywhere, self.tokens)


def survival(masks: Sequence[Tensor], ranges: Iterable[tuple[int, int]]) -> Survival:
    """What is left of the tokens in these [start, end) ranges of the prompt; tokens in several count once.

    Args:
        masks: those of `kept_masks`.
    """
    if not masks:
        raise ValueError("masks=[]: the model has no layer with full attention, so nothing was compressed")
    wanted = torch.zeros(masks[0].shape[-1], dtype=torch.bool)
    for start, end in ranges:
        wanted[start:end] = True
    kept = [mask[:, wanted] for mask in masks]
    return Survival(
        tokens=int(wanted.sum()),
        kept=tuple(tuple(heads.sum(dim=-1).tolist()) for heads in kept),
        anywhere=int(torch.cat(kept).any(dim=0).sum()),
    )


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
