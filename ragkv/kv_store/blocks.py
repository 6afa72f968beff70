"""K/V of a run of tokens in host memory, for all layers: filled while a prompt is read, never changed afterwards."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LayerStates = tuple[Tensor, ...]
"""Keys (after rotation) and values of one layer, each (kv_heads, tokens, head_dim)."""


@dataclass(frozen=True)
class Block:
    """The keys and values of a run of tokens, one pair per layer; `mapped` if they are views of a file."""

    layers: tuple[LayerStates, ...]
    mapped: bool = False

    @property
    def tokens(self) -> int:
        return self.layers[0][0].shape[1]

    @property
    def nbytes(self) -> int:
        return sum(states.nbytes for layer in self.layers for states in layer)

    def in_memory(self) -> "Block":
        """The block itself, or a copy if it is mapped."""
        if not self.mapped:
            return self
        return Block(tuple((_copied(key), _copied(value)) for key, value in self.layers))


def _copied(states: Tensor) -> Tensor:
    """A copy in memory from which a GPU, where one is in use, can be fed directly."""
    pinned = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.empty_like(states, pin_memory=pinned).copy_(states)


class BlockRecorder:
    """Copies a prompt's K/V into blocks, layer by layer, as forward passes show them.

    Args:
        seen: tokens that the first pass does not show.
        start: first token to record, where a block begins; at least `seen`.
        end: behind the last token to record; the last block may be shorter than the others.
        most_bytes: the blocks together stay below; those at the end of the prompt are left out first.
    """

    def __init__(self, seen: int, start: int, end: int, block_size: int, num_layers: int, most_bytes: int) -> None:
        self._start, self._end, self._block_size, self._most_bytes = start, end, block_size, most_bytes
        self._count: int | None = None
        self._gpu: torch.device | None = None
        self._seen = [seen] * num_layers
        self._states: list[list[LayerStates]] = [[] for _ in range(num_layers)]

    def record(self, layer: int, key: Tensor, value: Tensor, new: int) -> None:
        """Take the states of a pass's new tokens: the last `new` of key and value, (1, kv_heads, tokens, head_dim)."""
        if self._count is None:
            block_bytes = (key[..., :1, :].nbytes + value[..., :1, :].nbytes) * self._block_size * len(self._seen)
            self._count = min(-(-(self._end - self._start) // self._block_size), self._most_bytes // block_bytes)
            self._gpu = key.device if key.is_cuda else None
        key, value = key[0, :, -new:], value[0, :, -new:]
        start, end = self._seen[layer], self._seen[layer] + new
        self._seen[layer] = end
        for block in range(max(0, (start - self._start) // self._block_size), self._count):
            block_start = self._start + block * self._block_size
            if block_start >= end:
                break
            block_end = min(self._end, block_start + self._block_size)
            if block == len(self._states[layer]):
                self._states[layer].append(tuple(_empty(states, block_end - block_start) for states in (key, value)))
            first, last = max(start, block_start), min(end, block_end)
            for stored, states in zip(self._states[layer][block], (key, value), strict=True):
                part = states[:, first - start : last - start]
                stored[:, first - block_start : last - block_start].copy_(part, non_blocking=True)

    def blocks(self) -> Sequence[Block]:
        """The blocks, once all layers have seen the whole prompt."""
        if self._gpu is not None:
            torch.cuda.current_stream(self._gpu).synchronize()  # until then the copies are under way
        return [Block(layers) for layers in zip(*self._states, strict=True)]


def _empty(states: Tensor, tokens: int) -> Tensor:
    """Room in host memory for `tokens` tokens of states (kv_heads, any, head_dim)."""
    return torch.empty((states.shape[0], tokens, states.shape[2]), dtype=states.dtype, pin_memory=states.is_cuda)
