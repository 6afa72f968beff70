"""Systems that answer the same token ids greedily: plain transformers here, others behind a pipe or a server."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from ragkv.attention import implementation_name
from ragkv_evals.peers.environment import PeerError, PeerProcess


@dataclass(frozen=True)
class Generated:
    """A reply and what it cost; None where a system does not tell."""

    tokens: Sequence[int]
    prefill_s: float
    decode_s: float
    kept_tokens: int | None = None
    kv_bytes_full: int | None = None
    kv_bytes_kept: int | None = None


class Generator(Protocol):
    """Somebody who continues token ids."""

    def generate(self, ids: Sequence[int], max_tokens: int) -> Generated:
        """At most `max_tokens` of the likeliest tokens, the end-of-sequence token included."""


class _Clock(BaseStreamer):
    """Notes when the first token is known; the prompt comes first."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        if len(self.seen) < 2:
            self.seen.append(time.perf_counter())

    def end(self) -> None:
        return


class Transformers:
    """`generate` of transformers on the model as it is without ragkv.

    Args:
        model: prepared by ragkv; its attention is switched for the time of a call.
        base: "sdpa" or "flash_attention_2".
    """

    def __init__(self, model: PreTrainedModel, base: str, eos: Sequence[int]) -> None:
        self._model, self._base, self._eos = model, base, list(eos)

    def generate(self, ids: Sequence[int], max_tokens: int) -> Generated:
        model: Any = self._model
        tokens, clock = torch.tensor([list(ids)], device=model.device), _Clock()
        config = GenerationConfig(  # type: ignore[no-untyped-call]
            max_new_tokens=max_tokens,
            do_sample=False,
            repetition_penalty=1.0,
            eos_token_id=self._eos,
            pad_token_id=self._eos[0],
        )
        model.set_attn_implementation(self._base)
        started = time.perf_counter()
        try:
            done = model.generate(
                tokens, attention_mask=torch.ones_like(tokens), generation_config=config, streamer=clock
            )
        finally:
            model.set_attn_implementation(implementation_name(self._base))
        first = clock.seen[1]
        seconds = time.perf_counter() - first
        return Generated(done[0, len(ids) :].tolist(), first - started, seconds, kept_tokens=len(ids))


class Piped:
    """A peer in an environment of its own; `options` go with every request."""

    def __init__(self, process: PeerProcess, **options: object) -> None:
        self._process, self._options = process, options

    def generate(self, ids: Sequence[int], max_tokens: int) -> Generated:
        done = Generated(**self._process.ask(ids=list(ids), max_tokens=max_tokens, **self._options))
        budget = self._options.get("budget")
        if isinstance(budget, int) and done.kept_tokens != min(budget, len(ids)):
            raise PeerError(f"a peer kept {done.kept_tokens} of {len(ids)} tokens, but its budget is {budget}")
        return done
