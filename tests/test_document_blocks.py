"""Blocks of documents: exact where they must be, an approximation that recomputation takes back elsewhere."""

import gc
import math
import weakref
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import reference
from conftest import EngineOf
from ragkv.answer import ask
from ragkv.backend import forward, rope_original_length
from ragkv.cache import compressible, kv_bytes
from ragkv.chat import Prompt, encode_chat
from ragkv.chat_model import ChatRequest, chat, stream_thread
from ragkv.config import SamplingParams
from ragkv.document_blocks import DocumentBlocks, bytes_to_store, encode_each, prefill_documents, read_documents
from ragkv.documents import Document
from ragkv.engine import Engine
from ragkv.errors import ConfigError
from ragkv.kv_store import KVStore, blend
from ragkv.kv_store.blend import best_voted
from ragkv.kv_store.folder_files import scan
from ragkv.policies import H2O, FullKV, Policy, SnapKV, StreamingLLM
from ragkv.prefill import Prefilled, prefill
from ragkv.prompt import CitePrompt
from ragkv.scoring import window_votes
from ragkv.streaming.threads import StreamingMemory
from ragkv.tools import ToolSpec
from tiny import ARCHITECTURES, tiny_engine

PROMPT = CitePrompt(system="Answer.", rules="Cite.", examples="")
DOCUMENTS = [Document(f"d{n}", f"Text {n} names the answer {n * 7}. " * (2 + n), f"Title {n}") for n in range(4)]
SNAPKV = SnapKV(120, 16)
NOTHING, SOME, USUAL, ALL = DocumentBlocks(0.0, 0), DocumentBlocks(0.25, 4), DocumentBlocks(), DocumentBlocks(1.0)
FITTING = [name for name in ARCHITECTURES if not name.endswith(("-sliding", "dynamic-rope", "longrope", "gemma3"))]


def _engine(base: Engine, block_size: int = 16) -> Engine:
    return Engine(base.loaded, SNAPKV, store=KVStore(10**9, block_size=block_size))


def _read(
    engine: Engine,
    documents: list[Document],
    blocks: DocumentBlocks = SOME,
    policy: Policy = SNAPKV,
) -> tuple[Prompt, Prefilled]:
    messages = PROMPT.messages("Who?", documents)
    whole, alone = encode_chat(engine.tokenizer, messages), list(encode_each(engine.tokenizer, messages))
    return whole, prefill_documents(engine, whole, alone, blocks, policy=policy)


