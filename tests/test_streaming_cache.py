"""The streaming cache against a slow reference that rotates every key anew at every step."""

import copy
from functools import partial

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    GlmConfig,
    Lfm2Config,
    LlamaConfig,
    MptConfig,
    OPTConfig,
    PreTrainedConfig,
    SmolLM3Config,
)

from conftest import ModelOf
from ragkv.backend import prepare
from ragkv.errors import ConfigError, ModelError
from ragkv.policies import StreamingLLM
from ragkv.streaming.cache import StreamingCache, read
from ragkv.streaming.layer import StreamingLayer
from ragkv.streaming.layout import Layout
from ragkv.streaming.rotation import find_rotations
from reference import greedy, run
from streaming_reference import ReferenceStream
from tiny import _BASE, ARCHITECTURES, FULL_LENGTH, VOCABULARY, random_prompt

SINKS, WINDOW = 4, 16  # 20 tokens are less than the sliding window of 24

Llama = partial(LlamaConfig, **_BASE)
MORE: dict[str, PreTrainedConfig] = {
    "linear": Llama(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}),
    # Half of each head is rotated, in neighbouring pairs.
    "glm": GlmConfig(**_BASE, head_dim=16, partial_rotary_factor=0.5, attention_bias=False),
    # Every other layer marks no positions.
    "smollm3": SmolLM3Config(**_BASE, no_rope_layers=[1, 0, 1]),
    "mpt": MptConfig(d_model=64, n_heads=4, n_layers=2, max_seq_len=FULL_LENGTH, vocab_size=VOCABULARY),
}


def _cache(model: torch.nn.Module, sinks: int = SINKS, window: int = WINDOW) -> StreamingCache:
    return StreamingCache(Layout.of(model, StreamingLLM(sinks, window)))


def _step(model: torch.nn.Module, cache: StreamingCache, tokens: list[int]) -> torch.Tensor:
    cache.evict(max(0, len(tokens) - cache.room))
    return read(model, cache, torch.tensor([tokens]))[0]


def _assert_streams_like_the_reference(
    model: torch.nn.Module, plain: torch.nn.Module, steps: int, sinks: int = SINKS, window: int = WINDOW
) -> None:
    """Greedy decoding behind a prompt: at each step both read the token that the fast one chose."""
    cache, tokens = _cache(model, sinks, window), list(random_prompt(10).ids)
    with ReferenceStream(plain, sinks, window) as reference:
        for _ in range(steps):
            logits, expected = _step(model, cache, tokens), reference.read(tokens)
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
            tokens = [int(logits.argmax())]
    assert len(cache) == sinks + window


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_streaming_equals_the_slow_reference(model_of: ModelOf, plain_of: ModelOf, name: str) -> None:
    """Some hundred steps, with dozens of rebases."""
    _assert_streams_like_the_reference(model_of(name), plain_of(name), 300)


@pytest.mark.parametrize("name", MORE)
def test_so_do_other_ways_to_mark_positions(name: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MORE[name], attn_implementation="eager").eval().requires_grad_(False)
    _sharpen(model)
    if name == "mpt":  # it computes its own attention, so the stored keys are as they are anyway
        _assert_equals_a_window_of_alibi(model)
        return
    plain = copy.deepcopy(model)
    prepare(model, "sdpa")
    _assert_streams_like_the_reference(model, plain, 200)


