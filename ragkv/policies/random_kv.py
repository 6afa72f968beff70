"""Random entries of the prompt: the control that shows what the votes of other policies are worth."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ragkv.errors import ConfigError
from ragkv.policies.base import Observation


@dataclass(frozen=True)
class RandomKV:
    """Per layer and KV head, random entries and the prompt's last `window_size`; the same ones whenever it is asked.

    Attributes:
        max_capacity_prompt: entries kept per KV head, the window included; shorter prompts are kept whole.
        window_size: number of last tokens that stay.
        seed: another one keeps other entries.
    """

    max_capacity_prompt: int = 4096
    window_size: int = 32
    seed: int = 0

    protects: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.window_size < 1:
            raise ConfigError(f"window_size={self.window_size}: must be at least 1")
        if self.max_capacity_prompt <= self.window_size:
            raise ConfigError(
                f"max_capacity_prompt={self.max_capacity_prompt}: must be larger than window_size={self.window_size}"
            )
        if not 0 <= self.seed < 2**32:
            raise ConfigError(f"seed={self.seed}: must be at least 0 and below 2**32")

    def budget(self, length: int, layer: int, num_layers: int) -> int:
        return min(length, self.max_capacity_prompt)

    def observation_window(self, question_tokens: int | None) -> int:
        return self.window_size

    def queries_needed(self, length: int) -> int:
        return 0

    def score(self, observation: Observation) -> Tensor:
        batch, kv_heads, length, _ = observation.key.shape
        generator = torch.Generator().manual_seed(self.seed * observation.num_layers + observation.layer)
        scores = torch.rand(batch, kv_heads, length - observation.window_size, generator=generator)
        return scores.to(observation.key.device)
