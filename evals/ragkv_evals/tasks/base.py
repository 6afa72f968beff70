"""What a task is: cases from a file, each laid out to a length as an example, and figures for each reply."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ragkv.documents import Document
from ragkv.errors import DocumentError
from ragkv.prompt import CitePrompt


@dataclass(frozen=True)
class Example:
    """One question over given texts.

    Attributes:
        documents: in the order of the prompt; number n is documents[n - 1].
        gold: numbers of the documents that the answer rests on.
        answers: what must be said, each with its synonyms; most tasks have one.
        kind: what sort of question it is, in the words of the data set.
        prompt: the texts around numbered documents; None puts the documents one after the other, as they are, and
            then the question.
        reply_start: words that the reply begins with, given to the model.
    """

    id: str
    question: str
    documents: tuple[Document, ...]
    gold: tuple[int, ...]
    answers: tuple[tuple[str, ...], ...]
    kind: str = ""
    prompt: CitePrompt | None = field(default=CitePrompt(), repr=False)
    reply_start: str = ""

    @property
    def titles(self) -> list[str]:
        """Those of the documents, in their order."""
        return [document.title for document in self.documents]


class Counter(Protocol):
    """Counts tokens as they will stand in the prompt."""

    def document(self, document: Document) -> int:
        """Tokens of a numbered document, header included; never less than in the prompt."""

    def text(self, text: str) -> int:
        """Tokens of a text by itself."""

    def frame(self, question: str, prompt: CitePrompt | None) -> int:
        """Tokens of the whole prompt without any document."""


@dataclass(frozen=True)
class Layout:
    """How a case becomes an example.

    Attributes:
        context_tokens: most tokens of the prompt; None adds nothing to the case's own texts.
        depth: where the gold documents stand, in percent of the rest before them; None leaves it to the seed.
        seed: with the case's id it fixes everything that is drawn.
        shared: whether questions share document sets; their gold documents then stand anywhere.
    """

    context_tokens: int | None
    depth: float | None
    seed: int
    counter: Counter
    shared: bool = False


class Cases(Protocol):
    """The cases of a data file."""

    ids: Sequence[str]

    def build(self, index: int, layout: Layout) -> Example:
        """The case number `index` laid out."""


Figures = Mapping[str, float]


@dataclass(frozen=True)
class Task:
    """A task by its functions.

    Attributes:
        open: reads a data file; None is the bundled one, if there is.
        score: figures between 0 and 1 of a reply; not every example needs to have all of them.
        headline: the figures that reports show first.
        max_tokens: most tokens of a reply.
        prompt: the texts around numbered documents.
        hints: what is said behind a question, by its kind.
        depths: where the gold documents stand unless a run says otherwise; empty leaves it to the seed.
        has_layout: whether lengths and depths can be chosen, or the file fixes both.
        has_documents: whether the prompt holds numbered documents, which can be left out.
        aggregate: figures of many replies together that are no means, from (example's kind, answers, reply) rows.
    """

    name: str
    help: str
    open: Callable[[Path | None], Cases]
    score: Callable[[Example, str], Figures]
    headline: tuple[str, ...]
    max_tokens: int
    prompt: CitePrompt = CitePrompt()
    hints: Mapping[str, str] = field(default_factory=dict)
    depths: tuple[float, ...] = ()
    has_layout: bool = True
    has_documents: bool = True
    aggregate: Callable[[Sequence["Row"]], Figures] = lambda rows: {}


@dataclass(frozen=True)
class Row:
    """What an aggregate sees of a reply."""

    kind: str
    answers: Sequence[Sequence[str]]
    reply: str


def read_rows(
    path: Path | None, required: Sequence[str], get: str, other_names: Mapping[str, str] | None = None
) -> Iterator[dict[str, Any]]:
    """The objects of a file: one a line, or a JSON array of them.

    Args:
        required: fields that every object must have.
        get: one sentence that says how to come by the data.
        other_names: of fields as the data set's authors spell them, and what they are called here.

    Raises:
        DocumentError: there is no such file, a line is not an object, or a field is missing.
    """
    if path is None:
        raise DocumentError(f"--data is missing. {get}")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DocumentError(f"--data {path}: cannot be read ({error}). {get}") from error
    if not text.strip():
        raise DocumentError(f"--data {path}: is empty. {get}")
    for where, row in _parsed(text, path, get):
        fields = row.items() if isinstance(row, dict) else ()
        named = {(other_names or {}).get(name, name): value for name, value in fields}
        if missing := [name for name in required if name not in named]:
            raise DocumentError(f"{where}: no field {', '.join(missing)}. {get}")
        yield named


def _parsed(text: str, path: Path, get: str) -> Iterator[tuple[str, Any]]:
    """Every value with the place it stands at."""
    if text.lstrip().startswith("["):
        rows = _json(text, f"--data {path}", get)
        yield from ((f"--data {path}, entry {number}", row) for number, row in enumerate(rows, 1))
        return
    # Only "\n" ends a row: str.splitlines would also cut at U+2028, which JSON strings may hold.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            where = f"--data {path}, line {number}"
            yield where, _json(line, where, get)


def _json(text: str, where: str, get: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DocumentError(f"{where}: not JSON ({error}). {get}") from error
