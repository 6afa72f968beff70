"""SnapKV inside a turn: a tool result of 20K tokens is read whole and enters the window as what the question looks at.

The new tokens are read behind all that is remembered, on a copy of the cache that has room for them. The question's
queries then vote; the entries with most votes move together, rotated to the positions that they get in the window.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ragkv.backend import forward
from ragkv.chat import Prompt
from ragkv.errors import Cancelled, PromptTooLong
from ragkv.policies import Observation, SnapKV, StreamingLLM
from ragkv.prefill import chunks
from ragkv.selection import protect, select
from ragkv.streaming.cache import StreamingCache

KEPT_TAIL = 16  # tokens at the end of a turn that stay: the template's, which begin the reply


@dataclass
class _Votes:
    """Observes one pass: each layer's scores of everything before the window, (1, kv_heads, length - window)."""

    policy: SnapKV
    window_size: int
    scores: list[Tensor] = field(default_factory=list)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, **kwargs: object) -> None:
        observation = Observation(layer, layer + 1, query, key, value, scaling, self.window_size)
        self.scores.append(self.policy.score(observation))


def read_compressed(
    model: PreTrainedModel,
    cache: StreamingCache,
    prompt: Prompt,
    question: Sequence[int],
    budget: int,
    chunk_size: int,
    cancel: threading.Event,
) -> Tensor:
    """Read a prompt and append `budget` entries of it, for which the cache has room.

    Args:
        prompt: longer than the budget. Of its "document" spans, if it has any, only what wins votes is kept.
        question: tokens of an earlier question that the prompt is about; empty if it ends with its own.
        budget: entries kept per layer and KV head.
        chunk_size: tokens per forward pass.
        cancel: when set, `Cancelled` is raised before the next pass, and the cache is as it was.

    Returns:
        Logits behind the prompt, (1, vocabulary), computed on all of it.
    """
    policy, held = SnapKV(), len(cache)
    window = len(question) or min(policy.observation_window(prompt.question_tokens), len(prompt))
    voted = len(prompt) - (0 if question else window)
    spans = [(0, max(0, cache.pinned - held)), *kept_spans(prompt, budget, voted)]
    wide, votes = _widened(cache, len(prompt) + len(question)), _Votes(policy, window)

    def read(ids: Sequence[int], observer: _Votes | None) -> Tensor:
        if cancel.is_set():
            raise Cancelled("the generation was cancelled while its prompt was being read")
        positions = wide.reserve(len(ids)).to(model.device).unsqueeze(0)
        return forward(model, torch.tensor([list(ids)], device=model.device), wide, positions, observer=observer)

    *first, last = (prompt.ids[start:end] for start, end in chunks(len(prompt), chunk_size, window))
    for ids in first:
        read(ids, None)
    logits = read(last, None if question else votes)
    if question:
        read(question, votes)
    kept = [
        select(protect(scores[..., held : held + voted], spans), budget - len(prompt) + voted, len(prompt) - voted)
        for scores in votes.scores
    ]
    cache.take(wide, held, kept)
    return logits


def kept_spans(prompt: Prompt, budget: int, voted: int) -> list[tuple[int, int]]:
    """What is kept without a vote: all but the documents, if there are any, and the prompt's last tokens.

    Args:
        voted: tokens of the prompt that are voted on; the rest is kept in any case.

    Raises:
        PromptTooLong: that leaves no room for what is voted on.
    """
    spans, start = [], 0
    documents = [span for span in prompt.spans if span.kind == "document"]
    for document in documents:
        spans.append((start, document.start))
        start = document.end
    tail = (start if documents else max(0, len(prompt) - KEPT_TAIL), len(prompt))
    spans = [(start, min(end, voted)) for start, end in (*spans, tail) if start < min(end, voted)]
    fixed = sum(end - start for start, end in spans) + len(prompt) - voted
    if fixed >= budget:
        raise PromptTooLong(
            f"{fixed} of {len(prompt)} new tokens are no tool result, and at most {budget} are kept of a turn: raise "
            "max_turn_tokens, or shorten the messages"
        )
    return spans


def _widened(cache: StreamingCache, tokens: int) -> StreamingCache:
    """A copy of the cache with room for `tokens` more, which moves back to the start rather than out of sight."""
    layout, sinks = cache.layout, cache.layout.policy.num_sink_tokens
    capacity, slots = len(cache) + tokens, cache.position + tokens
    if layout.sight is not None:
        slots = max(capacity, cache.position, min(slots, layout.sight))
    wide = replace(layout, policy=StreamingLLM(sinks, max(1, capacity - sinks)), slots=slots)
    return StreamingCache.restored(wide, cache.state())
