"""SnapKV inside a turn: what is kept is what a prefill with SnapKV keeps, at the positions it has in the window."""

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from conftest import EngineOf, ModelOf
from ragkv.chat import Prompt, Span
from ragkv.config import SamplingParams
from ragkv.engine import Engine
from ragkv.errors import Cancelled, ConfigError, PromptTooLong
from ragkv.policies import FullKV, SnapKV, StreamingLLM
from ragkv.prefill import prefill
from ragkv.streaming.cache import StreamingCache, read
from ragkv.streaming.compress_turn import kept_spans, read_compressed
from ragkv.streaming.layout import Layout
from streaming_reference import ReferenceStream
from tiny import random_prompt

MODELS = ["llama", "gemma3", "cohere", "phi3", "gpt-neox", "qwen3"]
SHORT = SamplingParams(max_tokens=6)
ROLES = ("user", "assistant")


def _cache(model: torch.nn.Module, sinks: int = 4, window: int = 196) -> StreamingCache:
    return StreamingCache(Layout.of(model, StreamingLLM(sinks, window)))


def _read_compressed(
    model: torch.nn.Module, cache: StreamingCache, prompt: Prompt, budget: int, question: Sequence[int] = ()
) -> torch.Tensor:
    return read_compressed(model, cache, prompt, question, budget, 512, threading.Event())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("seen", [40, 250])
def test_entries_that_are_moved_are_as_if_they_had_been_read(model_of: ModelOf, name: str, seen: int) -> None:
    """All entries of a turn, read on a larger cache and moved: behind evictions and across a rebase."""
    model = model_of(name)
    cache, turn, after = _cache(model), torch.tensor([random_prompt(60, seed=1).ids]), torch.tensor([[7, 8, 9]])
    for token in random_prompt(seen).ids:
        cache.evict(max(0, 1 - cache.room))
        read(model, cache, torch.tensor([[token]]))
    cache.evict(max(0, 63 - cache.room))
    straight, wide, held = cache.copy(), cache.copy(), len(cache)
    read(model, wide, turn)
    kept = [torch.arange(60).expand(1, layer.keys.shape[1], -1) for layer in cache.layers]
    cache.take(wide, held, kept)
    read(model, straight, turn)
    torch.testing.assert_close(read(model, cache, after), read(model, straight, after), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_entries_that_move_together_are_rotated_for_where_they_get(
    model_of: ModelOf, plain_of: ModelOf, name: str
) -> None:
    """The second half of a turn, moved up to what came before it, against the reference that rotates all keys anew."""
    model, before, turn = model_of(name), list(random_prompt(4).ids), list(random_prompt(60, seed=1).ids)
    cache = _cache(model)
    with ReferenceStream(plain_of(name), 4, 196) as reference:
        for tokens in (before, turn):
            reference.read(tokens)
        reference.evict(30)
        expected = reference.read([7, 8, 9])
    read(model, cache, torch.tensor([before]))
    wide = cache.copy()
    read(model, wide, torch.tensor([turn]))
    cache.take(wide, 4, [torch.arange(30, 60).expand(1, layer.keys.shape[1], -1) for layer in cache.layers])
    torch.testing.assert_close(read(model, cache, torch.tensor([[7, 8, 9]]))[0], expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "cohere", "phi3", "gpt-neox", "qwen3"])
@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("remembered", [0, 40])
def test_what_is_kept_is_what_snapkv_keeps(model_of: ModelOf, name: str, asked: bool, remembered: int) -> None:
    """With the window at the end of the prompt, or with a question behind it that votes and is not kept."""
    model, before, prompt = model_of(name), random_prompt(remembered, seed=3).ids, random_prompt(300)
    question = random_prompt(20, seed=2).ids if asked else ()
    cache = _cache(model, sinks=0, window=200)
    if remembered:
        read(model, cache, torch.tensor([before]))
    logits = _read_compressed(model, cache, prompt, 80, question)
    # A prefill of it all, which protects what is remembered, and the prompt's tail from a question behind it.
    spans = [Span(0, remembered, "instruction")] if remembered else []
    spans += [Span(remembered + 284, remembered + 300, "instruction")] if asked else []
    whole = Prompt((*before, *prompt.ids, *question), tuple(spans))
    policy = SnapKV(remembered + 80 + len(question), window_size=20 if asked else 32)
    expected = prefill(model, whole, policy)
    for ours, theirs in zip(cache.layers, expected.cache.layers, strict=True):
        torch.testing.assert_close(ours.values, theirs.values[..., : remembered + 80, :], rtol=0, atol=1e-5)
    alone = prefill(model, Prompt((*before, *prompt.ids)), FullKV())
    torch.testing.assert_close(logits, alone.logits, rtol=0, atol=1e-4)


