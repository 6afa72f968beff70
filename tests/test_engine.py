"""The engine: equal to transformers where it must be, each request for itself, and replies that end as they should."""

import dataclasses
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import reference
from conftest import EngineOf
from ragkv.chat import Prompt, Span
from ragkv.config import SamplingParams
from ragkv.engine import Engine
from ragkv.errors import Cancelled, ConfigError, PromptTooLong
from ragkv.kv_store import KVStore
from ragkv.models import LoadedModel
from ragkv.policies import FullKV, Policy, SnapKV, StreamingLLM
from ragkv.policies.base import tokens_to_read
from ragkv.reply import Chunk, Completion
from tiny import ARCHITECTURES, FULL_LENGTH, plain_model, random_prompt, tiny_engine, tiny_model, tiny_tokenizer

SNAPKV = SnapKV(40, 8)
NEVER = (10**6,)  # an end that no model writes
LENGTHS = (10, 39, 40, 41, 100)


def _engine(engine: Engine, eos: tuple[int, ...] = NEVER, **options: object) -> Engine:
    """The same model with other ends."""
    loaded = dataclasses.replace(engine.loaded, eos_token_ids=eos)
    return Engine(loaded, engine.policy, **options)  # type: ignore[arg-type]


@pytest.fixture
def llama(engine_of: EngineOf) -> Engine:
    return _engine(engine_of("llama"))


def _prompts(lengths: tuple[int, ...] = LENGTHS) -> list[Prompt]:
    return [random_prompt(length, seed=length) for length in lengths]


def _tokens(engine: Engine, prompt: Prompt, policy: Policy = SNAPKV, max_tokens: int = 24) -> tuple[int, ...]:
    return engine.generate([prompt], SamplingParams(max_tokens=max_tokens), policy=policy)[0].tokens


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("length", [3, 30, 100])
@pytest.mark.parametrize("policy", [FullKV(), SnapKV(), SnapKV(101, 8), StreamingLLM(4, 200)], ids=str)
def test_without_eviction_replies_equal_those_of_generate(
    engine_of: EngineOf, name: str, length: int, policy: Policy
) -> None:
    prompt = random_prompt(length)
    expected = reference.greedy(plain_model(name), prompt.ids, 24)
    assert len(set(expected)) > 3  # a reply that repeats one token would prove little
    assert list(_tokens(_engine(engine_of(name)), prompt, policy)) == expected


def test_an_end_of_sequence_ends_like_that_of_generate(engine_of: EngineOf) -> None:
    prompt = random_prompt(30)
    free = reference.greedy(plain_model("llama"), prompt.ids, 24)
    for position in (0, 5, 23):
        ends = [free[position], free[-1]]
        expected = reference.greedy(plain_model("llama"), prompt.ids, 24, ends)
        completion = _engine(engine_of("llama"), tuple(ends)).generate([prompt], SamplingParams(max_tokens=24))[0]
        assert list(completion.tokens) == expected
        assert completion.finish_reason == "stop"


def test_every_end_of_sequence_ends(llama: Engine) -> None:
    prompt = random_prompt(30)
    free = _tokens(llama, prompt)
    for position in (2, 6, 11):
        first = free.index(free[position])
        engine = _engine(llama, (*NEVER, 2, free[position]))
        completion = engine.generate([prompt], SamplingParams(max_tokens=24), policy=SNAPKV)[0]
        assert completion.tokens == free[: first + 1]
        assert completion.finish_reason == "stop"
        assert completion.stats.completion_tokens == first + 1
        assert completion.text == tiny_tokenizer().decode(free[:first], skip_special_tokens=True)


@pytest.mark.parametrize("max_tokens", [1, 2, 300])
def test_max_tokens_end_a_reply(llama: Engine, max_tokens: int) -> None:
    completion = llama.generate([random_prompt(60)], SamplingParams(max_tokens=max_tokens), policy=SNAPKV)[0]
    assert len(completion.tokens) == completion.stats.completion_tokens == max_tokens
    assert completion.finish_reason == "length"