def _sharpen(model: torch.nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2 and "norm" not in name and parameter is not model.get_output_embeddings().weight:
            parameter.mul_(6)


def _assert_equals_a_window_of_alibi(model: torch.nn.Module) -> None:
    cache, tokens = _cache(model), list(random_prompt(10).ids)
    reference = DynamicCache()
    for _ in range(100):
        logits = _step(model, cache, tokens)
        for layer in reference.layers if len(tokens) == 1 and reference.get_seq_length() == SINKS + WINDOW else ():
            for states in ("keys", "values"):
                now = getattr(layer, states)
                setattr(layer, states, torch.cat([now[..., :SINKS, :], now[..., SINKS + 1 :, :]], dim=-2))
        expected = run(model, tokens, reference, 0)[-1]
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
        tokens = [int(logits.argmax())]


@pytest.mark.parametrize("name", ["llama", "gemma3", "cohere"])
@pytest.mark.parametrize("sinks", [0, 1, 8])
def test_any_number_of_sinks(model_of: ModelOf, plain_of: ModelOf, name: str, sinks: int) -> None:
    _assert_streams_like_the_reference(model_of(name), plain_of(name), 100, sinks=sinks)


def test_thousands_of_steps(model_of: ModelOf, plain_of: ModelOf) -> None:
    _assert_streams_like_the_reference(model_of("llama"), plain_of("llama"), 3000, sinks=4, window=28)


def test_layers_with_a_smaller_window_of_their_own(model_of: ModelOf, plain_of: ModelOf) -> None:
    """Gemma's sliding layers see 24 tokens of the 64 that its full layer sees."""
    _assert_streams_like_the_reference(model_of("gemma3"), plain_of("gemma3"), 200, window=60)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_reading_in_chunks_equals_the_slow_reference(model_of: ModelOf, plain_of: ModelOf, name: str) -> None:
    """Chunks of any size up to all that is not pinned; each evicts just what it needs."""
    model, sizes = model_of(name), (20, 1, 16, 7, 3, 16, 1, 1, 12, 5, 16, 2, 9)
    cache, ids = _cache(model), list(random_prompt(sum(sizes)).ids)
    with ReferenceStream(plain_of(name), SINKS, WINDOW) as reference:
        for size in sizes:
            chunk, ids = ids[:size], ids[size:]
            torch.testing.assert_close(_step(model, cache, chunk), reference.read(chunk), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_nothing_differs_while_everything_fits(model_of: ModelOf, plain_of: ModelOf, name: str) -> None:
    model, prompt = model_of(name), list(random_prompt(8).ids)
    cache, tokens, written = _cache(model), prompt, []
    for _ in range(12):
        tokens = [int(_step(model, cache, tokens).argmax())]
        written += tokens
    assert written == greedy(plain_of(name), prompt, 12)


def test_pinned_tokens_are_sinks_of_their_own(model_of: ModelOf, plain_of: ModelOf) -> None:
    """Nine pinned tokens, of which four are the sinks, equal nine sinks."""
    model, ids = model_of("llama"), random_prompt(9).ids
    pinned, sinks = _cache(model, 4, 16), _cache(model, 9, 11)
    pinned.pin(9)
    for tokens in ([*ids], *([token] for token in random_prompt(60, seed=1).ids)):
        assert torch.equal(_step(model, pinned, tokens), _step(model, sinks, tokens))


def test_rows_stream_side_by_side(model_of: ModelOf) -> None:
    model, streams = model_of("llama"), torch.tensor([random_prompt(60, seed=seed).ids for seed in range(3)])
    together, alone = _cache(model), [_cache(model) for _ in range(3)]
    for column in streams.T:
        together.evict(max(0, 1 - together.room))
        logits = read(model, together, column.unsqueeze(1))
        expected = torch.stack([_step(model, cache, [int(t)]) for cache, t in zip(alone, column, strict=True)])
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "gemma3", "phi3-longrope"])
@pytest.mark.parametrize("seen", [0, 5, 20, 21, 29, 30, 31, 100])
def test_a_copy_goes_on_bit_for_bit(model_of: ModelOf, name: str, seen: int) -> None:
    model, cache = model_of(name), _cache(model_of(name))
    for token in random_prompt(seen).ids:
        _step(model, cache, [token])
    copied = cache.copy()
    rest = random_prompt(50, seed=1).ids
    straight = [_step(model, cache, [token]) for token in rest]
    assert all(torch.equal(_step(model, copied, [t]), logits) for t, logits in zip(rest, straight, strict=True))


def test_memory_stays_as_it_is(model_of: ModelOf) -> None:
    model = model_of("llama")
    cache, sizes = _cache(model), set()
    for number, token in enumerate(random_prompt(400).ids):
        _step(model, cache, [token])
        if number >= 40:
            sizes.add(cache.nbytes)
    per_token = 2 * 3 * 2 * 16 * 4  # keys and values, layers, KV heads, head_dim, float32
    assert sizes == {(30 + SINKS) * per_token}