@pytest.mark.parametrize("name", FITTING)
def test_recomputing_all_is_exact(engine_of: EngineOf, name: str) -> None:
    engine = _engine(engine_of(name))
    whole, read = _read(engine, DOCUMENTS, ALL)
    fresh = prefill(engine.model, whole, SNAPKV)
    assert read.cache_read_tokens == next(span.end for span in whole.spans if span.kind == "document")  # it is exact
    torch.testing.assert_close(read.logits, fresh.logits, rtol=1e-4, atol=1e-4)
    for (_, mine), (_, other) in zip(compressible(read.cache), compressible(fresh.cache), strict=True):
        assert mine.positions is not None
        assert torch.equal(mine.positions, other.positions)
        torch.testing.assert_close(mine.keys, other.keys, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", FITTING)
def test_keys_move_to_where_a_fresh_prefill_has_them(engine_of: EngineOf, name: str) -> None:
    """Keys of the first layer depend on token and position alone, so moved ones must be those of a fresh prefill."""
    engine = _engine(engine_of(name))
    documents = [DOCUMENTS[n] for n in (2, 0, 3, 1)]
    whole, read = _read(engine, documents, NOTHING, FullKV())
    fresh = prefill(engine.model, whole, FullKV())
    assert read.cache_read_tokens > len(whole) // 2
    torch.testing.assert_close(read.cache.layers[0].keys, fresh.cache.layers[0].keys, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(read.cache.layers[0].values, fresh.cache.layers[0].values, rtol=1e-4, atol=1e-4)
    assert (read.cache.layers[2].keys - fresh.cache.layers[2].keys).abs().max() > 0.01  # what makes it approximate


def test_a_document_alone_is_exact(engine_of: EngineOf) -> None:
    """It stands where it was read."""
    engine = _engine(engine_of("qwen3"))
    whole, read = _read(engine, DOCUMENTS[:1], NOTHING)
    fresh = prefill(engine.model, whole, SNAPKV)
    text = next(span for span in whole.spans if span.kind == "document")
    assert read.cache_read_tokens == text.end
    torch.testing.assert_close(read.logits, fresh.logits, rtol=1e-4, atol=1e-4)


def test_the_window_is_computed_even_where_it_begins_in_a_document(engine_of: EngineOf) -> None:
    engine, bare = _engine(engine_of("llama")), CitePrompt(system="", rules="", examples="")
    messages = bare.messages("Who?", [DOCUMENTS[3]])
    whole, alone = encode_chat(engine.tokenizer, messages), list(encode_each(engine.tokenizer, messages))
    for window_size in (8, 60):
        policy = SnapKV(80, window_size)
        read = prefill_documents(engine, whole, alone, NOTHING, policy=policy)
        fresh = prefill(engine.model, whole, policy)
        assert 0 < read.cache_read_tokens <= len(whole) - window_size
        torch.testing.assert_close(read.logits, fresh.logits, rtol=1e-4, atol=1e-4)
        for (_, mine), (_, other) in zip(compressible(read.cache), compressible(fresh.cache), strict=True):
            assert mine.positions is not None
            assert torch.equal(mine.positions, other.positions)


def test_the_best_voted_are_chosen_among_the_eligible() -> None:
    fresh = torch.tensor([True, False, False, False, False, True, False, False])
    votes = torch.tensor([9.0, 1, 5, 3, 8, 9])
    chosen = best_voted(votes, fresh, [(0, 4), (5, 8)], 3)
    assert chosen.nonzero().flatten().tolist() == [1, 2, 3]  # 4 is not eligible, 6 and 7 have no vote
    assert best_voted(votes, fresh, [(0, 4), (7, 8)], 2).nonzero().flatten().tolist() == [2, 3]
    assert best_voted(votes, fresh, [(0, 4)], 9).nonzero().flatten().tolist() == [1, 2, 3]


def test_first_tokens_of_all_but_the_first_document_are_computed_anew(engine_of: EngineOf) -> None:
    """Values of the second layer tell: they depend on what their token saw in the first, and on no other token's."""
    engine = _engine(engine_of("llama"))
    whole, without = _read(engine, DOCUMENTS, NOTHING, FullKV())
    _, read = _read(engine, DOCUMENTS, DocumentBlocks(0.0, 6), FullKV())
    before, after = (each.cache.layers[1].values for each in (without, read))
    changed = (before - after).abs().amax(dim=(0, 1, 3)) > 1e-4  # keys that are turned are off by 1e-6
    starts = [span.start for span in whole.spans if span.kind == "document"]
    assert changed.nonzero().flatten().tolist() == [start + n for start in starts[1:] for n in range(6)]
    assert without.cache_read_tokens - read.cache_read_tokens == 18


def test_votes_are_pooled_and_added_up_over_layers(engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, by_layer, totals, held = _engine(engine_of("qwen3")), list[Tensor](), list[Tensor](), list[int]()
    read_documents(engine, DOCUMENTS[:2], PROMPT)

    def votes(query: Tensor, key: Tensor, scaling: float, window_size: int) -> Tensor:
        by_layer.append(reference.pool(reference.votes(query, key, scaling, window_size), 7, "avg").mean(dim=1)[0])
        return window_votes(query, key, scaling, window_size)

    def chosen(votes: Tensor, fresh: Tensor, eligible: list[tuple[int, int]], count: int) -> Tensor:
        totals.append(votes)
        return best_voted(votes, fresh, eligible, count)

    observe = blend._Votes.__call__

    def observed(self: blend._Votes, *args: Any) -> None:
        observe(self, *args)
        held.append(kv_bytes(self.cache))

    monkeypatch.setattr(blend, "window_votes", votes)
    monkeypatch.setattr(blend, "best_voted", chosen)
    monkeypatch.setattr(blend._Votes, "__call__", observed)
    whole, _ = _read(engine, DOCUMENTS[:2], DocumentBlocks(0.3, 0))
    end = [span.end for span in whole.spans if span.kind == "document"][-1]
    assert [len(total) for total in totals] == [end]
    torch.testing.assert_close(totals[0].double(), torch.stack(by_layer).sum(dim=0)[:end], rtol=1e-5, atol=1e-6)
    assert held == [0] * engine.model.config.num_hidden_layers  # one layer's K/V at a time


def test_recomputation_takes_the_error_back(engine_of: EngineOf) -> None:
    engine, errors, read_tokens = _engine(engine_of("llama")), [], []
    for share in (0.0, 0.3, 0.6, 1.0):
        blocks = DocumentBlocks(share, 0)
        whole, read = _read(engine, DOCUMENTS, blocks, FullKV())
        fresh = prefill(engine.model, whole, FullKV())
        pairs = zip(read.cache.layers, fresh.cache.layers, strict=True)
        errors.append(sum(float((mine.values - other.values).norm()) for mine, other in pairs))
        read_tokens.append(read.cache_read_tokens)
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 1 > 1e-2 > errors[-1]
    assert read_tokens == sorted(read_tokens, reverse=True)


def test_the_question_alone_votes_on_stored_headers(engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass that votes computes the question, directly behind the documents; the second one all that is behind
    them, and all headers but the first."""
    engine, passes = _engine(engine_of("llama")), list[list[int]]()
    documents = DOCUMENTS * 3  # numbers of two digits take more tokens than that of a document alone
    read_documents(engine, documents, PROMPT)

    def watched(model: PreTrainedModel, ids: Tensor, *args: Any) -> Tensor:
        passes.append(ids[0].tolist())
        return forward(model, ids, *args)

    monkeypatch.setattr("ragkv.kv_store.blend.forward", watched)
    whole, _ = _read(engine, documents, DocumentBlocks(2, 0))
    texts = [span for span in whole.spans if span.kind == "document"]
    headers = sum(after.start - before.end for before, after in pairwise(texts))
    assert whole.question_tokens is not None
    assert passes[0] == list(whole.ids[-whole.question_tokens :])
    assert len(passes[1]) == len(whole) - texts[-1].end + headers + 2


def test_votes_are_those_of_a_prompt_without_examples(engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, totals = _engine(engine_of("llama")), list[Tensor]()

    def chosen(votes: Tensor, *args: Any) -> Tensor:
        totals.append(votes)
        return best_voted(votes, *args)

    monkeypatch.setattr(blend, "best_voted", chosen)
    for prompt in (replace(PROMPT, rules="", examples=""), replace(PROMPT, examples="Question: Where?\nAnswer: There")):
        messages = prompt.messages("Who was it that came first?", DOCUMENTS)
        alone = list(encode_each(engine.tokenizer, messages))
        prefill_documents(engine, encode_chat(engine.tokenizer, messages), alone, DocumentBlocks(2, 0))
    torch.testing.assert_close(totals[0], totals[1])


@pytest.mark.parametrize("marked", [True, False])
def test_a_question_longer_than_the_window_and_none(
    engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch, marked: bool
) -> None:
    """All of a long question is read though its end alone votes; without one the end of the prompt votes."""
    engine, passes, totals = _engine(engine_of("llama")), list[int](), list[Tensor]()
    bare = CitePrompt(system="", rules="", examples="", reply_start="")

    def watched(model: PreTrainedModel, ids: Tensor, *args: Any) -> Tensor:
        passes.append(ids.shape[1])
        return forward(model, ids, *args)

    def chosen(votes: Tensor, *args: Any) -> Tensor:
        totals.append(votes)
        return best_voted(votes, *args)

    read_documents(engine, DOCUMENTS, bare)
    monkeypatch.setattr(blend, "forward", watched)
    monkeypatch.setattr(blend, "best_voted", chosen)
    messages = bare.messages("Who was it? " * 20 if marked else "?", DOCUMENTS)
    whole = encode_chat(engine.tokenizer, messages)
    texts = [span for span in whole.spans if span.kind == "document"]
    whole = whole if marked else replace(whole, spans=tuple(texts))
    prefill_documents(engine, whole, list(encode_each(engine.tokenizer, messages)), DocumentBlocks(2, 0))
    expected = (whole.question_tokens, texts[-1].end) if marked else (32, len(whole) - 32)
    assert (passes[0], len(totals[0])) == expected
    assert (passes[0] > 64) if marked else (len(whole) - 32 < texts[-1].end)


def test_documents_are_read_once_in_any_set_and_order(engine_of: EngineOf) -> None:
    engine, told = _engine(engine_of("llama")), list[tuple[str, int, int]]()
    computed = read_documents(engine, DOCUMENTS[:3], PROMPT, lambda *progress: told.append(progress))
    assert computed > 0
    assert told == [("reading documents", n, 3) for n in (1, 2, 3)]
    assert read_documents(engine, DOCUMENTS[:3], PROMPT) == 0
    _, read = _read(engine, [DOCUMENTS[2], DOCUMENTS[0]])
    assert read.cache_creation_tokens == 0
    _, read = _read(engine, [DOCUMENTS[3], DOCUMENTS[0]])
    assert 0 < read.cache_creation_tokens < computed


def test_replies_go_on_from_blocks(engine_of: EngineOf) -> None:
    """Decoding appends, compressed or not."""
    engine = _engine(engine_of("qwen2"))
    for policy in (SNAPKV, FullKV()):
        whole, read = _read(engine, DOCUMENTS, ALL, policy)
        (reply,) = engine.replies([(whole, read)], SamplingParams(max_tokens=12))
        expected = Engine(engine.loaded, policy).generate([whole], SamplingParams(max_tokens=12))[0]
        assert reply.tokens == expected.tokens


@pytest.mark.parametrize("name", ["gemma3", "mistral-sliding", "llama-dynamic-rope", "phi3-longrope"])
def test_models_that_blocks_do_not_fit_read_the_prompt(engine_of: EngineOf, name: str) -> None:
    engine = _engine(engine_of(name))
    whole, read = _read(engine, DOCUMENTS, NOTHING)
    torch.testing.assert_close(read.logits, prefill(engine.model, whole, SNAPKV).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama-dynamic-rope", "phi3-longrope"])
def test_prompts_within_the_original_length_fit(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    config = ARCHITECTURES[name]()
    if "dynamic" in name:
        config.max_position_embeddings = 512
    else:
        config.original_max_position_embeddings = config.rope_parameters["original_max_position_embeddings"] = 512
    monkeypatch.setitem(ARCHITECTURES, name, lambda: config)
    engine = _engine(tiny_engine(name))
    assert rope_original_length(engine.model) == 512
    whole, read = _read(engine, DOCUMENTS[::-1], NOTHING, FullKV())
    assert read.cache_read_tokens > len(whole) // 2
    keys = prefill(engine.model, whole, FullKV()).cache.layers[0].keys
    torch.testing.assert_close(read.cache.layers[0].keys, keys, rtol=1e-4, atol=1e-4)
    beyond, read = _read(engine, DOCUMENTS * 2, NOTHING)
    assert len(beyond) > 512
    torch.testing.assert_close(read.logits, prefill(engine.model, beyond, SNAPKV).logits, rtol=1e-4, atol=1e-4)
    with pytest.raises(ConfigError, match="is longer than the 512 up to which"):
        read_documents(engine, [Document("long", "Text. " * 200, "Long")], PROMPT)


def test_policies_that_take_no_queries_keep_a_tail_of_stored_pieces(engine_of: EngineOf) -> None:
    """Only what observes for the vote is computed, however long the tail."""
    engine = _engine(engine_of("llama"))
    read_documents(engine, DOCUMENTS, PROMPT)
    whole, read = _read(engine, DOCUMENTS, NOTHING, StreamingLLM(4, 200))
    _, snapkv = _read(engine, DOCUMENTS, NOTHING)
    assert read.cache_read_tokens == snapkv.cache_read_tokens > len(whole) - 200


def test_policies_that_need_all_queries_read_the_prompt(engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = _engine(engine_of("llama"))
    monkeypatch.setattr("ragkv.document_blocks._stored", None)  # no single document is read for it
    whole, read = _read(engine, DOCUMENTS, NOTHING, H2O(120))
    assert read.cache_read_tokens == 0
    torch.testing.assert_close(read.logits, prefill(engine.model, whole, H2O(120)).logits, rtol=1e-4, atol=1e-4)


def test_documents_are_not_read_for_a_model_that_cannot_use_them(engine_of: EngineOf) -> None:
    engine = _engine(engine_of("gemma3"))
    for refused in (read_documents, bytes_to_store):
        with pytest.raises(ConfigError, match="cannot be joined"):
            refused(engine, DOCUMENTS, PROMPT)


def test_bytes_are_known_beforehand(engine_of: EngineOf) -> None:
    engine = _engine(engine_of("llama"))
    assert engine.store is not None
    missing = [bytes_to_store(engine, DOCUMENTS, PROMPT)]
    for document in DOCUMENTS:
        before = engine.store.info().nbytes
        read_documents(engine, [document], PROMPT)
        missing.append(bytes_to_store(engine, DOCUMENTS, PROMPT))
        # What documents share at their beginning is held once.
        assert missing[-2] - missing[-1] >= engine.store.info().nbytes - before > 0
    assert missing[-1] == 0


def test_reading_shows_progress_and_can_be_stopped(engine_of: EngineOf) -> None:
    engine, told = _engine(engine_of("llama")), list[tuple[int, int]]()
    messages = PROMPT.messages("Who?", DOCUMENTS[:2])
    whole, alone = encode_chat(engine.tokenizer, messages), list(encode_each(engine.tokenizer, messages))

    def watch(done: int, total: int) -> None:
        told.append((done, total))
        if len(told) == 11:
            raise KeyboardInterrupt

    def read() -> Prefilled:
        return prefill_documents(engine, whole, alone, policy=SNAPKV, on_layer=watch)

    with pytest.raises(KeyboardInterrupt):
        read()
    assert told == [(1, 3), (2, 3), (3, 3)] * 3 + [(1, 3), (2, 3)]  # two documents, the votes, what is computed anew
    assert read().cache_creation_tokens == 0  # both documents were kept
    assert told[11:] == [(1, 3), (2, 3), (3, 3)] * 2


def test_no_documents_and_no_store(engine_of: EngineOf) -> None:
    engine = _engine(engine_of("llama"))
    whole, read = _read(engine, [])
    assert read.length == len(whole)
    with pytest.raises(ConfigError, match="document blocks live in a store"):
        _read(tiny_engine(), DOCUMENTS)


def test_answers_on_blocks(engine_of: EngineOf) -> None:
    """With all recomputed it is the usual answer; the costs are those of the blocks."""
    engine, sampling = _engine(engine_of("llama")), SamplingParams(max_tokens=8)
    usual = ask(engine, "Who?", DOCUMENTS, sampling, prompt=PROMPT)
    exact = ask(engine, "Who?", DOCUMENTS, sampling, prompt=PROMPT, blocks=ALL)
    assert (exact.text, exact.documents) == (usual.text, usual.documents)
    stats = ask(engine, "Who?", DOCUMENTS[::-1], sampling, prompt=PROMPT, blocks=NOTHING).stats
    assert stats.cache_read_tokens > stats.prompt_tokens // 2
    assert stats.cache_creation_tokens == 0
    assert (stats.kept_tokens, stats.ttft_s > 0) == (120, True)


def test_chat_requests_on_blocks(engine_of: EngineOf) -> None:
    """Tools and schemas stand in both prompts alike; a batch may have rows of either kind."""
    engine, sampling = _engine(engine_of("llama")), SamplingParams(max_tokens=8)
    messages = PROMPT.messages("Who?", DOCUMENTS)
    tool = ToolSpec("look_up", "Looks up.", {"type": "object", "properties": {"what": {"type": "string"}}})
    usual = ChatRequest(messages, sampling)
    requests = [usual, replace(usual, tools=[tool]), replace(usual, response_format={"type": "object"})]
    expected = chat(Engine(engine.loaded, SNAPKV), requests)
    on_blocks = chat(engine, [replace(request, blocks=ALL) for request in requests])
    assert [reply.text for reply in on_blocks] == [reply.text for reply in expected]
    assert all(reply.stats.cache_read_tokens > 0 for reply in on_blocks)
    approximate, exact = chat(engine, [replace(usual, blocks=NOTHING), usual])
    assert approximate.stats.cache_read_tokens > approximate.stats.prompt_tokens // 2
    assert exact.text == expected[0].text


def test_a_chat_request_without_documents_is_read_as_it_is(engine_of: EngineOf) -> None:
    engine = _engine(engine_of("llama"))
    request = ChatRequest([{"role": "user", "content": "Who? " * 40}], SamplingParams(max_tokens=4))
    (expected,), (reply,) = chat(engine, [request]), chat(engine, [replace(request, blocks=NOTHING)])
    assert reply.text == expected.text


def test_sessions_with_a_memory_refuse_blocks(engine_of: EngineOf) -> None:
    request = ChatRequest(PROMPT.messages("Who?", DOCUMENTS), SamplingParams(max_tokens=4), blocks=USUAL)
    with pytest.raises(ConfigError, match="recompute=768: a session with a memory reads its turns as they are"):
        list(stream_thread(_engine(engine_of("llama")), request, StreamingMemory()))


def test_what_blocks_do_not_fit_is_read_in_chunks(engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(engine_of("mistral-sliding").loaded, SNAPKV, prefill_chunk_size=64, store=KVStore(10**9))
    sizes = list[int | None]()

    def watched(*args: Any, chunk_size: int | None = None, **options: Any) -> Prefilled:
        sizes.append(chunk_size)
        return prefill(*args, chunk_size=chunk_size, **options)

    monkeypatch.setattr("ragkv.document_blocks.prefill", watched)
    _read(engine, DOCUMENTS)
    assert sizes == [64]


def test_documents_of_other_messages_are_refused(engine_of: EngineOf) -> None:
    engine = _engine(engine_of("llama"))
    whole = encode_chat(engine.tokenizer, PROMPT.messages("Who?", DOCUMENTS))
    for other in (replace(PROMPT, system="Cite."), PROMPT):
        alone = list(encode_each(engine.tokenizer, other.messages("Who?", DOCUMENTS[::-1])))
        with pytest.raises(ConfigError, match="encode both from the same messages"):
            prefill_documents(engine, whole, alone)


def test_a_store_without_room(engine_of: EngineOf) -> None:
    """At index time it is an error; a question is answered all the same, from the prompt as a whole."""
    engine = Engine(engine_of("llama").loaded, SNAPKV, store=KVStore(100, block_size=16))
    with pytest.raises(ConfigError, match="the store has no room for a document of"):
        read_documents(engine, DOCUMENTS, PROMPT)
    with pytest.warns(UserWarning, match="has no room for a document of 64 tokens, so the prompt is read as a whole"):
        whole, read = _read(engine, DOCUMENTS)
    torch.testing.assert_close(read.logits, prefill(engine.model, whole, SNAPKV).logits, rtol=0, atol=1e-4)


def test_a_folder_that_cannot_be_written_costs_no_answer(engine_of: EngineOf, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    engine = Engine(engine_of("llama").loaded, SNAPKV, store=KVStore(0, tmp_path / "file" / "kv", block_size=16))
    with pytest.warns(UserWarning, match="cannot be written"):
        whole, read = _read(engine, DOCUMENTS)
    torch.testing.assert_close(read.logits, prefill(engine.model, whole, SNAPKV).logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize("where", ["memory", "folder"])
def test_documents_that_were_found_have_been_used(engine_of: EngineOf, tmp_path: Path, where: str) -> None:
    """What is asked about stays, and is counted as a hit; what was read after it makes room."""
    *first, last = DOCUMENTS[::-1]  # the last one is the shortest
    loaded, folder = engine_of("llama").loaded, tmp_path if where == "folder" else None
    roomy = KVStore(0 if folder else 10**9, folder, 10**9, block_size=16)
    read_documents(Engine(loaded, SNAPKV, store=roomy), first, PROMPT)
    held = sum(file.size for file in scan(folder)) if folder else roomy.info().nbytes
    store = KVStore(0 if folder else held, folder, held, block_size=16)
    engine = Engine(loaded, SNAPKV, store=store)
    read_documents(engine, first, PROMPT)
    before = store.info().usage
    _, read = _read(engine, first[:2])
    after = store.info().usage
    assert read.cache_creation_tokens == 0
    assert (after.hits, after.misses) == (before.hits + 1, before.misses)
    assert after.read_tokens > before.read_tokens
    read_documents(engine, [last], PROMPT)
    assert [bytes_to_store(engine, [each], PROMPT) > 0 for each in [*first, last]] == [False, False, True, False]


def test_documents_of_one_namespace_are_not_found_from_another(engine_of: EngineOf) -> None:
    engine = _engine(engine_of("llama"))
    assert engine.store is not None
    read_documents(engine, DOCUMENTS, PROMPT)
    other = Engine(engine.loaded, SNAPKV, store=engine.store.within("other"))
    assert bytes_to_store(engine, DOCUMENTS, PROMPT) == 0
    assert bytes_to_store(other, DOCUMENTS, PROMPT) > 0
    assert read_documents(other, DOCUMENTS, PROMPT) > 0


def test_a_reply_on_blocks_lets_go_of_the_full_cache(engine_of: EngineOf) -> None:
    engine = _engine(engine_of("llama"))
    _, read = _read(engine, DOCUMENTS)
    assert engine.store is not None
    blocks = [weakref.ref(entry.block) for entry in engine.store._memory._entries.values()]
    engine.store.clear()
    gc.collect()
    assert blocks
    assert read.length
    assert not any(block() for block in blocks)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((-0.1, 0), "recompute=-0.1"),
        ((1.5, 0), "recompute=1.5"),
        ((math.nan, 0), "recompute=nan"),
        ((math.inf, 0), "recompute=inf"),
        ((0.5, -1), "first_tokens=-1"),
    ],
)
def test_bounds(values: tuple[float, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DocumentBlocks(*values)


def test_a_share_or_a_number_of_tokens() -> None:
    chosen = [DocumentBlocks(recompute).voted_tokens(1000) for recompute in (0, 0.25, 1, 2, 768, 4096)]
    assert chosen == [0, 250, 1000, 2, 768, 4096]
