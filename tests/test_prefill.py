"""Prefill: what is kept, that the rest is gone, and that going on without it is exact."""

import itertools
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import reference
from conftest import ModelOf
from ragkv.backend import forward
from ragkv.cache import compressible, new_cache
from ragkv.chat import Prompt, Span
from ragkv.policies import FullKV, Observation, Policy, SnapKV, StreamingLLM
from ragkv.prefill import Prefilled, PrefillObserver, chunks, prefill
from tiny import ARCHITECTURES, COMPRESSIBLE, plain_model, random_prompt

LENGTH, BUDGET, WINDOW = 100, 40, 8
SNAPKV = SnapKV(BUDGET, WINDOW)
CHUNKABLE = [name for name in COMPRESSIBLE if name not in ("llama-dynamic-rope", "phi3-longrope")]


def _positions(prefilled: Prefilled) -> dict[int, Tensor]:
    """Per compressible layer, (kv_heads, kept) positions."""
    kept = {i: layer.positions for i, layer in compressible(prefilled.cache)}
    assert kept
    return {i: positions[0] for i, positions in kept.items() if positions is not None}


@pytest.mark.parametrize("name", COMPRESSIBLE)
@pytest.mark.parametrize("policy", [SNAPKV, SnapKV(20, 4, 1, "max", "max"), StreamingLLM(3, 30)])
def test_going_on_equals_a_full_cache_of_which_each_head_sees_what_it_kept(
    model_of: ModelOf, name: str, policy: Policy
) -> None:
    """Token by token, then several at once, then token by token again; the tokens are given, not chosen."""
    model, prompt = model_of(name), random_prompt(LENGTH)
    prefilled = prefill(model, prompt, policy)
    kept = _positions(prefilled)
    stream = iter(random_prompt(40, seed=1).ids)
    steps = [list(itertools.islice(stream, n)) for n in (1, 1, 1, 5, 1, 7, 2, 1)]
    expected = reference.continue_masked(plain_model(name), prompt.ids, kept, steps)
    torch.testing.assert_close(prefilled.logits, expected[0], rtol=1e-5, atol=1e-5)
    seen = LENGTH
    with torch.inference_mode():
        for tokens, logits in zip(steps, expected[1:], strict=True):
            got = reference.run(model, tokens, prefilled.cache, seen)
            torch.testing.assert_close(got, logits, rtol=1e-5, atol=1e-5)
            seen += len(tokens)


def test_the_reference_tells_heads_and_layers_apart(model_of: ModelOf, plain_of: ModelOf) -> None:
    """Otherwise the test above would pass with the wrong positions, too."""
    prompt, steps = random_prompt(LENGTH), [[7], [8]]
    kept = _positions(prefill(model_of("llama"), prompt, SNAPKV))
    right = reference.continue_masked(plain_of("llama"), prompt.ids, kept, steps)
    heads_swapped = {i: positions.flip(0) for i, positions in kept.items()}
    layers_swapped = dict(zip(kept, [*list(kept.values())[1:], kept[0]], strict=True))
    for wrong in (heads_swapped, layers_swapped, {}):
        logits = reference.continue_masked(plain_of("llama"), prompt.ids, wrong, steps)
        assert (logits[-1] - right[-1]).abs().max() > 1e-3


@pytest.mark.parametrize("name", COMPRESSIBLE)
def test_heads_and_layers_choose_for_themselves(model_of: ModelOf, name: str) -> None:
    rows = [
        row
        for positions in _positions(prefill(model_of(name), random_prompt(LENGTH), SNAPKV)).values()
        for row in positions
    ]
    assert len({tuple(row.tolist()) for row in rows}) == len(rows)


