"""Keys that tell apart what must be told apart, blocks as they are recorded, and memory that keeps within its bound."""

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragkv.errors import ConfigError
from ragkv.kv_store import KVStore
from ragkv.kv_store.blocks import Block, BlockRecorder
from ragkv.kv_store.keys import Owner, child_key, model_digest
from ragkv.kv_store.memory import BlockMemory
from ragkv.policies import FullKV, SnapKV
from ragkv.prefill import prefill
from tiny import random_prompt, tiny_model

OWNER = Owner("model", "", 2)


def block(number: int = 0, tokens: int = 2) -> Block:
    """64 bytes of K/V: two layers, one head of two numbers."""
    states = torch.full((1, tokens, 2), float(number))
    return Block(((states, states + 1), (states + 2, states + 3)))


BYTES = block().nbytes


def test_a_chain_names_blocks_by_all_tokens_up_to_their_end() -> None:
    chain = OWNER.chain([1, 2, 3, 4])
    assert chain == [child_key(OWNER.root, [1, 2]), child_key(child_key(OWNER.root, [1, 2]), [3, 4])]
    assert OWNER.chain([1, 2, 3, 4, 5]) == [*chain, child_key(chain[1], [5])]
    assert OWNER.chain([1, 2, 3, 4, 5, 6])[2] != OWNER.chain([1, 2, 3, 4, 5])[2]
    assert OWNER.chain([]) == []
    other_beginning = OWNER.chain([9, 2, 3, 4])
    assert not {*other_beginning} & {*chain}


@given(st.lists(st.lists(st.integers(0, 2**40), max_size=6), min_size=2, max_size=8))
def test_equal_keys_mean_equal_tokens(prompts: list[list[int]]) -> None:
    tokens_of: dict[str, list[int]] = {}
    for ids in prompts:
        for number, key in enumerate(OWNER.chain(ids), 1):
            assert tokens_of.setdefault(key, ids[: 2 * number]) == ids[: 2 * number]


def test_roots_tell_owners_apart() -> None:
    owners = [
        OWNER,
        Owner("model", "a", 2),
        Owner("model", "", 3),
        Owner("other", "", 2),
        Owner("modela", "", 2),
        Owner("model", '", "a', 2),
        Owner("model", "", 2, "int8"),
        Owner("model", "", 2, "model", 1),
    ]
    assert len({owner.root for owner in owners}) == len(owners)
    assert Owner("model", "", 2, name="shown") == OWNER


def test_a_model_is_its_weights_its_configuration_and_its_dtype() -> None:
    model = tiny_model("llama")
    assert model_digest(model) == model_digest(tiny_model("llama"))
    others = [tiny_model("llama", seed=1), tiny_model("llama", torch.bfloat16), tiny_model("qwen2")]
    one_more = tiny_model("llama")
    one_more.config.rms_norm_eps *= 2
    rotated = tiny_model("llama")
    rotated.config.rope_parameters = {**rotated.config.rope_parameters, "rope_theta": 5000.0}
    tuned = tiny_model("llama")
    with torch.no_grad():
        tuned.model.layers[1].mlp.up_proj.weight += 1e-6
    one_number = tiny_model("llama")
    with torch.no_grad():
        one_number.model.embed_tokens.weight[3, 1] += 1e-3
    digests = {model_digest(each) for each in (model, *others, one_more, rotated, tuned, one_number)}
    assert len(digests) == 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("length", [0, 1, 3, 10, 63, 65, 1003])
