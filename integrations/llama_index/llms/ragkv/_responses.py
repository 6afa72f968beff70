"""ragkv's events as LlamaIndex's responses: text so far, calls, and at the end token counts and statistics."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    ContentBlock,
    MessageRole,
    TextBlock,
    ToolCallBlock,
)

from ragkv.chat_model import ChatEvent, ChatReply
from ragkv.tools import ToolCall


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
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return {**counts, "cache_read": reply.stats.cache_read_tokens, "cache_creation": reply.stats.cache_creation_tokens}


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