def test_long_replies_equal_those_of_generate(llama: Engine) -> None:
    """Across the 256 spare slots of the cache's buffers."""
    prompt = random_prompt(30)
    assert list(_tokens(llama, prompt, FullKV(), 280)) == reference.greedy(plain_model("llama"), prompt.ids, 280)


@pytest.mark.parametrize("chunk_size", [1, 8, 40, 99, 100, 101])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "mistral-sliding"])
def test_chunked_prefills_give_the_same_reply(engine_of: EngineOf, name: str, chunk_size: int) -> None:
    prompt, chunked = random_prompt(100), _engine(engine_of(name), prefill_chunk_size=chunk_size)
    for policy in (SNAPKV, FullKV()):
        assert _tokens(chunked, prompt, policy) == _tokens(_engine(engine_of(name)), prompt, policy)


@pytest.mark.parametrize("name", ["llama-dynamic-rope", "phi3-longrope"])
def test_rotation_by_length_forbids_chunks(engine_of: EngineOf, name: str) -> None:
    with pytest.raises(ConfigError, match=f"prefill_chunk_size=512: tiny-{name} rotates .* leave it at None"):
        _engine(engine_of(name), prefill_chunk_size=512)


def test_chunks_of_nothing_are_refused(engine_of: EngineOf) -> None:
    with pytest.raises(ConfigError, match="prefill_chunk_size=0: must be at least 1, or None for one pass"):
        _engine(engine_of("llama"), prefill_chunk_size=0)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_request_is_unaffected_by_those_before_it(name: str) -> None:
    """A prompt gives what it gives on a fresh model, after longer and shorter ones, with and without compression."""
    prompt = random_prompt(80)
    expected = _tokens(_engine(tiny_engine(name)), prompt)
    engine = _engine(tiny_engine(name))
    for length, policy in [(300, FullKV()), (5, SNAPKV), (200, SNAPKV), (80, StreamingLLM(2, 20))]:
        _tokens(engine, random_prompt(length, seed=9), policy)
        assert _tokens(engine, prompt) == expected


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_interleaved_requests_do_not_mix(engine_of: EngineOf, name: str) -> None:
    engine, prompts = _engine(engine_of(name)), _prompts((100, 30, 55))
    expected = [_tokens(engine, prompt) for prompt in prompts]
    streams = [engine.stream(prompt, SamplingParams(max_tokens=24), policy=SNAPKV) for prompt in prompts]
    *_, last = zip(*streams, strict=True)  # one token of each in turn
    assert [chunk.completion.tokens for chunk in last if chunk.completion] == expected


@pytest.mark.parametrize("name", ["llama", "gemma3", "phi3-longrope", "llama-dynamic-rope"])
def test_threads_may_share_an_engine(engine_of: EngineOf, name: str) -> None:
    engine, prompts = _engine(engine_of(name)), _prompts((100, 30, 55, 200))
    expected = [_tokens(engine, prompt) for prompt in prompts]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(2):
            assert list(pool.map(lambda prompt: _tokens(engine, prompt), prompts)) == expected


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("policy", [SNAPKV, FullKV(), StreamingLLM(2, 20)], ids=str)
def test_a_batch_equals_its_rows(engine_of: EngineOf, name: str, policy: Policy) -> None:
    """Prompts shorter than the budget, of just the budget and longer; greedy and sampled; ending at different times."""
    engine, prompts = _engine(engine_of(name)), _prompts()
    options = [
        SamplingParams(max_tokens=20),
        SamplingParams(max_tokens=31, temperature=1.0, seed=1),
        SamplingParams(max_tokens=3),
        SamplingParams(max_tokens=25, temperature=0.5, top_p=0.9, seed=2),
        SamplingParams(max_tokens=12, repetition_penalty=1.3),
    ]
    batch = engine.generate(prompts, options, policy=policy)
    for prompt, option, together in zip(prompts, options, batch, strict=True):
        alone = engine.generate([prompt], option, policy=policy)[0]
        assert (together.tokens, together.text, together.finish_reason) == (
            alone.tokens,
            alone.text,
            alone.finish_reason,
        )
        for name_ in (
            "prompt_tokens",
            "completion_tokens",
            "kv_bytes_full",
            "kv_bytes_kept",
            "kept_tokens",
            "window_size",
        ):
            assert getattr(together.stats, name_) == getattr(alone.stats, name_)


