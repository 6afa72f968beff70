"""Document sets of a given length: a question's own documents among others, in a seeded order.

What is drawn depends on the seed and the question's id alone, so that every policy, run and machine sees the same.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ragkv.documents import Document
from ragkv.errors import DocumentError
from ragkv.prompt import CitePrompt
from ragkv_evals.tasks.base import Example, Layout
from ragkv_evals.tasks.question import Question, drawn, identity
from ragkv_evals.tasks.shared_sets import SharedSets


@dataclass
class DocumentSets:
    """The cases of a file of questions; each is padded with documents of the other questions.

    Attributes:
        most: most documents in a prompt.
        prompt: the texts around them.
        hints: what is said behind a question, by its kind.
    """

    questions: Sequence[Question]
    most: int | None = None
    prompt: CitePrompt = CitePrompt()
    hints: Mapping[str, str] = field(default_factory=dict)
    ids: Sequence[str] = field(init=False)

    def __post_init__(self) -> None:
        self.ids = [question.id for question in self.questions]
        every = (document for question in self.questions for document in question.documents)
        self._pool = list({identity(document): document for document in every}.values())  # one for each title
        self._tokens: dict[Document, int] = {}  # not by id: a passage of one abstract differs by question
        self._shared: dict[tuple[int, int], SharedSets] = {}

    def build(self, index: int, layout: Layout) -> Example:
        """The question among as many documents as fit, in a set of its own or in one that it shares with others.

        Raises:
            DocumentError: not even the gold documents fit.
        """
        question = self.questions[index]
        text = self._text(question)
        gold = [question.documents[i] for i in sorted(question.gold)]
        if layout.shared:
            documents: Sequence[Document] = self._sets(layout).documents_of(index)
        else:
            documents = self._own_set(question, gold, text, layout)
        return Example(
            id=question.id,
            question=text,
            documents=tuple(documents),
            gold=tuple(number for number, document in enumerate(documents, 1) if document in gold),
            answers=question.answers,
            kind=question.kind,
            prompt=self.prompt,
        )

    def _sets(self, layout: Layout) -> SharedSets:
        """The shared sets of this length, packed as far as anyone has asked for."""
        if layout.context_tokens is None:
            raise DocumentError("shared document sets need a length: give --context-tokens")
        key = layout.context_tokens, layout.seed
        if key not in self._shared:
            self._shared[key] = SharedSets(
                self.questions,
                drawn(len(self.questions), layout.seed),
                self._pool,
                lambda document: self._count(document, layout),
                lambda question: layout.counter.frame(self._text(question), self.prompt),
                layout.context_tokens,
                self.most,
                layout.seed,
            )
        return self._shared[key]

    def _text(self, question: Question) -> str:
        return " ".join(part for part in (question.text, self.hints.get(question.kind)) if part)

    def _own_set(self, question: Question, gold: Sequence[Document], text: str, layout: Layout) -> Sequence[Document]:
        rng = random.Random(f"{layout.seed} {question.id}")  # noqa: S311 (a draw, not a secret)
        others = [document for i, document in enumerate(question.documents) if i not in question.gold]
        if layout.context_tokens is not None:
            room = layout.context_tokens - layout.counter.frame(text, self.prompt)
            others = self._fitting(question, gold, others, room, layout, rng)
        return _ordered(gold, others, layout.depth, rng)

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
        seen = {identity(document) for document in question.documents}
        taken: list[Document] = []
        for document in own:
            if (tokens := self._count(document, layout)) <= room:
                taken.append(document)
                room -= tokens
        for document in rng.sample(self._pool, len(self._pool)):
            if identity(document) in seen:
                continue
            room -= self._count(document, layout)
            if room < 0 or len(gold) + len(taken) == self.most:
                break
            taken.append(document)
        return taken

    def _count(self, document: Document, layout: Layout) -> int:
        if document not in self._tokens:
            self._tokens[document] = layout.counter.document(document)
        return self._tokens[document]


def _ordered(
    gold: Sequence[Document], others: Sequence[Document], depth: float | None, rng: random.Random
) -> list[Document]:
    """All of them shuffled; with a depth, the gold ones together behind that share of the others."""
    if depth is None:
        return rng.sample([*gold, *others], len(gold) + len(others))
    before = round(len(others) * depth / 100)
    shuffled = rng.sample(others, len(others))
    return [*shuffled[:before], *rng.sample(gold, len(gold)), *shuffled[before:]]
