"""What can be served: models outside the reach of the observer are refused by name when they are prepared."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    FalconConfig,
    Gemma2Config,
    Gemma3nTextConfig,
    LlamaConfig,
    MptConfig,
    PreTrainedConfig,
)

from conftest import ModelOf
from ragkv.backend import prepare, rope_depends_on_length, rope_regime
from ragkv.errors import ConfigError, ModelError
from tiny import ARCHITECTURES, VOCABULARY, plain_model, tiny_model

_SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
}
REFUSED: dict[str, tuple[PreTrainedConfig, str]] = {
    "FalconForCausalLM": (
        FalconConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4),
        "does not use transformers' attention interface",
    ),
    "MptForCausalLM": (
        MptConfig(vocab_size=VOCABULARY, d_model=32, n_layers=2, n_heads=4, max_seq_len=64),
        "does not use transformers' attention interface",
    ),
    "BloomForCausalLM": (
        BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4),
        "does not use transformers' attention interface",
    ),
    "Gemma2ForCausalLM": (
        Gemma2Config(**_SMALL, num_attention_heads=4, num_key_value_heads=2, head_dim=8),
        "soft-capped attention logits",
    ),
    "Gemma3nForCausalLM": (
        Gemma3nTextConfig(
            **{**_SMALL, "num_hidden_layers": 4, "intermediate_size": 48},
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            num_kv_shared_layers=2,
            vocab_size_per_layer_input=VOCABULARY,
            hidden_size_per_layer_input=8,
            activation_sparsity_pattern=[0.0] * 4,
            laurel_rank=4,
            layer_types=["sliding_attention", "full_attention"] * 2,
        ),
        "share K/V",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_cannot_be_observed_are_refused_by_name(name: str) -> None:
    config, reason = REFUSED[name]
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(ModelError, match=f"^{name} cannot be served: .*{reason}"):
        prepare(model, "sdpa")


def test_a_layer_that_hides_its_attention_is_found_at_load_time() -> None:
    model = plain_model("llama")
    attention = model.model.layers[1].self_attn
    plain_forward = attention.forward
    attention.forward = lambda *args, observer=None, **kwargs: plain_forward(*args, **kwargs)
    with pytest.raises(ModelError, match=r"LlamaForCausalLM cannot be served: the attention of its layers \[1\]"):
        prepare(model, "sdpa")


def test_a_model_that_cannot_run_is_refused() -> None:
    model = plain_model("llama")
    model.model.layers[0].self_attn.q_proj = torch.nn.Linear(3, 3)
    with pytest.raises(ModelError, match="LlamaForCausalLM cannot be served: a trial of four tokens failed"):
        prepare(model, "sdpa")


def test_unknown_attention_is_refused() -> None:
    with pytest.raises(ConfigError, match="attn_implementation='eager'"):
        prepare(plain_model("llama"), "eager")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_preparing_leaves_no_trace_in_the_modules(model_of: ModelOf, name: str) -> None:
    """No hook, no new attribute: state on modules is how one request would leak into the next."""
    plain, prepared = plain_model(name), tiny_model(name)
    for before, after in zip(plain.modules(), prepared.modules(), strict=True):
        assert type(before) is type(after)
        assert vars(before).keys() ^ vars(after).keys() <= {"long_inv_freq"}  # transformers' own, made by any pass
        assert not after._forward_hooks
        assert not after._forward_pre_hooks


def test_rotation_that_depends_on_length_is_recognised(model_of: ModelOf) -> None:
    depends = [name for name in ARCHITECTURES if rope_depends_on_length(model_of(name))]
    assert depends == ["llama-dynamic-rope", "phi3-longrope"]


def test_prompts_of_one_regime_rotate_alike(model_of: ModelOf) -> None:
    found = {name: [rope_regime(model_of(name), length) for length in (1, 64, 65, 1000)] for name in ARCHITECTURES}
    assert found.pop("llama-dynamic-rope") == [0, 0, None, None]
    assert found.pop("phi3-longrope") == [0, 0, 1, 1]
    assert all(regimes == [0] * 4 for regimes in found.values())


def test_every_rope_type_of_a_mixed_model_counts() -> None:
    model = plain_model("gemma3")
    assert not rope_depends_on_length(model)
    model.config.rope_parameters["full_attention"]["rope_type"] = "dynamic"
    assert rope_depends_on_length(model)


def test_plain_llama_config_has_no_such_rotation() -> None:
    model = AutoModelForCausalLM.from_config(LlamaConfig(**_SMALL, num_attention_heads=4))
    assert not rope_depends_on_length(model)
