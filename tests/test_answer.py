"""Answers: one numbering from document to citation, text as it streams, and documents dropped only when allowed."""

import dataclasses

import pytest
import torch

from conftest import EngineOf
from ragkv.answer import Answer, ask, stream_answer
from ragkv.chat import encode_chat
from ragkv.config import SamplingParams
from ragkv.documents import Document
from ragkv.engine import Engine
from ragkv.errors import ConfigError, PromptTooLong
from ragkv.policies import FullKV, SnapKV
from ragkv.prompt import CitePrompt
from tiny import FULL_LENGTH, tiny_engine, tiny_tokenizer

DOCUMENTS = [Document(f"d{i}", f"Text number {i}. " * 3, f"Title {i}") for i in range(1, 7)]
PROMPT = CitePrompt(system="", rules="Cite.", examples="")
SHORT = SamplingParams(max_tokens=20, temperature=1.0, seed=1)


@pytest.fixture
def engine(engine_of: EngineOf) -> Engine:
    return engine_of("llama")


class Saying(Engine):
    """A tiny model made to say one text: every token but the next one of it is forbidden."""

    def __init__(self, text: str) -> None:
        base = tiny_engine("llama")
        super().__init__(base.loaded, FullKV())
        self._ids = [*tiny_tokenizer().encode(text, add_special_tokens=False), 2]

    def stream(self, prompts, *args, **options):  # type: ignore[no-untyped-def, override]
        return super().stream(prompts, *args, **{**options, "constraints": [_Script(list(self._ids))]})


class _Script:
    def __init__(self, left: list[int]) -> None:
        self._left = left

    def mask(self, logits: torch.Tensor) -> torch.Tensor:
        return torch.full_like(logits, -torch.inf).index_fill(0, torch.tensor(self._left[:1]), 0.0)

    def accept(self, token: int) -> None:
        self._left.pop(0)


def test_streamed_text_is_the_text_of_the_answer(engine: Engine) -> None:
    chunks = list(stream_answer(engine, "Where?", DOCUMENTS, SHORT, prompt=PROMPT))
    answers = [chunk.answer for chunk in chunks if chunk.answer]
    assert len(answers) == 1
    assert chunks[-1].answer is answers[0]
    assert "".join(chunk.text for chunk in chunks).strip() == answers[0].text != ""
    assert _but_time(ask(engine, "Where?", DOCUMENTS, SHORT, prompt=PROMPT)) == _but_time(answers[0])


def _but_time(answer: Answer) -> Answer:
    """Without what differs from run to run: times, and the memory of the process."""
    stats = dataclasses.replace(answer.stats, ttft_s=0, decode_tokens_per_s=0, peak_memory_bytes=None)
    return dataclasses.replace(answer, stats=stats)


def test_the_model_reads_the_numbered_prompt(engine: Engine) -> None:
    prompt = encode_chat(engine.tokenizer, PROMPT.messages("Where?", DOCUMENTS))
    expected = engine.generate([prompt], SHORT, policy=FullKV())[0]
    answer = ask(engine, "Where?", DOCUMENTS, SHORT, prompt=PROMPT, policy=FullKV())
    assert answer.text == expected.text.strip()
    assert answer.stats.prompt_tokens == len(prompt)
    assert answer.finish_reason == expected.finish_reason == "length"
    assert answer.documents == tuple(DOCUMENTS)
    assert answer.dropped_documents == ()


def test_citations_are_checked_against_the_documents() -> None:
    answer = ask(Saying("Toads [2][9], and dogs [5, 2]. [1-3] [0]"), "Where?", DOCUMENTS, prompt=PROMPT)
    assert answer.text == "Toads [2][9], and dogs [5, 2]. [1-3] [0]"
    assert answer.citations == (2, 5, 1, 3)
    assert answer.invalid_citations == (9, 0)
    assert answer.cited_documents == [DOCUMENTS[1], DOCUMENTS[4], DOCUMENTS[0], DOCUMENTS[2]]
    assert answer.finish_reason == "stop"


