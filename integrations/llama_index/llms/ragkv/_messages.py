"""LlamaIndex's messages into ragkv's, and ragkv's events into LlamaIndex's responses."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from llama_index.core.base.llms.types import (
    CachePoint,
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    ContentBlock,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)

from ragkv.chat_model import ChatEvent, ChatReply
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
    return [ToolCall.from_openai(call if isinstance(call, Mapping) else call.model_dump()).to_openai() for call in calls]


def responses(events: Iterable[ChatEvent], model: str) -> Iterator[ChatResponse]:
    """One response per event, each with all that came so far; token counts and statistics are in the last."""
    text, calls = "", list[ToolCall]()
    for event in events:
        delta = "".join(part for part in event.parts if isinstance(part, str))
        text += delta
        calls += [part for part in event.parts if isinstance(part, ToolCall)]
        usage = _usage(event.reply) if event.reply else {}
        raw = _raw(event.reply, model, usage) if event.reply else None
        yield ChatResponse(message=_message(text, calls), delta=delta, raw=raw, additional_kwargs=usage)


def _message(text: str, calls: Sequence[ToolCall]) -> ChatMessage:
    blocks: list[ContentBlock] = [TextBlock(text=text)] if text or not calls else []
    blocks += [ToolCallBlock(tool_call_id=call.id, tool_name=call.name, tool_kwargs=call.arguments) for call in calls]
    # LlamaIndex's own programs still look for calls here, in OpenAI's form.
    openai = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": json.dumps(call.arguments)}}
        for call in calls
    ]
    return ChatMessage(
        role=MessageRole.ASSISTANT, blocks=blocks, additional_kwargs={"tool_calls": openai} if openai else {}
    )


def _usage(reply: ChatReply) -> dict[str, int]:
    prompt, completion = reply.stats.prompt_tokens, reply.stats.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _raw(reply: ChatReply, model: str, usage: Mapping[str, int]) -> dict[str, Any]:
    """What the reply cost. LlamaIndex's token counter reads "usage"."""
    invalid = [asdict(call) for call in reply.invalid_tool_calls]
    about = {"model": model, "finish_reason": reply.finish_reason, "invalid_tool_calls": invalid}
    return {**about, "usage": dict(usage), "stats": asdict(reply.stats)}


def to_completion(response: ChatResponse) -> CompletionResponse:
    """The same reply as a completion."""
    return CompletionResponse(
        text=response.message.content or "",
        delta=response.delta,
        raw=response.raw,
        additional_kwargs=response.additional_kwargs,
    )