def test_every_number_of_a_weight_counts(length: int, dtype: torch.dtype) -> None:
    def digest(weight: torch.Tensor) -> str:
        model = tiny_model("llama")
        model.register_buffer("extra", weight)
        return model_digest(model)

    weight = torch.arange(length).remainder(50).to(dtype)
    changed = weight.repeat(length, 1) + torch.eye(length, dtype=dtype)
    assert digest(weight) == digest(weight.clone())
    chosen = [*range(0, length, max(1, length // 11)), *range(max(0, length - 3), length)]
    assert digest(weight) not in [digest(changed[n]) for n in chosen]


@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=8),
    st.integers(1, 7),
    st.integers(0, 3),
    st.integers(0, 3),
    st.integers(0, 60),
    st.booleans(),
)
def test_blocks_are_the_states_of_all_passes_in_order(
    passes: list[int], block_size: int, used_blocks: int, known_blocks: int, room: int, tail: bool
) -> None:
    """Whatever the passes, blocks begin where they should, and no more are made than there is room for."""
    seen = used_blocks * block_size
    start = seen + known_blocks * block_size
    length = seen + sum(passes)
    states = torch.arange(2 * 2 * 3 * length * 2, dtype=torch.float32).view(2, 2, 1, 3, length, 2)  # layers, K and V
    stop = start + (length - start) // block_size * block_size  # without and with the tail
    stop = length if tail else max(start, stop)
    recorder = BlockRecorder(seen, start, stop, block_size, 2, room * states[:, :, :, :, :1].nbytes * block_size)
    end = seen
    for new in passes:
        end += new
        for layer in range(2):
            key, value = states[layer, :, :, :, max(0, end - new - 1) : end]  # with a little of the past, as layers see
            recorder.record(layer, key, value, new)
    blocks = recorder.blocks()
    assert len(blocks) == min(room, math.ceil(max(0, stop - start) / block_size))
    for number, recorded in enumerate(blocks):
        begin = start + number * block_size
        assert recorded.tokens == min(block_size, stop - begin)
        for layer in range(2):
            for n in range(2):
                assert torch.equal(recorded.layers[layer][n], states[layer, n, 0, :, begin : begin + recorded.tokens])


def test_blocks_own_their_memory() -> None:
    """Or a block would keep the whole prompt alive."""
    recorder = BlockRecorder(0, 0, 8, 2, 1, 10**6)
    states = torch.randn(1, 1, 8, 2)
    recorder.record(0, states, states, 8)
    stored = [states for each in recorder.blocks() for states in each.layers[0]]
    assert len(stored) == 8
    assert all(each.untyped_storage().nbytes() == each.nbytes for each in stored)


def test_tails_are_kept_and_found_where_asked_for() -> None:
    """Whole blocks are shared either way."""
    model, store, policy = tiny_model("gemma3"), KVStore(10**8, block_size=16), SnapKV(40, 8)
    prompt, tails = random_prompt(100), store.with_tails()
    assert prefill(model, prompt, policy, store=tails).cache_creation_tokens == 100
    assert tails.longest_prefix(model, prompt.ids).length == 100
    assert store.longest_prefix(model, prompt.ids).length == 96
    assert tails.longest_prefix(model, prompt.ids[:99]).length == 96
    again = prefill(model, prompt, policy, store=tails)
    assert (again.cache_read_tokens, again.cache_creation_tokens) == (80, 0)
    torch.testing.assert_close(again.logits, prefill(model, prompt, policy).logits, rtol=1e-4, atol=1e-4)
    tail = tails.longest_prefix(model, prompt.ids).blocks[-1]
    cache = prefill(model, prompt, FullKV()).cache
    assert torch.equal(tail.layers[1][0], cache.layers[1].keys[0, :, 96:])


def test_what_was_used_longest_ago_goes_first_and_ends_before_beginnings() -> None:
    memory = BlockMemory(4 * BYTES)
    first, second = ["a1", "a2", "a3"], ["b1", "b2"]
    assert memory.put(OWNER, first, [block()] * 3) == {*first}
    assert memory.put(OWNER, second, [block()] * 2) == {*second}
    assert [memory.get(key) is not None for key in (*first, *second)] == [True, True, False, True, True]
    memory.put(OWNER, first[:1], [block()])  # used again
    assert memory.put(OWNER, ["c1", "c2"], [block()] * 2) == {"c1", "c2"}
    assert [memory.get(key) is not None for key in (*first, *second)] == [True, False, False, True, False]
    assert (len(memory), memory.nbytes, memory.evictions) == (4, 4 * BYTES, 3)


def test_of_a_prompt_that_is_too_long_the_beginning_stays() -> None:
    memory = BlockMemory(2 * BYTES)
    assert memory.put(OWNER, ["a1", "a2", "a3"], [block()] * 3) == {"a1", "a2"}
    assert BlockMemory(BYTES - 1).put(OWNER, ["a1"], [block()]) == set()
    assert BlockMemory(0).put(OWNER, ["a1"], [block()]) == set()


@given(st.integers(1, 8), st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), max_size=12))
def test_every_block_in_memory_can_be_reached_and_the_bound_holds(room: int, prompts: list[list[int]]) -> None:
    memory, seen, owner = BlockMemory(room * BYTES), dict[str, str | None](), Owner("model", "", 1)
    for ids in prompts:
        chain = owner.chain(ids)
        seen |= dict(zip(chain, [None, *chain], strict=False))
        memory.put(owner, chain, [block()] * len(chain))
        held = {key for key in seen if memory.get(key) is not None}
        assert len(held) == len(memory) <= room
        assert memory.nbytes == len(memory) * BYTES
        assert all(seen[key] is None or seen[key] in held for key in held)


