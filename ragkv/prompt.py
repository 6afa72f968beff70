"""The prompt that makes a small model answer and cite: numbered documents first, the question last.

The order is what SnapKV needs: the observation window at the end covers the question, and everything before it competes
for the budget. Numbers are 1-based and belong to the documents in the order given, from here to the parsed citation.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ragkv.citations import SOURCES_LABEL, strip_markers
from ragkv.documents import Document
from ragkv.errors import ConfigError
from ragkv.messages import Message, Segment, in_segments

SYSTEM = "You answer questions from numbered documents. Answer briefly and cite the documents that the answer rests on."

# Questions of HotpotQA's training set; document numbers are only shapes to imitate. The answer comes before the
# documents: a small model that has said what it found names the right ones, and hardly does the other way round.
EXAMPLES = f"""\
Question: Toad Hall is a residential hall in a university located in what Australian city?
Answer: Canberra
{SOURCES_LABEL} [4] Toad Hall (ANU) [9] Australian National University

Question: Who is the oldest, Sid Haig or Vic Darchinyan?
Answer: Sid Haig
{SOURCES_LABEL} [2] Sid Haig [7] Vic Darchinyan

Question: At the 2011 census, what was the population of the city where Kerry Saxby-Junna was born?
Answer: 6,960
{SOURCES_LABEL} [10] Kerry Saxby-Junna [3] Young, New South Wales

Question: Are Medici and Senet both board games?
Answer: yes
{SOURCES_LABEL} [6] Medici (board game) [8] Senet"""

RULES = (
    "Answer the question from the documents above. First write only the answer itself, in as few words as possible: a "
    "name, a date, a number, yes or no. On the next line name the documents that it rests on, with their numbers in "
    "brackets."
)


@dataclass(frozen=True)
class CitePrompt:
    """The texts around documents and question.

    Attributes:
        system: the system message; empty for none.
        rules: what to do, behind the documents.
        examples: answered questions in the wanted form; empty for none.
        reply_start: what the reply begins with, so that chat models go on in that form; not part of the answer.
    """

    system: str = SYSTEM
    rules: str = RULES
    examples: str = EXAMPLES
    reply_start: str = "Answer:"

    def messages(self, question: str, documents: Sequence[Document]) -> list[Message]:
        """The chat that asks `question` about `documents`, in segments that mark instructions, headers and question."""
        if not question.strip():
            raise ConfigError("the question is empty: ask something")
        segments = [Segment("Documents:\n\n", "instruction")]
        for number, document in enumerate(documents, start=1):
            segments.append(Segment(heading(number, document) + "\n", "header", number))
            segments.append(Segment(document.text.strip() + "\n\n", "document", number))
        guidance = "\n\n".join(part for part in (self.rules, self.examples) if part)
        segments += [
            Segment(guidance + "\n\n", "instruction"),
            Segment(f"Question: {question.strip()}", "question"),
            Segment(f"\n{self.reply_start}", "reply"),
        ]
        system = [{"role": "system", "content": [Segment(self.system, "instruction")]}] if self.system else []
        return [*system, {"role": "user", "content": segments}]


def heading(number: int, document: Document) -> str:
    """A document's number and title, in one line."""
    return " ".join([f"[{number}]", *document.title.split()])


def each_alone(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """For each document in messages of a `CitePrompt`, messages that end with its text, as if it were the only one.

    Before it stand what is before the first document, and its header with the number of that; what is between them or
    behind them is left out.
    """
    parts = in_segments(messages)
    places = [(i, j) for i, part in enumerate(parts) for j in range(len(part["content"]))]
    marked = [(i, j) for i, j in places if parts[i]["content"][j].kind in ("header", "document")]
    header: list[Segment] = []
    for i, j in marked:
        segment, (first, begin) = parts[i]["content"][j], marked[0]
        if segment.kind == "header":
            text = _marker(parts[first]["content"][begin].text) + segment.text.removeprefix(_marker(segment.text))
            header = [replace(segment, text=text)]
        else:
            content = [*parts[first]["content"][:begin], *header, segment]
            yield [*parts[:first], {**parts[first], "content": content}]


def _marker(header: str) -> str:
    """The number at the beginning of a header, in its brackets."""
    found = re.match(r"\[\d+\]", header)
    return found[0] if found else ""


def answer_alone(reply: str) -> str:
    """A reply without the line that names its documents, and without citation markers."""
    return strip_markers(re.split(rf"^\s*{SOURCES_LABEL}", reply, maxsplit=1, flags=re.MULTILINE)[0])
