"""SnapKV (arXiv 2404.14469): keep what the end of the prompt looks at."""

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from torch import Tensor

from ragkv.errors import ConfigError
from ragkv.policies.base import Observation
from ragkv.scoring import GQAReduction, Pooling, pool_votes, window_votes

_DEFAULT_WINDOW, _SMALLEST_WINDOW, _LARGEST_WINDOW = 32, 16, 64


@dataclass(frozen=True)
class SnapKV:
    """Per layer and KV head, the prompt's last `window_size` queries vote for the tokens before them (section 4).

    Attributes:
        max_capacity_prompt: entries kept per KV head, the window included; shorter prompts are kept whole.
        window_size: length of the observation window; "auto" covers the question and the template's closing tokens
            (16 to 64 tokens), or takes 32 where the prompt has no marked question.
        kernel_size: odd width of the pool over the votes; 1 is no pooling.
        pooling: "avg" or "max".
        gqa_reduction: how the query heads of one KV head join their votes: "mean", "max" or "sum".
    """

    max_capacity_prompt: int = 4096
    window_size: int | Literal["auto"] = "auto"
    kernel_size: int = 7
    pooling: Pooling = "avg"
    gqa_reduction: GQAReduction = "mean"

    protects: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.window_size != "auto" and not (isinstance(self.window_size, int) and self.window_size >= 1):
            raise ConfigError(f"window_size={self.window_size!r}: must be at least 1, or 'auto'")
        if self.max_capacity_prompt <= self.widest_window:
            raise ConfigError(
                f"max_capacity_prompt={self.max_capacity_prompt}: must be larger than the observation window "
                f"(window_size={self.window_size!r}, up to {self.widest_window} tokens); raise it or set a smaller "
                "window_size"
            )
        if self.kernel_size < 1 or self.kernel_size % 2 == 0:
            raise ConfigError(f"kernel_size={self.kernel_size}: must be an odd number of at least 1 (1 is no pooling)")
        if self.pooling not in get_args(Pooling):
            raise ConfigError(f"pooling={self.pooling!r}: choose one of {', '.join(get_args(Pooling))}")
        if self.gqa_reduction not in get_args(GQAReduction):
            raise ConfigError(
                f"gqa_reduction={self.gqa_reduction!r}: choose one of {', '.join(get_args(GQAReduction))}"
            )

    @property
    def widest_window(self) -> int:
        """The most tokens that the observation window can have."""
        return _LARGEST_WINDOW if self.window_size == "auto" else self.window_size

    def budget(self, length: int, layer: int, num_layers: int) -> int:
        return min(length, self.max_capacity_prompt)

    def observation_window(self, question_tokens: int | None) -> int:
        if self.window_size != "auto":
            return self.window_size
        if question_tokens is None:
            return _DEFAULT_WINDOW
        return min(max(question_tokens, _SMALLEST_WINDOW), _LARGEST_WINDOW)

    def score(self, observation: Observation) -> Tensor:
        votes = observation.measure(window_votes, observation.window_size, self.gqa_reduction)
        return pool_votes(votes, self.kernel_size, self.pooling)
