"""Keep everything: the baseline that every other policy is compared with."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ragkv.policies.base import Observation


@dataclass(frozen=True)
class FullKV:
    """The full KV cache."""

    protects: ClassVar[bool] = False

    def budget(self, length: int, layer: int, num_layers: int) -> int:
        return length

    def observation_window(self, question_tokens: int | None) -> int:
        return 1

    def queries_needed(self, length: int) -> int:
        return 0

    def score(self, observation: Observation) -> Tensor:
        return observation.key.new_zeros((*observation.key.shape[:2], observation.key.shape[2] - 1))
