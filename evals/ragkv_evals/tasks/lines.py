"""LongEval line retrieval (lmsys.org, 2023): the number that stands in one of hundreds of lines."""

import re
from pathlib import Path

from ragkv.errors import DocumentError
from ragkv_evals.tasks.base import Example, Figures, Task, read_rows
from ragkv_evals.tasks.plain import FixedCases, pieces

GET = (
    "Give test cases of LongEval (github.com/DachengLi1/LongChat, longeval/evaluation/lines) as JSON lines with the "
    "fields prompt, expected_number, correct_line, num_lines."
)
_QUESTION = "\nNow the record is over."


def load(data: Path | None) -> list[Example]:
    """The cases of a file; their kind is the number of lines."""
    rows = read_rows(data, ("prompt", "expected_number", "correct_line", "num_lines"), GET)
    return [
        _example(f"{row['num_lines']}-{number}", row["prompt"], row["correct_line"], row["expected_number"])
        for number, row in enumerate(rows)
    ]


def _example(name: str, prompt: str, line: str, expected: int) -> Example:
    record, mark, rest = prompt.rpartition(_QUESTION)
    before, found, after = record.partition(line)
    if not mark or not found:
        raise DocumentError(f"case {name}: its prompt has no {'question' if not mark else 'correct line'}. {GET}")
    return Example(
        id=name,
        question=(mark + rest).strip(),
        documents=pieces([before, line, after + "\n"]),
        gold=(2,),
        answers=((str(expected),),),
        kind=name.split("-")[0],
        prompt=None,
        reply_start=f"The <REGISTER_CONTENT> in {line.split(':')[0]} is <",
    )


def score(example: Example, reply: str) -> Figures:
    """Whether the first number of the reply is the one asked for.

    LongEval takes the last, of a reply in the model's own words. Here the reply is begun up to the number: the first is
    the answer, and those behind it are of lines that a small model goes on to.
    """
    said = re.search(r"\d+", reply)
    return {"accuracy": float(said is not None and said.group() == example.answers[0][0])}


LINES = Task(
    name="lines",
    help="LongEval: the number in one of hundreds of lines.",
    open=lambda data: FixedCases(load(data)),
    score=score,
    headline=("accuracy",),
    max_tokens=16,
    has_layout=False,
    has_documents=False,
)
