"""Long conversations with questions whose evidence is known by exchange: LoCoMo and tau-bench transcripts."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragkv.errors import DocumentError
from ragkv.messages import Message
from ragkv.streaming.exchanges import exchanges, plain

LINES_PER_EXCHANGE = 4
_ADVERSARIAL = 5  # LoCoMo's questions without an answer in the conversation


@dataclass(frozen=True)
class Question:
    """Asked once the conversation is over; `evidence` are numbers of exchanges that hold the answer."""

    text: str
    answers: tuple[str, ...]
    evidence: tuple[int, ...]


@dataclass(frozen=True)
class Conversation:
    """Exchanges, each ending with a reply, and questions about them."""

    name: str
    system: str
    exchanges: Sequence[Sequence[Message]]
    questions: Sequence[Question]


def read_conversations(path: Path, limit: int | None = None) -> list[Conversation]:
    """The conversations of a JSON-lines file of LoCoMo or of tau-bench, as its rows are.

    Raises:
        DocumentError: the file cannot be read, or holds rows of another kind.
    """
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:limit] if line.strip()]
    except (OSError, ValueError) as error:
        raise DocumentError(f"cannot read {path} as JSON lines ({error})") from error
    try:
        conversations = [_locomo(row) if "conversation" in row else _tau_bench(row) for row in rows]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise DocumentError(f"{path}: a row is neither LoCoMo's nor tau-bench's ({error!r})") from error
    if not conversations:
        raise DocumentError(f"{path} is empty: give a file with conversations")
    return conversations


def _locomo(row: Mapping[str, Any]) -> Conversation:
    """What two people said, told to an assistant a few lines at a time, with the date of their talk."""
    talk, told, place = row["conversation"], list[list[Message]](), dict[str, int]()
    names = (talk["speaker_a"], talk["speaker_b"])
    number = 1
    while lines := talk.get(f"session_{number}"):
        date = talk.get(f"session_{number}_date_time", "")
        for start in range(0, len(lines), LINES_PER_EXCHANGE):
            some = lines[start : start + LINES_PER_EXCHANGE]
            place |= {line["dia_id"]: len(told) for line in some}
            text = "\n".join([f"({date})", *(f"{line['speaker']}: {line['text']}" for line in some)])
            told.append([{"role": "user", "content": text}, {"role": "assistant", "content": "Noted."}])
        number += 1
    questions = [
        Question(
            asked["question"],
            (str(asked["answer"]),),
            tuple(sorted({place[mark] for mark in asked["evidence"] if mark in place})),
        )
        for asked in row["qa"]
        if asked["category"] != _ADVERSARIAL and "answer" in asked
    ]
    # What to do is said here and not in the questions, which are what a memory is searched with.
    system = f"You are told what {names[0]} and {names[1]} said to each other. Answer questions in a few words."
    return Conversation(str(row["sample_id"]), system, told, [question for question in questions if question.evidence])


def _tau_bench(row: Mapping[str, Any]) -> Conversation:
    """An agent's work with tools; asked for is what it wrote in calls that it made once."""
    system, *rest = [plain(message) for message in row["traj"]]
    *whole, _ = exchanges(rest)
    calls = [(number, *call) for number, each in enumerate(whole) for call in _arguments(each)]
    count = Counter((tool, name) for _, tool, name, _ in calls)
    questions = [
        Question(
            f"What was the argument {name} when you called {tool}? Answer with the value only.",
            (value,),
            (number,),
        )
        for number, tool, name, value in calls
        if count[tool, name] == 1
    ]
    return Conversation(f"task {row['task_id']}", str(system["content"]), whole, questions)


def _arguments(exchange: Sequence[Message]) -> Iterator[tuple[str, str, str]]:
    """(tool, argument, value) of every call, values that are text or numbers."""
    for message in exchange:
        for call in message.get("tool_calls") or ():
            function = call["function"]
            for name, value in json.loads(function["arguments"]).items():
                if isinstance(value, str | int | float) and not isinstance(value, bool) and str(value).strip():
                    yield function["name"], name, str(value)
