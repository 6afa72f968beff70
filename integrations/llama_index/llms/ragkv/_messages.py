"""LlamaIndex's messages into ragkv's, and ragkv's prompts into messages that keep their marks."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    CachePoint,
    ChatMessage,
    ContentBlock,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)

from ragkv.errors import ConfigError
from ragkv.messages import Message, Segment, SpanKind
from ragkv.tools import ToolCall

_ROLES = {
    MessageRole.SYSTEM: "system",
    MessageRole.DEVELOPER: "system",
    MessageRole.USER: "user",
    MessageRole.ASSISTANT: "assistant",
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
    MessageRole.TOOL: "tool",
    MessageRole.FUNCTION: "tool",
}


class SegmentBlock(TextBlock):
    """A text block that keeps what ragkv knows of it; to everybody else it is text."""

    kind: SpanKind | None = None
    document: int | None = None


def to_chat_messages(messages: Sequence[Message]) -> list[ChatMessage]:
    """ragkv's messages, contents in segments, as LlamaIndex's."""
    return [
        ChatMessage(
            role=message["role"],
            blocks=[SegmentBlock(text=s.text, kind=s.kind, document=s.document) for s in message["content"]],
        )
        for message in messages
    ]


def plain_text(message: ChatMessage) -> ChatMessage:
    """The message in one block, for models that do not know segments."""
    text = "".join(block.text for block in message.blocks if isinstance(block, TextBlock))
    return ChatMessage(role=message.role, content=text)


def from_chat_messages(messages: Sequence[ChatMessage]) -> list[Message]:
    """LlamaIndex's messages as ragkv's.

    Raises:
        ConfigError: a message holds an image, audio, video or a document, which no model here can read.
    """
    return [_from_chat_message(message) for message in messages]


def _from_chat_message(message: ChatMessage) -> Message:
    extra = message.additional_kwargs
    plain: dict[str, Any] = {"role": _ROLES[message.role], "content": _content(message.blocks)}
    if message.role in (MessageRole.TOOL, MessageRole.FUNCTION):
        failed = extra.get("is_error") or extra.get("status") == "error"
        plain |= {"tool_call_id": extra.get("tool_call_id", ""), "status": "error" if failed else "success"}
    if calls := _tool_calls(message):
        plain["tool_calls"] = calls
    return {**plain, "name": extra["name"]} if extra.get("name") else plain


def _content(blocks: Sequence[ContentBlock]) -> str | list[Segment]:
    """A string, or segments where a block is marked. Thoughts of earlier turns are not sent again."""
    texts: list[TextBlock] = []
    for block in blocks:
        if isinstance(block, TextBlock):
            texts.append(block)
        elif not isinstance(block, ToolCallBlock | ThinkingBlock | CachePoint):
            raise ConfigError(
                f"a message holds a block of type {block.block_type!r}: these models read text only; give its text"
            )
    if any(isinstance(block, SegmentBlock) for block in texts):
        return [Segment(b.text, getattr(b, "kind", None), getattr(b, "document", None)) for b in texts]
    return "\n".join(block.text for block in texts)


def _tool_calls(message: ChatMessage) -> list[dict[str, Any]]:
    """Calls from blocks; where there is none, from `additional_kwargs`, in which older integrations keep them."""
    blocks = [block for block in message.blocks if isinstance(block, ToolCallBlock)]
    calls: Iterable[Any] = [
        {"id": block.tool_call_id, "function": {"name": block.tool_name, "arguments": block.tool_kwargs}}
        for block in blocks
    ] or message.additional_kwargs.get("tool_calls", ())
    return [
        ToolCall.from_openai(call if isinstance(call, Mapping) else call.model_dump()).to_openai() for call in calls
    ]
