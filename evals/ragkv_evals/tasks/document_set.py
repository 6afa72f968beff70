"""Document sets of a given length: a question's own documents among others, in a seeded order.

What is drawn depends on the seed and the question's id alone, so that every policy, run and machine sees the same.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ragkv.documents import Document
from ragkv.errors import DocumentError
from ragkv.prompt import CitePrompt
from ragkv_evals.tasks.base import Example, Layout


@dataclass(frozen=True)
class Question:
    """A question with its own documents; `gold` are indices of those that answer it."""

    id: str
    text: str
    answers: tuple[tuple[str, ...], ...]
    documents: tuple[Document, ...]
    gold: frozenset[int]
    kind: str = ""


@dataclass
class DocumentSets:
    """The cases of a file of questions; each is padded with documents of the other questions.

    Attributes:
        most: most documents in a prompt.
        prompt: the texts around them.
        hint: what is said behind a question, by its kind.
    """

    questions: Sequence[Question]
    most: int | None = None
    prompt: CitePrompt = CitePrompt()
    hint: Callable[[str], str] = lambda kind: ""
    ids: Sequence[str] = field(init=False)

    def __post_init__(self) -> None:
        self.ids = [question.id for question in self.questions]
        every = (document for question in self.questions for document in question.documents)
        self._pool = list({_identity(document): document for document in every}.values())  # one for each title
        self._tokens: dict[str, int] = {}

    def build(self, index: int, layout: Layout) -> Example:
        """The question among as many documents as fit.

        Raises:
            DocumentError: not even the gold documents fit.
        """
        question = self.questions[index]
        rng = random.Random(f"{layout.seed} {question.id}")  # noqa: S311 (a draw, not a secret)
        text = " ".join(part for part in (question.text, self.hint(question.kind)) if part)
        gold = [question.documents[i] for i in sorted(question.gold)]
        others = [document for i, document in enumerate(question.documents) if i not in question.gold]
        if layout.context_tokens is not None:
            room = layout.context_tokens - layout.counter.frame(text, self.prompt)
            others = self._fitting(question, gold, others, room, layout, rng)
        documents = _ordered(gold, others, layout.depth, rng)
        return Example(
            id=question.id,
            question=text,
            documents=tuple(documents),
            gold=tuple(number for number, document in enumerate(documents, 1) if document in gold),
            answers=question.answers,
            kind=question.kind,
            prompt=self.prompt,
        )

    def _fitting(
        self,
        question: Question,
        gold: Sequence[Document],
        own: Sequence[Document],
        room: int,
        layout: Layout,
        rng: random.Random,
    ) -> list[Document]:
        """The question's other documents as far as they fit beside gold, then those of the pool up to the first misfit.

        Smaller ones that still fit behind a misfit would make the lengths of the documents tell gold from others.
        """
        room -= sum(self._count(document, layout) for document in gold)
        if room < 0:
            raise DocumentError(
                f"question {question.id}: its gold documents need {-room} tokens more than "
                f"--context-tokens {layout.context_tokens}: raise it"
            )
        seen = {_identity(document) for document in question.documents}
        taken: list[Document] = []
        for document in own:
            if (tokens := self._count(document, layout)) <= room:
                taken.append(document)
                room -= tokens
        for document in rng.sample(self._pool, len(self._pool)):
            if _identity(document) in seen:
                continue
            room -= self._count(document, layout)
            if room < 0 or len(gold) + len(taken) == self.most:
                break
            taken.append(document)
        return taken

    def _count(self, document: Document, layout: Layout) -> int:
        if document.id not in self._tokens:
            self._tokens[document.id] = layout.counter.document(document)
        return self._tokens[document.id]


def _identity(document: Document) -> str:
    """What a document of another question must not share with one that is there."""
    return document.title or document.id


def _ordered(
    gold: Sequence[Document], others: Sequence[Document], depth: float | None, rng: random.Random
) -> list[Document]:
    """All of them shuffled; with a depth, the gold ones together behind that share of the others."""
    if depth is None:
        return rng.sample([*gold, *others], len(gold) + len(others))
    before = round(len(others) * depth / 100)
    shuffled = rng.sample(others, len(others))
    return [*shuffled[:before], *rng.sample(gold, len(gold)), *shuffled[before:]]
