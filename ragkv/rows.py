"""A layer of a batch whose rows do not line up: each row keeps its own cache layer, and nothing is padded.

Its `update` returns tuples with the keys and the values of each row, themselves tuples by KV head or of one tensor for
all heads, which `ragkv.attention` attends to row by row; transformers hands them from one to the other untouched.
"""

from collections.abc import Sequence

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

ByRow = tuple[tuple[Tensor, ...], ...]


class RowsLayer(CacheLayerMixin):
    """K/V of rows that hold different numbers of entries; for decoding, where a token sees all entries of its row.

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

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only these rows."""
        self._rows = [self._rows[row] for row in indices.tolist()]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return max(row.get_mask_sizes(query_length) for row in self._rows)

    def get_seq_length(self) -> int:
        return max(row.get_seq_length() for row in self._rows)

    def get_max_length(self) -> int:
        return max(row.get_max_length() for row in self._rows)


def side_by_side(caches: Sequence[Cache]) -> Cache:
    """One cache for a batch out of any single-row caches of a model; the rows' own caches are used up."""
    together = Cache(layers=[RowsLayer(rows) for rows in zip(*(cache.layers for cache in caches), strict=True)])
    for cache in caches:
        cache.layers.clear()
    return together


def _by_head(states: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return states if isinstance(states, tuple) else (states,)