def test_a_turn_is_read_within_the_length_that_rotates_as_the_cache_does(model_of: ModelOf) -> None:
    """LongRoPE rotates otherwise beyond 64 positions: what is in the cache moves back to the start before."""
    model, prompt, question = model_of("phi3-longrope"), random_prompt(36), random_prompt(4, seed=2).ids
    caches = [_cache(model, window=20) for _ in range(2)]
    for cache in caches:
        for token in random_prompt(36, seed=1).ids:
            cache.evict(max(0, 1 - cache.room))
            read(model, cache, torch.tensor([[token]]))
        cache.evict(20)
    assert caches[0].position + 40 > 64 >= len(caches[0]) + 40
    with torch.inference_mode():
        for layer in caches[1].layers:
            layer.rebase(4)
    logits = [_read_compressed(model, cache, prompt, 19, question) for cache in caches]
    torch.testing.assert_close(*logits, rtol=0, atol=1e-4)
    after = [read(model, cache, torch.tensor([[7]])) for cache in caches]
    torch.testing.assert_close(*after, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("name", "sight", "most"), [("phi3-longrope", 64, 50), ("mistral-sliding", 24, 19)])
def test_a_turn_that_the_model_cannot_see_whole_is_refused(
    engine_of: EngineOf, name: str, sight: int, most: int
) -> None:
    session = engine_of(name).session(StreamingLLM(4, sight - 4), max_turn_tokens=most)
    session.append(_tool("lazy dog " * 12))
    with pytest.raises(PromptTooLong, match=f"tiny-{name} sees at most {sight} tokens at once"):
        session.generate(SamplingParams(max_tokens=1))
    assert session.report().tokens_seen == 0


def test_another_question_keeps_other_entries(model_of: ModelOf) -> None:
    model, prompt, kept = model_of("llama"), random_prompt(300), []
    for seed in (2, 3):
        cache = _cache(model)
        _read_compressed(model, cache, prompt, 80, random_prompt(20, seed=seed).ids)
        kept.append(cache.layers[1].values.clone())
    assert not torch.equal(*kept)


def test_the_sinks_are_kept_whatever_their_votes(model_of: ModelOf) -> None:
    model, prompt = model_of("llama"), random_prompt(300)
    plain, cache = _cache(model, window=500), _cache(model)
    read(model, plain, torch.tensor([prompt.ids]))
    _read_compressed(model, cache, prompt, 40)
    for ours, theirs in zip(cache.layers, plain.layers, strict=True):
        torch.testing.assert_close(ours.values[..., :4, :], theirs.values[..., :4, :], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("documents", "voted", "expected"),
    [
        ([], 70, [(84 - 14, 70)][:0]),
        ([], 100, [(84, 100)]),
        ([(20, 90)], 100, [(0, 20), (90, 100)]),
        ([(20, 50), (60, 90)], 80, [(0, 20), (50, 60)]),
        ([(0, 100)], 100, []),
    ],
)
def test_all_but_the_documents_is_kept(
    documents: list[tuple[int, int]], voted: int, expected: list[tuple[int, int]]
) -> None:
    prompt = Prompt(tuple(range(100)), tuple(Span(*each, "document") for each in documents))
    assert kept_spans(prompt, 60, voted) == expected
    fixed = sum(end - start for start, end in expected) + 100 - voted
    with pytest.raises(PromptTooLong, match=f"{fixed} of 100 new tokens are no tool result, and at most {fixed} are"):
        kept_spans(prompt, fixed, voted)


def test_a_cancelled_reading_leaves_the_cache_alone(model_of: ModelOf) -> None:
    model, cache, cancel = model_of("llama"), _cache(model_of("llama")), threading.Event()
    read(model, cache, torch.tensor([random_prompt(30).ids]))
    before = cache.state()
    cancel.set()
    with pytest.raises(Cancelled):
        read_compressed(model, cache, random_prompt(300), (), 60, 512, cancel)
    assert all(torch.equal(tensor, before[name]) for name, tensor in cache.state().items())


@pytest.fixture
def engine(engine_of: EngineOf) -> Engine:
    return engine_of("llama")


def _tool(text: str) -> dict[str, str]:
    return {"role": "tool", "content": text, "name": "search", "tool_call_id": "1"}