@settings(max_examples=10)
@given(st.lists(st.integers(1, 90), min_size=2, max_size=5), st.integers(20, 60), st.sampled_from(["qwen2", "gemma3"]))
def test_any_batch_equals_its_rows(lengths: list[int], budget: int, name: str) -> None:
    engine, policy = _engine(_shared_engine(name)), SnapKV(budget, 8)
    batch = engine.generate(_prompts(tuple(lengths)), SamplingParams(max_tokens=10), policy=policy)
    for prompt, completion in zip(_prompts(tuple(lengths)), batch, strict=True):
        assert completion.tokens == _tokens(engine, prompt, policy, 10)


_ENGINES: dict[str, Engine] = {}


def _shared_engine(name: str) -> Engine:
    return _ENGINES.setdefault(name, tiny_engine(name))


def test_rows_that_end_on_their_own_leave_the_batch(llama: Engine) -> None:
    """One row ends by an end-of-sequence, one by a stop string, one by length; the others go on undisturbed."""
    prompts = _prompts((100, 50, 30))
    free = [_tokens(llama, prompt) for prompt in prompts]
    engine = _engine(llama, (free[0][4],))
    alone = [engine.generate([p], SamplingParams(max_tokens=24), policy=SNAPKV)[0] for p in prompts]
    together = engine.generate(prompts, SamplingParams(max_tokens=24), policy=SNAPKV)
    assert [c.tokens for c in together] == [c.tokens for c in alone]
    assert len(together[0].tokens) <= 5
    assert max(len(c.tokens) for c in together) == 24


def test_no_prompt_no_reply(llama: Engine) -> None:
    assert llama.generate([]) == []


def test_samplings_are_one_for_all_or_one_for_each(llama: Engine) -> None:
    with pytest.raises(ValueError, match="zip"):
        llama.generate(_prompts((5, 6)), [SamplingParams()])


def test_seeds_make_sampling_repeatable(llama: Engine) -> None:
    prompt = random_prompt(60)

    def reply(seed: int | None) -> tuple[int, ...]:
        return llama.generate([prompt], SamplingParams(max_tokens=20, temperature=1.0, seed=seed), policy=SNAPKV)[
            0
        ].tokens

    assert reply(1) == reply(1) != reply(2)
    assert reply(None) != reply(None)


def _collect(chunks: list[Chunk]) -> tuple[str, Completion]:
    completions = [chunk.completion for chunk in chunks if chunk.completion]
    assert len(completions) == 1
    assert chunks[-1].completion is completions[0]
    return "".join(chunk.text for chunk in chunks), completions[0]


def test_streamed_text_is_the_text_of_the_completion(llama: Engine) -> None:
    sampling = SamplingParams(max_tokens=60, temperature=1.0, seed=0)
    text, completion = _collect(list(llama.stream(random_prompt(60), sampling, policy=SNAPKV)))
    assert text == completion.text != ""
    assert completion == dataclasses.replace(
        llama.generate([random_prompt(60)], sampling, policy=SNAPKV)[0], stats=completion.stats
    )
    assert text == tiny_tokenizer().decode(completion.tokens, skip_special_tokens=True)


