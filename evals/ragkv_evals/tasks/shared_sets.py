"""One document set for several questions, as a collection is asked again and again: what each brings, together.

The prompts of a set differ in the question at their end alone, so a store of K/V reads the documents once for all.
"""

import random
from collections.abc import Callable, Iterator, Sequence

from ragkv.documents import Document
from ragkv.errors import DocumentError
from ragkv_evals.tasks.question import Question, identity


class SharedSets:
    """Packs questions, in the order in which runs draw them, into as few sets as their documents allow.

    Args:
        order: indices of the questions.
        pool: documents that fill what a set has left.
        count: tokens of a document, header included.
        frame: tokens of the prompt of a question without documents.
        context_tokens: most tokens of a prompt.
        most: most documents in a prompt.
        seed: fixes what fills a set and the order of its documents.
    """

    def __init__(
        self,
        questions: Sequence[Question],
        order: Sequence[int],
        pool: Sequence[Document],
        count: Callable[[Document], int],
        frame: Callable[[Question], int],
        context_tokens: int,
        most: int | None,
        seed: int,
    ) -> None:
        self._questions, self._pool, self._seed = questions, pool, seed
        self._count, self._frame = count, frame
        self._context_tokens, self._most = context_tokens, most
        self._of: dict[int, tuple[Document, ...]] = {}
        self._packing = self._pack(order)

    def documents_of(self, index: int) -> tuple[Document, ...]:
        """The documents of the set that question number `index` belongs to, in their order.

        Raises:
            DocumentError: the gold documents of a question up to there do not fit alone.
        """
        while index not in self._of:
            next(self._packing)
        return self._of[index]

    def _pack(self, order: Sequence[int]) -> Iterator[None]:
        open_set = _Set(self._context_tokens, self._most, self._count)
        for index in order:
            question = self._questions[index]
            frame = self._frame(question)
            if not open_set.join(index, question, frame):
                self._close(open_set)
                yield
                open_set = _Set(self._context_tokens, self._most, self._count)
                open_set.begin(index, question, frame)
        self._close(open_set)
        yield

    def _close(self, packed: "_Set") -> None:
        """Fill what is left, up to the first misfit, and shuffle."""
        if not packed.members:
            return
        first = self._questions[packed.members[0]]
        rng = random.Random(f"{self._seed} {first.id} shared")  # noqa: S311 (a draw, not a secret)
        for document in rng.sample(self._pool, len(self._pool)):
            if identity(document) not in packed.names and not packed.add([document]):
                break
        shuffled = tuple(rng.sample(packed.documents, len(packed.documents)))
        self._of.update(dict.fromkeys(packed.members, shuffled))


class _Set:
    """A set while it is being packed. A question may bring several documents of one name; others then leave them alone.

    Attributes:
        names: the identities of its documents.
    """

    def __init__(self, context_tokens: int, most: int | None, count: Callable[[Document], int]) -> None:
        self.members: list[int] = []
        self.documents: list[Document] = []
        self.names: set[str] = set()
        self._context_tokens, self._most, self._count = context_tokens, most, count
        self._used = self._frame = 0

    def join(self, index: int, question: Question, frame: int) -> bool:
        """Take a question with all of its documents; False if they do not fit, or one of them is there in other words.

        Only evidence must be there word for word: of any other document, what came first stays.
        """
        gold = {question.documents[n] for n in question.gold}
        held = {identity(document) for document in self.documents if document not in question.documents}
        if any(identity(document) in held for document in gold):
            return False
        more = [each for each in question.documents if each in gold or identity(each) not in self.names]
        before, self._frame = self._frame, max(self._frame, frame)
        if not self.add(more):
            self._frame = before
            return False
        self.members.append(index)
        return True

    def begin(self, index: int, question: Question, frame: int) -> None:
        """Take the first question: its gold documents, and of the others those that fit."""
        self._frame = frame
        gold = [question.documents[n] for n in sorted(question.gold)]
        if not self.add(gold):
            raise DocumentError(
                f"question {question.id}: its gold documents do not fit into --context-tokens {self._context_tokens}: "
                "raise it"
            )
        for document in question.documents:
            self.add([document])
        self.members.append(index)

    def add(self, documents: Sequence[Document]) -> bool:
        """All of these that are not there yet, or none if they do not fit."""
        new = [document for document in dict.fromkeys(documents) if document not in self.documents]
        tokens = sum(map(self._count, new))
        if self._used + tokens + self._frame > self._context_tokens:
            return False
        if self._most is not None and len(self.documents) + len(new) > self._most:
            return False
        self._used += tokens
        self.documents += new
        self.names.update(map(identity, new))
        return True
