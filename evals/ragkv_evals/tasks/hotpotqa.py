"""HotpotQA (arXiv 1809.09600): questions over two Wikipedia paragraphs each, among eight that mislead and others."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ragkv.documents import Document
from ragkv_evals.long_text import SAMPLE
from ragkv_evals.metrics import cited_answer
from ragkv_evals.tasks.base import Example, Figures, Task, read_rows
from ragkv_evals.tasks.document_set import DocumentSets
from ragkv_evals.tasks.question import Question

GET = (
    "Leave --data out to use the bundled sample of 50 questions, or give the development set in the distractor setting "
    "(hotpot_dev_distractor_v1.json from hotpotqa.github.io)."
)
_OTHER_NAMES = {"_id": "id", "supporting_facts": "supporting", "context": "paragraphs"}


def load(data: Path | None) -> list[Question]:
    """The questions of a file, in the format of the bundled sample or of the data set itself."""
    fields = ("id", "question", "answer", "type", "supporting", "paragraphs")
    return [_question(row) for row in read_rows(data or SAMPLE, fields, GET, _OTHER_NAMES)]


def _question(row: Mapping[str, Any]) -> Question:
    named = ({"title": p[0], "sentences": p[1]} if isinstance(p, list) else p for p in row["paragraphs"])
    documents = tuple(Document(id="", title=p["title"], text="".join(p["sentences"])) for p in named)
    supporting = {title for title, _ in row["supporting"]}
    return Question(
        id=row["id"],
        text=row["question"],
        answers=((row["answer"],),),
        documents=documents,
        gold=frozenset(index for index, document in enumerate(documents) if document.title in supporting),
        kind=row["type"],
    )


def score(example: Example, reply: str) -> Figures:
    """Figures of the answer, of its citations, and of both."""
    accepted = [synonym for answer in example.answers for synonym in answer]
    return cited_answer(reply, accepted, example.gold, example.titles)


HOTPOTQA = Task(
    name="hotpotqa",
    help="Cited answers to questions over two paragraphs of Wikipedia among many.",
    open=lambda data: DocumentSets(load(data)),
    score=score,
    headline=("f1", "citation_f1", "joint_f1"),
    max_tokens=64,
)
