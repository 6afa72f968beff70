"""The one place that knows how today's transformers spells things: arguments, rope types, what can be served."""

import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ragkv.attention import AttentionObserver, implementation_name
from ragkv.cache import compressible, kv_bytes, new_cache
from ragkv.errors import ModelError


@torch.inference_mode()
def forward(
    model: PreTrainedModel,
    ids: Tensor,
    cache: Cache,
    positions: Tensor,
    mask: Tensor | None = None,
    observer: AttentionObserver | None = None,
) -> Tensor:
    """One forward pass that appends to the cache.

    Args:
        ids: (batch, new tokens).
        positions: (batch, new tokens) logical positions.
        mask: (batch, tokens seen with the new ones) bool, False on padding; None without padding.
        observer: sees every layer's attention.

    Returns:
        Logits of the last token, (batch, vocabulary).
    """
    options: dict[str, Any] = {_cache_argument(model): cache}
    if observer is not None:
        options["observer"] = observer
    with _rotation_of_its_own(model):
        output = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **options,
        )
    return output.logits[:, -1]  # type: ignore[no-any-return]


def _cache_argument(model: PreTrainedModel) -> str:
    """`cache` in new releases of transformers, `past_key_values` before."""
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"


def prepare(model: PreTrainedModel, base: str) -> None:
    """Switch a loaded model to the observed attention and make sure that ragkv can serve it.

    Raises:
        ModelError: the architecture does not use transformers' attention interface, shares K/V between layers, or caps
            its attention logits; the text names it.
    """
    name, config = type(model).__name__, model.config.get_text_config()
    if not getattr(model, "_supports_attention_backend", False):
        raise ModelError(f"{name} cannot be served: it does not use transformers' attention interface")
    if getattr(config, "num_kv_shared_layers", 0):
        raise ModelError(f"{name} cannot be served: its layers share K/V, so none can be compressed alone")
    if getattr(config, "attn_logit_softcapping", None):
        raise ModelError(f"{name} cannot be served: sdpa and its observer know no soft-capped attention logits")
    model.set_attn_implementation(implementation_name(base))
    _probe(model, name)


def _probe(model: PreTrainedModel, name: str) -> None:
    """Run four tokens and see that every full-attention layer shows its keys as they are cached."""
    cache, seen = new_cache(model.config), set[int]()
    layers = dict(compressible(cache))

    def observer(layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> None:
        stored = layers.get(layer)
        if stored is not None and key.shape == stored.keys.shape and value.shape == stored.values.shape:
            seen.add(layer)

    tokens = torch.arange(4, device=model.device).unsqueeze(0)
    try:
        forward(model, tokens, cache, tokens, observer=observer)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ModelError(f"{name} cannot be served: a trial of four tokens failed ({error})") from error
    missing = sorted(layers.keys() - seen)
    if missing:
        raise ModelError(f"{name} cannot be served: the attention of its layers {missing} cannot be observed")


def bytes_per_token(model: PreTrainedModel) -> int:
    """Bytes of K/V that the model makes of one token, in all layers."""
    cache, token = new_cache(model.config), torch.zeros(1, 1, dtype=torch.long, device=model.device)
    forward(model, token, cache, token)
    return kv_bytes(cache)


def rope_depends_on_length(model: PreTrainedModel) -> bool:
    """Whether a token's rotation depends on the longest position of its pass: it then differs in chunks and batches."""
    return bool(_ropes_by_length(model))


def rope_original_length(model: PreTrainedModel) -> int | None:
    """Positions that a model whose rotation depends on length rotates as it was first trained; None for all others."""
    return min((original for _, original in _ropes_by_length(model)), default=None)


def rope_regime(model: PreTrainedModel, length: int) -> int | None:
    """How many of the model's rotations a prompt of this length has driven beyond their original lengths.

    Prompts of one regime rotate their tokens alike. None: a rotation is this length's own ("dynamic").
    """
    beyond = [kind for kind, original in _ropes_by_length(model) if length > original]
    return None if "dynamic" in beyond else len(beyond)


def _ropes_by_length(model: PreTrainedModel) -> list[tuple[str, int]]:
    """Type and original length of the rotations that depend on length."""
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    entries = [entry for entry in (rope, *rope.values()) if isinstance(entry, dict)]
    return [
        (entry["rope_type"], int(entry.get("original_max_position_embeddings") or config.max_position_embeddings))
        for entry in entries
        if entry.get("rope_type") in ("dynamic", "longrope")
    ]


_ROTATING = threading.RLock()  # a callback of a prefill may use the model itself


@contextmanager
def _rotation_of_its_own(model: PreTrainedModel) -> Iterator[None]:
    """Let a forward pass depend on nothing but its own positions, and on no other thread.

    Rotations that depend on length are kept on the model's modules, from pass to pass ("dynamic" even remembers the
    longest prompt that it has met), so they are reset before each pass, and passes take turns.
    """
    if not rope_depends_on_length(model):
        yield
        return
    with _ROTATING:
        for module in model.modules():
            original = getattr(module, "original_inv_freq", None)
            if isinstance(original, Tensor) and hasattr(module, "max_seq_len_cached"):
                module.max_seq_len_cached = module.original_max_seq_len
                module.register_buffer("inv_freq", original.clone(), persistent=False)
        yield
