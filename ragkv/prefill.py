"""Read a prompt and keep what the policy chooses: each layer is compressed right after its own attention.

In one pass the full K/V of a single layer lives on top of the compressed layers before it. In chunks, which bound the
activations, the full K/V of all layers lives until the last chunk. Both keep the same entries, and so does a prompt
whose beginning is taken from a store.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ragkv.backend import forward
from ragkv.cache import CompressibleLayer, compressible, kv_bytes, kv_bytes_allocated, kv_bytes_full, new_cache, own
from ragkv.chat import Prompt
from ragkv.errors import ConfigError
from ragkv.kv_store import KVStore
from ragkv.kv_store.reuse import Reuse
from ragkv.policies import Observation, Policy, SplitsBudget
from ragkv.policies.base import tokens_to_read
from ragkv.ragged import RaggedLayer
from ragkv.selection import fit_protected, protect, select

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
        kv_bytes_allocated: bytes of the memory that holds what was kept.
        cache_read_tokens, cache_creation_tokens: tokens whose K/V a store had, and tokens that it got from this prompt.
    """

    cache: Cache
    logits: Tensor
    length: int
    window_size: int
    kept_tokens: int
    unprotected_tokens: int
    kv_bytes_full: int
    kv_bytes_kept: int
    kv_bytes_allocated: int
    cache_read_tokens: int = 0
    cache_creation_tokens: int = 0


class PrefillObserver:
    """Scores, selects and gathers one layer at a time; the state of one prefill, never kept beyond it."""

    def __init__(
        self,
        cache: Cache,
        policy: Policy,
        prompt: Prompt,
        on_layer: LayerCallback | None = None,
        reuse: Reuse | None = None,
    ) -> None:
        self.window_size = policy.observation_window(prompt.question_tokens)
        self.unprotected_tokens = 0
        self.cache, self._policy, self._prompt = cache, policy, prompt
        self._numbers = {layer: number for number, (layer, _) in enumerate(compressible(cache))}
        self._on_layer, self._reuse = on_layer, reuse

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        measured: dict[Hashable, Tensor] | None = None,
    ) -> None:
        if self._reuse is not None:
            self._reuse.observe(layer, key, value, query.shape[-2])
        stored = self.cache.layers[layer]
        if isinstance(stored, CompressibleLayer) and stored.seen == len(self._prompt):
            place = self._numbers[layer], len(self._numbers)
            budget = self._policy.budget(stored.seen, *place)
            if budget < stored.seen:
                measured = {} if measured is None else measured
                observation = Observation(*place, query, key, value, scaling, self.window_size, measured)
                stored = self._compress(stored, observation, budget)
                self.cache.layers[layer] = stored
        own(stored)
        if self._on_layer is not None:
            self._on_layer(layer + 1, len(self.cache))

    def _compress(self, stored: CompressibleLayer, observation: Observation, budget: int) -> CompressibleLayer:
        """The layer with what the policy keeps."""
        count, prefix = budget - self.window_size, len(self._prompt) - self.window_size
        spans = self._prompt.protected if self._policy.protects else []
        # Half of the budget stays for the votes, however much wants protection.
        protected, left_out = fit_protected(spans, prefix, count // 2)
        self.unprotected_tokens = max(self.unprotected_tokens, left_out)
        scores = protect(self._policy.score(observation), protected)
        if isinstance(self._policy, SplitsBudget):
            counts = self._policy.head_budgets(scores, count)
            heads = scores.chunk(scores.shape[1], dim=1)
            return RaggedLayer(
                stored, [select(head, n, self.window_size) for head, n in zip(heads, counts, strict=True)]
            )
        stored.keep(select(scores, count, self.window_size))
        return stored

    def prefilled(self, logits: Tensor) -> Prefilled:
        """What has been read, once all layers have been seen."""
        kept = [part.keys.shape[-2] for _, layer in compressible(self.cache) for part in layer.parts]
        return Prefilled(
            cache=self.cache,
            logits=logits,
            length=len(self._prompt),
            window_size=self.window_size,
            kept_tokens=max(kept, default=0),
            unprotected_tokens=self.unprotected_tokens,
            kv_bytes_full=kv_bytes_full(self.cache),
            kv_bytes_kept=kv_bytes(self.cache),
            kv_bytes_allocated=kv_bytes_allocated(self.cache),
            cache_read_tokens=0 if self._reuse is None else self._reuse.read_tokens,
            cache_creation_tokens=0 if self._reuse is None else self._reuse.finish(),
        )


def prefill(
    model: PreTrainedModel,
    prompt: Prompt,
    policy: Policy,
    *,
    chunk_size: int | None = None,
    on_layer: LayerCallback | None = None,
    store: KVStore | None = None,
) -> Prefilled:
    """Run the prompt through the model and compress each layer's K/V by the policy (design: SnapKV, section 4).

    Args:
        chunk_size: tokens per forward pass; None reads the prompt in one pass, which is fastest.
        on_layer: told of the progress of each pass.
        store: has the K/V of the prompt's beginning, perhaps, and gets those of the rest. The tokens
            whose queries the policy needs (`ragkv.policies.base.tokens_to_read`) are read anew in any case. Of no use
            to models whose rotation depends on the prompt's length: their K/V fit no prompt of another length.

    Raises:
        ConfigError: the policy takes the queries of more tokens at once than chunks have.
    """
    cache = new_cache(model.config)
    needed = tokens_to_read(policy, len(prompt), prompt.question_tokens)
    reuse = Reuse.of(store, model, cache, prompt.ids, len(prompt) - needed)
    known = 0 if reuse is None else reuse.read_tokens
    observer = PrefillObserver(cache, policy, prompt, on_layer, reuse)
    ids = torch.tensor([prompt.ids[known:]], device=model.device)
    positions = torch.arange(known, len(prompt), device=model.device).unsqueeze(0)
    passes = chunks(len(prompt) - known, chunk_size, needed)
    window_size = observer.window_size
    if needed > window_size and len(chunks(len(prompt), chunk_size, window_size)) > 1:
        raise ConfigError(
            f"prefill_chunk_size={chunk_size}: {type(policy).__name__} needs the queries of {needed} tokens "
            "at once; leave it at None to read prompts in one pass"
        )
    for start, end in passes:
        logits = forward(model, ids[:, start:end], cache, positions[:, start:end], observer=observer)
    return observer.prefilled(logits)


def chunks(length: int, chunk_size: int | None, window_size: int) -> Sequence[tuple[int, int]]:
    """[start, end) of each forward pass; the last one holds the whole observation window."""
    starts = list(range(0, length, chunk_size or length))
    while len(starts) > 1 and length - starts[-1] < window_size:
        starts.pop()
    return list(zip(starts, [*starts[1:], length], strict=True))
