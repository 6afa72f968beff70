"""How a reply is sampled: one frozen, validated dataclass shared by the engine, the command line and the adapters."""

from collections.abc import Sequence
from dataclasses import dataclass

from ragkv.errors import ConfigError


@dataclass(frozen=True)
class SamplingParams:
    """Options of one generation.

    Attributes:
        max_tokens: most tokens to generate, at least 1.
        temperature: 0 decodes greedily; above 0 the logits are divided by it and sampled.
        top_p: keep the smallest set of tokens whose probability reaches this, in (0, 1].
        top_k: keep this many most likely tokens; 0 keeps all.
        min_p: drop tokens less likely than this fraction of the likeliest, in [0, 1).
        repetition_penalty: above 1 makes tokens of the prompt and the reply less likely.
        seed: makes sampling repeatable; None draws a fresh one.
        stop: strings that end the reply; they never appear in it.
    """

    max_tokens: int = 512
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: Sequence[str] = ()

    def __post_init__(self) -> None:
        _require(self.max_tokens >= 1, "max_tokens", self.max_tokens, "at least 1")
        _require(self.temperature >= 0, "temperature", self.temperature, "at least 0")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        _require(self.top_k >= 0, "top_k", self.top_k, "at least 0 (0 keeps every token)")
        _require(0 <= self.min_p < 1, "min_p", self.min_p, "in [0, 1)")
        _require(self.repetition_penalty > 0, "repetition_penalty", self.repetition_penalty, "above 0")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        _require(all(stop), "stop", list(stop), "strings that are not empty")
        object.__setattr__(self, "stop", stop)


def _require(holds: bool, option: str, value: object, bound: str) -> None:
    if not holds:
        raise ConfigError(f"{option}={value!r}: must be {bound}")
