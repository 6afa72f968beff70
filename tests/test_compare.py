"""One prefill for several policies: entry for entry what each keeps alone, and one layer's whole K/V at a time."""

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from transformers.cache_utils import DynamicLayer

from conftest import EngineOf, ModelOf
from ragkv.cache import CompressibleLayer, compressible
from ragkv.chat import Prompt, Span
from ragkv.compare import prefill_many
from ragkv.config import SamplingParams
from ragkv.decode import Decoder
from ragkv.errors import PromptTooLong
from ragkv.kv_store import KVStore
from ragkv.policies import H2O, AdaKV, FullKV, Observation, Policy, PyramidKV, RandomKV, SnapKV, StreamingLLM
from ragkv.prefill import Prefilled, prefill
from tiny import ARCHITECTURES, random_prompt

LENGTH = 100
POLICIES: list[Policy] = [
    FullKV(),
    SnapKV(40, 8),
    SnapKV(60, 8),
    SnapKV(40, 16, 1, "max"),
    SnapKV(LENGTH, 8),  # keeps everything
    H2O(40),
    H2O(60, 8),
    StreamingLLM(3, 30),
    RandomKV(40, 8, seed=3),
    PyramidKV(40, 8),
    AdaKV(40, 8),
]
PROMPT = Prompt(random_prompt(LENGTH).ids, (Span(0, 6, "instruction"), Span(50, 55, "header", 1)))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_each_policy_keeps_what_it_keeps_alone(model_of: ModelOf, name: str) -> None:
    together = prefill_many(model_of(name), PROMPT, POLICIES)
    for policy, mine in zip(POLICIES, together, strict=True):
        alone = prefill(model_of(name), PROMPT, policy)
        assert _facts(mine) == _facts(alone)
        assert torch.equal(mine.logits, alone.logits)
        for layer, other in zip(_parts(mine), _parts(alone), strict=True):
            assert type(layer) is type(other)
            assert torch.equal(layer.keys, other.keys)
            assert torch.equal(layer.values, other.values)
            assert layer.get_seq_length() == other.get_seq_length()
            if isinstance(layer, CompressibleLayer):
                assert (layer.positions is None) == (other.positions is None)
                assert layer.positions is None or torch.equal(layer.positions, other.positions)


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if "dynamic" not in name and "longrope" not in name])
def test_a_store_has_the_beginning(model_of: ModelOf, name: str) -> None:
    """The second question about a text reads its end alone, and each policy keeps what it keeps without a store."""
    store, policies = KVStore(10**8, block_size=16), [FullKV(), SnapKV(40, 8), StreamingLLM(3, 30)]
    other = Prompt((*PROMPT.ids[:80], *random_prompt(20, seed=5).ids))
    assert {read.cache_read_tokens for read in prefill_many(model_of(name), other, policies, store=store)} == {0}
    together = prefill_many(model_of(name), PROMPT, policies, store=store)
    for policy, mine in zip(policies, together, strict=True):
        alone = prefill(model_of(name), PROMPT, policy)
        assert _facts(mine) == {**_facts(alone), "cache_read_tokens": 80, "cache_creation_tokens": 16}
        torch.testing.assert_close(mine.logits, alone.logits, rtol=1e-4, atol=1e-4)
        for layer, fresh in zip(_parts(mine), _parts(alone), strict=True):
            torch.testing.assert_close(layer.keys, fresh.keys, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(layer.values, fresh.values, rtol=1e-4, atol=1e-4)


def test_policies_that_need_all_queries_read_all(model_of: ModelOf) -> None:
    store = KVStore(10**8, block_size=16)
    for _ in range(2):
        read = prefill_many(model_of("llama"), PROMPT, [SnapKV(40, 8), H2O(40)], store=store)
        assert read[0].cache_read_tokens == 0


def _parts(read: Prefilled) -> list[DynamicLayer]:
    layers = read.cache.layers
    return [part for layer in layers for part in (layer.parts if isinstance(layer, CompressibleLayer) else [layer])]


def _facts(read: Prefilled) -> dict[str, object]:
    return {name: value for name, value in vars(read).items() if name not in ("cache", "logits")}


@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral-sliding", "phi3"])
def test_replies_are_those_of_separate_prefills(model_of: ModelOf, name: str) -> None:
    """Also of policies that share whole layers: what one row appends does not reach another."""
    model = model_of(name)
    streams = [random_prompt(20, seed=row).ids for row in range(len(POLICIES))]
    decoders = [Decoder(model, [read]) for read in prefill_many(model, PROMPT, POLICIES)]
    expected = [Decoder(model, [prefill(model, PROMPT, policy)]) for policy in POLICIES]
    for tokens in zip(*streams, strict=True):
        for token, mine, other in zip(tokens, decoders, expected, strict=True):
            mine.step([token])
            other.step([token])
            assert torch.equal(mine.logits, other.logits)


@dataclass(frozen=True)
class Watching(SnapKV):
    """SnapKV that remembers, weakly, the storages of each layer's full K/V and what of them is left at the next."""

    storages: list[StorageWeakRef] = field(default_factory=list)
    alive: list[int] = field(default_factory=list)

    def score(self, observation: Observation) -> Tensor:
        self.alive.append(sum(not storage.expired() for storage in self.storages))
        self.storages.extend(StorageWeakRef(s.untyped_storage()) for s in (observation.key, observation.value))
        return super().score(observation)


def test_one_layer_at_a_time_holds_its_whole_prompt(model_of: ModelOf) -> None:
    watching = Watching(40, 8)
    read = prefill_many(model_of("llama"), PROMPT, [SnapKV(50, 8), watching, H2O(40)])
    assert watching.alive == [0, 0, 0]
    assert all(storage.expired() for storage in watching.storages)
    for budget, prefilled in zip((50, 40, 40), read, strict=True):
        held = [s.untyped_storage().nbytes() for _, layer in compressible(prefilled.cache) for s in _states(layer)]
        assert held == [2 * budget * 16 * 4] * 6
    watching = Watching(40, 8)
    prefill_many(model_of("llama"), PROMPT, [watching, FullKV()])
    assert watching.alive == [0, 2, 4]  # the full cache is held where it is asked for


def test_layers_that_are_kept_whole_are_held_once(model_of: ModelOf) -> None:
    first, second = prefill_many(model_of("phi3"), PROMPT, [FullKV(), SnapKV(LENGTH, 8)])
    for (_, layer), (_, other) in zip(compressible(first.cache), compressible(second.cache), strict=True):
        for states, same in zip(_states(layer), _states(other), strict=True):
            assert states.data_ptr() == same.data_ptr()
            assert states.untyped_storage().nbytes() == states.nbytes


def _states(layer: CompressibleLayer) -> tuple[Tensor, Tensor]:
    return layer.keys, layer.values


def test_attention_is_measured_once_for_all_budgets(model_of: ModelOf, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def counted(query: Tensor, key: Tensor, scaling: float, gqa_reduction: str) -> Tensor:
        calls.append(1)
        return torch.rand(1, 2, LENGTH)

    monkeypatch.setattr("ragkv.policies.h2o.accumulated_attention", counted)
    prefill_many(model_of("llama"), PROMPT, [H2O(20), H2O(40), H2O(60, 4), H2O(60, 4, "max")])
    assert len(calls) == 3 * 2  # layers, and ways to join a group's heads


def test_progress_is_told_by_layer_and_may_end_the_prefill(model_of: ModelOf) -> None:
    told: list[tuple[int, int]] = []
    prefill_many(model_of("llama"), PROMPT, POLICIES, on_layer=lambda done, layers: told.append((done, layers)))
    assert told == [(1, 3), (2, 3), (3, 3)]


@pytest.mark.parametrize("name", ["llama", "gemma3", "llama-dynamic-rope"])
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("sampling", [SamplingParams(max_tokens=12), SamplingParams(12, temperature=1.0, seed=5)])
def test_the_engine_replies_to_what_was_read_as_to_a_prompt_of_its_own(
    engine_of: EngineOf, sampling: SamplingParams, together: bool, name: str
) -> None:
    """In any batch, however unlike the rows' caches are."""
    engine = engine_of(name)
    read = prefill_many(engine.model, PROMPT, POLICIES)
    if together:
        replies = engine.replies([(PROMPT, each) for each in read], sampling)
    else:
        replies = [reply for each in read for reply in engine.replies([(PROMPT, each)], sampling)]
    for policy, reply in zip(POLICIES, replies, strict=True):
        (alone,) = engine.generate([PROMPT], sampling, policy=policy)
        assert (reply.text, reply.tokens, reply.finish_reason) == (alone.text, alone.tokens, alone.finish_reason)
        assert reply.stats.kv_bytes_kept == alone.stats.kv_bytes_kept
        assert reply.stats.kept_tokens == alone.stats.kept_tokens
    # Of gemma3's layers, one has full attention.
    assert len({reply.tokens for reply in replies}) > (1 if name == "gemma3" else 3)


def test_replies_follow_a_grammar_and_fit_into_the_context(engine_of: EngineOf) -> None:
    engine = engine_of("llama")

    class Always:
        """Allows one token."""

        def mask(self, logits: Tensor) -> Tensor:
            return torch.full_like(logits, -torch.inf).index_fill(0, torch.tensor(7), 0.0)

        def accept(self, token: int) -> None:
            pass

    first, second = prefill_many(engine.model, PROMPT, [SnapKV(40, 8), SnapKV(40, 8)])
    with pytest.raises(PromptTooLong, match="a prompt of 100 tokens and max_tokens=1000"):
        engine.replies([(PROMPT, second)], SamplingParams(max_tokens=1000))
    held, free = engine.replies(
        [(PROMPT, first), (PROMPT, second)], SamplingParams(max_tokens=3), constraints=[Always(), None]
    )
    assert held.tokens == (7, 7, 7) != free.tokens
