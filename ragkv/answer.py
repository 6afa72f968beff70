"""A question about documents, answered and cited: prompt, generation and citations tied together by one numbering."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from ragkv.chat import Prompt, encode_chat
from ragkv.citations import cited_numbers
from ragkv.cite_grammar import citation_constraint
from ragkv.config import SamplingParams
from ragkv.document_blocks import DocumentBlocks, reader
from ragkv.documents import Document
from ragkv.engine import Engine
from ragkv.errors import ConfigError, PromptTooLong
from ragkv.grammar import GrammarConstraint
from ragkv.ordering import PopularFirst
from ragkv.policies import Policy
from ragkv.prefill import LayerCallback
from ragkv.prompt import CitePrompt
from ragkv.reply import Completion, FinishReason, Stats

Overflow = Literal["error", "drop_documents"]


@dataclass(frozen=True)
class Answer:
    """An answer and what it rests on.

    Attributes:
        text: the reply as the model wrote it, markers included, without the white space around it.
        documents: those that were in the prompt; number n is documents[n - 1].
        citations: numbers of the documents cited, in order of first mention; by title where the text gives titles
            (`ragkv.citations.cited_numbers`).
        invalid_citations: cited numbers that no document has.
        dropped_documents: lowest-ranked documents left out because the caller allowed it.
    """

    text: str
    documents: tuple[Document, ...]
    citations: tuple[int, ...]
    invalid_citations: tuple[int, ...]
    dropped_documents: tuple[Document, ...]
    finish_reason: FinishReason
    stats: Stats

    @property
    def cited_documents(self) -> list[Document]:
        """The documents behind `citations`, in that order."""
        return [self.documents[number - 1] for number in self.citations]


@dataclass(frozen=True)
class AnswerChunk:
    """New text of an answer, and the whole answer with the last piece."""

    text: str
    answer: Answer | None = None


def ask(
    engine: Engine,
    question: str,
    documents: Sequence[Document],
    sampling: SamplingParams = SamplingParams(max_tokens=128),
    *,
    prompt: CitePrompt = CitePrompt(),
    policy: Policy | None = None,
    on_overflow: Overflow = "error",
    order: PopularFirst | None = None,
    blocks: DocumentBlocks | None = None,
    must_cite: bool = False,
) -> Answer:
    """Answer a question from documents (best first); see `stream_answer`."""
    chunks = stream_answer(
        engine,
        question,
        documents,
        sampling,
        prompt=prompt,
        policy=policy,
        on_overflow=on_overflow,
        order=order,
        blocks=blocks,
        must_cite=must_cite,
    )
    return next(chunk.answer for chunk in chunks if chunk.answer is not None)


def stream_answer(
    engine: Engine,
    question: str,
    documents: Sequence[Document],
    sampling: SamplingParams = SamplingParams(max_tokens=128),
    *,
    prompt: CitePrompt = CitePrompt(),
    policy: Policy | None = None,
    on_overflow: Overflow = "error",
    order: PopularFirst | None = None,
    blocks: DocumentBlocks | None = None,
    must_cite: bool = False,
    on_layer: LayerCallback | None = None,
) -> Iterator[AnswerChunk]:
    """Answer a question from documents, yielding text as it is made.

    Args:
        documents: best first; they are numbered in this order, unless `order` gives another.
        sampling: how the answer is generated.
        prompt: the texts around documents and question.
        on_overflow: "error", or "drop_documents" to leave out as many of the last documents as the context demands;
            the answer reports them.
        order: counts the documents of every call and puts the most frequent first, so that later prompts begin like
            earlier ones and an engine with a store reads less of them.
        blocks: read the documents one by one, once each, and join their K/V: approximate, and for an engine with a
            store; see `ragkv.document_blocks`. None reads the prompt as it is.
        must_cite: hold the reply to the form of the prompt by a grammar, for models that do not keep to it by
            themselves: the answer in a line, then documents that are there. A custom `prompt` must ask for that form.

    Raises:
        ConfigError: the question is empty, `on_overflow` is neither of the two, or there is nothing to cite.
        PromptTooLong: the documents do not fit and may not be dropped, or the question alone does not fit.
    """
    if on_overflow not in get_args(Overflow):
        raise ConfigError(f"on_overflow={on_overflow!r}: choose one of {', '.join(get_args(Overflow))}")
    kept, encoded = _fit(engine, question, documents, sampling, prompt, on_overflow, order)
    dropped = tuple(documents[len(kept) :])
    if order is not None:
        order.count([document.id for document in kept])

    read = None
    if blocks is not None:
        read = reader(engine, encoded, prompt.messages(question, kept), blocks, policy=policy)
    constraint = _constraint(engine, kept) if must_cite else None
    for chunk in engine.stream(
        encoded, sampling, policy=policy, constraints=[constraint], on_layer=on_layer, reads=[read]
    ):
        done = chunk.completion
        yield AnswerChunk(chunk.text, None if done is None else _answer(done, tuple(kept), dropped))


def _constraint(engine: Engine, documents: Sequence[Document]) -> GrammarConstraint:
    return citation_constraint(engine.tokenizer, documents, eos_token_ids=engine.loaded.eos_token_ids)


def _answer(completion: Completion, documents: tuple[Document, ...], dropped: tuple[Document, ...]) -> Answer:
    valid, invalid = cited_numbers(completion.text, [document.title for document in documents])
    return Answer(
        text=completion.text.strip(),
        documents=documents,
        citations=tuple(valid),
        invalid_citations=tuple(invalid),
        dropped_documents=dropped,
        finish_reason=completion.finish_reason,
        stats=completion.stats,
    )


def _fit(
    engine: Engine,
    question: str,
    documents: Sequence[Document],
    sampling: SamplingParams,
    prompt: CitePrompt,
    on_overflow: Overflow,
    order: PopularFirst | None,
) -> tuple[Sequence[Document], Prompt]:
    """The longest head of the documents whose prompt leaves room for the reply, as ordered, and that prompt."""

    def ordered(count: int) -> Sequence[Document]:
        if order is None:
            return documents[:count]
        return [documents[n] for n in order.positions([document.id for document in documents[:count]])]

    def encoded(count: int) -> Prompt:
        return encode_chat(engine.tokenizer, prompt.messages(question, ordered(count)))

    whole = encoded(len(documents))
    room = engine.loaded.context_length - sampling.max_tokens
    if len(whole) <= room or on_overflow == "error":
        return ordered(len(documents)), whole  # the engine names both numbers if it is too long
    count = _largest(len(documents), lambda n: len(encoded(n)) <= room)
    if count == 0 and documents:
        raise PromptTooLong(
            f"not even the best document fits beside the question into {engine.loaded.context_length} tokens of "
            f"context with max_tokens={sampling.max_tokens}: split the documents or lower max_tokens"
        )
    return ordered(count), encoded(count)


def _largest(upper: int, fits: Callable[[int], bool]) -> int:
    """The largest n in 0..upper for which `fits` holds, or 0; `fits` is monotone."""
    low = 0
    while low < upper:
        middle = (low + upper + 1) // 2
        low, upper = (middle, upper) if fits(middle) else (low, middle - 1)
    return low
