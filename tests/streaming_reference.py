"""The slow, obvious way to stream: keys are stored without rotation, and every step rotates all of them anew.

The model's rotary modules are made to rotate by nothing; the attention function then rotates queries and keys with
transformers' own functions, for the positions 0, 1, 2, ... of what is stored at that step.
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.masking_utils import eager_mask

from ragkv.backend import _cache_argument


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    stream: "ReferenceStream",
    **kwargs: Any,
) -> tuple[Tensor, None]:
    query, key = stream.rotated(module, query, key)
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    logits = query @ key.transpose(-1, -2) * scaling
    if attention_mask is not None:
        logits = logits + attention_mask
    return (logits.softmax(-1, dtype=torch.float32).to(value.dtype) @ value).transpose(1, 2).contiguous(), None


AttentionInterface.register("reference_streaming", _attention)
AttentionMaskInterface.register("reference_streaming", eager_mask)


class ReferenceStream:
    """A model that reads tokens and keeps the first `sinks` and the last `window` of them.

    Use as a context manager: the model is changed inside, and restored at the end.
    """

    def __init__(self, model: PreTrainedModel, sinks: int, window: int) -> None:
        self.model, self.sinks, self.capacity = model, sinks, sinks + window
        self.cache = DynamicCache()  # of plain layers, whatever the model: masks come from the positions in it
        self.tokens: list[int] = []
        self._rotary = [module for module in model.modules() if type(module).__name__.endswith("RotaryEmbedding")]

    def __enter__(self) -> "ReferenceStream":
        self._implementation = self.model.config._attn_implementation
        self.model.set_attn_implementation("reference_streaming")
        self._hooks = [module.register_forward_hook(_no_rotation) for module in self._rotary]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self.model.set_attn_implementation(self._implementation)

    def evict(self, count: int) -> None:
        """Drop the `count` oldest tokens behind the sinks."""
        for layer in self.cache.layers if count else ():
            for name in ("keys", "values"):
                states = getattr(layer, name)
                first, rest = states[..., : self.sinks, :], states[..., self.sinks + count :, :]
                setattr(layer, name, torch.cat([first, rest], dim=-2))
        self.tokens = self.tokens[: self.sinks] + self.tokens[self.sinks + count :]

    @torch.inference_mode()
    def read(self, tokens: list[int]) -> Tensor:
        """Make just enough room, append the tokens, and return the logits behind the last one, (vocabulary,)."""
        self.evict(max(0, len(self.tokens) + len(tokens) - self.capacity))
        positions = torch.arange(len(self.tokens), len(self.tokens) + len(tokens)).unsqueeze(0)
        self.tokens += tokens
        options = {_cache_argument(self.model): self.cache, "stream": self}
        ids = torch.tensor([tokens])
        return self.model(input_ids=ids, position_ids=positions, use_cache=True, **options).logits[0, -1]

    def rotated(self, module: nn.Module, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys for the positions that they have in the cache now."""
        if not getattr(module, "use_rope", True):
            return query, key
        rotary, positions = self._rotary[0], torch.arange(key.shape[-2]).unsqueeze(0)
        types = [self.model.config.layer_types[module.layer_idx]] if isinstance(rotary.rope_type, dict) else []
        cos, sin = type(rotary).forward(rotary, key, positions, *types)
        rotate = sys.modules[type(self.model).__module__].apply_rotary_pos_emb
        new = query.shape[-2]
        rotated_query = rotate(query, query, cos[:, -new:], sin[:, -new:])[0]
        return rotated_query, rotate(key, key, cos, sin)[1]


def _no_rotation(module: nn.Module, args: object, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return torch.ones_like(output[0]), torch.zeros_like(output[1])