def test_stop_strings_never_appear(llama: Engine) -> None:
    sampling = SamplingParams(max_tokens=60, temperature=1.0, seed=0)
    whole = llama.generate([random_prompt(60)], sampling, policy=SNAPKV)[0]
    stop = whole.text[20:24]
    assert len(stop) == 4
    text, completion = _collect(
        list(llama.stream(random_prompt(60), dataclasses.replace(sampling, stop=[stop]), policy=SNAPKV))
    )
    assert text == completion.text == whole.text[: whole.text.index(stop)]
    assert completion.finish_reason == "stop"
    assert completion.tokens == whole.tokens[: len(completion.tokens)]
    assert len(completion.tokens) < 60


def test_what_was_held_back_is_shown_at_the_end(llama: Engine) -> None:
    """The reply ends by its length in the midst of what might have become a stop string."""
    sampling = SamplingParams(max_tokens=60, temperature=1.0, seed=0)
    whole = llama.generate([random_prompt(60)], sampling, policy=SNAPKV)[0]
    stop = whole.text[-3:] + " never said"
    chunks = list(llama.stream(random_prompt(60), dataclasses.replace(sampling, stop=[stop]), policy=SNAPKV))
    text, completion = _collect(chunks)
    assert text == completion.text == whole.text
    assert chunks[-1].text.endswith(stop[:3])
    assert completion.finish_reason == "length"


def test_a_batch_streams_each_row_in_turn(llama: Engine) -> None:
    options = [SamplingParams(max_tokens=n, temperature=1.0, seed=n) for n in (3, 5)]
    chunks = list(llama.stream(_prompts((30, 60)), options, policy=SNAPKV))
    assert [chunk.row for chunk in chunks] == [0, 1, 0, 1, 0, 1, 1, 1]
    for row, option in enumerate(options):
        text, completion = _collect([chunk for chunk in chunks if chunk.row == row])
        assert completion.text == text
        assert len(completion.tokens) == option.max_tokens


def test_statistics(llama: Engine) -> None:
    prompt = Prompt(random_prompt(100).ids, (Span(0, 30, "instruction"), Span(80, 98, "question")))
    policy = SnapKV(70)
    completion = llama.generate([prompt], SamplingParams(max_tokens=5), policy=policy)[0]
    stats = completion.stats
    token = 3 * 2 * 2 * 16 * 4  # layers, keys and values, KV heads, head_dim, float32
    assert (stats.prompt_tokens, stats.completion_tokens, stats.kept_tokens, stats.window_size) == (100, 5, 70, 20)
    assert (stats.kv_bytes_full, stats.kv_bytes_kept, stats.kv_bytes_allocated) == (100 * token, 70 * token, 70 * token)
    weights = sum(weight.nbytes for weight in llama.model.parameters())
    assert stats.peak_memory_bytes is None or stats.peak_memory_bytes > weights
    assert stats.unprotected_tokens == 30  # half of 70 - 20 entries is 25
    assert stats.ttft_s > 0
    assert stats.decode_tokens_per_s > 0
    one = llama.generate([prompt], SamplingParams(max_tokens=1), policy=policy)[0]
    assert one.stats.decode_tokens_per_s == 0


def test_the_policy_of_the_engine_is_the_default(engine_of: EngineOf) -> None:
    loaded = engine_of("llama").loaded
    assert Engine(loaded).policy == SnapKV()
    completion = Engine(loaded, SnapKV(50, 8)).generate([random_prompt(90)], SamplingParams(max_tokens=1))[0]
    assert completion.stats.kept_tokens == 50


def test_prompts_beyond_the_context_are_refused_with_both_numbers(engine_of: EngineOf) -> None:
    engine = _engine(engine_of("llama"))
    fits = SamplingParams(max_tokens=24)
    with pytest.raises(PromptTooLong) as raised:
        engine.stream([random_prompt(10), random_prompt(FULL_LENGTH - 23)], fits)
    message = "a prompt of 1001 tokens and max_tokens=24 do not fit into the 1024 tokens of context of tiny-llama"
    assert str(raised.value).startswith(message)
    assert len(engine.generate([random_prompt(FULL_LENGTH - 24)], fits)[0].tokens) == 24
    with pytest.raises(ConfigError, match="the prompt is empty"):
        engine.stream(Prompt(()))


