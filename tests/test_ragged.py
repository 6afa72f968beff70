"""Layers whose KV heads hold different numbers of entries: exact, freed, and in batches with any others."""

import itertools

import pytest
import torch
from torch import Tensor

import reference
from conftest import EngineOf, ModelOf
from ragkv.cache import CompressibleLayer, compressible, kv_bytes, kv_bytes_full, own
from ragkv.chat import Prompt, Span
from ragkv.config import SamplingParams
from ragkv.decode import Decoder
from ragkv.policies import AdaKV, FullKV, Policy, PyramidKV, SnapKV
from ragkv.prefill import Prefilled, prefill
from ragkv.ragged import RaggedLayer
from tiny import COMPRESSIBLE, random_prompt

LENGTH, BUDGET, WINDOW = 100, 40, 8
ADA = AdaKV(BUDGET, WINDOW, kernel_size=1, safeguard=0.1)
SEVERAL_HEADS = [name for name in COMPRESSIBLE if name != "llama-mqa"]


def _positions(prefilled: Prefilled) -> dict[int, list[Tensor]]:
    """Per compressible layer and KV head, (kept,) positions."""
    return {i: [part.positions[0, 0] for part in layer.parts] for i, layer in compressible(prefilled.cache)}


@pytest.mark.parametrize("name", COMPRESSIBLE)
def test_going_on_equals_a_full_cache_of_which_each_head_sees_what_it_kept(
    model_of: ModelOf, plain_of: ModelOf, name: str
) -> None:
    """Token by token, then several at once, then token by token again; the tokens are given, not chosen."""
    model, prompt = model_of(name), random_prompt(LENGTH)
    prefilled = prefill(model, prompt, ADA)
    kept = _positions(prefilled)
    stream = iter(random_prompt(40, seed=1).ids)
    steps = [list(itertools.islice(stream, n)) for n in (1, 1, 1, 5, 1, 7, 2, 1)]
    expected = reference.continue_masked(plain_of(name), prompt.ids, kept, steps)
    torch.testing.assert_close(prefilled.logits, expected[0], rtol=1e-5, atol=1e-5)
    seen = LENGTH
    with torch.inference_mode():
        for tokens, logits in zip(steps, expected[1:], strict=True):
            got = reference.run(model, tokens, prefilled.cache, seen)
            torch.testing.assert_close(got, logits, rtol=1e-5, atol=1e-5)
            seen += len(tokens)


@pytest.mark.parametrize("name", SEVERAL_HEADS)
def test_heads_of_a_layer_keep_different_numbers(model_of: ModelOf, name: str) -> None:
    """Otherwise the test above would not be about ragged layers."""
    positions = _positions(prefill(model_of(name), random_prompt(LENGTH), ADA))
    counts = [[len(head) for head in heads] for heads in positions.values()]
    assert any(len(set(layer)) > 1 for layer in counts)
    assert all(sum(layer) == len(layer) * BUDGET for layer in counts)
    assert min(map(min, counts)) >= WINDOW + 3


@pytest.mark.parametrize("name", COMPRESSIBLE)
def test_what_is_kept_is_the_best_of_all_heads(model_of: ModelOf, name: str) -> None:
    """Without a floor: the votes that stay, of all heads together, are the highest there are."""
    model, prompt = model_of(name), random_prompt(LENGTH)
    seen: dict[int, Tensor] = {}

    class Spy(AdaKV):
        def head_budgets(self, scores: Tensor, count: int) -> list[int]:
            seen[len(seen)] = scores[0]
            return super().head_budgets(scores, count)

    kept = _positions(prefill(model, prompt, Spy(BUDGET, WINDOW, safeguard=0.0)))
    for scores, heads in zip(seen.values(), kept.values(), strict=True):
        stay = [float(scores[h, i]) for h, head in enumerate(heads) for i in head[:-WINDOW].tolist()]
        best = scores.flatten().sort(descending=True).values[: len(stay)]
        assert sorted(stay, reverse=True) == best.tolist()


def test_a_safeguard_of_one_is_snapkv(model_of: ModelOf) -> None:
    model, prompt = model_of("llama"), random_prompt(LENGTH)
    ada = _positions(prefill(model, prompt, AdaKV(BUDGET, WINDOW, safeguard=1.0)))
    for layer, snapkv in compressible(prefill(model, prompt, SnapKV(BUDGET, WINDOW)).cache):
        assert torch.equal(torch.stack(ada[layer]), snapkv.positions[0])


def test_protected_spans_stay_in_every_head(model_of: ModelOf) -> None:
    prompt = Prompt(random_prompt(LENGTH).ids, (Span(0, 6, "instruction"), Span(50, 55, "header", 1)))
    wanted = {*range(6), *range(50, 55)}
    heads = [set(row.tolist()) for rows in _positions(prefill(model_of("llama"), prompt, ADA)).values() for row in rows]
    assert all(wanted <= head for head in heads)
    assert sum(map(len, heads)) == 6 * BUDGET


