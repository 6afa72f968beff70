"""Chat messages cut into exchanges, written as text for a long-term memory, and reminded of what it recalls.

An exchange is what was said since the last reply, and the reply. Pure functions.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ragkv.chunking import split_text
from ragkv.messages import Message, Segment

RECALLED = "Recalled from earlier in this conversation:\n"
END_OF_RECALLED = "End of what was recalled.\n\n"
_CUT = " [...]"
_SHORTEST = 16  # tokens of a passage that are worth a reminder


@dataclass(frozen=True)
class Recalled:
    """A piece of an earlier turn that fits the question."""

    turn: int
    text: str

    @property
    def line(self) -> str:
        """As it stands in the prompt: every line is quoted, or a tool's result could end the quotation."""
        return "".join(f"> {line}\n" for line in f"[turn {self.turn}] {self.text.strip()}".splitlines())

    def shortened(self, token_budget: int, count_tokens: Callable[[str], int]) -> "Recalled":
        """Its beginning, with a mark at the end, if all of it does not fit and that much is worth it; else itself."""

        def needed(text: str) -> int:
            return count_tokens(replace(self, text=text + _CUT).line)

        if count_tokens(self.line) <= token_budget or needed("") + _SHORTEST > token_budget:
            return self
        beginning = split_text(self.text.strip(), needed, token_budget)[0].rstrip()
        return replace(self, text=beginning + _CUT)


def plain(message: Message) -> dict[str, Any]:
    """The message with its content as one string."""
    return {**message, "content": text_of(message)}


def text_of(message: Message) -> str:
    """The text of a content that is a string, segments or nothing."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(segment.text for segment in content)


def exchanges(messages: Sequence[Message]) -> list[list[Message]]:
    """Runs of messages that end with a reply; what comes after the last reply is the last run, which may be empty."""
    runs: list[list[Message]] = [[]]
    for message in messages:
        if runs[-1] and runs[-1][-1]["role"] == "assistant" and message["role"] != "assistant":
            runs.append([])
        runs[-1].append(message)
    if runs[-1] and runs[-1][-1]["role"] == "assistant":
        runs.append([])
    return runs


def as_text(messages: Sequence[Message]) -> str:
    """An exchange as a reader would note it down; calls are written as name and arguments."""
    return "\n".join(f"{message['role']}: {_said(message)}" for message in messages)


def _said(message: Message) -> str:
    calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
    return " ".join([text_of(message), *(f"{call['name']}({call.get('arguments')})" for call in calls)]).strip()


def key_of(text: str) -> str:
    """What tells a turn from others, by its text."""
    return hashlib.sha256(text.strip().encode("utf-8", "surrogatepass")).hexdigest()[:32]


def edited_out(before: Sequence[str], now: Sequence[str]) -> set[str]:
    """Exchanges that an edit took out of a history: from the first that has another in its place, those that are gone.

    A history that was cut short or summed up looks edited too, so none without proof: some exchange is still in its
    place, and none has moved to another.

    Args:
        before, now: keys of the exchanges of the history as it was read, and as it is sent now.
    """
    pairs, known = list(zip(before, now, strict=False)), set(before)
    first = next((i for i, (old, new) in enumerate(pairs) if old != new), len(pairs))
    moved = any(old != new and new in known for old, new in pairs)
    proven = any(old == new for old, new in pairs) and not moved
    return set(before[first:]) - set(now) if proven and first < len(pairs) else set()


def last_question(messages: Sequence[Message]) -> str:
    """Text of the last user message, or nothing."""
    return next((text_of(message) for message in reversed(messages) if message["role"] == "user"), "")


def with_documents(messages: Sequence[Message]) -> list[Message]:
    """The messages with the results of tools marked as documents."""
    return [
        {**message, "content": [Segment(text_of(message), "document")]} if message["role"] == "tool" else message
        for message in messages
    ]


def with_recalled(messages: Sequence[Message], recalled: Sequence[Recalled]) -> list[Message]:
    """The messages with what was recalled, marked as such, at the head of the last user message."""
    if not recalled:
        return list(messages)
    last = max(i for i, message in enumerate(messages) if message["role"] == "user")
    reminder = RECALLED + "".join(each.line for each in recalled) + END_OF_RECALLED
    content = [Segment(reminder), Segment(text_of(messages[last]), "question")]
    return [*messages[:last], {**messages[last], "content": content}, *messages[last + 1 :]]
