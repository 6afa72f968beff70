"""Several policies on one and the same prefill: the prompt is read once, and each policy keeps a cache of its own.

After a layer's attention every policy scores and gathers its copy, then the layer's whole K/V is dropped: on top of the
compressed caches one layer's lives at a time. What each policy keeps is what it keeps in a prefill of its own.
"""

from collections.abc import Hashable, Sequence
from copy import copy

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ragkv.backend import forward
from ragkv.cache import new_cache, own
from ragkv.chat import Prompt
from ragkv.kv_store import KVStore
from ragkv.kv_store.reuse import Reuse
from ragkv.policies import Policy
from ragkv.policies.base import tokens_to_read
from ragkv.prefill import LayerCallback, Prefilled, PrefillObserver


def prefill_many(
    model: PreTrainedModel,
    prompt: Prompt,
    policies: Sequence[Policy],
    *,
    on_layer: LayerCallback | None = None,
    store: KVStore | None = None,
) -> list[Prefilled]:
    """Read a prompt in one pass and compress each layer's K/V by every policy.

    Args:
        store: as of `ragkv.prefill.prefill`; the beginning is read anew if one of the policies needs all queries.

    Returns:
        One for each policy. Layers that several keep whole are held once, and copied by the first token decoded.
    """
    trunk = new_cache(model.config)
    branches = [PrefillObserver(new_cache(model.config), policy, prompt) for policy in policies]
    needed = max(tokens_to_read(policy, len(prompt), prompt.question_tokens) for policy in policies)
    reuse = Reuse.of(store, model, trunk, prompt.ids, len(prompt) - needed)
    known = 0 if reuse is None else reuse.read_tokens
    ids = torch.tensor([prompt.ids[known:]], device=model.device)
    positions = torch.arange(known, len(prompt), device=model.device).unsqueeze(0)
    logits = forward(model, ids, trunk, positions, observer=_Branching(trunk, branches, on_layer, reuse))
    created = 0 if reuse is None else reuse.finish()
    read = [branch.prefilled(logits) for branch in branches]
    for each in read:
        each.cache_read_tokens, each.cache_creation_tokens = known, created
    return read


class _Branching:
    """Gives each layer of the trunk to all branches, and empties it."""

    def __init__(
        self,
        trunk: Cache,
        branches: Sequence[PrefillObserver],
        on_layer: LayerCallback | None,
        reuse: Reuse | None,
    ) -> None:
        self._trunk, self._branches, self._on_layer, self._reuse = trunk, branches, on_layer, reuse

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> None:
        if self._reuse is not None:
            self._reuse.observe(layer, key, value, query.shape[-2])
        stored = self._trunk.layers[layer]
        own(stored)
        measured: dict[Hashable, Tensor] = {}
        for branch in self._branches:
            branch.cache.layers[layer] = copy(stored)  # the tensors are shared, and no layer changes them in place
            branch(layer, query, key, value, scaling, measured)
        stored.reset()
        if self._on_layer is not None:
            self._on_layer(layer + 1, len(self._trunk))
