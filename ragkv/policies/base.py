"""What a policy must answer: how many, which tail is safe, and a score for everything before that tail."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, runtime_checkable

from torch import Tensor


@dataclass(frozen=True)
class Observation:
    """One layer of a prompt right after its attention.

    Attributes:
        layer: number of the layer among the `num_layers` with full attention.
        query: (batch, heads, queries, head_dim) after rotation; the last ones, at least those that the policy needs.
        key, value: (batch, kv_heads, length, head_dim) of the whole prompt.
        scaling: factor of the attention logits.
        window_size: length of the observation window at the end of the prompt.
        measured: what `measure` has computed on this layer.
    """

    layer: int
    num_layers: int
    query: Tensor
    key: Tensor
    value: Tensor
    scaling: float
    window_size: int
    measured: dict[Hashable, Tensor] = field(default_factory=dict, repr=False, compare=False)

    def measure(self, attention: Callable[..., Tensor], *options: Hashable) -> Tensor:
        """`attention(query, key, scaling, *options)`, computed once for all policies that are compared on this layer.

        The result is shared, so it must not be changed in place.
        """
        known = (attention, *options)
        if known not in self.measured:
            self.measured[known] = attention(self.query, self.key, self.scaling, *options)
        return self.measured[known]


class Policy(Protocol):
    """Decides per layer and KV head which entries of the prompt stay. Holds options, never state.

    A policy whose score takes other queries than the window's has a method `queries_needed`, too; see `OtherQueries`
    and `SplitsBudget`.
    """

    protects: ClassVar[bool]
    """Whether protected spans are kept in spite of their score."""

    def budget(self, length: int, layer: int, num_layers: int) -> int:
        """Entries kept per KV head for a prompt of `length` tokens, the window included.

        Args:
            layer: number of the layer among the `num_layers` with full attention, the only ones that are compressed.
        """

    def observation_window(self, question_tokens: int | None) -> int:
        """Length of the tail that is kept whole; `question_tokens` counts from the question to the prompt's end."""

    def score(self, observation: Observation) -> Tensor:
        """(batch, kv_heads, length - window_size): higher stays."""


@runtime_checkable
class SplitsBudget(Protocol):
    """What a policy adds if the KV heads of a layer are to keep different numbers of entries."""

    def head_budgets(self, scores: Tensor, count: int) -> Sequence[int]:
        """Entries before the window that each KV head keeps; together at most `count` times the heads.

        Args:
            scores: (1, kv_heads, length - window_size); protected positions, at most half of `count`, are infinite.
            count: the layer's budget per KV head, without the window.
        """


@runtime_checkable
class OtherQueries(Protocol):
    """What a policy adds if its score takes more queries than those of its window, or fewer."""

    def queries_needed(self, length: int) -> int:
        """How many of a prompt's last queries the score takes; 0 for none."""


def tokens_to_read(policy: Policy, length: int, question_tokens: int | None) -> int:
    """How many of a prompt's last tokens must be read for the policy, whatever is known of their K/V; at least 1.

    Args:
        length: of the prompt.
    """
    if isinstance(policy, OtherQueries):
        return min(length, max(1, policy.queries_needed(length)))
    return min(length, policy.observation_window(question_tokens))
