"""ragkv's replies into LangChain's messages and chunks."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.messages.tool import invalid_tool_call, tool_call, tool_call_chunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult

from ragkv.chat_model import ChatEvent, ChatReply
from ragkv.tools import HERMES, InvalidToolCall, ToolCall


def to_result(reply: ChatReply, model_name: str) -> ChatResult:
    """A whole reply."""
    message = AIMessage(
        content=reply.text,
        tool_calls=[tool_call(name=call.name, args=call.arguments, id=call.id) for call in reply.tool_calls],
        invalid_tool_calls=[
            invalid_tool_call(name=call.name, args=_arguments(call), id=call.id, error=call.error)
            for call in reply.invalid_tool_calls
        ],
        usage_metadata=_usage(reply),
        response_metadata=_response_metadata(reply, model_name),
    )
    return ChatResult(generations=[ChatGeneration(message=message)])


class ReplyChunks:
    """One reply as it comes in: text in pieces, calls whole; the last chunk has the usage and nothing to read."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        # LangChain merges chunks of the same index, and gives 0 to the text before a call.
        self._next_index = 1

    def of(self, event: ChatEvent) -> Iterator[ChatGenerationChunk]:
        """The chunks of one event."""
        for part in event.parts:
            message = AIMessageChunk(content=part) if isinstance(part, str) else self._call(part)
            yield ChatGenerationChunk(message=message)
        if event.reply is not None:
            last = AIMessageChunk(
                content="",
                usage_metadata=_usage(event.reply),
                response_metadata=_response_metadata(event.reply, self._model_name),
                chunk_position="last",
            )
            yield ChatGenerationChunk(message=last)

    def _call(self, call: ToolCall | InvalidToolCall) -> AIMessageChunk:
        chunk = tool_call_chunk(name=call.name, args=_arguments(call), id=call.id, index=self._next_index)
        self._next_index += 1
        return AIMessageChunk(content="", tool_call_chunks=[chunk])


def _arguments(call: ToolCall | InvalidToolCall) -> str:
    """Arguments as JSON. Those of a broken call keep their tag, or LangChain would repair them in a stream."""
    if isinstance(call, ToolCall):
        return json.dumps(call.arguments, ensure_ascii=False)
    return f"{HERMES.begin}\n{call.arguments}"


def _usage(reply: ChatReply) -> UsageMetadata:
    prompt, completion = reply.stats.prompt_tokens, reply.stats.completion_tokens
    reused = InputTokenDetails(
        cache_read=reply.stats.cache_read_tokens, cache_creation=reply.stats.cache_creation_tokens
    )
    return UsageMetadata(
        input_tokens=prompt,
        output_tokens=completion,
        total_tokens=prompt + completion,
        input_token_details=reused,
    )


def _response_metadata(reply: ChatReply, model_name: str) -> dict[str, Any]:
    """Who answered, why it ended, and `ragkv.reply.Stats` but for the counts that are usage."""
    stats = asdict(reply.stats)
    del stats["prompt_tokens"], stats["completion_tokens"]
    about = {"model_name": model_name, "model_provider": "ragkv", "finish_reason": reply.finish_reason}
    return {**about, **stats}
