"""BioASQ task B: questions of biomedical experts over abstracts of PubMed, up to 200 of them in a prompt.

Every document is cut to a passage around the evidence for its own question. A question is padded with passages that are
gold for others, so neither length nor completeness gives its gold documents away.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ragkv.documents import Document
from ragkv_evals.bioasq_metrics import question_figures, yesno_macro_f1
from ragkv_evals.metrics import citation_figures, citation_overlap, cited
from ragkv_evals.tasks.base import Example, Figures, Row, Task, read_rows
from ragkv_evals.tasks.document_set import DocumentSets
from ragkv_evals.tasks.question import Question

GET = (
    "Register at participants-area.bioasq.org, take a task-B golden file and give it as JSON lines with the fields id, "
    "question, type, exact_answer, ideal_answer, documents [{pmid, text}], snippets [{pmid, text}]."
)
MOST_DOCUMENTS = 200
PASSAGE = 1200  # characters; 200 documents, of which many are shorter, are about 24K tokens
HINTS = {
    "yesno": "Answer yes or no.",
    "list": "Name all of them, separated by commas.",
    "summary": "Answer in one to three sentences.",
}

_SENTENCE = re.compile(r"\S.*?(?:[.!?](?=\s)|$)", re.DOTALL)


def load(data: Path | None) -> list[Question]:
    """The questions of a file; documents without text are left out, and so are questions that have none left."""
    rows = read_rows(data, ("id", "question", "type", "exact_answer", "ideal_answer", "documents", "snippets"), GET)
    return [question for question in map(_question, rows) if question.documents]


def _question(row: Mapping[str, Any]) -> Question:
    evidence: dict[str, str] = {}
    for snippet in row["snippets"]:
        evidence.setdefault(snippet["pmid"], snippet["text"])
    documents = tuple(
        Document(id=document["pmid"], text=passage(document["text"], evidence.get(document["pmid"], "")))
        for document in row["documents"]
        if document["text"]
    )
    return Question(
        id=row["id"],
        text=row["question"],
        answers=_answers(row),
        documents=documents,
        gold=frozenset(range(len(documents))),
        kind=row["type"],
    )


def _answers(row: Mapping[str, Any]) -> tuple[tuple[str, ...], ...]:
    exact = row["exact_answer"]
    if row["type"] == "summary":
        return (tuple(row["ideal_answer"]),)
    if row["type"] == "yesno":
        return ((exact,),)
    groups = tuple(tuple(group) if isinstance(group, list) else (group,) for group in exact)
    # The groups of a factoid are all names of one answer, those of a list are its items.
    return groups if row["type"] == "list" else (tuple(name for group in groups for name in group),)


def passage(text: str, evidence: str, most: int = PASSAGE) -> str:
    """Whole sentences of a text, at most `most` characters, grown from the one in which the evidence begins."""
    sentences = [match.span() for match in _SENTENCE.finditer(text)]
    at = max(0, text.find(evidence.strip()))
    first = last = max((i for i, (start, _) in enumerate(sentences) if start <= at), default=0)
    while True:
        ways = [(first, last + 1), (first - 1, last)]  # on first: evidence goes on behind its beginning
        fitting = [
            (a, b) for a, b in ways if a >= 0 and b < len(sentences) and sentences[b][1] - sentences[a][0] <= most
        ]
        if not fitting:
            return text[sentences[first][0] : sentences[last][1]]
        first, last = fitting[0]


def score(example: Example, reply: str) -> Figures:
    """Figures of the answer by the kind of question, and of its citations."""
    citations = citation_overlap(cited(reply, example.titles), example.gold)
    return {**question_figures(example.kind, example.answers, reply), **citation_figures(citations)}


def aggregate(rows: Sequence[Row]) -> Figures:
    """Macro F1, which is about all yes/no questions together."""
    rows = [row for row in rows if row.kind == "yesno"]
    truths = [row.answers[0][0] for row in rows]
    return {"yesno_macro_f1": yesno_macro_f1([row.reply for row in rows], truths)} if rows else {}


BIOASQ = Task(
    name="bioasq",
    help="Cited answers to experts' questions over up to 200 abstracts of PubMed.",
    open=lambda data: DocumentSets(load(data), most=MOST_DOCUMENTS, hints=HINTS),
    score=score,
    headline=("score", "citation_f1"),
    max_tokens=128,
    hints=HINTS,
    aggregate=aggregate,
)
