"""A reply while it is being made, what has become of it in the end, and what it cost."""

import time
from dataclasses import dataclass
from typing import Literal

from ragkv import peak_memory
from ragkv.chat import Prompt
from ragkv.config import SamplingParams
from ragkv.detokenize import TextStream
from ragkv.models import LoadedModel
from ragkv.prefill import Prefilled
from ragkv.sampling import Constraint, Sampler

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class Stats:
    """What a reply cost.

    Attributes:
        prompt_tokens, completion_tokens: tokens read and written; the end-of-sequence token counts as written.
        ttft_s: seconds from the call to this reply's first token.
        decode_tokens_per_s: after the first token; 0 if there was only one.
        kv_bytes_full, kv_bytes_kept: bytes of the prompt's K/V before and after compression.
        kv_bytes_allocated: bytes of the memory that holds them after compression.
        kept_tokens: entries kept per KV head of a full-attention layer.
        window_size: length of the observation window.
        unprotected_tokens: tokens of instructions or document headers that the budget had no room to protect.
        cache_read_tokens, cache_creation_tokens: tokens of the prompt whose K/V the store had, and those it got.
        peak_memory_bytes: most memory that this process has had, the model included, since its start or the last
            `ragkv.peak_memory.reset`; on a GPU what torch had there. None where the system does not tell.
    """

    prompt_tokens: int
    completion_tokens: int
    ttft_s: float
    decode_tokens_per_s: float
    kv_bytes_full: int
    kv_bytes_kept: int
    kept_tokens: int
    window_size: int
    unprotected_tokens: int
    cache_read_tokens: int = 0
    cache_creation_tokens: int = 0
    kv_bytes_allocated: int = 0
    peak_memory_bytes: int | None = None


@dataclass(frozen=True)
class Completion:
    """A whole reply. `tokens` are all that were generated; `text` ends before a stop string or control token."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    stats: Stats


@dataclass(frozen=True)
class Chunk:
    """A step of the reply to prompt number `row`: its new text, and the completion once the reply has ended."""

    row: int
    text: str
    completion: Completion | None = None


class Reply:
    """One reply while it is being made.

    Attributes:
        prefilled: the prompt as it was read; set before the first token is pushed.
        tokens: what has been generated.
        finish_reason: None until the reply has ended.
    """

    prefilled: Prefilled

    def __init__(
        self,
        row: int,
        loaded: LoadedModel,
        prompt: Prompt,
        sampling: SamplingParams,
        constraint: Constraint | None,
    ) -> None:
        self.row, self.prompt = row, prompt
        self.sampler = Sampler(sampling, prompt.ids, constraint)
        self.tokens: list[int] = []
        self.finish_reason: FinishReason | None = None
        self._text = TextStream(loaded.tokenizer, sampling.stop, strip_start=prompt.begun)
        self._max_tokens, self._eos, self._device = sampling.max_tokens, loaded.eos_token_ids, loaded.model.device
        self._first_token_at = self._last_token_at = 0.0

    def push(self, token: int, started: float) -> Chunk:
        """Take the next token; the chunk carries the completion if it is the last one."""
        self._last_token_at = time.perf_counter()
        self._first_token_at = self._first_token_at or self._last_token_at
        self.tokens.append(token)
        text = "" if token in self._eos else self._text.push(token)
        if token in self._eos or self._text.stopped:
            return self.end("stop", started, text)
        if len(self.tokens) == self._max_tokens:
            return self.end("length", started, text)
        return Chunk(self.row, text)

    def end(self, reason: FinishReason, started: float, text: str = "") -> Chunk:
        """Show what was held back and sum up. A stop string that only the end reveals counts as one."""
        text += self._text.finish()
        self.finish_reason = "stop" if self._text.stopped else reason
        return Chunk(
            self.row,
            text,
            Completion(self._text.text, tuple(self.tokens), self.finish_reason, self._stats(started)),
        )

    def _stats(self, started: float) -> Stats:
        decoding = self._last_token_at - self._first_token_at
        return Stats(
            prompt_tokens=len(self.prompt),
            completion_tokens=len(self.tokens),
            ttft_s=max(0.0, self._first_token_at - started),
            decode_tokens_per_s=(len(self.tokens) - 1) / decoding if decoding else 0.0,
            kv_bytes_full=self.prefilled.kv_bytes_full,
            kv_bytes_kept=self.prefilled.kv_bytes_kept,
            kept_tokens=self.prefilled.kept_tokens,
            window_size=self.prefilled.window_size,
            unprotected_tokens=self.prefilled.unprotected_tokens,
            cache_read_tokens=self.prefilled.cache_read_tokens,
            cache_creation_tokens=self.prefilled.cache_creation_tokens,
            kv_bytes_allocated=self.prefilled.kv_bytes_allocated,
            peak_memory_bytes=peak_memory.peak(self._device),
        )
