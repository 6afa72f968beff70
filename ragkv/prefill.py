"""Read a prompt and keep what the policy chooses: each layer is compressed right after its own attention.

In one pass the full K/V of a single layer lives on top of the compressed layers before it. In chunks, which bound the
activations, the full K/V of all layers lives until the last chunk. Both keep the same entries.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ragkv.backend import forward
from ragkv.cache import CompressibleLayer, kv_bytes, kv_bytes_full, new_cache, own
from ragkv.chat import Prompt
from ragkv.policies import Observation, Policy
from ragkv.selection import fit_protected, select

LayerCallback = Callable[[int, int], None]
"""Called with (layers done, layers in all) as a prefill goes on; an exception it raises ends the prefill."""


@dataclass
class Prefilled:
    """A prompt that has been read.

    Attributes:
        cache: what was kept; decoding appends to it.
        logits: (1, vocabulary) for the first token of the reply.
        window_size: length of the observation window that was used.
        kept_tokens: most entries that any KV head of a full-attention layer keeps.
        unprotected_tokens: tokens of spans that were to be protected and for which the budget had no room.
        kv_bytes_full, kv_bytes_kept: bytes of K/V for the whole prompt and as kept.
    """

    cache: Cache
    logits: Tensor
    length: int
    window_size: int
    kept_tokens: int
    unprotected_tokens: int
    kv_bytes_full: int
    kv_bytes_kept: int


class PrefillObserver:
    """Scores, selects and gathers one layer at a time; the state of one prefill, never kept beyond it."""

    def __init__(self, cache: Cache, policy: Policy, prompt: Prompt, on_layer: LayerCallback | None = None) -> None:
        self.window_size = policy.observation_window(prompt.question_tokens)
        self.unprotected_tokens = 0
        self._cache, self._policy, self._prompt = cache, policy, prompt
        self._on_layer = on_layer

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> None:
        stored = self._cache.layers[layer]
        if isinstance(stored, CompressibleLayer) and stored.seen == len(self._prompt):
            budget = self._policy.budget(stored.seen, layer, len(self._cache))
            if budget < stored.seen:
                observation = Observation(layer, len(self._cache), query, key, value, scaling, self.window_size)
                stored.keep(self._kept(observation, budget))
        own(stored)
        if self._on_layer is not None:
            self._on_layer(layer + 1, len(self._cache))

    def _kept(self, observation: Observation, budget: int) -> Tensor:
        count, prefix = budget - self.window_size, len(self._prompt) - self.window_size
        spans = self._prompt.protected if self._policy.protects else []
        # Half of the budget stays for the votes, however much wants protection.
        protected, left_out = fit_protected(spans, prefix, count // 2)
        self.unprotected_tokens = max(self.unprotected_tokens, left_out)
        return select(self._policy.score(observation), count, self.window_size, protected)


def prefill(
    model: PreTrainedModel,
    prompt: Prompt,
    policy: Policy,
    *,
    chunk_size: int | None = None,
    on_layer: LayerCallback | None = None,
) -> Prefilled:
    """Run the prompt through the model and compress each layer's K/V by the policy (design: SnapKV, section 4).

    Args:
        chunk_size: tokens per forward pass; None reads the prompt in one pass, which is fastest.
        on_layer: told of the progress of each pass.
    """
    cache = new_cache(model.config)
    observer = PrefillObserver(cache, policy, prompt, on_layer)
    ids = torch.tensor([prompt.ids], device=model.device)
    positions = torch.arange(len(prompt), device=model.device).unsqueeze(0)
    for start, end in chunks(len(prompt), chunk_size, observer.window_size):
        logits = forward(model, ids[:, start:end], cache, positions[:, start:end], observer=observer)
    full_layers = [layer for layer in cache.layers if isinstance(layer, CompressibleLayer)]
    return Prefilled(
        cache=cache,
        logits=logits,
        length=len(prompt),
        window_size=observer.window_size,
        kept_tokens=max((layer.keys.shape[-2] for layer in full_layers), default=0),
        unprotected_tokens=observer.unprotected_tokens,
        kv_bytes_full=kv_bytes_full(cache),
        kv_bytes_kept=kv_bytes(cache),
    )


def chunks(length: int, chunk_size: int | None, window_size: int) -> Sequence[tuple[int, int]]:
    """[start, end) of each forward pass; the last one holds the whole observation window."""
    starts = list(range(0, length, chunk_size or length))
    while len(starts) > 1 and length - starts[-1] < window_size:
        starts.pop()
    return list(zip(starts, [*starts[1:], length], strict=True))
