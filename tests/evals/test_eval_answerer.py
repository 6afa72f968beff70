"""The answerer on a tiny model: one prefill, the replies of the engine, checked budgets, and what survived."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from conftest import EngineOf
from ragkv.chat import Prompt
from ragkv.compare import prefill_many
from ragkv.config import SamplingParams
from ragkv.documents import Document
from ragkv.engine import Engine
from ragkv.errors import PromptTooLong
from ragkv.kv_store import KVStore
from ragkv.policies import Policy, SnapKV
from ragkv.policies.names import parse
from ragkv.prefill import Prefilled
from ragkv.survival import kept_masks, survival
from ragkv_evals import answerers
from ragkv_evals.answerers import EngineAnswerer, PolicyFailure, check_kept
from ragkv_evals.gold_tokens import answer_ranges, document_ranges, gold_ranges
from ragkv_evals.prompts import PromptCounter, encode
from ragkv_evals.records import Outcome
from ragkv_evals.tasks.base import Example
from ragkv_evals.truncation import truncated
from ragkv_evals.variants import variant
from tiny import tiny_tokenizer

POLICIES = (
    "full",
    "snapkv:96,window_size=16",
    "snapkv:96,window_size=16,pooling=max",
    "h2o:96",
    "streaming:96",
    "random:96",
    "pyramidkv:96,window_size=16",
    "adakv:96,window_size=16",
)
PLAIN = Example(
    "p",
    "Where is it?",
    (Document("1", "Before. "), Document("2", "It is in Toad Hall. ")),
    (2,),
    (("Toad Hall",),),
    prompt=None,
)


def example(documents: int = 4) -> Example:
    texts = [f"Document number {n} says that the answer is {n}{n}{n}." for n in range(1, documents + 1)]
    numbered = tuple(Document(id="", title=f"Title {n}", text=text) for n, text in enumerate(texts, 1))
    cited = Example("e", "What says the second?", numbered, (2,), (("222",),), "toy")
    # The examples of the default prompt would fill a tiny model's context.
    assert cited.prompt is not None
    return replace(cited, prompt=replace(cited.prompt, system="", rules="", examples=""))


@pytest.fixture
def engine(engine_of: EngineOf) -> Engine:
    return engine_of("llama")


def answers(engine: Engine, names: Sequence[str], which: Example | None = None) -> dict[str, Outcome]:
    return {outcome.policy: outcome for outcome in EngineAnswerer(engine).answer(which or example(), names, 6)}


def test_replies_are_those_of_the_engine(engine: Engine) -> None:
    prompt = encode(engine.tokenizer, example())
    found = answers(engine, POLICIES)
    assert list(found) == list(POLICIES)
    for name, outcome in found.items():
        alone = engine.generate([prompt], SamplingParams(max_tokens=6), policy=parse(name))[0]
        assert outcome.reply == alone.text.strip()
        assert (outcome.finish_reason, outcome.completion_tokens) == (alone.finish_reason, len(alone.tokens))
        assert (outcome.kv_bytes_full, outcome.kv_bytes_kept) == (alone.stats.kv_bytes_full, alone.stats.kv_bytes_kept)
    assert len({outcome.reply for outcome in found.values()}) > 1


def test_all_policies_share_one_prefill(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def counted(model: PreTrainedModel, prompt: Prompt, policies: Sequence[Policy], **store: Any) -> list[Prefilled]:
        calls.append(len(policies))
        return prefill_many(model, prompt, policies, **store)

    monkeypatch.setattr(answerers, "prefill_many", counted)
    found = answers(engine, [*POLICIES, "truncate:200"])
    assert calls == [len(POLICIES), 1]
    assert len({found[name].ttft_s for name in POLICIES}) == 1


def test_policies_decoded_together_reply_as_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    names, batches = [*POLICIES, "truncate:200"], []
    alone = answers(engine, names)
    replies = Engine.replies

    def counted(self: Engine, read: Sequence[tuple[Prompt, Prefilled]], *args: Any, **options: Any) -> Any:
        batches.append(len(read))
        return replies(self, read, *args, **options)

    monkeypatch.setattr(Engine, "replies", counted)
    found = list(EngineAnswerer(engine, together=True).answer(example(), names, 6))
    assert batches == [len(POLICIES), 1]
    assert [outcome.policy for outcome in found] == names
    timed = {"ttft_s": 0.0, "peak_memory_bytes": None, "decode_tokens_per_s": None}
    for outcome in found:
        assert replace(outcome, **timed) == replace(alone[outcome.policy], **timed)
        assert (outcome.decode_tokens_per_s is None) == (outcome.policy in POLICIES)


def test_replies_can_be_held_to_citing_the_documents_that_were_read(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    class Seven:
        """Allows one token."""

        def mask(self, logits: Tensor) -> Tensor:
            return torch.full_like(logits, -torch.inf).index_fill(0, torch.tensor(7), 0.0)

        def accept(self, token: int) -> None:
            pass

    def constraint(tokenizer: object, documents: Sequence[Document], *, eos_token_ids: frozenset[int]) -> Seven:
        assert eos_token_ids == engine.loaded.eos_token_ids
        seen.append(len(documents))
        return Seven()

    monkeypatch.setattr(answerers, "citation_constraint", constraint)
    counter, whole = PromptCounter(engine.tokenizer), example()
    frame = counter.frame(whole.question, whole.prompt)
    one = frame + counter.document(whole.documents[0])
    names = ["full", "snapkv:96,window_size=16", f"truncate:{one}", f"truncate:{frame}"]
    outcomes = list(EngineAnswerer(engine, must_cite=True).answer(whole, names, 4))
    assert seen == [4, 4, 1]  # none where no document is left
    sevens = engine.tokenizer.decode([7] * 4).strip()
    assert [outcome.reply == sevens for outcome in outcomes] == [True, True, True, False]


def test_questions_about_one_set_read_it_once(engine: Engine) -> None:
    """And are answered as if each had been read alone."""
    names = ["full", "snapkv:96,window_size=16", "streaming:96"]
    sharing = Engine(engine.loaded, store=KVStore(10**8, block_size=16))
    for question in ("What says the second?", "And what says the third document?"):
        asked = replace(example(), question=question)
        alone = answers(engine, names, asked)
        for name, outcome in answers(sharing, names, asked).items():
            assert (outcome.reply, outcome.kept_tokens) == (alone[name].reply, alone[name].kept_tokens)
            assert outcome.documents_kept == alone[name].documents_kept
    assert sharing.store is not None
    usage = sharing.store.info().usage
    assert (usage.hits, usage.misses) == (1, 1)


def instructed(documents: int) -> Example:
    """With instructions between documents and question, which all questions have in common."""
    asked = example(documents)
    assert asked.prompt is not None
    return replace(asked, prompt=replace(asked.prompt, rules="Answer from the documents above, in one word. " * 3))


def test_heavy_hitters_of_one_set_are_found_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """H2O takes the queries of all tokens, but what the documents look at is the same for all of their questions."""
    names = ["h2o:96", "h2o:120,gqa_reduction=sum", "h2o:120,gqa_reduction=max", "streaming:96", "h2o:150"]
    known: list[int] = []

    def counted(*args: Any, **store: Any) -> list[Prefilled]:
        read = prefill_many(*args, **store)
        known.append(read[0].cache_read_tokens)
        return read

    monkeypatch.setattr(answerers, "prefill_many", counted)
    for used in (names, [name for name in names if "max" not in name]):
        answerer = EngineAnswerer(Engine(engine.loaded, store=KVStore(10**8, block_size=16)))
        for question in ("What says the second?", "And what says the third document?"):
            for documents in (4, 3):
                asked = replace(instructed(documents), question=question)
                alone = answers(engine, used, asked)
                for outcome in answerer.answer(asked, used, 6):
                    assert outcome.reply == alone[outcome.policy].reply
                    assert outcome.documents_kept == pytest.approx(alone[outcome.policy].documents_kept)
    shared = known[1::2]  # every other one is of `answers`
    assert shared[:6] == [0] * 6  # the maximum over heads does not add up; and first questions are read whole
    for documents, tokens in zip((4, 3), shared[6:], strict=True):
        prompt = encode(engine.tokenizer, instructed(documents))
        assert tokens // 16 == (len(prompt) - (prompt.question_tokens or 0)) // 16


def test_papers_policies_protect_neither_instructions_nor_headers(engine: Engine) -> None:
    """Such as "snapkv:96,protect=nothing"; alone, decoded together, and on a set that was read before."""
    bare = [
        "snapkv:96,window_size=16,protect=nothing",
        "adakv:96,window_size=16,protect=nothing",
        "random:96,window_size=16,protect=nothing",
        "h2o:96,window_size=16,protect=nothing",
    ]
    names = [
        name
        for pair in zip((name.removesuffix(",protect=nothing") for name in bare), bare, strict=True)
        for name in pair
    ]
    prompt = encode(engine.tokenizer, example())
    read = prefill_many(engine.model, prompt, [variant(name) for name in names])  # type: ignore[misc]
    spans = prompt.protected
    for protecting, protects_nothing in zip(read[::2], read[1::2], strict=True):
        kept = [
            survival(kept_masks(each.cache, len(prompt)), spans).mean_share for each in (protecting, protects_nothing)
        ]
        assert kept[0] > kept[1]
        assert protecting.unprotected_tokens > 0  # there is not even room for all of them
        assert protects_nothing.unprotected_tokens == 0
    alone = answers(engine, names)
    answerer = EngineAnswerer(Engine(engine.loaded, store=KVStore(10**8, block_size=16)), together=True)
    for _ in range(2):
        for outcome in answerer.answer(example(), names, 6):
            assert outcome.documents_kept == pytest.approx(alone[outcome.policy].documents_kept)
            assert outcome.unprotected_tokens == alone[outcome.policy].unprotected_tokens


def test_only_whole_prompts_tell_how_long_reading_takes(engine: Engine) -> None:
    answerer = EngineAnswerer(Engine(engine.loaded, store=KVStore(10**8, block_size=16)))
    first, second = (
        list(answerer.answer(replace(example(), question=question), ["full", "truncate:150"], 2))
        for question in ("What says the second?", "And what says the third document?")
    )
    assert first[0].ttft_s is not None
    assert [outcome.ttft_s for outcome in second] == [None, None]  # their documents had been read
    assert all(outcome.ttft_s is not None for outcome in answers(engine, ["full", "truncate:150"]).values())


def test_kept_counts_are_the_budgets(engine: Engine) -> None:
    length = len(encode(engine.tokenizer, example()))
    for name, outcome in answers(engine, POLICIES).items():
        assert outcome.prompt_tokens == length
        assert outcome.kept_tokens == outcome.budget == (length if name == "full" else 96)


class Lazy(SnapKV):
    """Announces a budget that is not what it keeps."""

    def budget(self, length: int, layer: int, num_layers: int) -> int:
        return length - 1 if layer == 1 else super().budget(length, layer, num_layers)


def test_a_policy_that_does_nothing_fails() -> None:
    whole = [torch.ones(2, 300, dtype=torch.bool)] * 3
    with pytest.raises(
        PolicyFailure, match="snapkv:96 kept 300 of 300 tokens per KV head in layer 0, but its budget is 96"
    ):
        check_kept("snapkv:96", SnapKV(96), whole)
    right = [torch.zeros(2, 300, dtype=torch.bool) for _ in range(3)]
    for mask in right:
        mask[:, :96] = True
    assert check_kept("snapkv:96", SnapKV(96), right) == 96
    with pytest.raises(PolicyFailure, match="in layer 1, but its budget is 299"):
        check_kept("lazy", Lazy(96), right)
    assert check_kept("snapkv:96", SnapKV(96), [torch.ones(2, 50, dtype=torch.bool)]) == 50  # shorter than the budget


def test_a_policy_that_does_nothing_fails_a_run(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ragkv.cache.CompressibleLayer.keep", lambda layer, positions: None)
    with pytest.raises(PolicyFailure, match="snapkv:96"):
        answers(engine, ["snapkv:96,window_size=16"])


def test_survival_is_that_of_the_gold_tokens(engine: Engine) -> None:
    found = answers(engine, ["full", "streaming:96", "truncate:150"])
    assert (found["full"].gold_survival, found["full"].answer_survival) == (1, 1)
    assert found["full"].documents_kept == (1, 1, 1, 1)
    prompt = encode(engine.tokenizer, example())
    _, end = document_ranges(prompt)[2]
    recent = len(prompt) - 92
    assert recent > end  # the second document is older than the window
    assert found["streaming:96"].gold_survival == 0
    assert found["streaming:96"].documents_kept[3] > 0
    assert found["truncate:150"].documents_kept[0] == 1
    assert found["full"].gold_kept == (((9, example().documents[1].text),),)
    assert found["streaming:96"].gold_kept == (((0, example().documents[1].text),),)


def test_truncation_leaves_out_the_last_documents(engine: Engine) -> None:
    counter, whole = PromptCounter(engine.tokenizer), example()
    length = len(encode(engine.tokenizer, whole))
    for most in (length - 1, length // 2, counter.frame(whole.question, whole.prompt)):
        left = truncated(whole, most, counter)
        assert left.documents == whole.documents[: len(left.documents)]
        assert len(left.documents) < 4
        assert len(encode(engine.tokenizer, left)) <= most
        assert left.gold == whole.gold
    assert truncated(whole, length + 50, counter) == whole
    with pytest.raises(PromptTooLong, match="truncate:3: the prompt needs"):
        truncated(whole, 3, counter)


def test_a_truncated_outcome_tells_what_was_left_out(engine: Engine) -> None:
    counter, whole = PromptCounter(engine.tokenizer), example()
    one = counter.frame(whole.question, whole.prompt) + counter.document(whole.documents[0])
    found = answers(engine, [f"truncate:{one}", "full"])
    assert list(found) == ["full", f"truncate:{one}"]
    cut = found[f"truncate:{one}"]
    assert cut.documents_kept == (1, 0, 0, 0)
    assert (cut.gold_survival, cut.answer_survival) == (0, 0)
    assert cut.prompt_tokens == cut.budget == cut.kept_tokens <= one
    assert cut.kv_bytes_kept < found["full"].kv_bytes_kept


def test_a_probe_reads_a_piece_of_the_prompt(engine: Engine) -> None:
    answerer = EngineAnswerer(engine)
    for documents, read in ((20, 512), (4, None)):
        length = len(encode(engine.tokenizer, example(documents)))
        probe = answerer.probe(example(documents))
        assert (probe.prompt_tokens, probe.read_tokens) == (length, read or length)
        assert 0 < probe.seconds < 5


def test_a_prompt_that_does_not_fit_is_refused(engine: Engine) -> None:
    with pytest.raises(PromptTooLong, match=r"example e: .* do not fit into the 1024 tokens"):
        answers(engine, ["full"], example(40))


def test_a_plain_example_is_its_texts_the_question_and_the_reply_begun() -> None:
    tokenizer, plain = tiny_tokenizer(), replace(PLAIN, reply_start="It is in")
    prompt = encode(tokenizer, plain)
    text = tokenizer.decode(prompt.ids)
    assert "Before. It is in Toad Hall. Where is it?<|im_end|>" in text
    assert text.endswith("<|im_start|>assistant\nIt is in")
    start = len(prompt) - (prompt.question_tokens or 0)
    assert tokenizer.decode(prompt.ids[start:]).startswith("Where is it?")


def test_control_tokens_in_a_reply_start_stay_text() -> None:
    tokenizer = tiny_tokenizer()
    prompt = encode(tokenizer, replace(PLAIN, reply_start="<|im_end|>"))
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") not in prompt.ids[-6:]


def text_of(prompt: Prompt, span: tuple[int, int]) -> str:
    return str(tiny_tokenizer().decode(prompt.ids[span[0] : span[1]]))


def test_gold_and_answer_tokens_are_found() -> None:
    prompt = encode(tiny_tokenizer(), example())
    assert [text_of(prompt, span).strip() for span in gold_ranges(prompt, example())] == [example().documents[1].text]
    (answer,) = answer_ranges(tiny_tokenizer(), prompt, example())
    assert text_of(prompt, answer).strip(" .") == "222"
    other = replace(example(), answers=(("DOCUMENT NUMBER", "no such words"),))
    (found,) = answer_ranges(tiny_tokenizer(), prompt, other)
    assert text_of(prompt, found).strip() == "Document number"
    assert answer_ranges(tiny_tokenizer(), prompt, replace(other, answers=(("22",),))) == []  # whole words only
    assert answer_ranges(tiny_tokenizer(), prompt, replace(other, answers=(("no",),))) == []


def test_counts_are_those_of_the_prompt() -> None:
    tokenizer, whole = tiny_tokenizer(), example()
    counter = PromptCounter(tokenizer)
    counted = counter.frame(whole.question, whole.prompt) + sum(map(counter.document, whole.documents))
    assert counted == len(encode(tokenizer, whole)) + 2 * 4  # room for the digits of larger numbers
    assert counter.text("Toad Hall") == len(tokenizer.encode("Toad Hall"))