@pytest.mark.parametrize("name", COMPRESSIBLE)
def test_what_is_kept_is_what_the_loops_choose(model_of: ModelOf, name: str) -> None:
    model, prompt = model_of(name), random_prompt(60)
    seen: dict[int, tuple[Tensor, Tensor, float]] = {}

    def observer(layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> None:
        seen[layer] = query, key, scaling

    forward(
        model, torch.tensor([prompt.ids]), new_cache(model.config), torch.arange(60).unsqueeze(0), observer=observer
    )
    for layer, positions in _positions(prefill(model, prompt, SnapKV(24, WINDOW))).items():
        query, key, scaling = seen[layer]
        scores = reference.pool(reference.votes(query, key, scaling, WINDOW), 7, "avg")
        assert torch.equal(positions.long(), reference.select(scores, 24 - WINDOW, WINDOW)[0])


@pytest.mark.parametrize("name", CHUNKABLE)
@pytest.mark.parametrize("chunk_size", [1, WINDOW, 33, LENGTH - 1, LENGTH, LENGTH + 1])
def test_chunks_keep_what_one_pass_keeps(model_of: ModelOf, name: str, chunk_size: int) -> None:
    model, prompt = model_of(name), random_prompt(LENGTH)
    whole, chunked = prefill(model, prompt, SNAPKV), prefill(model, prompt, SNAPKV, chunk_size=chunk_size)
    torch.testing.assert_close(chunked.logits, whole.logits, rtol=1e-5, atol=1e-5)
    for (layer, positions), other in zip(_positions(whole).items(), _positions(chunked).values(), strict=True):
        assert torch.equal(positions, other), layer
    for mine, other in zip(whole.cache.layers, chunked.cache.layers, strict=True):
        torch.testing.assert_close(mine.keys, other.keys, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(mine.values, other.values, rtol=1e-5, atol=1e-5)
    assert (chunked.kv_bytes_kept, chunked.kv_bytes_full) == (whole.kv_bytes_kept, whole.kv_bytes_full)


@pytest.mark.parametrize("chunk_size", [1, 24, 99])
def test_chunks_of_a_model_of_sliding_windows_alone(model_of: ModelOf, chunk_size: int) -> None:
    model, prompt = model_of("mistral-sliding"), random_prompt(LENGTH)
    whole, chunked = prefill(model, prompt, SNAPKV), prefill(model, prompt, SNAPKV, chunk_size=chunk_size)
    torch.testing.assert_close(chunked.logits, whole.logits, rtol=1e-5, atol=1e-5)
    assert whole.kept_tokens == 0
    assert whole.kv_bytes_kept == whole.kv_bytes_full == 3 * 2 * 2 * 23 * 16 * 4


def test_chunks_cover_the_prompt_and_the_last_one_holds_the_window() -> None:
    for length, size, window in itertools.product(range(1, 30), [*range(1, 32), None], (1, 3, 8, 40)):
        pieces = chunks(length, size, window)
        assert [token for start, end in pieces for token in range(start, end)] == list(range(length))
        assert len(pieces) == 1 or pieces[-1][1] - pieces[-1][0] >= window
        assert all(end - start == size for start, end in pieces[:-1])
    assert chunks(10, 4, 2) == [(0, 4), (4, 8), (8, 10)]
    assert chunks(10, 4, 3) == [(0, 4), (4, 10)]


@pytest.mark.parametrize(
    ("name", "chunk_size"), [*((name, None) for name in COMPRESSIBLE), *((name, 30) for name in CHUNKABLE)]
)
def test_bytes_held_are_what_the_budget_says(model_of: ModelOf, name: str, chunk_size: int | None) -> None:
    """Counted from the storages behind the tensors: a view into something larger would keep that alive."""
    model = model_of(name)
    config = model.config
    prefilled = prefill(model, random_prompt(LENGTH), SNAPKV, chunk_size=chunk_size)
    full_layers = dict(compressible(prefilled.cache))
    held = full = 0
    for i, layer in enumerate(prefilled.cache.layers):
        entries = BUDGET if i in full_layers else config.sliding_window - 1
        kv_heads, head_dim = layer.keys.shape[1], layer.keys.shape[3]
        assert kv_heads == getattr(config, "num_key_value_heads", config.num_attention_heads)
        for states in (layer.keys, layer.values):
            assert states.shape == (1, kv_heads, entries, head_dim)
            assert states.untyped_storage().nbytes() == kv_heads * entries * head_dim * 4
        held += 2 * kv_heads * entries * head_dim * 4
        full += 2 * kv_heads * (LENGTH if i in full_layers else entries) * head_dim * 4
    assert prefilled.kv_bytes_kept == prefilled.kv_bytes_allocated == held
    assert prefilled.kv_bytes_full == full
    assert prefilled.kept_tokens == BUDGET
    if len(full_layers) == len(prefilled.cache.layers):
        assert prefilled.kv_bytes_kept / prefilled.kv_bytes_full == BUDGET / LENGTH


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_bytes_held_without_compression_are_those_of_the_prompt(model_of: ModelOf, name: str) -> None:
    prefilled = prefill(model_of(name), random_prompt(LENGTH), FullKV())
    held = sum(s.untyped_storage().nbytes() for layer in prefilled.cache.layers for s in (layer.keys, layer.values))
    assert held == prefilled.kv_bytes_kept == prefilled.kv_bytes_full == prefilled.kv_bytes_allocated


@dataclass(frozen=True)
class Watching:
    """SnapKV that remembers, weakly, the storages of each layer's full K/V and what of them is left at the next."""

    storages: list[StorageWeakRef] = field(default_factory=list)
    alive: list[int] = field(default_factory=list)
    inner: SnapKV = SNAPKV
    protects = True

    def budget(self, length: int, layer: int, num_layers: int) -> int:
        return self.inner.budget(length, layer, num_layers)

    def observation_window(self, question_tokens: int | None) -> int:
        return self.inner.observation_window(question_tokens)

    def score(self, observation: Observation) -> Tensor:
        self.alive.append(sum(not storage.expired() for storage in self.storages))
        self.storages.extend(StorageWeakRef(s.untyped_storage()) for s in (observation.key, observation.value))
        return self.inner.score(observation)


@pytest.mark.parametrize("name", CHUNKABLE)
def test_one_layer_at_a_time_holds_its_whole_prompt(model_of: ModelOf, name: str) -> None:
    watching = Watching()
    prefilled = prefill(model_of(name), random_prompt(LENGTH), watching)
    assert watching.alive == [0] * len(compressible(prefilled.cache))
    assert all(storage.expired() for storage in watching.storages)


def test_sliding_layers_hold_their_window_while_the_next_layer_runs(model_of: ModelOf) -> None:
    model, prompt = model_of("mistral-sliding"), random_prompt(LENGTH)
    cache = new_cache(model.config)
    held: list[int] = []

    def on_layer(done: int, layers: int) -> None:
        held.extend(
            states.untyped_storage().nbytes() for layer in cache.layers[:done] for states in (layer.keys, layer.values)
        )

    observer = PrefillObserver(cache, SNAPKV, prompt, on_layer)
    forward(model, torch.tensor([prompt.ids]), cache, torch.arange(LENGTH).unsqueeze(0), observer=observer)
    assert held == [2 * 23 * 16 * 4] * 12


@pytest.mark.parametrize("name", COMPRESSIBLE)
@pytest.mark.parametrize("length", [BUDGET - 1, BUDGET])
def test_prompts_within_the_budget_are_left_alone(model_of: ModelOf, name: str, length: int) -> None:
    prompt = random_prompt(length)
    mine, full = prefill(model_of(name), prompt, SNAPKV), prefill(model_of(name), prompt, FullKV())
    assert _positions(mine) == {}
    assert mine.kept_tokens == length
    assert torch.equal(mine.logits, full.logits)
    for layer, other in zip(mine.cache.layers, full.cache.layers, strict=True):
        assert torch.equal(layer.keys, other.keys)


@pytest.mark.parametrize("length", [BUDGET + 1, LENGTH])
def test_positions_ascend_and_end_with_the_window(model_of: ModelOf, length: int) -> None:
    prefilled = prefill(model_of("qwen3"), random_prompt(length), SNAPKV)
    for positions in _positions(prefilled).values():
        assert positions.shape[-1] == BUDGET
        assert (positions.diff() > 0).all()
        assert positions[:, -WINDOW:].tolist() == [list(range(length - WINDOW, length))] * positions.shape[0]


def _marked(length: int, *spans: Span) -> Prompt:
    return Prompt(random_prompt(length).ids, spans)


def test_protected_spans_stay_in_every_head(model_of: ModelOf) -> None:
    prompt = _marked(LENGTH, Span(0, 6, "instruction"), Span(50, 55, "header", 1), Span(56, 70, "document", 1))
    unmarked = prefill(model_of("llama"), random_prompt(LENGTH), SNAPKV)
    wanted = {*range(6), *range(50, 55)}
    assert any(not wanted <= set(row.tolist()) for p in _positions(unmarked).values() for row in p)
    prefilled = prefill(model_of("llama"), prompt, SNAPKV)
    assert all(wanted <= set(row.tolist()) for p in _positions(prefilled).values() for row in p)
    assert all(p.shape[-1] == BUDGET for p in _positions(prefilled).values())
    assert prefilled.unprotected_tokens == 0


def test_half_of_the_budget_stays_for_the_votes(model_of: ModelOf) -> None:
    """Of 32 entries beside the window 16 may be protected: instructions first, then headers; the rest is reported."""
    prompt = _marked(
        LENGTH,
        Span(2, 7, "header", 1),  # 5: fits behind the instruction
        Span(20, 30, "instruction"),  # 10: comes first though it stands later
        Span(40, 43, "header", 2),  # 3: one too many
        Span(60, 61, "header", 3),  # 1: fits
    )
    prefilled = prefill(model_of("llama"), prompt, SNAPKV)
    assert prefilled.unprotected_tokens == 3
    wanted = {*range(2, 7), *range(20, 30), 60}
    assert all(wanted <= set(row.tolist()) for p in _positions(prefilled).values() for row in p)


def test_spans_in_the_window_need_no_protection(model_of: ModelOf) -> None:
    prompt = _marked(LENGTH, Span(LENGTH - WINDOW, LENGTH, "instruction"))
    assert prefill(model_of("llama"), prompt, SNAPKV).unprotected_tokens == 0


def test_policies_that_do_not_protect_ignore_spans(model_of: ModelOf) -> None:
    prompt = _marked(LENGTH, Span(20, 90, "instruction"))
    prefilled = prefill(model_of("llama"), prompt, StreamingLLM(4, 16))
    assert prefilled.unprotected_tokens == 0
    expected = [*range(4), *range(LENGTH - 16, LENGTH)]
    assert all(row.tolist() == expected for p in _positions(prefilled).values() for row in p)


@pytest.mark.parametrize(("question_tokens", "window_size"), [(3, 16), (30, 30), (90, 64)])
def test_the_window_covers_the_question(model_of: ModelOf, question_tokens: int, window_size: int) -> None:
    prompt = _marked(200, Span(200 - question_tokens, 198, "question"))
    prefilled = prefill(model_of("llama"), prompt, SnapKV(100))
    assert prefilled.window_size == window_size
    for positions in _positions(prefilled).values():
        assert positions[0, -window_size:].tolist() == list(range(200 - window_size, 200))


def test_progress_is_told_by_layer_and_may_end_the_prefill(model_of: ModelOf) -> None:
    model, told = model_of("llama"), []
    prefill(model, random_prompt(50), SNAPKV, on_layer=lambda done, layers: told.append((done, layers)))
    assert told == [(1, 3), (2, 3), (3, 3)]

    class Enough(Exception):
        pass

    def stop(done: int, layers: int) -> None:
        if done == 2:
            raise Enough

    with pytest.raises(Enough):
        prefill(model, random_prompt(50), SNAPKV, on_layer=stop)


@dataclass(frozen=True)
class Pyramid(SnapKV):
    """A budget that differs by layer, which any policy may have."""

    def budget(self, length: int, layer: int, num_layers: int) -> int:
        return min(length, self.max_capacity_prompt - 8 * layer)


def test_budgets_may_differ_by_layer(model_of: ModelOf, plain_of: ModelOf) -> None:
    model, prompt = model_of("llama"), random_prompt(LENGTH)
    prefilled = prefill(model, prompt, Pyramid(BUDGET, WINDOW))
    kept = _positions(prefilled)
    assert [positions.shape[-1] for positions in kept.values()] == [40, 32, 24]
    steps = [[5], [6, 7, 8], [9]]
    expected = reference.continue_masked(plain_of("llama"), prompt.ids, kept, steps)
    with torch.inference_mode():
        for seen, tokens, logits in zip((100, 101, 104), steps, expected[1:], strict=True):
            got = reference.run(model, tokens, prefilled.cache, seen)
            torch.testing.assert_close(got, logits, rtol=1e-5, atol=1e-5)
