"""A batch out of prompts that were read one by one: layers whose rows are alike are stacked, all others stay apart.

Nothing is padded, so no row needs a mask, and a short row never waits for the kernel to read the slots of a long one.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from ragkv.cache import CompressibleLayer

ByRow = tuple[tuple[Tensor, ...], ...]


class RowsLayer(CacheLayerMixin):
    """Rows that hold different numbers of entries, each with a layer of its own; for decoding, where a token sees all.

    Its `update` returns tuples with the keys and the values of each row, themselves tuples by KV head or of one tensor
    for all heads, which `ragkv.attention` attends to row by row; transformers hands them on untouched.

    Args:
        rows: each row's layer, as its prompt left it; they are appended to.
    """

    def __init__(self, rows: Sequence[DynamicLayer]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_initialized, self.is_sliding = True, getattr(rows[0], "is_sliding", False)
        self._rows = list(rows)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the rows have been read."""

    def update(  # type: ignore[override]
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[ByRow, ByRow]:
        count = len(self._rows)
        new = zip(self._rows, key_states.chunk(count), value_states.chunk(count), strict=True)
        keys, values = zip(*(row.update(*states) for row, *states in new), strict=True)
        return tuple(map(_by_head, keys)), tuple(map(_by_head, values))

    @property
    def parts(self) -> list[DynamicLayer]:
        """The layers whose tensors hold the entries."""
        return [part for row in self._rows for part in getattr(row, "parts", [row])]

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only these rows."""
        self._rows = [self._rows[row] for row in indices.tolist()]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return max(row.get_mask_sizes(query_length) for row in self._rows)

    def get_seq_length(self) -> int:
        return max(row.get_seq_length() for row in self._rows)

    def get_max_length(self) -> int:
        return max(row.get_max_length() for row in self._rows)


def join(caches: Sequence[Cache]) -> Cache:
    """One cache for a batch out of single-row caches of a model; the rows' own caches are used up."""
    joined, *others = caches
    if others:
        joined.layers = [_joined(rows) for rows in zip(*(cache.layers for cache in caches), strict=True)]
        for cache in others:
            cache.layers.clear()  # else their entries would be held twice for as long as someone holds the row
    return joined


def _joined(rows: Sequence[DynamicLayer]) -> CacheLayerMixin:
    first, shapes = rows[0], set(map(_shape, rows))
    if None in shapes or len(shapes) > 1:
        return RowsLayer(rows)
    for name in ("keys", "values"):
        setattr(first, name, torch.cat([getattr(row, name) for row in rows]))
    if isinstance(first, CompressibleLayer):
        first.seen, first.positions = max(row.get_seq_length() for row in rows), None
    elif isinstance(first, DynamicSlidingWindowLayer):
        first.cumulative_length = max(row.get_seq_length() for row in rows)
    return first


def _shape(layer: DynamicLayer) -> torch.Size | None:
    """Of the tensor that holds the keys of all heads; None where there is none."""
    return layer.keys.shape if layer.keys is not None and getattr(layer, "parts", [layer]) == [layer] else None


def _by_head(states: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return states if isinstance(states, tuple) else (states,)