def test_an_eviction_writes_the_pinned_keys_and_no_others(model_of: ModelOf) -> None:
    model, cache = model_of("llama"), _cache(model_of("llama"))
    _step(model, cache, list(random_prompt(20).ids))
    recent = cache.layers[0].keys[..., SINKS + 3 :, :].clone()
    cache.evict(3)
    assert torch.equal(cache.layers[0].keys[..., SINKS:, :], recent)
    assert cache.layers[0].keys.data_ptr() - cache.layers[0]._buffers[0].data_ptr() == 3 * 16 * 4


def test_no_drift_after_a_hundred_thousand_evictions(model_of: ModelOf) -> None:
    """Keys of fixed content flow through a layer; at the end each is as if it had been rotated once."""
    rotation = find_rotations(model_of("llama"))[0]
    assert rotation is not None
    unrotated = torch.randn(1, 2, 64, 16, generator=torch.Generator().manual_seed(0))
    layer, sinks, window = StreamingLayer(SINKS + 60 + 30, rotation, False), SINKS, 60
    for token in range(100_000 + sinks + window):
        if layer.end - layer.start == sinks + window:
            layer.evict(1, sinks)
        if layer.end == SINKS + 60 + 30:
            layer.rebase(sinks)
        one = unrotated[:, :, token % 64 : token % 64 + 1]
        layer.update(rotation.rotate(one, torch.tensor([layer.end])), one)
    held = [*range(sinks), *((100_000 + sinks + i) % 64 for i in range(window))]
    expected = rotation.rotate(unrotated[:, :, held], torch.arange(layer.start, layer.end))
    assert torch.equal(layer.values, unrotated[:, :, held])
    assert float((layer.keys - expected).abs().max()) < 2e-5


@pytest.mark.parametrize(
    ("name", "window", "most"),
    [("mistral-sliding", 21, 20), ("llama-dynamic-rope", 61, 60), ("phi3-longrope", 1000, 60)],
)
def test_more_than_the_model_sees_is_refused(model_of: ModelOf, name: str, window: int, most: int) -> None:
    with pytest.raises(ConfigError, match=f"so the sinks would be out of sight; set window_length to {most} or less"):
        _cache(model_of(name), window=window)
    assert _cache(model_of(name), window=most).capacity == most + SINKS


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (OPTConfig(hidden_size=64, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=64,
                   vocab_size=VOCABULARY), "OPTForCausalLM cannot stream: the keys of its layer 0 change with their"),
        (Lfm2Config(**{**_BASE, "tie_word_embeddings": True}, layer_types=["conv", "full_attention", "conv"]),
         "Lfm2ForCausalLM cannot stream: its layer 0 is a Linear"),
    ],
)  # fmt: skip
def test_models_that_cannot_stream_are_named(config: PreTrainedConfig, message: str) -> None:
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(ModelError, match=message):
        _cache(model)


def test_room_is_made_before_tokens_are_read(model_of: ModelOf) -> None:
    model, cache = model_of("llama"), _cache(model_of("llama"))
    _step(model, cache, list(random_prompt(18).ids))
    with pytest.raises(ConfigError, match="there is room for 2 tokens"):
        read(model, cache, torch.tensor([[5, 6, 7]]))
    with pytest.raises(ConfigError, match=r"evict\(15\): 18 tokens are held, 4 of them pinned"):
        cache.evict(15)
    with pytest.raises(ConfigError, match="must be less than the 20 tokens"):
        cache.pin(20)
    cache.evict(1)
    with pytest.raises(ConfigError, match="tokens have been evicted already"):
        cache.pin(8)


def test_a_pass_that_breaks_off_leaves_no_trace(model_of: ModelOf) -> None:
    model, cache = model_of("llama"), _cache(model_of("llama"))
    _step(model, cache, list(random_prompt(40).ids)[:20])
    _step(model, cache, [7])
    copied = cache.copy()

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    hook = model.model.layers[1].register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        _step(model, cache, [8])
    hook.remove()
    copied.evict(1)
    assert torch.equal(_step(model, cache, [9]), read(model, copied, torch.tensor([[9]]))[0])
