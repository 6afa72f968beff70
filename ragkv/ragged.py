"""A layer whose KV heads hold different numbers of entries: one cache layer for each head, so that nothing is padded.

Its `update` returns tuples with the keys and the values of each head, which `ragkv.attention` attends to head by head;
transformers hands them from one to the other untouched.
"""

from collections.abc import Sequence

from torch import Tensor

from ragkv.cache import CompressibleLayer


class RaggedLayer(CompressibleLayer):  # type: ignore[no-untyped-call]
    """K/V of one row. `keys`, `values` and `positions` are those of the `parts`, (1, 1, entries, head_dim) each.

    Args:
        layer: the whole prompt's entries.
        positions: for each KV head, (1, 1, kept) indices into them, ascending.
    """

    def __init__(self, layer: CompressibleLayer, positions: Sequence[Tensor]) -> None:
        super().__init__()
        self.seen, self.is_initialized = layer.seen, True
        self._heads = [CompressibleLayer() for _ in positions]
        states = zip(layer.keys.chunk(len(positions), dim=1), layer.values.chunk(len(positions), dim=1), strict=True)
        for head, kept, (keys, values) in zip(self._heads, positions, states, strict=True):
            head.update(keys, values)
            head.keep(kept)

    @property
    def parts(self) -> Sequence[CompressibleLayer]:
        return self._heads

    def update(  # type: ignore[override]
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        self.seen += key_states.shape[-2]
        count = len(self._heads)
        new = zip(self._heads, key_states.chunk(count, dim=1), value_states.chunk(count, dim=1), strict=True)
        keys, values = zip(*(head.update(*states) for head, *states in new), strict=True)
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return max(head.get_mask_sizes(query_length) for head in self._heads)

    def crop(self, tokens_to_remove: int) -> None:
        for head in self._heads:
            head.crop(tokens_to_remove)
        self.seen += tokens_to_remove

    def reset(self) -> None:
        for head in self._heads:
            head.reset()
        self.seen = 0
