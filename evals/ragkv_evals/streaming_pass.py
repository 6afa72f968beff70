"""StreamingLLM for many tokens in one pass: each sees what a cache would have shown it that drops a token per token.

A text that is known beforehand need not be read token by token. The recent tokens are a band of the causal mask, and
their distances are those in the text. The sinks stand directly before the window, wherever that is, so for them each
query is rotated to its position in the cache. The two parts are merged by their log-sum-exp.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv

from ragkv.attention import masked_attention, merged
from ragkv.backend import rope_depends_on_length
from ragkv.errors import ConfigError
from ragkv.kv_store.blend import rotations_of
from ragkv.policies import StreamingLLM

_NAME = "ragkv_evals_streaming_pass"


class StreamingPass:
    """Reads texts side by side, chunk by chunk, with a window that moves on by one token per token.

    Args:
        policy: what each token sees, itself included.

    Raises:
        ConfigError: the model has layers that this does not fit.
    """

    def __init__(self, model: PreTrainedModel, policy: StreamingLLM) -> None:
        rotations = None if rope_depends_on_length(model) else rotations_of(model)
        if rotations is None:
            raise ConfigError(
                f"{type(model).__name__} cannot be read in passes: a layer has a sliding window, or a rotation that "
                "ragkv does not know or that depends on the length of the text; choose another model"
            )
        self._model, self._rotations = model, rotations
        self._sinks, self._recent = policy.num_sink_tokens, policy.window_length
        self._seen = 0
        self._first: dict[int, tuple[Tensor, Tensor]] = {}  # of each layer, the sinks
        self._last: dict[int, tuple[Tensor, Tensor]] = {}  # of each layer, the recent tokens

    @torch.inference_mode()
    def read(self, ids: Tensor) -> Tensor:
        """Logits behind every token of the next chunk, (streams, tokens, vocabulary).

        Args:
            ids: (streams, tokens); the first chunk holds all sinks.
        """
        if self._seen == 0 and ids.shape[1] < self._sinks:
            raise ConfigError(f"a first chunk of {ids.shape[1]} tokens: must hold the {self._sinks} sinks")
        held = min(self._seen, self._recent)
        positions = torch.arange(held, held + ids.shape[1], device=self._model.device).expand(ids.shape)
        with _attention_of(self._model):
            logits: Tensor = self._model(
                input_ids=ids.to(self._model.device), position_ids=positions, use_cache=False, streaming_pass=self
            ).logits
        self._seen += ids.shape[1]
        return logits

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """One layer's attention, (streams, heads, tokens, head_dim); its keys are kept for the next chunk."""
        new, before = query.shape[2], self._last.get(layer, (key[:, :, :0], value[:, :, :0]))
        keys, values = (torch.cat(states, dim=2) for states in zip(before, (key, value), strict=True))
        at = torch.arange(keys.shape[2], device=key.device)
        distance = at[-new:, None] - at
        output, lse = _attention(query, keys, values, (distance >= 0) & (distance < self._recent), scaling)
        text = self._seen + torch.arange(new, device=key.device)
        late = max(0, self._recent - self._seen)  # the first query from which a sink is no longer recent
        if self._sinks and late < new:
            first = self._first.get(layer, (key[:, :, : self._sinks], value[:, :, : self._sinks]))
            in_cache = text.clamp(max=self._sinks + self._recent - 1)
            moved = self._moved(layer, query[:, :, late:], (in_cache - at[-new:])[late:])
            gone = torch.arange(self._sinks, device=key.device) <= text[late:, None] - self._recent
            on_sinks = _plain(moved, *first, gone, scaling)
            output[:, :, late:] = merged(output[:, :, late:], lse[:, :, late:], *on_sinks)
        if self._seen == 0:
            self._first[layer] = key[:, :, : self._sinks].clone(), value[:, :, : self._sinks].clone()
        back = torch.tensor([min(0, self._recent - keys.shape[2])], device=key.device)
        last = self._moved(layer, keys[:, :, -self._recent :], back)
        self._last[layer] = last, values[:, :, -self._recent :].clone()
        return output

    def _moved(self, layer: int, states: Tensor, positions: Tensor) -> Tensor:
        rotation = self._rotations[layer]
        return states.clone() if rotation is None else rotation.rotate(states, positions).to(states.dtype)


def _attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp under a (queries, keys) mask."""
    if query.device.type == "cpu":
        return masked_attention(query, key, value, mask[None, None], scaling)
    return _plain(query, key, value, mask, scaling)


def _plain(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    groups = query.shape[1] // key.shape[1]
    scores = query.float() * scaling @ repeat_kv(key, groups).float().transpose(2, 3)
    scores.masked_fill_(~mask, -torch.inf)
    output = scores.softmax(dim=-1).to(value.dtype) @ repeat_kv(value, groups)
    return output, scores.logsumexp(dim=-1)


def _attention_interface(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    streaming_pass: StreamingPass,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    scaling = scaling or 1 / math.sqrt(query.shape[-1])
    output = streaming_pass.attend(int(module.layer_idx), query, key, value, scaling)  # type: ignore[arg-type]
    return output.transpose(1, 2).contiguous(), None


def _no_mask(**kwargs: Any) -> None:
    return None


AttentionInterface.register(_NAME, _attention_interface)
AttentionMaskInterface.register(_NAME, _no_mask)


@contextmanager
def _attention_of(model: PreTrainedModel) -> Iterator[None]:
    before = model.config._attn_implementation
    model.set_attn_implementation(_NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
