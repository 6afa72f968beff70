"""One layer of the streaming cache: slot i of its buffers holds a key rotated for position i.

What is in the cache is the run of slots [start, end). To evict, start moves on and the pinned keys are written into the
slots behind it, rotated anew from unrotated copies; recent keys stay as they are. Only when the buffers are used up
does everything move back to slot 0.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from ragkv.streaming.rotation import Rotation


class StreamingLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """K/V of one layer, (batch, kv_heads, start to end, head_dim).

    Attributes:
        start, end: the slots in use; the next token stands at position `end`.
        pinned_keys, pinned_values: copies of the pinned tokens; keys without rotation, in float32. None before the
            first eviction, when the pinned tokens are still where they were read.
    """

    keys: Tensor
    values: Tensor

    def __init__(self, slots: int, rotation: Rotation | None, is_sliding: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_sliding = is_sliding
        self.start = self.end = 0
        self.pinned_keys: Tensor | None = None
        self.pinned_values: Tensor | None = None
        self._slots, self._rotation = slots, rotation
        self._buffers: list[Tensor] = []

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.device, self.is_initialized = key_states.device, True
            self._buffers = [torch.empty_like(states[..., :0, :]) for states in (key_states, value_states)]
        start, end, slots = self.end, self.end + key_states.shape[-2], self._buffers[0].shape[-2]
        if end > slots:
            more = min(self._slots, max(end, 2 * slots)) - slots
            self._buffers = [F.pad(buffer, (0, 0, 0, more)) for buffer in self._buffers]
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[..., start:end, :] = states
        self._show(self.start, end)
        return self.keys, self.values

    def evict(self, count: int, pinned: int) -> None:
        """Drop the `count` entries behind the first `pinned`."""
        if self.pinned_keys is None:
            first = self.keys[..., :pinned, :].clone()
            self.pinned_keys = self._moved(first, -self._positions(pinned)).float()
            self.pinned_values = self.values[..., :pinned, :].clone()
        self._show(self.start + count, self.end)
        self._place_pinned()

    def rebase(self, pinned: int) -> None:
        """Move everything back to slot 0."""
        back, length = torch.tensor([-self.start], device=self.device), self.end - self.start
        recent = self._moved(self.keys[..., pinned:, :], back), self.values[..., pinned:, :]
        for buffer, states in zip(self._buffers, recent, strict=True):
            buffer[..., pinned:length, :] = states.clone()
        self._show(0, length)
        self._place_pinned()

    def take(self, source: "StreamingLayer", index: Tensor, positions: Tensor) -> None:
        """Append entries of another layer, rotated for these positions instead of those that they have there.

        Args:
            index: (1, kv_heads, count) of the other layer's entries, for each head its own.
            positions: (count,).
        """
        every = index.unsqueeze(-1)
        keys, values = (
            states.gather(2, every.expand(-1, -1, -1, states.shape[-1])) for states in (source.keys, source.values)
        )
        self.update(self._moved(keys, positions - source.start - index).to(keys.dtype), values)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens (a negative number, as in transformers), none of them pinned."""
        if tokens_to_remove:
            self._show(self.start, self.end + tokens_to_remove)

    def restore(self, tensors: Mapping[str, Tensor], start: int) -> None:
        """Become a layer that gave these `tensors` and stood at `start`; nothing is shared with it."""
        self.update(*(F.pad(tensors[name], (0, 0, start, 0)) for name in ("keys", "values")))
        self._show(start, self.end)
        pinned = (tensors.get(name) for name in ("pinned_keys", "pinned_values"))
        self.pinned_keys, self.pinned_values = (None if each is None else each.clone() for each in pinned)

    def tensors(self) -> dict[str, Tensor]:
        """What `restore` needs, by name; they go on being used here."""
        if not self.is_initialized:
            return {}
        names = ("keys", "values") if self.pinned_keys is None else ("keys", "values", "pinned_keys", "pinned_values")
        return {name: getattr(self, name) for name in names}

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers and of the pinned copies."""
        held = (*self._buffers, self.pinned_keys, self.pinned_values)
        return sum(tensor.nbytes for tensor in held if tensor is not None)

    def _place_pinned(self) -> None:
        if self.pinned_keys is None or self.pinned_values is None:
            return
        pinned = self.pinned_keys.shape[-2]
        self.keys[..., :pinned, :] = self._moved(self.pinned_keys, self.start + self._positions(pinned))
        self.values[..., :pinned, :] = self.pinned_values

    def _positions(self, count: int) -> Tensor:
        return torch.arange(count, device=self.device)

    def _moved(self, keys: Tensor, positions: Tensor) -> Tensor:
        return keys if self._rotation is None else self._rotation.rotate(keys, positions)

    def _show(self, start: int, end: int) -> None:
        self.start, self.end = start, end
        self.keys, self.values = (buffer[..., start:end, :] for buffer in self._buffers)

    def get_seq_length(self) -> int:
        return self.end

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.end - self.start + query_length, self.start