def test_an_event_cancels_between_two_tokens(llama: Engine) -> None:
    cancel = threading.Event()
    stream = llama.stream(_prompts((60, 30)), SamplingParams(max_tokens=50), policy=SNAPKV, cancel=cancel)
    chunks = list(itertools.islice(stream, 8))
    cancel.set()
    ends = list(stream)
    assert [chunk.row for chunk in ends] == [0, 1]
    for row, prompt in enumerate(_prompts((60, 30))):
        text, completion = _collect([chunk for chunk in [*chunks, *ends] if chunk.row == row])
        assert completion.finish_reason == "cancelled"
        assert completion.tokens == _tokens(llama, prompt)[:4]
        assert completion.text == text


def test_a_reply_may_be_cancelled_before_its_first_token(llama: Engine) -> None:
    """The event is set while the last layer of the prompt is read: nothing is left to interrupt but the reply."""
    cancel = threading.Event()

    def on_layer(done: int, layers: int) -> None:
        if done == layers:
            cancel.set()

    (chunk,) = llama.stream(random_prompt(30), on_layer=on_layer, cancel=cancel)
    assert chunk.completion is not None
    assert (chunk.completion.finish_reason, chunk.completion.tokens, chunk.completion.text) == ("cancelled", (), "")
    assert chunk.completion.stats.decode_tokens_per_s == 0


def test_an_event_cancels_a_prefill(llama: Engine) -> None:
    cancel, told = threading.Event(), []

    def on_layer(done: int, layers: int) -> None:
        told.append(done)
        if done == 2:
            cancel.set()

    with pytest.raises(Cancelled, match="while its prompt was being read"):
        list(llama.stream(_prompts((60, 30)), on_layer=on_layer, cancel=cancel))
    assert told == [1, 2]


def test_closing_a_stream_ends_it_and_harms_nobody(llama: Engine) -> None:
    expected = _tokens(llama, random_prompt(60))
    stream = llama.stream(random_prompt(60), SamplingParams(max_tokens=50), policy=SNAPKV)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert list(stream) == []
    assert _tokens(llama, random_prompt(60)) == expected


def test_a_callback_may_end_a_prefill(llama: Engine) -> None:
    class Enough(Exception):
        pass

    told: list[tuple[int, int]] = []

    def on_layer(done: int, layers: int) -> None:
        told.append((done, layers))
        if len(told) == 5:
            raise Enough

    expected = _tokens(llama, random_prompt(60))
    with pytest.raises(Enough):
        list(llama.stream(_prompts((60, 30)), policy=SNAPKV, on_layer=on_layer))
    assert told == [(1, 3), (2, 3), (3, 3), (1, 3), (2, 3)]
    assert _tokens(llama, random_prompt(60)) == expected


class Only:
    """A grammar that allows one list of tokens, in order."""

    def __init__(self, tokens: list[int]) -> None:
        self.left = tokens

    def mask(self, logits: torch.Tensor) -> torch.Tensor:
        return torch.full_like(logits, -torch.inf).index_fill(0, torch.tensor(self.left[:1]), 0.0)

    def accept(self, token: int) -> None:
        assert token == self.left.pop(0)


def test_constraints_are_per_row(engine_of: EngineOf) -> None:
    engine = _engine(engine_of("llama"), (2,))
    chunks = list(engine.stream(_prompts((60, 30)), policy=SNAPKV, constraints=[Only([70, 80, 2]), Only([90, 2])]))
    completions = {chunk.row: chunk.completion for chunk in chunks if chunk.completion}
    assert [completions[row].tokens for row in (0, 1)] == [(70, 80, 2), (90, 2)]
    free = engine.stream(
        _prompts((60, 30)), SamplingParams(max_tokens=3), policy=SNAPKV, constraints=[None, Only([90, 2])]
    )
    rows = {chunk.row: chunk.completion for chunk in free if chunk.completion}
    assert rows[0].tokens == _tokens(_engine(engine, (2,)), random_prompt(60, seed=60), max_tokens=3)


