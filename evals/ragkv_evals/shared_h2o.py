"""H2O for questions that share their documents: what the tokens before them look at is added up once for them all.

Causal attention of a prompt's beginning does not depend on what follows, so its votes are the same in every prompt that
begins so; only those of the tokens behind it are new.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from ragkv.chat import Prompt
from ragkv.errors import ConfigError
from ragkv.policies import H2O, Observation, Policy
from ragkv.scoring import accumulated_attention
from ragkv_evals.variants import unprotecting

_REMEMBERED = 8  # sets of votes, a few MB each


@dataclass(frozen=True)
class H2OBehind:
    """H2O on a prompt of which the first `start` tokens have voted before, or will be asked for their votes first.

    Unlike other policies it holds something besides options: votes, which the first prefill fills in.

    Attributes:
        votes: theirs by layer, (batch, kv_heads, start).
    """

    base: H2O
    start: int
    votes: dict[int, Tensor] = field(repr=False, compare=False)

    protects: ClassVar[bool] = H2O.protects

    def budget(self, length: int, layer: int, num_layers: int) -> int:
        return self.base.budget(length, layer, num_layers)

    def observation_window(self, question_tokens: int | None) -> int:
        return self.base.observation_window(question_tokens)

    def queries_needed(self, length: int) -> int:
        return length - self.start if self.votes else length

    def score(self, observation: Observation) -> Tensor:
        query, key, layer = observation.query, observation.key, observation.layer
        queries, length = query.shape[-2], key.shape[-2]
        if queries < (length - self.start if layer in self.votes else length):
            raise ConfigError(f"H2O behind {self.start} of {length} tokens: {queries} queries are too few")
        options = observation.scaling, self.base.gqa_reduction
        if layer not in self.votes:
            first = slice(0, self.start)
            self.votes[layer] = accumulated_attention(query[:, :, first], key[:, :, first], *options)
        total = accumulated_attention(query[:, :, self.start - length :], key, *options)
        total[..., : self.start] += self.votes[layer]
        return total[..., : length - observation.window_size]


class SharedH2O:
    """Remembers the votes of the document sets that were read last: a run may take turns between several lengths."""

    def __init__(self) -> None:
        self._votes: dict[tuple[Sequence[int], str], dict[int, Tensor]] = {}

    def policy_for(self, policy: Policy, prompt: Prompt) -> Policy:
        """The policy, or, if it is an H2O whose votes add up, one that keeps the same entries and reads less."""
        end = len(prompt) - (prompt.question_tokens or len(prompt))  # instructions behind the documents are shared, too
        if not isinstance(policy, H2O) or policy.gqa_reduction == "max" or end == 0:
            return policy
        key = prompt.ids[:end], policy.gqa_reduction
        self._votes[key] = self._votes.pop(key, {})  # the last one now
        while len(self._votes) > _REMEMBERED:
            del self._votes[next(iter(self._votes))]
        behind = H2OBehind(policy, end, self._votes[key])
        return behind if policy.protects else unprotecting(behind)
