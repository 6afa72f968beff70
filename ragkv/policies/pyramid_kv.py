"""PyramidKV (arXiv 2406.02069): SnapKV's votes, with more entries in the lower layers and fewer in the upper ones."""

from dataclasses import dataclass

from ragkv.errors import ConfigError
from ragkv.policies.snapkv import SnapKV


@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """SnapKV whose budget falls evenly from layer to layer; all layers together keep what SnapKV keeps (section 4).

    The part of the budget beside the window falls to 1/beta of its mean in the top layer. Where the bottom layer would
    keep more than there is, the slope is less steep. A window of "auto" is counted as the widest that it may be.

    Attributes:
        max_capacity_prompt: mean over the layers of the entries kept per KV head, the window included.
        beta: steepness, at least 1, which is SnapKV.
    """

    beta: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beta < 1:
            raise ConfigError(f"beta={self.beta}: must be at least 1 (1 gives every layer the same)")

    def budget(self, length: int, layer: int, num_layers: int) -> int:
        if length <= self.max_capacity_prompt:
            return length
        mean = self.max_capacity_prompt - self.widest_window
        largest = min(2 * mean - mean // self.beta, length - self.widest_window)
        from_end = num_layers - 1 - layer
        if layer == from_end:
            return self.max_capacity_prompt
        # Pairs of layers from both ends keep twice the mean, so that rounding changes no total.
        above = largest - mean - 2 * (largest - mean) * min(layer, from_end) // (num_layers - 1)
        return self.max_capacity_prompt + (above if layer < from_end else -above)
