"""Cases that come as a text and a question, without numbered documents."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from ragkv.documents import Document
from ragkv_evals.tasks.base import Example, Figures, Layout


def pieces(texts: Sequence[str]) -> tuple[Document, ...]:
    """Texts that stand one after the other in the prompt, as documents."""
    return tuple(Document(id=str(number), text=text) for number, text in enumerate(texts, 1))


@dataclass
class FixedCases:
    """Cases whose length and order are those of the file."""

    examples: Sequence[Example]
    ids: Sequence[str] = field(init=False)

    def __post_init__(self) -> None:
        self.ids = [example.id for example in self.examples]

    def build(self, index: int, layout: Layout) -> Example:
        return self.examples[index]


def contains(example: Example, reply: str) -> Figures:
    """The share of the answers that the reply has in it, letter for letter, as RULER counts (`string_match_all`)."""
    said = reply.casefold()
    return {"accuracy": fmean(any(name.casefold() in said for name in names) for names in example.answers)}
