"""Replies that are JSON: the instruction that shows the model the schema, and the way back from text to values.

The grammar (`ragkv.grammar`) makes a reply valid; the instruction makes it sensible, for a model that has not seen the
schema fills it with anything.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ragkv.errors import ReplyError
from ragkv.messages import Message, Segment

_FENCE = re.compile(r"^```(?:json)?\s*(.*?)\s*```$", re.DOTALL)


def response_schema_instruction(schema: Mapping[str, Any] | None = None) -> str:
    """A system instruction that asks for JSON of this schema, or for any JSON object."""
    if schema is None:
        return "Reply with one JSON object and nothing else."
    text = json.dumps(schema, ensure_ascii=False)
    return f"Reply with JSON that fits this JSON schema, and nothing else:\n{text}"


def add_instruction(messages: Sequence[Message], text: str) -> list[Message]:
    """The messages with an instruction after the system messages at their head, where `encode_chat` joins them."""
    head = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    instruction = {"role": "system", "content": [Segment(text, "instruction")]}
    return [*messages[:head], instruction, *messages[head:]]


def parse_json_reply(text: str, finish_reason: str = "stop") -> Any:
    """The value that a reply holds; a code fence around the whole of it is ignored.

    Args:
        finish_reason: of the completion; "length" tells a reply that was cut off from one that is no JSON.

    Raises:
        ReplyError: the text is not JSON.
    """
    stripped = text.strip()
    fenced = _FENCE.match(stripped)
    try:
        return json.loads(fenced[1] if fenced else stripped)
    except (ValueError, RecursionError) as error:
        if finish_reason == "length":
            raise ReplyError(
                f"the JSON is incomplete: max_tokens ended it after {len(text)} characters; raise max_tokens"
            ) from error
        raise ReplyError(f"the reply is not JSON ({error}): {_shortened(stripped)!r}") from error


def _shortened(text: str, length: int = 200) -> str:
    return text if len(text) <= length else f"{text[:length]}..."
