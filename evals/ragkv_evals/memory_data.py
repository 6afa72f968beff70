"""Long conversations with questions whose evidence is known by exchange: LoCoMo and tau-bench transcripts."""

import json
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragkv.errors import DocumentError
from ragkv.messages import Message
from ragkv.streaming.exchanges import as_text, exchanges, plain

LINES_PER_EXCHANGE = 4
_LONGEST_VALUE = 8  # words; longer ones are an agent's thoughts, which nobody asks for word by word
_ADVERSARIAL = 5  # LoCoMo's questions without an answer in the conversation


@dataclass(frozen=True)
class Question:
    """Asked once the conversation is over.

    Attributes:
        evidence: numbers of the exchanges that hold the answer.
        one_is_enough: whether each of them holds all of it, or a part.
    """

    text: str
    answers: tuple[str, ...]
    evidence: tuple[int, ...]
    one_is_enough: bool = False

    def answerable(self, held: Collection[int]) -> bool:
        """Whether these exchanges are enough to answer it."""
        return (any if self.one_is_enough else all)(number in held for number in self.evidence)


@dataclass(frozen=True)
class Conversation:
    """Exchanges, each ending with a reply, and questions about them."""

    name: str
    system: str
    exchanges: Sequence[Sequence[Message]]
    questions: Sequence[Question]

    def early(self, held: Collection[int]) -> list[Question]:
        """The questions that these exchanges are not enough to answer."""
        return [question for question in self.questions if not question.answerable(held)]


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
            tuple(sorted({place[mark] for mark in asked["evidence"]})),
        )
        for asked in row["qa"]
        if asked["category"] != _ADVERSARIAL and "answer" in asked
        # A few marks are misspelt, and evidence that is not known may be early or late.
        if asked["evidence"] and place.keys() >= set(asked["evidence"])
    ]
    # What to do is said here and not in the questions, which are what a memory is searched with.
    system = f"You are told what {names[0]} and {names[1]} said to each other. Answer questions in a few words."
    return Conversation(str(row["sample_id"]), system, told, questions)


def _tau_bench(row: Mapping[str, Any]) -> Conversation:
    """An agent's work with tools; asked for is what it wrote in calls that it made once.

    Evidence is every exchange that names the value. What the system message names is never forgotten, so not asked for.
    """
    system, *rest = [plain(message) for message in row["traj"]]
    *whole, _ = exchanges(rest)
    opening, texts = str(system["content"]), [as_text(exchange) for exchange in whole]
    calls = [(number, *call) for number, each in enumerate(whole) for call in _arguments(each)]
    count = Counter((tool, name) for _, tool, name, _ in calls)
    questions = [
        Question(
            f"What was the argument {name} when you called {tool}? Answer with the value only.",
            (value,),
            # The call's own text may write the value in another way, with quotes escaped.
            tuple(i for i, text in enumerate(texts) if i == number or _names(text, value)),
            one_is_enough=True,
        )
        for number, tool, name, value in calls
        if count[tool, name] == 1 and len(value.split()) <= _LONGEST_VALUE and not _names(opening, value)
    ]
    return Conversation(f"task {row['task_id']}", opening, whole, questions)


def _names(text: str, value: str) -> bool:
    """Whether the value stands in the text, not as a part of a longer word or number."""
    return re.search(rf"(?<!\w){re.escape(value)}(?!\w)", text, re.IGNORECASE) is not None


def _arguments(exchange: Sequence[Message]) -> Iterator[tuple[str, str, str]]:
    """(tool, argument, value) of every call, values that are text or numbers."""
    for message in exchange:
        for call in message.get("tool_calls") or ():
            function = call["function"]
            for name, value in json.loads(function["arguments"]).items():
                if isinstance(value, str | int | float) and not isinstance(value, bool) and str(value).strip():
                    yield function["name"], name, str(value)