def test_an_answer_without_citations_and_one_without_documents() -> None:
    assert ask(Saying("Nothing."), "Where?", DOCUMENTS, prompt=PROMPT).citations == ()
    answer = ask(Saying("Toads [1]"), "Where?", [], prompt=PROMPT)
    assert (answer.citations, answer.invalid_citations, answer.documents) == ((), (1,), ())


def test_a_policy_may_differ_by_call(engine: Engine) -> None:
    answer = ask(engine, "Where?", DOCUMENTS, SHORT, prompt=PROMPT, policy=SnapKV(80, 16))
    assert answer.stats.kept_tokens == 80 < answer.stats.prompt_tokens


def _narrow(context_length: int) -> Engine:
    return tiny_engine("llama", FullKV(), context_length=context_length)


def _length(count: int) -> int:
    return len(encode_chat(tiny_tokenizer(), PROMPT.messages("Where?", DOCUMENTS[:count])))


def test_documents_that_do_not_fit_are_an_error() -> None:
    context = _length(6) + 19
    with pytest.raises(PromptTooLong, match=f"a prompt of {_length(6)} tokens and max_tokens=20 .* {context} tokens"):
        ask(_narrow(context), "Where?", DOCUMENTS, SHORT, prompt=PROMPT)
    assert ask(_narrow(context + 1), "Where?", DOCUMENTS, SHORT, prompt=PROMPT).dropped_documents == ()


@pytest.mark.parametrize("fitting", [1, 2, 3, 5, 6])
@pytest.mark.parametrize("spare", [0, 1, 10])
def test_as_many_as_needed_are_dropped_from_the_end_and_reported(fitting: int, spare: int) -> None:
    engine = _narrow(_length(fitting) + 20 + spare)
    answer = ask(engine, "Where?", DOCUMENTS, SHORT, prompt=PROMPT, on_overflow="drop_documents")
    assert answer.documents == tuple(DOCUMENTS[:fitting])
    assert answer.dropped_documents == tuple(DOCUMENTS[fitting:])
    assert answer.stats.prompt_tokens == _length(fitting)


def test_a_context_too_narrow_for_one_document_is_an_error() -> None:
    with pytest.raises(
        PromptTooLong, match=r"not even the best document fits beside the question into .* max_tokens=20"
    ):
        ask(_narrow(_length(1) + 19), "Where?", DOCUMENTS, SHORT, prompt=PROMPT, on_overflow="drop_documents")


def test_an_unknown_way_to_overflow_is_refused(engine: Engine) -> None:
    with pytest.raises(ConfigError, match="on_overflow='drop': choose one of error, drop_documents"):
        ask(engine, "Who?", [], on_overflow="drop")  # type: ignore[arg-type]


def test_an_empty_question_is_refused(engine: Engine) -> None:
    with pytest.raises(ConfigError, match="the question is empty"):
        ask(engine, "  ", DOCUMENTS)


def test_progress_is_told_and_closing_ends(engine: Engine) -> None:
    told: list[int] = []
    stream = stream_answer(
        engine, "Where?", DOCUMENTS, SHORT, prompt=PROMPT, on_layer=lambda done, layers: told.append(done)
    )
    next(stream)
    assert told == [1, 2, 3]
    stream.close()  # type: ignore[attr-defined]
    assert list(stream) == []


def test_headers_and_instructions_outlive_a_tight_budget(engine: Engine) -> None:
    """The prompt's spans reach the policy: with room for them none is unprotected, without it they are counted."""
    roomy = ask(engine, "Where?", DOCUMENTS, SHORT, prompt=PROMPT, policy=SnapKV(250, 16))
    assert roomy.stats.kept_tokens == 250 < roomy.stats.prompt_tokens <= FULL_LENGTH
    tight = ask(engine, "Where?", DOCUMENTS, SHORT, prompt=PROMPT, policy=SnapKV(40, 16))
    assert roomy.stats.unprotected_tokens == 0 < tight.stats.unprotected_tokens