def test_clear_forgets_one_model_or_one_namespace() -> None:
    memory = BlockMemory(10 * BYTES)
    for model in ("m", "n"):
        for namespace in ("", "a"):
            memory.put(Owner(model, namespace, 2), [model + namespace], [block()])
    memory.clear(namespace="a")
    assert [memory.get(key) is not None for key in ("m", "ma", "n", "na")] == [True, False, True, False]
    memory.clear(model="n")
    assert (len(memory), memory.nbytes) == (1, BYTES)
    memory.clear()
    assert (len(memory), memory.nbytes) == (0, 0)


def test_mapped_blocks_are_copied_into_memory() -> None:
    memory, mapped = BlockMemory(10 * BYTES), Block(block(3).layers, mapped=True)
    memory.put(OWNER, ["a1"], [mapped])
    stored = memory.get("a1")
    assert stored is not None
    assert not stored.mapped
    assert torch.equal(stored.layers[1][1], mapped.layers[1][1])
    assert stored.layers[0][0].data_ptr() != mapped.layers[0][0].data_ptr()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory_bytes": -1}, "memory_bytes=-1"),
        ({"disk_bytes": -1}, "disk_bytes=-1"),
        ({"block_size": 0}, "block_size=0: must be at least 1"),
        ({"disk_dtype": "fp4"}, "disk_dtype='fp4': choose one of model, int8"),
    ],
)
def test_bounds_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KVStore(**options)


def test_threads_share_a_store() -> None:
    model, policy, store = tiny_model("llama"), SnapKV(40, 8), KVStore(60_000, block_size=16)
    prompts = [random_prompt(length, seed) for length in (60, 100) for seed in range(3)]
    expected = [prefill(model, prompt, policy).logits for prompt in prompts]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            for logits, read in zip(
                expected, pool.map(lambda prompt: prefill(model, prompt, policy, store=store), prompts), strict=True
            ):
                torch.testing.assert_close(read.logits, logits, rtol=1e-4, atol=1e-4)
    info = store.info()
    assert info.nbytes <= info.max_bytes == 60_000
    assert info.usage.hits + info.usage.misses == 18
    assert info.usage.evictions > 0


def test_accounting() -> None:
    model, policy, store = tiny_model("llama"), SnapKV(40, 8), KVStore(10**8, block_size=16)
    for length in (100, 10, 100):
        prefill(model, random_prompt(length), policy, store=store)
    info = store.info()
    token = 3 * 2 * 2 * 16 * 4  # layers, keys and values, KV heads, head_dim, float32
    assert (info.blocks, info.nbytes, info.max_bytes) == (6, 96 * token, 10**8)
    usage = info.usage
    assert (usage.hits, usage.misses, usage.read_tokens, usage.created_tokens, usage.evictions) == (1, 1, 80, 96, 0)
    store.clear()
    assert (store.info().blocks, store.info().nbytes) == (0, 0)
