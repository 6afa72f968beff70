"""Chat messages as ragkv sees them: contents in segments, so that a prompt remembers which tokens came from what.

A message is a mapping with "role" and "content" (a string, or a sequence of `Segment`) and whatever else chat templates
know ("tool_calls", "name", "tool_call_id"). Pure functions; nothing here knows a tokenizer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

SpanKind = Literal["instruction", "header", "document", "question", "reply"]
Message = Mapping[str, Any]

_MERGEABLE = ("system", "user", "assistant")


@dataclass(frozen=True)
class Segment:
    """A piece of a message: its text, what it is, and the number of the document that it belongs to.

    A "reply" at the end of the last message is what the answer begins with: the model goes on from there.
    """

    text: str
    kind: SpanKind | None = None
    document: int | None = None


def in_segments(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Copies of the messages whose contents are lists of segments.

    A system message given as a string is marked as an instruction, the last user message as the question.
    """
    last_user = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)
    copies = []
    for i, message in enumerate(messages):
        content = message.get("content") or ""
        if isinstance(content, str):
            kind: SpanKind | None = "instruction" if message["role"] == "system" else None
            kind = "question" if i == last_user else kind
            content = [Segment(content, kind)] if content else []
        copies.append({**message, "content": list(content)})
    return copies


def merge_neighbours(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join runs of system, user or assistant messages: templates want roles to alternate. Tool calls stay apart."""
    merged: list[dict[str, Any]] = []
    for message in messages:
        same_role = bool(merged) and merged[-1]["role"] == message["role"] and message["role"] in _MERGEABLE
        if same_role and not message.get("tool_calls") and not merged[-1].get("tool_calls"):
            merged[-1]["content"] = [*merged[-1]["content"], Segment("\n\n"), *message["content"]]
        else:
            merged.append(dict(message))
    return merged


def take_reply(messages: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """The messages without the "reply" segments that end the last one, and the text of those."""
    *before, last = messages
    content = list(last["content"])
    begun: list[str] = []
    while content and content[-1].kind == "reply":
        begun.insert(0, content.pop().text)
    return [*before, {**last, "content": content}], "".join(begun).lstrip()


def fold_system(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put all system messages at the head of the first user message, for templates that know no system role."""
    system = [message for message in messages if message["role"] == "system"]
    rest = [dict(message) for message in messages if message["role"] != "system"]
    if not any(message["role"] == "user" for message in rest):
        rest.insert(0, {"role": "user", "content": []})
    first = next(message for message in rest if message["role"] == "user")
    head = [part for message in system for part in (*message["content"], Segment("\n\n"))]
    first["content"] = [*head, *first["content"]]
    return rest
