"""A chat turn without framework vocabulary: messages, tools or a schema in; text, tool calls and statistics out.

The adapters for LangChain and LlamaIndex translate to and from this; how prompts, grammars and parsing come together is
decided here, once for both.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ragkv.chat import Prompt, encode_chat
from ragkv.config import SamplingParams
from ragkv.deadline import limited
from ragkv.document_blocks import DocumentBlocks, reader
from ragkv.engine import Engine, Read
from ragkv.errors import ConfigError
from ragkv.grammar import json_object_constraint, json_schema_constraint
from ragkv.messages import Message
from ragkv.policies import Policy
from ragkv.reply import Chunk, Completion, Stats
from ragkv.sampling import Constraint
from ragkv.streaming.threads import StreamingMemory
from ragkv.structured import add_instruction, response_schema_instruction
from ragkv.tools import (
    InvalidToolCall,
    ToolCall,
    ToolCallStream,
    ToolSpec,
    prepare_tool_messages,
    tool_call_constraint,
)
from ragkv.tools.parsing import ReplyPart, collect


@dataclass(frozen=True)
class ChatRequest:
    """One turn to be answered.

    Attributes:
        messages: the conversation; see `ragkv.messages` and, for tool calls and results, `ragkv.tools`.
        sampling: how the reply is generated.
        tools: functions that the model may call.
        tool_choice: "auto", "none", "any" (must call one), or the name of the tool to call.
        parallel_tool_calls: whether one reply may hold several calls.
        response_format: a JSON schema that the reply must fit, "json_object" for any object, or None for text.
        strict: refuse schemas that the grammar cannot enforce in full.
        blocks: read the documents of the messages one by one, once each, and join their K/V: approximate, and for an
            engine with a store; see `ragkv.document_blocks`. None reads the prompt as it is.
    """

    messages: Sequence[Message]
    sampling: SamplingParams = SamplingParams()
    tools: Sequence[ToolSpec] = ()
    tool_choice: str = "auto"
    parallel_tool_calls: bool = True
    response_format: Mapping[str, Any] | Literal["json_object"] | None = None
    strict: bool = False
    blocks: DocumentBlocks | None = None

    def __post_init__(self) -> None:
        if self.response_format is not None and self.tools and self.tool_choice != "none":
            raise ConfigError(
                f"{len(self.tools)} tools and a response format: a reply is either calls or JSON of a schema; make the "
                "schema one more tool, or set tool_choice='none'"
            )


@dataclass(frozen=True)
class ChatReply:
    """A whole reply. `finish_reason` is the completion's, or "tool_calls" when it ended with calls."""

    text: str
    finish_reason: str
    stats: Stats
    tool_calls: tuple[ToolCall, ...] = ()
    invalid_tool_calls: tuple[InvalidToolCall, ...] = ()


@dataclass(frozen=True)
class ChatEvent:
    """What is new in the reply to request number `row`: pieces of text and whole calls; at its end, the reply."""

    row: int
    parts: tuple[ReplyPart, ...]
    reply: ChatReply | None = None


def chat(
    engine: Engine,
    requests: Sequence[ChatRequest],
    *,
    policy: Policy | None = None,
    cancel: threading.Event | None = None,
    timeout_s: float | None = None,
) -> list[ChatReply]:
    """Answer several requests as one batched generation; replies in the order of the requests. See `stream_chat`."""
    events = stream_chat(engine, requests, policy=policy, cancel=cancel, timeout_s=timeout_s)
    replies = {event.row: event.reply for event in events if event.reply}
    return [replies[row] for row in range(len(requests))]


def stream_chat(
    engine: Engine,
    requests: Sequence[ChatRequest],
    *,
    policy: Policy | None = None,
    cancel: threading.Event | None = None,
    timeout_s: float | None = None,
) -> Iterator[ChatEvent]:
    """Answer requests, yielding what is new as it is made; see `Engine.stream` for `cancel` and its errors.

    Args:
        timeout_s: seconds for all replies together; None for no limit.

    Raises:
        ReplyTimeout: they took longer.
    """
    rows = [_Row(request) for request in requests]

    def generate(cancel: threading.Event) -> Iterator[Chunk]:
        asked = [_asked(engine, request, policy) for request in requests]
        return engine.stream(
            [prompt for prompt, _ in asked],
            [request.sampling for request in requests],
            policy=policy,
            constraints=[_constraint(engine, request) for request in requests],
            reads=[read for _, read in asked],
            cancel=cancel,
        )

    for chunk in limited(generate, timeout_s, cancel):
        event = rows[chunk.row].event(chunk.row, chunk.text, chunk.completion)
        if event.parts or event.reply:
            yield event


