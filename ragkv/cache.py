"""The KV cache that can forget: it holds fewer entries than it has seen, and says so to transformers.

The *logical* length (tokens seen) fixes the position of the next token; the *physical* length is what is stored. Keys
keep the rotation of the position they were seen at, so nothing moves when entries between them go.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

_GROWTH = 256  # slots added when the buffer is full, so that a decoding step copies one token and not the cache


class CompressibleLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """K/V of one full-attention layer, (batch, kv_heads, physical length, head_dim), of which some may be dropped.

    Attributes:
        seen: logical length.
        positions: (batch, kv_heads, kept) int32 prompt positions that the last `keep` left, ascending; None before it.
    """

    keys: Tensor
    values: Tensor

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = 0
        self.positions: Tensor | None = None
        self._buffers: tuple[Tensor, ...] = ()

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        self.seen += key_states.shape[-2]
        if not self.is_initialized:
            self.device = key_states.device
            # The kernel reads a layer that lies in one piece 7% faster than slices of its projections.
            self.keys, self.values = key_states.contiguous(), value_states.contiguous()
            self.is_initialized = True
        else:
            self._append(key_states, value_states)
        return self.keys, self.values

    def _append(self, key_states: Tensor, value_states: Tensor) -> None:
        old = self.keys.shape[-2]
        new = old + key_states.shape[-2]
        if not self._has_room(new):
            self._buffers = tuple(_grown(states, new + _GROWTH) for states in (self.keys, self.values))
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[..., old:new, :] = states
        self.keys, self.values = (buffer[..., :new, :] for buffer in self._buffers)

    def _has_room(self, length: int) -> bool:
        """Whether the entries still are the head of the buffers (nobody replaced them) and `length` fit into those."""
        if not self._buffers:
            return False
        pairs = zip(self._buffers, (self.keys, self.values), strict=True)
        untouched = all(old.data_ptr() == now.data_ptr() and old.shape[:2] == now.shape[:2] for old, now in pairs)
        return untouched and length <= self._buffers[0].shape[-2]

    def keep(self, positions: Tensor) -> None:
        """Drop every entry but these.

        Args:
            positions: (batch, kv_heads, kept) indices into the stored entries, ascending.
        """
        index = positions.unsqueeze(-1)
        self.keys = self.keys.gather(2, index.expand(-1, -1, -1, self.keys.shape[-1]))
        self.values = self.values.gather(2, index.expand(-1, -1, -1, self.values.shape[-1]))
        self.positions, self._buffers = positions.to(torch.int32), ()

    @property
    def parts(self) -> Sequence["CompressibleLayer"]:
        """The layers whose tensors hold the entries: this one, unless its heads hold different numbers of them."""
        return [self]

    @property
    def grown(self) -> bool:
        """Whether the entries are the head of buffers with slots to spare."""
        return bool(self._buffers)

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        physical = self.keys.shape[-2] if self.is_initialized else 0
        return physical + query_length, self.seen - physical

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens (a negative number, as in transformers)."""
        super().crop(tokens_to_remove)
        if self.is_initialized:
            self.seen += tokens_to_remove

    def reset(self) -> None:
        super().reset()
        self.seen, self.positions, self._buffers = 0, None, ()


def _grown(states: Tensor, slots: int) -> Tensor:
    """A buffer of `slots` slots that begins with these states."""
    buffer = states.new_empty((*states.shape[:-2], slots, states.shape[-1]))
    buffer[..., : states.shape[-2], :] = states
    return buffer


class CompressibleCache(DynamicCache):
    """A cache whose full-attention layers may hold different numbers of entries."""

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """transformers makes one mask for all full-attention layers: it is that of the longest, of which the attention
        function takes the end that fits."""
        sizes = super().get_mask_sizes(query_length, layer_idx)
        if not isinstance(self.layers[layer_idx], CompressibleLayer):
            return sizes
        return max(layer.get_mask_sizes(query_length) for _, layer in compressible(self))


def new_cache(config: PreTrainedConfig) -> DynamicCache:
    """An empty cache for a model: full-attention layers can be compressed, all others are transformers' own."""
    cache = CompressibleCache(config=config)
    cache.layers = [CompressibleLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def compressible(cache: Cache) -> list[tuple[int, CompressibleLayer]]:
    """The layers of full attention with their indices."""
    return [(i, layer) for i, layer in enumerate(cache.layers) if isinstance(layer, CompressibleLayer)]


def own(layer: object) -> None:
    """Copy entries that are a view into something larger (a fused projection, a whole prompt), so that it is freed."""
    for part in _parts(layer):
        if isinstance(part, CompressibleLayer) and part.grown:
            continue
        for name in ("keys", "values"):
            states = getattr(part, name, None)
            if states is not None and states.untyped_storage().nbytes() > states.nbytes:
                setattr(part, name, states.clone(memory_format=torch.contiguous_format))


def kv_bytes(cache: Cache) -> int:
    """Bytes of the keys and values that the cache holds now."""
    return sum(_layer_bytes(part) for layer in cache.layers for part in _parts(layer))


def kv_bytes_allocated(cache: Cache) -> int:
    """Bytes of the memory behind its keys and values, whatever part of it they use."""
    storages = {}
    for part in (part for layer in cache.layers for part in _parts(layer)):
        for states in _states(part):
            storage = states.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def kv_bytes_full(cache: Cache) -> int:
    """Bytes that the same cache would hold had no full-attention layer dropped anything."""
    total = 0
    for part in (part for layer in cache.layers for part in _parts(layer)):
        held = _layer_bytes(part)
        if isinstance(part, CompressibleLayer) and part.is_initialized:
            held = held // part.keys.shape[-2] * part.seen
        total += held
    return total


def _parts(layer: object) -> Sequence[object]:
    return getattr(layer, "parts", [layer])


def _layer_bytes(layer: object) -> int:
    return sum(states.numel() * states.element_size() for states in _states(layer))


def _states(layer: object) -> list[Tensor]:
    return [states for name in ("keys", "values") if (states := getattr(layer, name, None)) is not None]
