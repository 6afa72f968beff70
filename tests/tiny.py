"""Tiny random decoders, one per architecture of the test matrix, a tokenizer, and prompts. No weights, no network."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
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
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from ragkv.backend import prepare
from ragkv.chat import Prompt
from ragkv.engine import Engine
from ragkv.models import LoadedModel
from ragkv.policies import Policy

VOCABULARY = 320  # three special tokens, the 256 bytes, some merges, and two added tokens
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ADDED_TOKENS = ["<tool_call>", "</tool_call>"]
FULL_LENGTH = 1024

_BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": FULL_LENGTH,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def _longrope() -> dict[str, Any]:
    pairs = 64 // 4 * 3 // 4 // 2
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.75,
        "factor": FULL_LENGTH / 64,
        "short_factor": [1.0 + 0.1 * i for i in range(pairs)],
        "long_factor": [2.0 + 0.3 * i for i in range(pairs)],
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
    "llama-yarn": lambda: LlamaConfig(
        **_BASE,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "llama-dynamic-rope": lambda: LlamaConfig(
        **{**_BASE, "max_position_embeddings": 64},
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 16.0},
    ),
    "mistral": lambda: MistralConfig(**_BASE, sliding_window=None),
    "mistral-sliding": lambda: MistralConfig(**_BASE, sliding_window=24),
    "mixtral": lambda: MixtralConfig(**_BASE, num_local_experts=3, num_experts_per_tok=2, sliding_window=None),
    "qwen2": lambda: Qwen2Config(**_BASE),
    "qwen3": lambda: Qwen3Config(**_BASE, head_dim=32),
    "phi3": lambda: Phi3Config(**{**_BASE, "num_key_value_heads": 4}),
    "phi3-longrope": lambda: Phi3Config(**_BASE, rope_parameters=_longrope(), original_max_position_embeddings=64),
    "gemma3": lambda: Gemma3TextConfig(
        **_BASE,
        head_dim=16,
        query_pre_attn_scalar=9,  # not the head dimension, so that scores need the model's own scaling
        sliding_window=24,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "cohere": lambda: CohereConfig(**_BASE, use_qk_norm=True, logit_scale=1.0),
    "gpt-neox": lambda: GPTNeoXConfig(**{k: v for k, v in _BASE.items() if k != "num_key_value_heads"}),
}

# Architectures with a layer whose whole prompt is cached, so that there is something to compress.
COMPRESSIBLE = [name for name in ARCHITECTURES if name != "mistral-sliding"]


def tiny_model(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """A random model of this architecture, ready for ragkv."""
    model = plain_model(name, dtype, seed)
    prepare(model, "sdpa")
    return model


def plain_model(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """The same model as transformers makes it."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(ARCHITECTURES[name]()).to(dtype).eval().requires_grad_(False)
    # Random initial weights attend almost evenly and repeat one token; larger ones make attention choose.
    head = model.get_output_embeddings().weight
    for weight_name, parameter in model.named_parameters():
        if parameter.ndim >= 2 and parameter is not head and "norm" not in weight_name:
            parameter.mul_(6)
    return model


def random_prompt(length: int, seed: int = 0) -> Prompt:
    """Tokens that are never a special or added one."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(len(SPECIAL_TOKENS), VOCABULARY - len(ADDED_TOKENS), (length,), generator=generator)
    return Prompt(tuple(ids.tolist()))


# ChatML with a tool section; like many real templates it passes arguments through `tojson` and refuses unknown roles.
CHAT_TEMPLATE = """\
{%- if tools %}<|im_start|>tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role not in ["system", "user", "assistant", "tool"] %}{{ raise_exception("unknown role") }}{% endif %}
{{- "<|im_start|>" + message.role + "\n" + (message.content or "") }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{{ {"name": call.function.name, "arguments": call.function.arguments} | tojson }}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# Merges are learned from this text, so that tokens end within, at and after words.
_TEXT = (
    "The documents name the answer, and the answer names the documents [1][2]. Who wrote the last question? "
    "Answer with brackets: Toad Hall, Canberra [4][9]; a quick brown fox jumps over the lazy dog."
)


@cache
def tiny_tokenizer(chat_template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of `VOCABULARY` tokens with the special tokens of ChatML."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(ADDED_TOKENS),
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT], trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=chat_template
    )
    wrapped.add_tokens(ADDED_TOKENS)  # known to the tokenizer, but not "special": decoding shows them
    return wrapped


def tiny_engine(
    name: str = "llama", policy: Policy | None = None, *, eos: tuple[int, ...] = (2,), context_length: int = FULL_LENGTH
) -> Engine:
    """An engine on a tiny model, ready at once."""
    loaded = LoadedModel(tiny_model(name), tiny_tokenizer(), f"tiny-{name}", context_length, eos, "sdpa")
    return Engine(loaded, policy)