def stream_thread(
    engine: Engine,
    request: ChatRequest,
    memory: StreamingMemory,
    thread_id: str | None = None,
    *,
    cancel: threading.Event | None = None,
    timeout_s: float | None = None,
) -> Iterator[ChatEvent]:
    """Answer a request on the session that has read its history; `stream_chat` of one request in all other respects.

    Args:
        memory: keeps the sessions.
        thread_id: of the conversation; None to go by its messages.

    Raises:
        ConfigError: the request wants document blocks, which sessions do not read.
    """
    if request.blocks is not None:
        raise ConfigError(
            f"recompute={request.blocks.recompute:g}: a session with a memory reads its turns as they are; leave out "
            "recompute or the memory"
        )
    row, messages = _Row(request), request.messages
    if request.response_format is not None:
        messages = add_instruction(messages, _format_instruction(request))
    conversation = memory.conversation(engine, messages, request.tools, thread_id)

    def generate(cancel: threading.Event) -> Iterator[Chunk]:
        return conversation.stream(request.sampling, _constraint(engine, request), cancel)

    for chunk in limited(generate, timeout_s, cancel):
        event = row.event(0, chunk.text, chunk.completion)
        if event.reply is not None:
            calls = [call.to_openai() for call in event.reply.tool_calls]
            conversation.replied({"role": "assistant", "content": event.reply.text, "tool_calls": calls})
        if event.parts or event.reply:
            yield event


def check(engine: Engine, request: ChatRequest) -> None:
    """Raise what would keep a request from being answered, such as its length or its schema. Runs no model."""
    engine.stream(_prompt(engine, request), request.sampling, constraints=[_constraint(engine, request)])


def count_tokens(engine: Engine, request: ChatRequest) -> int:
    """Length of the request's prompt, template included."""
    return len(_prompt(engine, request))


@dataclass
class _Row:
    """One reply while it comes in."""

    request: ChatRequest
    parts: list[ReplyPart] = field(default_factory=list)
    calls: ToolCallStream | None = None

    def __post_init__(self) -> None:
        if _may_call(self.request):
            self.calls = ToolCallStream(self.request.tools)

    def event(self, row: int, text: str, completion: Completion | None) -> ChatEvent:
        new: list[ReplyPart] = [text] if text else []
        if self.calls is not None:
            new = [*self.calls.push(text), *(self.calls.finish() if completion else [])]
        self.parts += new
        return ChatEvent(row, tuple(new), self._reply(completion) if completion else None)

    def _reply(self, completion: Completion) -> ChatReply:
        whole = collect(self.parts)
        ended_with_calls = completion.finish_reason == "stop" and whole.tool_calls
        return ChatReply(
            text=whole.text,
            finish_reason="tool_calls" if ended_with_calls else completion.finish_reason,
            stats=completion.stats,
            tool_calls=whole.tool_calls,
            invalid_tool_calls=whole.invalid_tool_calls,
        )


def _may_call(request: ChatRequest) -> bool:
    return bool(request.tools) and request.tool_choice != "none" and request.response_format is None


def _prompt(engine: Engine, request: ChatRequest) -> Prompt:
    return _asked(engine, request, None)[0]


def _asked(engine: Engine, request: ChatRequest, policy: Policy | None) -> tuple[Prompt, Read | None]:
    """The prompt, and what reads it if its documents are to be joined."""
    messages, tools = _prepared(engine, request)
    prompt = encode_chat(engine.tokenizer, messages, tools)
    if request.blocks is None:
        return prompt, None
    return prompt, reader(engine, prompt, messages, request.blocks, tools=tools, policy=policy)


def _prepared(engine: Engine, request: ChatRequest) -> tuple[Sequence[Message], Sequence[Mapping[str, Any]] | None]:
    """The messages as the model is sent them, and tools for its template."""
    tools = request.tools if _may_call(request) else ()
    messages, for_template = prepare_tool_messages(engine.tokenizer, request.messages, tools)
    if request.response_format is not None:
        messages = add_instruction(messages, _format_instruction(request))
    return messages, for_template


def _format_instruction(request: ChatRequest) -> str:
    """What the model is told about the form of its reply."""
    schema = request.response_format
    return response_schema_instruction(None if schema is None or schema == "json_object" else schema)


def _constraint(engine: Engine, request: ChatRequest) -> Constraint | None:
    eos = engine.loaded.eos_token_ids
    if request.response_format == "json_object":
        return json_object_constraint(engine.tokenizer, eos_token_ids=eos)
    if request.response_format is not None:
        return json_schema_constraint(
            engine.tokenizer, request.response_format, strict=request.strict, eos_token_ids=eos
        )
    if not _may_call(request):
        return None
    return tool_call_constraint(
        engine.tokenizer,
        request.tools,
        request.tool_choice,
        parallel=request.parallel_tool_calls,
        strict=request.strict,
        eos_token_ids=eos,
    )
