"""RULER's needles (arXiv 2404.06654): keys and values hidden in a text, and a question for some of them."""

import re
from pathlib import Path

from ragkv.errors import DocumentError
from ragkv_evals.tasks.base import Example, Task, read_rows
from ragkv_evals.tasks.plain import FixedCases, contains, pieces

GET = "Make cases with RULER (github.com/NVIDIA/RULER) as JSON lines with the fields index, input, outputs."
_QUESTION = re.compile(r"\nWhat (?:is|are all) the special magic [^\n]*$")
_REPLY_START = re.compile(r"(?<=\?) (The special magic .*)$")


def load(data: Path | None) -> list[Example]:
    """The cases of a file."""
    rows = read_rows(data, ("index", "input", "outputs"), GET)
    return [_example(str(row["index"]), row["input"], row["outputs"]) for row in rows]


def _example(name: str, text: str, outputs: list[str]) -> Example:
    asked = _QUESTION.search(text)
    if asked is None:
        raise DocumentError(f"case {name}: its input does not end in a question for a special magic value. {GET}")
    question = asked.group().strip()
    begun = _REPLY_START.search(question)
    lines = text[: asked.start() + 1].splitlines(keepends=True)
    return Example(
        id=name,
        question=question[: begun.start()] if begun else question,
        documents=pieces(lines),
        gold=tuple(number for number, line in enumerate(lines, 1) if any(value in line for value in outputs)),
        answers=tuple((value,) for value in outputs),
        prompt=None,
        reply_start=begun.group(1) if begun else "",
    )


RULER = Task(
    name="ruler",
    help="RULER: values of keys hidden in a text.",
    open=lambda data: FixedCases(load(data)),
    score=contains,
    headline=("accuracy",),
    max_tokens=48,
    has_layout=False,
    has_documents=False,
)