@pytest.mark.parametrize("name", COMPRESSIBLE)
@pytest.mark.parametrize("steps", [0, 1, 300])
def test_bytes_held_are_those_of_the_entries(model_of: ModelOf, name: str, steps: int) -> None:
    """Counted from the storages; buffers have at most 256 slots to spare for each head while tokens are added."""
    prefilled = prefill(model_of(name), random_prompt(LENGTH), ADA)
    decoder = Decoder(model_of(name), [prefilled])
    for _ in range(steps):
        decoder.step([7])
    for _, layer in compressible(prefilled.cache):
        token = 2 * layer.parts[0].keys.shape[-1] * 4
        heads = len(layer.parts)
        entries = heads * (BUDGET + steps)
        assert sum(_held(part) for part in layer.parts) <= token * (entries + (heads * 256 if steps else 0))
        assert sum(part.keys.nbytes + part.values.nbytes for part in layer.parts) == token * entries
    sliding = [layer for layer in prefilled.cache.layers if not isinstance(layer, CompressibleLayer)]
    others = sum(layer.keys.nbytes + layer.values.nbytes for layer in sliding)
    layers = len(prefilled.cache.layers) - len(sliding)
    assert kv_bytes(prefilled.cache) == others + layers * token * heads * (BUDGET + steps)
    assert kv_bytes_full(prefilled.cache) == others + layers * token * heads * (LENGTH + steps)


def _held(layer: CompressibleLayer) -> int:
    return sum(states.untyped_storage().nbytes() for states in (layer.keys, layer.values))


def _filled(counts: tuple[int, ...], seed: int = 0) -> RaggedLayer:
    generator = torch.Generator().manual_seed(seed)
    whole = CompressibleLayer()
    whole.update(*torch.randn(2, 1, len(counts), 60, 4, generator=generator))
    return RaggedLayer(whole, [torch.arange(60 - n, 60).view(1, 1, -1) for n in counts])


def test_rolling_back_and_going_on_equals_never_having_been_there() -> None:
    straight, rolled = _filled((10, 30)), _filled((10, 30))
    new = torch.randn(3, 2, 1, 2, 5, 4, generator=torch.Generator().manual_seed(1))
    rolled.update(*new[0])
    rolled.crop(-5)
    for states in new[1:]:
        got, expected = rolled.update(*states), straight.update(*states)
        assert all(torch.equal(a, b) for a, b in zip(got[0] + got[1], expected[0] + expected[1], strict=True))
    assert rolled.get_seq_length() == straight.get_seq_length() == 70
    assert rolled.get_mask_sizes(2) == straight.get_mask_sizes(2) == (42, 30)


def test_owning_a_ragged_layer_frees_what_a_view_holds() -> None:
    layer = _filled((10, 30))
    big = torch.zeros(1, 1, 500, 4)
    layer.parts[0].keys = big[:, :, :10]
    own(layer)
    assert layer.parts[0].keys.untyped_storage().nbytes() == 10 * 4 * 4


def test_reset_forgets_everything() -> None:
    layer = _filled((10, 30))
    layer.reset()
    keys, _ = layer.update(*torch.randn(2, 1, 2, 5, 4))
    assert [key.shape[-2] for key in keys] == [5, 5]
    assert layer.get_seq_length() == 5


@pytest.mark.parametrize(
    ("policies", "lengths"),
    [
        ((ADA, ADA), (LENGTH, LENGTH)),
        ((ADA, FullKV()), (LENGTH, LENGTH)),
        ((ADA, ADA), (30, BUDGET)),  # kept whole
        ((SnapKV(40, 8), SnapKV(40, 8)), (LENGTH, 35)),
        ((SnapKV(40, 8), SnapKV(48, 8)), (LENGTH, LENGTH)),
        ((SnapKV(40, 8), FullKV()), (LENGTH, 35)),
        ((SnapKV(40, 8), FullKV()), (LENGTH, 41)),
        ((PyramidKV(40, 8), PyramidKV(40, 8)), (LENGTH, 90)),
        ((PyramidKV(40, 8), PyramidKV(40, 8)), (LENGTH, 45)),  # too short for so steep a slope
    ],
)
def test_rows_of_any_policies_go_on_together(
    model_of: ModelOf, policies: tuple[Policy, ...], lengths: tuple[int, ...]
) -> None:
    model = model_of("llama")
    rows = [prefill(model, random_prompt(n, seed=n), policy) for policy, n in zip(policies, lengths, strict=True)]
    alone = [
        Decoder(model, [prefill(model, random_prompt(n, seed=n), policy)])
        for policy, n in zip(policies, lengths, strict=True)
    ]
    decoder = Decoder(model, rows)
    for token in range(5, 15):
        decoder.step([token, token + 1])
        for row, other in enumerate(alone):
            other.step([token + row])
        torch.testing.assert_close(decoder.logits, torch.cat([d.logits for d in alone]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("policy", [ADA, PyramidKV(BUDGET, WINDOW)])
def test_a_batch_replies_as_its_rows_do_alone(engine_of: EngineOf, policy: Policy) -> None:
    """However unlike they are, and when they leave at different steps."""
    engine = engine_of("llama")
    prompts = [random_prompt(n, seed=n) for n in (LENGTH, 45, 90, 20)]
    sampling = [SamplingParams(max_tokens=n) for n in (8, 5, 12, 8)]
    together = engine.generate(prompts, sampling, policy=policy)
    alone = [engine.generate([p], s, policy=policy)[0] for p, s in zip(prompts, sampling, strict=True)]
    assert [reply.tokens for reply in together] == [reply.tokens for reply in alone]
