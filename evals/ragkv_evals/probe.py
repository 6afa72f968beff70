"""A first guess at how long a run takes, before its first example: a short piece of a prompt is read."""

import time
from collections.abc import Collection
from dataclasses import dataclass

from ragkv.chat import Prompt
from ragkv.engine import Engine
from ragkv.policies import FullKV
from ragkv.prefill import prefill
from ragkv_evals.plan import Kind

PIECE = 512  # tokens


@dataclass(frozen=True)
class Probe:
    """A piece of a prompt that was read.

    Attributes:
        prompt_tokens: of the whole prompt; examples without a chosen length are taken to be as long.
        read_tokens, seconds: of the piece.
    """

    prompt_tokens: int
    read_tokens: int
    seconds: float

    def estimate(self, left: Collection[Kind]) -> float:
        """Seconds to read the prompts of these examples, were a token of theirs no slower; replies are left out."""
        tokens = sum(length or self.prompt_tokens for length, begins in left if begins)
        return tokens * self.seconds / self.read_tokens


def probe(engine: Engine, prompt: Prompt) -> Probe:
    """Read the prompt's beginning twice: the first pass warms up."""
    piece = Prompt(prompt.ids[:PIECE])
    seconds = 0.0
    for _ in range(2):
        started = time.perf_counter()
        prefill(engine.model, piece, FullKV()).logits.argmax().item()  # waits for a GPU
        seconds = time.perf_counter() - started
    return Probe(len(prompt), len(piece), seconds)
