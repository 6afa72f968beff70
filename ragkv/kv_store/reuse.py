"""One prompt's dealings with a store: the prefix that its cache begins with, and the blocks that it leaves behind.

A layer takes its part of the prefix when it is about to attend, so that in one pass the full K/V of a single layer
lives on the device at a time, as without a store.
"""

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicSlidingWindowLayer

from ragkv.backend import rope_regime
from ragkv.cache import CompressibleLayer
from ragkv.kv_store.blocks import Block, BlockRecorder
from ragkv.kv_store.store import KVStore


class PrefixedLayer(CompressibleLayer):  # type: ignore[no-untyped-call]
    """A full-attention layer that has seen a stored prefix, and fetches it with the first states behind it."""

    def __init__(self, layer: int, length: int, blocks: Sequence[Block]) -> None:
        super().__init__()
        self.seen = length
        self._layer, self._blocks = layer, blocks

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if self.is_initialized:
            return super().update(key_states, value_states, *args, **kwargs)
        self.device, self.is_initialized = key_states.device, True
        self.keys, self.values = (
            _behind([block.layers[self._layer][n] for block in self._blocks], self.seen, states)
            for n, states in enumerate((key_states, value_states))
        )
        self.seen, self._blocks = self.seen + key_states.shape[-2], ()
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if self.is_initialized:
            return super().get_mask_sizes(query_length)
        return self.seen + query_length, 0


def _begin_with(cache: Cache, blocks: Sequence[Block], length: int, device: torch.device) -> None:
    """Let an empty cache begin with `length` tokens. Sliding windows take what they can see of them at once."""
    for n, layer in enumerate(cache.layers):
        if isinstance(layer, DynamicSlidingWindowLayer):
            pairs = [block.layers[n] for block in blocks]
            nothing = [states[None, :, :0].to(device) for states in pairs[0]]
            layer.lazy_initialization(*nothing)
            layer.keys, layer.values = (
                _behind(states, min(length, layer.sliding_window - 1), new)
                for states, new in zip(zip(*pairs, strict=True), nothing, strict=True)
            )
            layer.cumulative_length = length
        else:
            cache.layers[n] = PrefixedLayer(n, length, blocks)


def _behind(blocks: Sequence[Tensor], length: int, new: Tensor) -> Tensor:
    """States behind the last `length` tokens of the blocks, in one tensor on the device of the states.

    Args:
        blocks: (kv_heads, tokens, head_dim) each.
        new: (1, kv_heads, new tokens, head_dim).
    """
    states = new.new_empty((*new.shape[:2], length + new.shape[2], new.shape[3]))
    end = length
    for block in reversed(blocks):
        start = max(0, end - block.shape[1])
        states[0, :, start:end].copy_(block[:, block.shape[1] - (end - start) :], non_blocking=True)
        end = start
    states[:, :, length:] = new
    return states


class Reuse:
    """Made for one prompt and its empty cache.

    Attributes:
        read_tokens: length of the prefix with which the cache now begins.
    """

    def __init__(self, store: KVStore, model: PreTrainedModel, cache: Cache, ids: Sequence[int], most: int) -> None:
        self._store, self._ids, size = store, ids, store.block_size
        self._known = store.longest_prefix(model, ids)
        used = self._known.blocks[: max(0, most) // size]
        self.read_tokens = len(used) * size
        if used:
            _begin_with(cache, used, self.read_tokens, model.device)
        self._recorder = BlockRecorder(
            self.read_tokens,
            self._known.length,
            store.stored_tokens(len(ids)),
            size,
            len(cache.layers),
            store.max_bytes,
        )

    @classmethod
    def of(
        cls, store: KVStore | None, model: PreTrainedModel, cache: Cache, ids: Sequence[int], most_tokens: int
    ) -> Self | None:
        """Begin with at most `most_tokens` tokens of what is stored.

        Returns:
            None without a store, and where no other prompt has the same K/V: if the rotation is that of this length
            alone, or layers keep another state.
        """
        layers_fit = all(type(layer) in (CompressibleLayer, DynamicSlidingWindowLayer) for layer in cache.layers)
        if store is None or rope_regime(model, len(ids)) is None or not layers_fit:
            return None
        return cls(store, model, cache, ids, most_tokens)

    def observe(self, layer: int, key: Tensor, value: Tensor, new: int) -> None:
        """Copy the states of a pass's new tokens: the last `new` of key and value, (1, kv_heads, tokens, head_dim)."""
        self._recorder.record(layer, key, value, new)

    def finish(self) -> int:
        """Put into the store what it lacks, once the whole prompt has been read; returns its number of tokens."""
        return self._store.put(self._ids, self._known, self._recorder.blocks(), self.read_tokens)
