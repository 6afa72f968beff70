"""Tools, calls and results put into messages that a chat template renders.

A template that speaks a known format gets them as they are. For any other the tools are described in the system
message, calls become text of the assistant and results text of the user, all in the format of `HERMES`.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from ragkv.messages import Message, Segment, in_segments
from ragkv.structured import add_instruction
from ragkv.tools.formats import HERMES, MISTRAL, tool_format
from ragkv.tools.spec import ToolCall, ToolSpec


def prepare_tool_messages(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()
) -> tuple[list[Message], list[dict[str, Any]] | None]:
    """Messages and tools as `encode_chat` takes them.

    Args:
        messages: assistant messages may have "tool_calls" (OpenAI-like; arguments as a dictionary or JSON text), and
            messages of the role "tool" have "tool_call_id", "name" and, for a call that failed, "status": "error".
            "invalid_tool_calls" are texts that an assistant wrote for calls, and nobody can read as such.
        tools: those that the model may call.

    Returns:
        The messages, and the tools for the template; None if it takes none.
    """
    known = tool_format(tokenizer)
    seen = [_with_broken_calls(_with_visible_error(message)) for message in messages]
    if known is None:
        return _as_plain_text(seen, tools), None
    prepared = [_with_calls(message, short_ids=known is MISTRAL) for message in seen]
    return prepared, [tool.to_openai() for tool in tools] or None


def _with_visible_error(message: Message) -> Message:
    """A failed tool's message says so in its text: no template shows a status."""
    if message.get("status") != "error":
        return message
    content = message.get("content") or ""
    parts = [Segment(content)] if isinstance(content, str) else list(content)
    if not "".join(part.text for part in parts).lstrip().lower().startswith("error"):
        parts.insert(0, Segment("Error: "))
    return {**message, "content": parts}


def _with_broken_calls(message: Message) -> Message:
    """Broken calls are part of a reply's text: no template can write them, and the model sees what went wrong."""
    broken = [Segment(call) for call in message.get("invalid_tool_calls") or ()]
    if not broken:
        return message
    content = message.get("content") or []
    parts = [Segment(content)] if isinstance(content, str) else list(content)
    for call in broken:
        parts += [Segment("\n"), call] if parts else [call]
    return {**message, "content": parts}


def _with_calls(message: Message, short_ids: bool) -> Message:
    """The message with calls in the form that templates expect."""
    result = dict(message)
    if message.get("tool_calls"):
        calls = [ToolCall.from_openai(call).to_openai() for call in message["tool_calls"]]
        result["tool_calls"] = [{**call, "id": _short(call["id"])} for call in calls] if short_ids else calls
    if short_ids and message.get("tool_call_id"):
        result["tool_call_id"] = _short(message["tool_call_id"])
    return result


def _short(call_id: str) -> str:
    """Nine letters or digits, as Mistral's templates demand; the same for the call and its result."""
    return call_id if len(call_id) == 9 and call_id.isalnum() else hashlib.sha256(call_id.encode()).hexdigest()[:9]


def _as_plain_text(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[Message]:
    plain = [_without_tool_fields(message) for message in in_segments(messages)]
    return add_instruction(plain, _description(tools)) if tools else plain


def _without_tool_fields(message: Mapping[str, Any]) -> Message:
    if message["role"] == "tool":
        content = [Segment("<tool_response>\n"), *message["content"], Segment("\n</tool_response>")]
        return {"role": "user", "content": content}
    plain = {key: value for key, value in message.items() if key != "tool_calls"}
    calls = "\n".join(HERMES.write(ToolCall.from_openai(call)) for call in message.get("tool_calls") or ())
    if calls:
        plain["content"] = [*message["content"], Segment("\n" if message["content"] else ""), Segment(calls)]
    return plain


def _description(tools: Sequence[ToolSpec]) -> str:
    functions = "\n".join(json.dumps(tool.to_openai()["function"], ensure_ascii=False) for tool in tools)
    return (
        "You can call these functions; each line describes one, its arguments as a JSON schema:\n"
        f"<tools>\n{functions}\n</tools>\n"
        "When a function helps, call it by writing a JSON object between two tags, once for each call:\n"
        f'{HERMES.begin}\n{{"name": "<function>", "{HERMES.arguments_key}": {{"<argument>": <value>}}}}\n{HERMES.end}\n'
        "The results come back between <tool_response> tags. Answer in plain text when no function helps."
    )
