"""A cited answer, and the prompt it is an answer to; both hold the documents in one order, which their numbers are."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from langchain_core.documents import Document
from langchain_core.messages import BaseMessage
from langchain_core.runnables.base import RunnableBindingBase
from pydantic import BaseModel, Field

from langchain_ragkv._documents import from_langchain
from langchain_ragkv._fields import ChatSnapKVFields
from langchain_ragkv._messages import to_langchain
from ragkv.budget import within_budget
from ragkv.citations import cited_numbers, settled
from ragkv.errors import ConfigError
from ragkv.options import OPTION_NAMES, ChatOptions
from ragkv.ordering import PopularFirst
from ragkv.prompt import CitePrompt

Question = str | Mapping[str, Any]


def question_text(question: Question) -> str:
    """The text of a question, which may stand under "input"."""
    text = question.get("input") if isinstance(question, Mapping) else question
    if not isinstance(text, str):
        raise ConfigError(f'{question!r} is no question: give a string, or a mapping that has one under "input"')
    return text


class Citation(BaseModel):
    """A document that the answer names, by the number in the answer's brackets."""

    number: int
    document: Document


class CitedAnswer(BaseModel):
    """An answer and what it rests on; also a piece of one, while it is streamed.

    Pieces add up in their order. In a piece, `citations` and `invalid_citations` are those that became whole with it.
    """

    answer: str = Field(description="The reply as the model wrote it, markers included.")
    citations: list[Citation] = Field(default=[], description="Documents cited, in order of first mention.")
    invalid_citations: list[int] = Field(default=[], description="Cited numbers that no document has.")
    sources: list[Document] = Field(default=[], description="All documents in the prompt: number n is sources[n - 1].")
    dropped_documents: list[Document] = Field(default=[], description="Left out, beyond the model's context_tokens.")

    @classmethod
    def read(cls, answer: str, sources: Sequence[Document], dropped: Sequence[Document] = ()) -> Self:
        """An answer with the citations that its text makes of these sources."""
        valid, invalid = cited_numbers(answer, [from_langchain(document).title for document in sources])
        return cls(
            answer=answer,
            citations=[Citation(number=number, document=sources[number - 1]) for number in valid],
            invalid_citations=invalid,
            sources=list(sources),
            dropped_documents=list(dropped),
        )

    def __add__(self, other: "CitedAnswer") -> "CitedAnswer":
        dropped = self.dropped_documents or other.dropped_documents
        return CitedAnswer.read(self.answer + other.answer, self.sources or other.sources, dropped)


@dataclass(frozen=True)
class Asked:
    """A question about documents as the model gets it, and which documents those are."""

    messages: list[BaseMessage]
    sources: Sequence[Document]
    dropped: Sequence[Document]

    @classmethod
    def about(
        cls,
        documents: Sequence[Document],
        question: str,
        prompt: CitePrompt,
        llm: Any,
        order: PopularFirst | None = None,
    ) -> Self:
        """The prompt for as many of the documents (best first) as the model's `context_tokens` allow."""
        given = [from_langchain(document) for document in documents]
        options = _options(llm)
        if options is not None and options.context_tokens is not None:
            given = within_budget(options.engine().tokenizer, given, options.context_tokens)
        sources, dropped = documents[: len(given)], documents[len(given) :]
        if order is not None:
            positions = order.positions([document.id for document in given])
            given, sources = [given[n] for n in positions], [sources[n] for n in positions]
            order.count([document.id for document in given])
        return cls(to_langchain(prompt.messages(question, given)), sources, dropped)

    def answer(self, reply: BaseMessage) -> CitedAnswer:
        """The answer that a whole reply gives."""
        return CitedAnswer.read(str(reply.text).strip(), self.sources, self.dropped)


def _options(llm: Any) -> ChatOptions | None:
    """The options of a `ChatSnapKV`, with what was bound to it; None for any other model."""
    bound: dict[str, Any] = {}
    while isinstance(llm, RunnableBindingBase):
        bound = {**llm.kwargs, **bound}
        llm = llm.bound
    if not isinstance(llm, ChatSnapKVFields):
        return None
    return llm.options().override(**{name: value for name, value in bound.items() if name in OPTION_NAMES})


class AnswerStream:
    """An answer while it comes in, in pieces whose sum is the whole."""

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        self._text = self._white_space = ""
        self._named: set[int] = set()

    def start(self) -> CitedAnswer:
        """The piece before the first word: the sources."""
        return CitedAnswer.read("", self.asked.sources, self.asked.dropped)

    def push(self, message: BaseMessage) -> Iterator[CitedAnswer]:
        """What a chunk of the reply adds, if anything; white space waits for a word, for at the ends there is none."""
        new = self._white_space + str(message.text)
        new = new if self._text else new.lstrip()
        piece = new.rstrip()
        self._white_space = new[len(piece) :]
        if not piece:
            return
        self._text += piece
        yield self._piece(piece, settled(self._text))

    def end(self) -> Iterator[CitedAnswer]:
        """What the end of the reply adds: a citation that might have gone on."""
        last = self._piece("", self._text)
        if last.citations or last.invalid_citations:
            yield last

    def _piece(self, answer: str, text: str) -> CitedAnswer:
        """This much of the answer, and the citations of the text that have not been given yet."""
        whole = CitedAnswer.read(text, self.asked.sources)
        citations = [citation for citation in whole.citations if citation.number not in self._named]
        invalid = [number for number in whole.invalid_citations if number not in self._named]
        self._named.update(invalid, (citation.number for citation in citations))
        return CitedAnswer(answer=answer, citations=citations, invalid_citations=invalid)
