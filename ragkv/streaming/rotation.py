"""How a model's layers rotate their keys by position, found out by trial, and the same rotation in float32.

A rotation turns pairs of a key's numbers by position x inverse frequency, so a cached key moves from one position to
another by one more turn. Whatever scales the rotated key (YaRN, LongRoPE) stays a factor of it and needs no care.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer

from ragkv.backend import forward
from ragkv.cache import CompressibleLayer, new_cache
from ragkv.errors import ModelError

_PROBED = (0, 1, 6, 37)  # positions; the last two tell frequencies apart, even in bfloat16


@dataclass(frozen=True, eq=False)
class Rotation:
    """The rotary positions of a layer. A head's numbers beyond the rotated ones are left alone.

    Attributes:
        inv_freq: (pairs,) float32, radians per position.
        interleaved: whether a pair is (0, 1), (2, 3), ... as in Cohere, or number i and number pairs + i as in Llama.
    """

    inv_freq: Tensor
    interleaved: bool

    def rotate(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Move keys forward by `positions`; negative ones move them back.

        Args:
            keys: (..., length, head_dim) of any float dtype.
            positions: (..., length) or (length,), or (1,) to move all keys alike.

        Returns:
            The rotated keys in float32.
        """
        angles = positions.unsqueeze(-1).float() * self.inv_freq
        cos, sin = angles.cos(), angles.sin()
        rotated = keys.float().clone()
        first, second = self._pairs(keys.float())
        into_first, into_second = self._pairs(rotated)
        into_first.copy_(first * cos - second * sin)
        into_second.copy_(second * cos + first * sin)
        return rotated

    def _pairs(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Views of the first and the second number of every pair, each (..., pairs)."""
        pairs = self.inv_freq.shape[0]
        if self.interleaved:
            return keys[..., 0 : 2 * pairs : 2], keys[..., 1 : 2 * pairs : 2]
        return keys[..., :pairs], keys[..., pairs : 2 * pairs]


def find_rotations(model: PreTrainedModel) -> list[Rotation | None]:
    """Every layer's rotation; None for a layer that does not mark positions in its keys.

    A lone token sees nothing but itself, so its keys at two positions differ by the rotation alone: each layer's keys
    at four positions are compared with what the inverse frequencies that the model's modules hold would make of them.

    Raises:
        ModelError: a layer has a state instead of keys, or marks positions in a way that ragkv does not know.
    """
    cache = new_cache(model.config)
    if "chunked_attention" in (getattr(model.config.get_text_config(), "layer_types", None) or ()):
        raise ModelError(f"{_name(model)} cannot stream: its layers see chunks of the text, not a window")
    for number, layer in enumerate(cache.layers):
        if type(layer) not in (CompressibleLayer, DynamicSlidingWindowLayer):
            raise ModelError(f"{_name(model)} cannot stream: its layer {number} is a {type(layer).__name__}")
    positions = torch.tensor(_PROBED, device=model.device).unsqueeze(1)
    forward(model, torch.ones_like(positions), cache, positions)
    candidates: list[Rotation | None] = [None, *_candidates(model)]
    seen: list[Tensor] = [getattr(layer, "keys") for layer in cache.layers]  # noqa: B009 (transformers types it as Any)
    return [_fitting(model, number, keys, candidates) for number, keys in enumerate(seen)]


def _fitting(model: PreTrainedModel, number: int, keys: Tensor, candidates: list[Rotation | None]) -> Rotation | None:
    """The candidate that makes of the keys at position 0 those at the others; keys: (positions, heads, 1, head_dim)."""
    positions = torch.tensor(_PROBED, device=keys.device).view(-1, 1, 1)

    def error(rotation: Rotation | None) -> float:
        still = keys[:1].float().expand(keys.shape)
        if rotation is not None and 2 * rotation.inv_freq.shape[0] > keys.shape[-1]:
            return float("inf")
        moved = still if rotation is None else rotation.rotate(still, positions)
        return float((moved - keys.float()).norm() / keys.float().norm())

    best = min(candidates, key=error)
    if error(best) > (1e-4 if keys.dtype == torch.float32 else 0.03):
        raise ModelError(
            f"{_name(model)} cannot stream: the keys of its layer {number} change with their position by more than a "
            "rotation that its modules state"
        )
    return best


def _candidates(model: PreTrainedModel) -> Iterator[Rotation]:
    """Rotations of the inverse frequencies that the modules hold; of two sets, the one that no length has changed."""
    for module in model.modules():
        buffers = {name: tensor for name, tensor in module.named_buffers(recurse=False) if name.endswith("inv_freq")}
        unchanged = {name: tensor for name, tensor in buffers.items() if "original" in name}
        for tensor in (unchanged or buffers).values():
            frequencies = tensor.detach().float().to(model.device)
            yield from (Rotation(frequencies, interleaved) for interleaved in (False, True))


def _name(model: PreTrainedModel) -> str:
    return type(model).__name__
