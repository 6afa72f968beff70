"""Tiny random decoders, one per architecture of the test matrix, and prompts for them. No weights, no network."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma3TextConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from ragkv.backend import prepare
from ragkv.chat import Prompt

VOCABULARY = 199
_BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def _longrope() -> dict[str, Any]:
    half = 64 // 4 * 3 // 4 // 2
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.75,
        "short_factor": [1.0 + 0.1 * i for i in range(half)],
        "long_factor": [2.0 + 0.3 * i for i in range(half)],
        "original_max_position_embeddings": 64,
    }


ARCHITECTURES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_BASE),
    "llama-mha": lambda: LlamaConfig(**{**_BASE, "num_key_value_heads": 4}),
    "llama-mqa": lambda: LlamaConfig(**{**_BASE, "num_key_value_heads": 1}),
    "llama-llama3-rope": lambda: LlamaConfig(
        **_BASE,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "mistral": lambda: MistralConfig(**_BASE, sliding_window=None),
    "mistral-sliding": lambda: MistralConfig(**_BASE, sliding_window=24),
    "mixtral": lambda: MixtralConfig(**_BASE, num_local_experts=3, num_experts_per_tok=2, sliding_window=None),
    "qwen2": lambda: Qwen2Config(**_BASE),
    "qwen3": lambda: Qwen3Config(**_BASE, head_dim=32),
    "phi3": lambda: Phi3Config(**{**_BASE, "num_key_value_heads": 4}),
    "phi3-longrope": lambda: Phi3Config(
        **_BASE, rope_parameters=_longrope(), original_max_position_embeddings=64
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **_BASE,
        head_dim=16,
        sliding_window=24,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "cohere": lambda: CohereConfig(**_BASE, use_qk_norm=True),
    "gpt-neox": lambda: GPTNeoXConfig(**{k: v for k, v in _BASE.items() if k != "num_key_value_heads"}),
}


def tiny_model(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """A random model of this architecture, ready for ragkv."""
    model = plain_model(name, dtype, seed)
    prepare(model, "sdpa")
    return model


def plain_model(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """The same model as transformers makes it."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(ARCHITECTURES[name]()).to(dtype).eval()
    # Random initial weights attend almost evenly; larger ones give attention something to choose.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(3)
    return model


def random_prompt(length: int, seed: int = 0) -> Prompt:
    """Tokens that are never a special one."""
    generator = torch.Generator().manual_seed(seed)
    return Prompt(tuple(torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()))
