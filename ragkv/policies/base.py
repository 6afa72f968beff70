"""What a policy must answer: how many, which tail is safe, and a score for everything before that tail."""

from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor


@dataclass(frozen=True)
class Observation:
    """One layer of a prompt right after its attention.

    Attributes:
        layer: index of the layer among the model's `num_layers`.
        query: (batch, heads, queries, head_dim) after rotation; at least the window's queries, the last ones.
        key, value: (batch, kv_heads, length, head_dim) of the whole prompt.
        scaling: factor of the attention logits.
        window_size: length of the observation window at the end of the prompt.
    """

    layer: int
    num_layers: int
    query: Tensor
    key: Tensor
    value: Tensor
    scaling: float
    window_size: int


class Policy(Protocol):
    """Decides per layer and KV head which entries of the prompt stay. Holds options, never state."""

    protects: ClassVar[bool]
    """Whether protected spans are kept in spite of their score."""

    def budget(self, length: int, layer: int, num_layers: int) -> int:
        """Entries kept per KV head of this layer for a prompt of `length` tokens, the window included."""

    def observation_window(self, question_tokens: int | None) -> int:
        """Length of the tail that is kept whole; `question_tokens` counts from the question to the prompt's end."""

    def score(self, observation: Observation) -> Tensor:
        """(batch, kv_heads, length - window_size): higher stays."""
