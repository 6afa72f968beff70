"""StreamingLLM (arXiv 2309.17453) applied once to a prompt: the first tokens (attention sinks) and the most recent."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ragkv.errors import ConfigError
from ragkv.policies.base import Observation


@dataclass(frozen=True)
class StreamingLLM:
    """Keep `num_sink_tokens` first and `window_length` last tokens, at the positions they were read at.

    Everything between is gone, whatever the question: a baseline for retrieval, not a way to read long prompts.
    """

    num_sink_tokens: int = 4
    window_length: int = 4092

    protects: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.num_sink_tokens < 0:
            raise ConfigError(f"num_sink_tokens={self.num_sink_tokens}: must be at least 0")
        if self.window_length < 1:
            raise ConfigError(f"window_length={self.window_length}: must be at least 1")

    def budget(self, length: int, layer: int, num_layers: int) -> int:
        return min(length, self.num_sink_tokens + self.window_length)

    def observation_window(self, question_tokens: int | None) -> int:
        return self.window_length

    def queries_needed(self, length: int) -> int:
        return 0

    def score(self, observation: Observation) -> Tensor:
        batch, kv_heads, length, _ = observation.key.shape
        earlier_first = torch.arange(length - observation.window_size, 0, -1, device=observation.key.device)
        return earlier_first.float().expand(batch, kv_heads, -1)
