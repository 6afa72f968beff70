"""A cache layer put together out of stored pieces of other prompts, moved to where they stand in this one.

Attention between the pieces is missing from them, so this is an approximation; tokens that are computed anew see all.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ragkv.cache import CompressibleLayer
from ragkv.kv_store.blocks import Block
from ragkv.streaming.rotation import Rotation


@dataclass(frozen=True)
class Piece:
    """Tokens [source, source + length) of a prompt whose whole blocks these are, for `target` in another prompt."""

    blocks: Sequence[Block]
    source: int
    target: int
    length: int


class JoinedLayer(CompressibleLayer):  # type: ignore[no-untyped-call]
    """A full-attention layer that has seen all of a prompt; the first states it is given replace those at `fresh`.

    Args:
        seen: tokens of the prompt.
        fresh: (new tokens,) positions of the tokens that are computed anew, ascending.
        fill: writes the keys and values of all other tokens into tensors (kv_heads, seen, head_dim).
    """

    def __init__(self, seen: int, fresh: Tensor, fill: Callable[[Tensor, Tensor], None]) -> None:
        super().__init__()
        self.seen = seen
        self._fresh = fresh
        self._fill: Callable[[Tensor, Tensor], None] | None = fill

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if self._fill is None:
            return super().update(key_states, value_states, *args, **kwargs)
        self.device, self.is_initialized = key_states.device, True
        self.keys, self.values = (
            states.new_empty((1, states.shape[1], self.seen, states.shape[3])) for states in (key_states, value_states)
        )
        self._fill(self.keys[0], self.values[0])
        self._fill = None  # it holds the pieces, which a reply need not keep in memory
        self.keys[:, :, self._fresh], self.values[:, :, self._fresh] = key_states, value_states
        return self.keys, self.values


def fill_from(pieces: Sequence[Piece], layer: int, rotation: Rotation | None, keys: Tensor, values: Tensor) -> None:
    """Copy a layer's part of the pieces to their targets; keys are turned, in float32, by the way they have moved."""
    for piece in pieces:
        place = slice(piece.target, piece.target + piece.length)
        key, value = (_cut(piece, layer, n).to(keys.device, non_blocking=True) for n in range(2))
        if rotation is not None and piece.target != piece.source:
            key = rotation.rotate(key, torch.tensor([piece.target - piece.source], device=key.device))
        keys[:, place], values[:, place] = key, value


def _cut(piece: Piece, layer: int, n: int) -> Tensor:
    """Keys (n=0) or values (n=1) of the piece, (kv_heads, length, head_dim)."""
    size = piece.blocks[0].layers[layer][n].shape[1]
    first, last = piece.source // size, (piece.source + piece.length - 1) // size
    states = torch.cat([block.layers[layer][n] for block in piece.blocks[first : last + 1]], dim=1)
    return states[:, piece.source - first * size :][:, : piece.length]
