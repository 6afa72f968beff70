"""A question of a data set with its own documents, and the order in which runs draw questions."""

import random
from dataclasses import dataclass

from ragkv.documents import Document


@dataclass(frozen=True)
class Question:
    """A question with its own documents; `gold` are indices of those that answer it."""

    id: str
    text: str
    answers: tuple[tuple[str, ...], ...]
    documents: tuple[Document, ...]
    gold: frozenset[int]
    kind: str = ""


def identity(document: Document) -> str:
    """What a document of another question must not share with one that is there."""
    return document.title or document.id


def drawn(count: int, seed: int) -> list[int]:
    """The indices below `count` in the order in which runs take them: smaller runs take the first of them."""
    return random.Random(seed).sample(range(count), count)  # noqa: S311 (a draw, not a secret)
