"""MuSiQue (arXiv 2108.00573): questions of two to four steps over Wikipedia, made so that no step can be skipped."""

from pathlib import Path

from ragkv.documents import Document
from ragkv_evals.tasks import hotpotqa
from ragkv_evals.tasks.base import Task, read_rows
from ragkv_evals.tasks.document_set import DocumentSets
from ragkv_evals.tasks.question import Question

GET = "Give MuSiQue's answerable set, such as musique_ans_v1.0_dev.jsonl (github.com/StonyBrookNLP/musique)."


def load(data: Path | None) -> list[Question]:
    """The questions of a file; their kind is the number of steps."""
    rows = read_rows(data, ("id", "question", "answer", "answer_aliases", "paragraphs"), GET)
    return [
        Question(
            id=row["id"],
            text=row["question"],
            answers=((row["answer"], *row["answer_aliases"]),),
            documents=tuple(
                Document(id="", title=paragraph["title"], text=paragraph.get("text") or paragraph["paragraph_text"])
                for paragraph in row["paragraphs"]
            ),
            gold=frozenset(i for i, paragraph in enumerate(row["paragraphs"]) if paragraph["is_supporting"]),
            kind=row["id"].split("__")[0],
        )
        for row in rows
    ]


MUSIQUE = Task(
    name="musique",
    help="Cited answers to questions of two to four steps over Wikipedia.",
    open=lambda data: DocumentSets(load(data)),
    score=hotpotqa.score,
    headline=("f1", "citation_f1", "joint_f1"),
    max_tokens=64,
)
