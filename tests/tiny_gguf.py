"""A tiny random Qwen2 as a GGUF file, with a byte-level tokenizer that has chat and tool tokens. No network."""

from pathlib import Path

import gguf
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import Qwen2Config, Qwen2ForCausalLM

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TOOLS = ("<tool_call>", "</tool_call>")
MERGES = ("Ġ t", "h e", "Ġt he")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.layers": "blk",
    "lm_head": "output",
}


def tokens() -> list[str]:
    """The vocabulary in the order of its ids."""
    merged = [merge.replace(" ", "") for merge in MERGES]
    return [*sorted(ByteLevel.alphabet()), *merged, *SPECIAL, *TOOLS]


def tiny_qwen2(tied: bool = False) -> Qwen2ForCausalLM:
    """A random model of two layers in float32, its weights representable in bfloat16."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokens()),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": 50_000.0},
        tie_word_embeddings=tied,
    )
    model = Qwen2ForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data = (parameter.data + 0.1 * torch.randn_like(parameter)).bfloat16().float()
    return model


def write_gguf(path: Path, model: Qwen2ForCausalLM, *, leave_out: str = "") -> Path:
    """Write the model in float32; `leave_out` names one GGUF tensor to forget."""
    config, vocabulary = model.config, tokens()
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_name("Tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(vocabulary)
    writer.add_token_types([3 if token in SPECIAL else 4 if token in TOOLS else 1 for token in vocabulary])
    writer.add_token_merges(list(MERGES))
    writer.add_eos_token_id(vocabulary.index("<|im_end|>"))
    writer.add_bos_token_id(vocabulary.index("<|endoftext|>"))
    writer.add_pad_token_id(vocabulary.index("<|endoftext|>"))
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, parameter in model.named_parameters():
        for theirs, ours in _NAMES.items():
            name = name.replace(theirs, ours)
        if name != leave_out:
            writer.add_tensor(name, parameter.detach().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