def test_a_large_tool_result_does_not_flush_the_conversation(engine: Engine) -> None:
    session = engine.session(StreamingLLM(4, 396), max_turn_tokens=100, chunk_size=64)
    for text in ("Who are you?", "Find the answer."):
        session.append({"role": "user", "content": text})
        session.generate(SHORT)
    held = session.report().tokens_held
    session.append(_tool("a quick brown fox jumps over the lazy dog; " * 20))
    reply = session.generate(SHORT)
    report = session.report()
    assert (report.remembered_turns, report.partial_turns) == ((0, 1), (2,))
    assert not session.remembers(2)
    # The pending end of the last reply, what is kept of the result, and the reply without its last token.
    assert report.tokens_held == held + len(session.transcript.closing) + 1 + 100 + len(reply.tokens) - 1
    assert report.tokens_seen > report.tokens_held + 300
    for number in range(12):
        session.append({"role": "user", "content": f"And {number}?"})
        session.generate(SHORT)
    assert not session.remembers(2)
    assert session.report().tokens_held <= 400


def _voters(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The questions that vote on what is compressed from now on, as they do."""
    seen = list[str]()

    def watched(model: Any, cache: Any, prompt: Any, question: Any, *rest: Any) -> Any:
        seen.append(engine.tokenizer.decode(question))
        return read_compressed(model, cache, prompt, question, *rest)

    monkeypatch.setattr("ragkv.streaming.reading.read_compressed", watched)
    return seen


def _history(result: str) -> list[dict[str, str]]:
    said = [("Who are you?", "A fox."), ("Find the answer.", "I search.")]
    history = [{"role": role, "content": text} for pair in said for role, text in zip(ROLES, pair, strict=True)]
    return [*history, _tool(result), {"role": "assistant", "content": "Found."}]


def test_a_large_tool_result_does_not_flush_a_history_that_is_read_again(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions = _voters(engine, monkeypatch)
    session = engine.session(StreamingLLM(4, 396), max_turn_tokens=100, chunk_size=64)
    session.append([*_history("a quick brown fox " * 40), {"role": "user", "content": "And?"}])
    session.generate(SHORT)
    report = session.report()
    assert (report.remembered_turns, report.partial_turns, report.dropped_turns) == ((0, 1, 3), (2,), 0)
    assert questions == ["Find the answer."]
    session.append(_tool("lazy dog " * 80))
    session.generate(SHORT)
    assert questions[1:] == ["And?"]


def test_what_of_a_history_cannot_be_compressed_is_dropped(engine: Engine) -> None:
    """Too long for the model to see, with all that is older; or no tool's result but for a little."""
    for result, kept in (("lazy dog " * 400, (3,)), ("lazy dog", (0, 1, 3))):
        history = _history(result)
        if len(kept) > 1:
            history[4:4] = [{"role": "user", "content": "word " * 80}]
        session = engine.session(StreamingLLM(4, 396), max_turn_tokens=100)
        session.append([*history, {"role": "user", "content": "And?"}])
        session.generate(SHORT)
        assert (session.report().remembered_turns, session.report().turns) == (kept, 4)


def test_the_question_before_a_tool_result_decides_what_is_kept(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = _voters(engine, monkeypatch)
    session = engine.session(StreamingLLM(4, 396), max_turn_tokens=100)
    session.append({"role": "user", "content": "Who wrote it?"})
    session.generate(SHORT)
    for message in (_tool("lazy dog " * 80), _tool("quick fox " * 80), {"role": "user", "content": "brown fox " * 60}):
        session.append(message)
        session.generate(SHORT)
    assert asked == ["Who wrote it?", "Who wrote it?", ""]


def test_what_cannot_be_read_or_kept_is_refused_with_the_numbers(engine: Engine) -> None:
    session = engine.session(StreamingLLM(4, 396), max_turn_tokens=100)
    session.append(_tool("lazy dog " * 400))
    with pytest.raises(
        PromptTooLong,
        match=r"new tokens are read behind up to 300 remembered ones.* tiny-llama sees at most 1024 tokens",
    ):
        session.generate(SHORT)
    session.discard()
    session.append([{"role": "user", "content": "word " * 100}, _tool("lazy dog")])
    with pytest.raises(PromptTooLong, match="are no tool result, and at most 100 are kept of a turn"):
        session.generate(SHORT)
    assert session.report().tokens_seen == 0
    with pytest.raises(ConfigError, match="max_turn_tokens=0: must be at least 1, or None"):
        engine.session(StreamingLLM(4, 60), max_turn_tokens=0)
