"""Reuse is exact: a prompt whose beginning comes from a store is read, observed and compressed as if it did not."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import reference
from conftest import ModelOf
from ragkv.backend import forward
from ragkv.cache import new_cache
from ragkv.chat import Prompt, Span
from ragkv.compare import prefill_many
from ragkv.kv_store import KVStore
from ragkv.policies import H2O, AdaKV, FullKV, Policy, PyramidKV, RandomKV, SnapKV, StreamingLLM
from ragkv.prefill import Prefilled, prefill
from tiny import ARCHITECTURES, random_prompt, tiny_model

BLOCK, WINDOW = 16, 8
SNAPKV = SnapKV(40, WINDOW)
REUSABLE = [name for name in ARCHITECTURES if name != "llama-dynamic-rope"]  # at the lengths of most tests


def small_store(memory_bytes: int = 2**30, folder: Path | None = None, **options: str) -> KVStore:
    return KVStore(memory_bytes, folder, block_size=BLOCK, **options)


def sharing(prompt: Prompt, shared: int, length: int, seed: int = 7) -> Prompt:
    """A prompt of `length` tokens whose first `shared` are those of another."""
    rest = list(random_prompt(length, seed).ids[shared:])
    if shared < min(length, len(prompt)) and rest[0] == prompt.ids[shared]:
        rest[0] = 3 + (rest[0] - 2) % 300
    return Prompt(prompt.ids[:shared] + tuple(rest))


def assert_equal(reused: Prefilled, fresh: Prefilled) -> None:
    """The same entries at the same positions, and the same logits."""
    torch.testing.assert_close(reused.logits, fresh.logits, rtol=1e-4, atol=1e-4)
    for mine, other in zip(_parts(reused), _parts(fresh), strict=True):
        assert mine.get_seq_length() == other.get_seq_length()
        positions = getattr(mine, "positions", None), getattr(other, "positions", None)
        assert positions == (None, None) or torch.equal(*positions)
        torch.testing.assert_close(mine.keys, other.keys, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(mine.values, other.values, rtol=1e-4, atol=1e-4)
    assert (reused.kv_bytes_full, reused.kv_bytes_kept) == (fresh.kv_bytes_full, fresh.kv_bytes_kept)
    assert (reused.kept_tokens, reused.window_size) == (fresh.kept_tokens, fresh.window_size)


def _parts(read: Prefilled) -> list[Any]:
    """The layers, and instead of one whose heads hold different numbers of entries its heads."""
    return [part for layer in read.cache.layers for part in getattr(layer, "parts", [layer])]


@pytest.mark.parametrize("policy", [AdaKV(40, WINDOW), PyramidKV(40, WINDOW), H2O(40)], ids=str)
def test_policies_of_every_kind_may_reuse(model_of: ModelOf, policy: Policy) -> None:
    """Budgets by head and by layer; and one that needs all queries, which reads the prompt whole."""
    model, store, first = model_of("qwen3"), small_store(), random_prompt(100)
    prefill(model, first, policy, store=store)
    second = sharing(first, 70, 110)
    reused = prefill(model, second, policy, store=store)
    assert reused.cache_read_tokens == (0 if isinstance(policy, H2O) else 64)
    assert_equal(reused, prefill(model, second, policy))


@pytest.mark.parametrize("policy", [StreamingLLM(3, 60), RandomKV(80, 60), FullKV()], ids=str)
@pytest.mark.parametrize("chunk_size", [None, 20])
def test_a_window_that_nobody_looks_out_of_is_reused_too(
    model_of: ModelOf, policy: Policy, chunk_size: int | None
) -> None:
    """Of policies that take no queries only what is new in a prompt is read, however long a tail they keep."""
    model, store, first = model_of("llama"), small_store(), random_prompt(100)
    prefill(model, first, policy, store=store)
    second = sharing(first, 100, 110)
    reused, fresh = prefill(model, second, policy, store=store, chunk_size=chunk_size), prefill(model, second, policy)
    assert reused.cache_read_tokens == 96
    assert_equal(reused, fresh)
    several = prefill_many(model, second, [policy, SNAPKV], store=store)
    assert several[0].cache_read_tokens == 96
    assert_equal(several[0], fresh)


@pytest.mark.parametrize("name", REUSABLE)
@pytest.mark.parametrize("policy", [SNAPKV, FullKV(), StreamingLLM(3, 20)], ids=str)
def test_reuse_equals_recomputation(model_of: ModelOf, name: str, policy: Policy) -> None:
    """Including what is decoded on the caches afterwards, across the window of sliding layers."""
    model, store, first = model_of(name), small_store(), random_prompt(100)
    prefill(model, first, policy, store=store)
    second = sharing(first, 70, 110)
    reused, fresh = prefill(model, second, policy, store=store), prefill(model, second, policy)
    assert reused.cache_read_tokens == 64
    assert_equal(reused, fresh)
    with torch.inference_mode():
        for n, token in enumerate(random_prompt(30, seed=1).ids):
            got, expected = (reference.run(model, [token], each.cache, 110 + n) for each in (reused, fresh))
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral-sliding"])
@pytest.mark.parametrize("shared", [0, 1, *range(BLOCK - 1, BLOCK + 2), *range(2 * BLOCK - 1, 2 * BLOCK + 2), 95, 96])
@pytest.mark.parametrize("length", [100, 104, 105, 112])
def test_prefixes_of_every_length_around_the_borders_of_blocks(
    model_of: ModelOf, name: str, shared: int, length: int
) -> None:
    model, store, first = model_of(name), small_store(), random_prompt(96)
    prefill(model, first, SNAPKV, store=store)
    second = sharing(first, shared, length)
    reused = prefill(model, second, SNAPKV, store=store)
    assert reused.cache_read_tokens == min(shared, length - WINDOW) // BLOCK * BLOCK
    assert reused.cache_creation_tokens == (length // BLOCK - shared // BLOCK) * BLOCK
    assert_equal(reused, prefill(model, second, SNAPKV))


@pytest.mark.parametrize("length", range(4 * BLOCK - 2, 4 * BLOCK + WINDOW + 3))
def test_the_window_is_always_read_anew(model_of: ModelOf, length: int) -> None:
    """The very same prompt again: all but the observation window may come from the store."""
    model, store, prompt = model_of("qwen3"), small_store(), random_prompt(length)
    prefill(model, prompt, SNAPKV, store=store)
    again = prefill(model, prompt, SNAPKV, store=store)
    assert again.cache_read_tokens == (length - WINDOW) // BLOCK * BLOCK
    assert again.cache_creation_tokens == 0
    assert_equal(again, prefill(model, prompt, SNAPKV))


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("first_chunk", [None, 7, BLOCK, 50])
@pytest.mark.parametrize("second_chunk", [None, 1, 9, 30])
def test_chunks_read_and_write_the_same_blocks(
    model_of: ModelOf, name: str, first_chunk: int | None, second_chunk: int | None
) -> None:
    model, store, first = model_of(name), small_store(), random_prompt(100)
    prefill(model, first, SNAPKV, chunk_size=first_chunk, store=store)
    second = sharing(first, 70, 110)
    reused = prefill(model, second, SNAPKV, chunk_size=second_chunk, store=store)
    assert (reused.cache_read_tokens, reused.cache_creation_tokens) == (64, 32)
    assert_equal(reused, prefill(model, second, SNAPKV))


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.integers(0, 120), st.integers(1, 120), st.booleans()), min_size=2, max_size=6),
    st.integers(1, 40),
    st.integers(0, 60_000),
)
def test_any_sequence_of_prompts_is_read_as_without_a_store(
    prompts: list[tuple[int, int, bool]], block_size: int, memory_bytes: int
) -> None:
    """Whatever the prompts share, however large the blocks, however little the memory."""
    model, base, store = _model(), random_prompt(120), KVStore(memory_bytes, block_size=block_size)
    for seed, (shared, length, whole) in enumerate(prompts):
        prompt, policy = sharing(base, min(shared, length), length, seed), FullKV() if whole else SNAPKV
        assert_equal(prefill(model, prompt, policy, store=store), prefill(model, prompt, policy))
        assert store.info().nbytes <= memory_bytes


_MODELS: dict[str, torch.nn.Module] = {}


def _model() -> torch.nn.Module:
    return _MODELS.setdefault("llama", tiny_model("llama"))


def test_a_rotation_that_is_one_length_s_own_is_never_reused(model_of: ModelOf) -> None:
    model, store, prompt = model_of("llama-dynamic-rope"), small_store(), random_prompt(100)
    for _ in range(2):
        read = prefill(model, prompt, SNAPKV, store=store)
        assert (read.cache_read_tokens, read.cache_creation_tokens) == (0, 0)
    assert store.info().blocks == 0


@pytest.mark.parametrize(("name", "beyond"), [("llama-dynamic-rope", 0), ("phi3-longrope", 80)])
def test_prompts_share_on_one_side_of_the_original_length(model_of: ModelOf, name: str, beyond: int) -> None:
    """Up to 64 tokens these models rotate as they were trained first; the same tokens in a longer prompt are others."""
    model, store, first, long = model_of(name), small_store(), random_prompt(60), random_prompt(100)
    assert first.ids == long.ids[:60]
    for prompt, reused in (
        (first, 0),
        (sharing(first, 40, 64), 32),
        (long, 0),
        (sharing(long, 90, 110), beyond),
        (sharing(first, 50, 60), 48),
    ):
        read = prefill(model, prompt, SNAPKV, store=store)
        assert read.cache_read_tokens == reused
        assert_equal(read, prefill(model, prompt, SNAPKV))


def test_policies_that_need_all_queries_read_the_whole_prompt_but_leave_it_to_others(model_of: ModelOf) -> None:
    model, store, prompt = model_of("llama"), small_store(), random_prompt(100)
    for created in (96, 0):
        read = prefill(model, prompt, H2O(40), store=store)
        assert (read.cache_read_tokens, read.cache_creation_tokens) == (0, created)
    assert prefill(model, prompt, SNAPKV, store=store).cache_read_tokens == 80


def test_half_precision_is_reused_up_to_rounding() -> None:
    model, store, first = tiny_model("qwen2", torch.bfloat16), small_store(), random_prompt(100)
    prefill(model, first, FullKV(), store=store)
    second = sharing(first, 70, 110)
    reused, fresh = prefill(model, second, FullKV(), store=store), prefill(model, second, FullKV())
    assert reused.cache_read_tokens == 64
    for mine, other in zip(reused.cache.layers, fresh.cache.layers, strict=True):
        assert torch.equal(mine.keys[:, :, :64], other.keys[:, :, :64])
    error = (reused.logits.float() - fresh.logits.float()).norm() / fresh.logits.float().norm()
    assert error < 0.02


def _two_questions() -> tuple[Prompt, Prompt]:
    """Questions about the same documents, which are a multiple of the block long."""
    documents = random_prompt(12 * BLOCK, seed=3).ids
    asked = [Prompt(documents + random_prompt(WINDOW, seed).ids) for seed in (4, 5)]
    first, second = (replace(p, spans=(Span(len(documents), len(p), "question"),)) for p in asked)
    return first, second


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_each_question_keeps_its_own_part_of_the_same_documents(model_of: ModelOf, name: str) -> None:
    """The second question selects from the full K/V, as a fresh prefill does; on what the first one kept it differs."""
    model, store, (first, second) = model_of(name), small_store(), _two_questions()
    on_first = prefill(model, first, SNAPKV, store=store)
    on_second = prefill(model, second, SNAPKV, store=store)
    fresh = prefill(model, second, SNAPKV)
    assert on_second.cache_read_tokens == 12 * BLOCK
    assert_equal(on_second, fresh)
    ids = torch.tensor([second.ids[-WINDOW:]])
    positions = torch.arange(len(second), len(second) + WINDOW).unsqueeze(0)
    plain_reuse = forward(model, ids, on_first.cache, positions)
    assert (plain_reuse - fresh.logits).abs().max() > 0.1


def test_a_store_of_another_model_or_namespace_has_nothing(model_of: ModelOf) -> None:
    store, prompt = small_store(), random_prompt(100)
    prefill(model_of("llama"), prompt, SNAPKV, store=store.within("a"))
    same_shape_other_weights = tiny_model("llama", seed=1)
    for model, namespace, read in [
        (model_of("llama"), "a", 80),
        (model_of("llama"), "b", 0),
        (model_of("llama"), "", 0),
        (same_shape_other_weights, "a", 0),
        (model_of("qwen2"), "a", 0),
    ]:
        assert prefill(model, prompt, SNAPKV, store=store.within(namespace)).cache_read_tokens == read


def test_an_interrupted_prefill_leaves_nothing_behind(model_of: ModelOf) -> None:
    model, store, prompt = model_of("llama"), small_store(), random_prompt(100)

    class Enough(Exception):
        pass

    def stop(done: int, layers: int) -> None:
        if done == 2:
            raise Enough

    with pytest.raises(Enough):
        prefill(model, prompt, SNAPKV, store=store, on_layer=stop)
    assert store.info().blocks == 0
    assert_equal(prefill(model, prompt, SNAPKV, store=store), prefill(model, prompt, SNAPKV))


def test_the_full_states_of_one_layer_at_a_time_are_on_the_device(
    model_of: ModelOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers that have not attended yet hold nothing of the prefix; those that have hold what the policy kept."""
    model, store, first = model_of("llama"), small_store(), random_prompt(200)
    prefill(model, first, SNAPKV, store=store)
    cache, held = new_cache(model.config), list[list[int]]()
    monkeypatch.setattr("ragkv.prefill.new_cache", lambda config: cache)

    def on_layer(done: int, layers: int) -> None:
        held.append([layer.keys.shape[2] if layer.is_initialized else 0 for layer in cache.layers])

    read = prefill(model, sharing(first, 190, 200), SNAPKV, store=store, on_layer=on_layer)
    assert read.cache_read_tokens == 176
    assert held == [[40, 0, 0], [40, 40, 0], [40, 40, 40]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("in_folder", [False, True])
def test_a_gpu_is_fed_from_pinned_host_memory(tmp_path: Path, name: str, in_folder: bool) -> None:
    model, first = tiny_model(name).to("cuda"), random_prompt(100)
    store = small_store(10**9, tmp_path)
    prefill(model, first, SNAPKV, store=store)
    store = small_store(10**9, tmp_path) if in_folder else store
    second = sharing(first, 70, 110)
    reused = prefill(model, second, SNAPKV, store=store)
    assert reused.cache_read_tokens == 64
    assert_equal(reused, prefill(model, second, SNAPKV))
    stored = [states for block in store.longest_prefix(model, second.ids).blocks for states in block.layers[0]]
    assert len(stored) == 12
    assert all(states.is_pinned() for states in stored)
