"""The prompt that makes a small model answer and cite: numbered documents first, the question last.

The order is what SnapKV needs: the observation window at the end covers the question, and everything before it competes
for the budget. Numbers are 1-based and belong to the documents in the order given, from here to the parsed citation.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ragkv.documents import Document
from ragkv.errors import ConfigError
from ragkv.messages import Message, Segment

SYSTEM = "You answer questions from numbered documents. Answer briefly and cite the documents that the answer rests on."

# Questions of HotpotQA's training set; document numbers are only shapes to imitate.
EXAMPLES = """\
Question: Toad Hall is a residential hall in a university located in what Australian city?
Answer: Canberra [4][9]

Question: Who is the oldest, Sid Haig or Vic Darchinyan?
Answer: Sid Haig [2][7]

Question: At the 2011 census, what was the population of the city where Kerry Saxby-Junna was born?
Answer: 6,960 [10][3]

Question: Are Medici and Senet both board games?
Answer: yes [6][8]"""

RULES = (
    "Answer the last question from the documents above, as briefly as in these examples, and put the numbers of the "
    "documents that you used in brackets."
)


@dataclass(frozen=True)
class CitePrompt:
    """The texts around documents and question.

    Attributes:
        system: the system message; empty for none.
        rules: what to do, behind the documents.
        examples: answered questions in the wanted form; empty for none.
    """

    system: str = SYSTEM
    rules: str = RULES
    examples: str = EXAMPLES

    def messages(self, question: str, documents: Sequence[Document]) -> list[Message]:
        """The chat that asks `question` about `documents`, in segments that mark instructions, headers and question."""
        if not question.strip():
            raise ConfigError("the question is empty: ask something")
        segments = [Segment("Documents:\n\n", "instruction")]
        for number, document in enumerate(documents, start=1):
            title = f" {_one_line(document.title)}" if document.title else ""
            segments.append(Segment(f"[{number}]{title}\n", "header", number))
            segments.append(Segment(document.text.strip() + "\n\n", "document", number))
        guidance = "\n\n".join(part for part in (self.rules, self.examples) if part)
        segments += [
            Segment(guidance + "\n\n", "instruction"),
            Segment(f"Question: {question.strip()}\nAnswer:", "question"),
        ]
        system = [{"role": "system", "content": [Segment(self.system, "instruction")]}] if self.system else []
        return [*system, {"role": "user", "content": segments}]


def _one_line(text: str) -> str:
    return " ".join(text.split())
