"""H2O (arXiv 2306.14048) applied once to a prompt: the tokens that all tokens look at most, and the most recent."""

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from torch import Tensor

from ragkv.errors import ConfigError
from ragkv.policies.base import Observation
from ragkv.scoring import GQAReduction, accumulated_attention


@dataclass(frozen=True)
class H2O:
    """Per layer and KV head, every token of the prompt votes for the tokens up to it: "heavy hitters" stay (section 4).

    The attention of the whole prompt is computed a second time, block by block, which takes as long as the first time
    and a bounded memory (`ragkv.scoring.accumulated_attention`). Decoding evicts nothing more.

    Attributes:
        max_capacity_prompt: entries kept per KV head, the recent ones included; shorter prompts are kept whole.
        window_size: number of recent tokens that stay; "half" of the entries as in the paper.
        gqa_reduction: how the query heads of one KV head join their votes: "mean", "max" or "sum".
    """

    max_capacity_prompt: int = 4096
    window_size: int | Literal["half"] = "half"
    gqa_reduction: GQAReduction = "mean"

    protects: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.max_capacity_prompt < 2:
            raise ConfigError(f"max_capacity_prompt={self.max_capacity_prompt}: must be at least 2")
        if self.window_size != "half" and not (isinstance(self.window_size, int) and self.window_size >= 1):
            raise ConfigError(f"window_size={self.window_size!r}: must be at least 1, or 'half'")
        if self.window_size != "half" and self.window_size >= self.max_capacity_prompt:
            raise ConfigError(
                f"window_size={self.window_size}: must be smaller than max_capacity_prompt={self.max_capacity_prompt}; "
                "lower it or raise the capacity"
            )
        if self.gqa_reduction not in get_args(GQAReduction):
            raise ConfigError(
                f"gqa_reduction={self.gqa_reduction!r}: choose one of {', '.join(get_args(GQAReduction))}"
            )

    def budget(self, length: int, layer: int, num_layers: int) -> int:
        return min(length, self.max_capacity_prompt)

    def observation_window(self, question_tokens: int | None) -> int:
        return self.max_capacity_prompt // 2 if self.window_size == "half" else self.window_size

    def queries_needed(self, length: int) -> int:
        return length

    def score(self, observation: Observation) -> Tensor:
        queries, length = observation.query.shape[-2], observation.key.shape[-2]
        if queries < length:
            raise ConfigError(
                f"H2O needs the queries of all {length} tokens, not of {queries}: read the prompt in one pass"
            )
        votes = observation.measure(accumulated_attention, self.gqa_reduction)
        return votes[..., : length - observation.window_size]