@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_half_precision_models_answer(dtype: torch.dtype) -> None:
    loaded = LoadedModel(tiny_model("llama", dtype), tiny_tokenizer(), "tiny", FULL_LENGTH, NEVER, "sdpa")
    completion = Engine(loaded).generate([random_prompt(100)], SamplingParams(max_tokens=9), policy=SNAPKV)[0]
    assert len(completion.tokens) == 9
    assert completion.stats.kv_bytes_kept == 40 * 3 * 2 * 2 * 16 * 2


def test_load_prepares_what_it_loads(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, store = tmp_path / "model", KVStore(10**6)
    plain_model("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    engine = Engine.load(str(folder), SNAPKV, device="cpu", dtype=torch.float32, prefill_chunk_size=50, store=store)
    assert (engine.policy, engine.prefill_chunk_size, engine.store) == (SNAPKV, 50, store)
    assert engine.loaded.eos_token_ids == (2,)
    prompt = random_prompt(90)
    expected = tiny_engine("llama").generate([prompt], SamplingParams(max_tokens=12), policy=SNAPKV)[0]
    assert engine.generate([prompt], SamplingParams(max_tokens=12))[0].tokens == expected.tokens


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("policy", [SNAPKV, FullKV(), StreamingLLM(2, 20)], ids=str)
def test_a_store_changes_no_token(engine_of: EngineOf, name: str, policy: Policy) -> None:
    """Requests that share beginnings, one by one and as a batch whose rows find what the rows before them read."""
    plain = _engine(engine_of(name))
    base = random_prompt(100).ids
    prompts = [
        Prompt(base[:shared] + random_prompt(100, seed=n).ids[shared:])
        for n, shared in enumerate((100, 96, 70, 99, 33))
    ]
    expected = [_tokens(plain, prompt, policy) for prompt in prompts]
    stored = _engine(engine_of(name), store=KVStore(10**8, block_size=16))
    assert [_tokens(stored, prompt, policy) for prompt in prompts] == expected
    stored = _engine(engine_of(name), store=KVStore(10**8, block_size=16))
    batch = stored.generate(prompts, SamplingParams(max_tokens=24), policy=policy)
    assert [completion.tokens for completion in batch] == expected
    read = [completion.stats.cache_read_tokens for completion in batch]
    most = (100 - tokens_to_read(policy, 100, None)) // 16 * 16
    reusable = name != "llama-dynamic-rope"  # beyond its original length
    assert read == [min(shared, most) if reusable else 0 for shared in (0, 96, 64, 96, 32)]


def test_a_conversation_selects_anew_for_every_question(engine_of: EngineOf) -> None:
    """Each turn's reply is that of an engine without a store; the turns before it are not read again."""
    plain, stored = _engine(engine_of("qwen2")), _engine(engine_of("qwen2"), store=KVStore(10**8, block_size=16))
    ids, asked = random_prompt(150).ids, 0
    for turn in range(4):
        prompt = Prompt((*ids, *random_prompt(20, seed=turn).ids))
        completion = stored.generate([prompt], SamplingParams(max_tokens=12), policy=SNAPKV)[0]
        assert completion.tokens == _tokens(plain, prompt, max_tokens=12)
        assert completion.stats.cache_read_tokens == asked // 16 * 16
        ids, asked = (*prompt.ids, *completion.tokens), len(prompt)


def test_threads_may_share_a_store(engine_of: EngineOf) -> None:
    engine, prompts = _engine(engine_of("gemma3")), _prompts((100, 30, 55, 200))
    expected = [_tokens(engine, prompt) for prompt in prompts]
    stored = _engine(engine_of("gemma3"), store=KVStore(100_000, block_size=16))
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            assert list(pool.map(lambda prompt: _tokens(stored, prompt), prompts)) == expected
