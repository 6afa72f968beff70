"""The streaming cache (design: StreamingLLM, section 4): the first tokens and the most recent, however many came by.

Positions are those in the cache. All layers hold the same tokens; a layer with a sliding window of its own looks at the
nearest of them. Who reads tokens makes room for them first, so nothing is ever dropped unasked.
"""

from collections.abc import Mapping, Sequence
from typing import Self

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ragkv.backend import forward
from ragkv.errors import ConfigError
from ragkv.streaming.layer import StreamingLayer
from ragkv.streaming.layout import Layout


class StreamingCache(Cache):
    """A cache that never holds more than its capacity, for reading and decoding without end.

    Attributes:
        capacity: most tokens that it holds.
        pinned: first tokens that stay for good: the sinks, or more after `pin`.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout, self.capacity, self.pinned = layout, layout.capacity, layout.policy.num_sink_tokens
        self._layers = [
            StreamingLayer(layout.slots, *each) for each in zip(layout.rotations, layout.sliding, strict=True)
        ]
        super().__init__(layers=self._layers)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return self._layers[0].end - self._layers[0].start

    def __bool__(self) -> bool:
        return True  # an empty cache is one

    @property
    def room(self) -> int:
        """Tokens that can be read before one must be evicted."""
        return self.capacity - len(self)

    @property
    def position(self) -> int:
        """Position of the next token."""
        return self._layers[0].end

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the cache takes, slots to spare included."""
        return sum(layer.nbytes for layer in self._layers)

    def pin(self, tokens: int) -> None:
        """Keep the first `tokens` tokens (and the sinks) for good; only before anything has been evicted."""
        if self._layers[0].pinned_keys is not None:
            raise ConfigError(f"pin({tokens}): tokens have been evicted already; pin before the cache is full")
        if tokens >= self.capacity:
            raise ConfigError(f"pin({tokens}): must be less than the {self.capacity} tokens that the cache holds")
        self.pinned = max(self.layout.policy.num_sink_tokens, tokens)

    @torch.inference_mode()
    def evict(self, count: int) -> None:
        """Drop the `count` oldest tokens that are not pinned."""
        if not 0 <= count <= max(0, len(self) - self.pinned):
            raise ConfigError(f"evict({count}): {len(self)} tokens are held, {self.pinned} of them pinned")
        for layer in self._layers if count else ():
            layer.evict(count, self.pinned)

    @torch.inference_mode()
    def reserve(self, count: int) -> Tensor:
        """Positions of the next `count` tokens, (count,); there must be room for them."""
        if count > self.room:
            raise ConfigError(f"reserve({count}): there is room for {self.room} tokens; evict some first")
        if self.position + count > self.layout.slots:
            for layer in self._layers:
                layer.rebase(self.pinned)
        return torch.arange(self.position, self.position + count)

    @torch.inference_mode()
    def take(self, other: Self, start: int, kept: Sequence[Tensor]) -> None:
        """Append entries of another cache of this model, moved together.

        Args:
            start: how many of its first entries are not meant.
            kept: per layer, (1, kv_heads, count) indices into those behind, ascending; one count for all layers.
        """
        positions = self.reserve(kept[0].shape[-1])
        for layer, source, index in zip(self._layers, other._layers, kept, strict=True):
            layer.take(source, start + index, positions.to(index.device))

    def rewind(self, position: int) -> None:
        """Forget all tokens from this position on, as if they had not been read; none of them may be pinned."""
        for layer in self._layers:
            layer.crop(min(0, position - layer.end))

    def state(self) -> dict[str, Tensor]:
        """The tensors that the cache is made of, by name; they go on being used."""
        named = {f"{i}.{name}": each for i, layer in enumerate(self._layers) for name, each in layer.tensors().items()}
        return {**named, "start": torch.tensor(self._layers[0].start), "pinned": torch.tensor(self.pinned)}

    @classmethod
    @torch.inference_mode()
    def restored(cls, layout: Layout, state: Mapping[str, Tensor]) -> Self:
        """A cache that goes on, bit for bit, like the one that gave `state`."""
        cache = cls(layout)
        cache.pinned = int(state["pinned"])
        for i, layer in enumerate(cache._layers):
            own = {name.partition(".")[2]: each for name, each in state.items() if name.startswith(f"{i}.")}
            if own:
                layer.restore(own, int(state["start"]))
        return cache

    def copy(self) -> Self:
        """An independent cache that goes on in the same way, bit for bit."""
        return self.restored(self.layout, self.state())


def read(model: PreTrainedModel, cache: StreamingCache, ids: Tensor) -> Tensor:
    """Append tokens for which the cache has room.

    Args:
        ids: (batch, new tokens).

    Returns:
        Logits behind the last one, (batch, vocabulary).
    """
    positions = cache.reserve(ids.shape[1]).to(model.device)
    try:
        return forward(model, ids.to(model.device), cache, positions.expand(ids.shape))
    except BaseException:  # a pass that broke off has reached some layers only
        cache.rewind(int(positions[0]))
        raise
