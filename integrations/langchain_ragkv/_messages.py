"""LangChain's messages into ragkv's."""

from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)

from ragkv.errors import ConfigError
from ragkv.messages import Message, Segment
from ragkv.tools import ToolCall
from ragkv.tools.spec import new_call_id

SEGMENTS = "ragkv_segments"
"""Key of `additional_kwargs`: [kind, document number, length] of each segment of the content, in order."""

# What an assistant's message holds beside its text; calls are in `tool_calls`, thoughts are not sent again.
_CALLS = ("tool_use", "tool_call", "tool_call_chunk", "invalid_tool_call", "input_json_delta")
_BESIDE_TEXT = (*_CALLS, "thinking", "redacted_thinking", "reasoning")


def to_ragkv(messages: Sequence[BaseMessage]) -> list[Message]:
    """The messages as ragkv takes them.

    Raises:
        ConfigError: a message holds anything but text, or is of a kind that no model is sent.
    """
    return [_to_ragkv(message) for message in messages]


def _to_ragkv(message: BaseMessage) -> Message:
    fields: dict[str, Any] = {"role": _role(message), "content": _content(message)}
    if message.name:
        fields["name"] = message.name
    if isinstance(message, ToolMessage):
        fields |= {"tool_call_id": message.tool_call_id, "status": message.status}
    if isinstance(message, AIMessage) and (calls := _tool_calls(message)):
        fields["tool_calls"] = [call.to_openai() for call in calls]
    if isinstance(message, AIMessage) and message.invalid_tool_calls:
        fields["invalid_tool_calls"] = [call["args"] or "" for call in message.invalid_tool_calls]
    return fields


def _role(message: BaseMessage) -> str:
    match message:
        case HumanMessage():
            return "user"
        case AIMessage():
            return "assistant"
        case SystemMessage():
            return "system"
        case ToolMessage() | FunctionMessage():
            return "tool"
        case ChatMessage():
            return message.role
    raise ConfigError(f"a message of type {message.type!r} cannot be sent to a model: remove it")


def _content(message: BaseMessage) -> str | list[Segment]:
    text = _text(message)
    return _segments(text, message.additional_kwargs.get(SEGMENTS)) or text


def _text(message: BaseMessage) -> str:
    """The text of a content that is a string, or a list of strings and blocks."""
    if isinstance(message.content, str):
        return message.content
    texts = []
    for block in message.content:
        if isinstance(block, str):
            texts.append(block)
        elif block.get("type") == "text":
            texts.append(str(block["text"]))
        elif not (isinstance(message, AIMessage) and block.get("type") in _BESIDE_TEXT):
            raise ConfigError(
                f"a message of type {message.type!r} holds a block of type {block.get('type')!r}: ragkv's models read "
                "text only; put the content into words"
            )
    return "".join(texts)


def _segments(text: str, marks: Any) -> list[Segment] | None:
    """The text in the segments that `to_langchain` noted; None if there are none, or the text was edited since."""
    if not marks or sum(length for _, _, length in marks) != len(text):
        return None
    segments, start = [], 0
    for kind, document, length in marks:
        segments.append(Segment(text[start : start + length], kind, document))
        start += length
    return segments


def to_langchain(messages: Sequence[Message]) -> list[BaseMessage]:
    """System and user messages in segments as LangChain's; any other chat model sees their plain text."""
    classes: Mapping[str, type[BaseMessage]] = {"system": SystemMessage, "user": HumanMessage}
    return [
        classes[message["role"]](
            content="".join(segment.text for segment in message["content"]),
            additional_kwargs={SEGMENTS: [[s.kind, s.document, len(s.text)] for s in message["content"]]},
        )
        for message in messages
    ]


def _tool_calls(message: AIMessage) -> list[ToolCall]:
    """Calls in `tool_calls`, and those that stand in the content alone, as Anthropic's do."""
    calls = [(call["id"], call["name"], call["args"]) for call in message.tool_calls]
    known = {call_id for call_id, _, _ in calls}
    blocks = [block for block in message.content if isinstance(block, dict) and block.get("type") == "tool_use"]
    calls += [(block["id"], block["name"], block["input"]) for block in blocks if block["id"] not in known]
    return [ToolCall(call_id or new_call_id(), name, dict(args)) for call_id, name, args in calls]
