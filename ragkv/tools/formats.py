"""How models write tool calls, and which of these ways a tokenizer's chat template speaks.

A template is known by what it does: a call is rendered through it, and the format is the one that the rendered text
shows. A template that shows none of them is not trusted with tools; `ragkv.tools.prompt` then describes HERMES itself.
"""

import json
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from ragkv.tools.spec import ToolCall, ToolSpec


@dataclass(frozen=True)
class ToolFormat:
    """The text of a call: `begin`, a JSON object with "name" and `arguments_key`, `end`.

    Attributes:
        begin, end: markers around each call, or `begin` alone before a JSON list of all calls; empty if there is none.
        arguments_key: the key that holds the arguments.
    """

    begin: str
    end: str
    arguments_key: str

    def write(self, call: ToolCall) -> str:
        """A call as the model would have written it."""
        body = json.dumps({"name": call.name, self.arguments_key: call.arguments}, ensure_ascii=False)
        return "\n".join(part for part in (self.begin, body, self.end) if part)


HERMES = ToolFormat("<tool_call>", "</tool_call>", "arguments")
LLAMA = ToolFormat("", "", "parameters")
MISTRAL = ToolFormat("[TOOL_CALLS]", "", "arguments")

_PROBE = ToolSpec("ragkv_probe", "a tool that reads the template")
_CALL = ToolCall("ragkvcall", _PROBE.name, {"key": "value"})


def tool_format(tokenizer: PreTrainedTokenizerBase) -> ToolFormat | None:
    """The format of the tokenizer's chat template; None if it has no template, or one that shows no known format."""
    rendered = _render_probe(tokenizer)
    if rendered is None or _PROBE.description not in rendered:
        return None
    compact = "".join(rendered.split())
    return next((known for known in (HERMES, MISTRAL, LLAMA) if _shows(compact, known)), None)


def _render_probe(tokenizer: PreTrainedTokenizerBase) -> str | None:
    if tokenizer.chat_template is None:
        return None
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "question"},
        {"role": "assistant", "content": "", "tool_calls": [_CALL.to_openai()]},
        {"role": "tool", "content": "result", "tool_call_id": _CALL.id, "name": _CALL.name},
    ]
    try:
        return str(tokenizer.apply_chat_template(messages, tools=[_PROBE.to_openai()], tokenize=False))
    except (TemplateError, TypeError):  # what templates raise on roles and fields that they do not know
        return None


def _shows(compact: str, known: ToolFormat) -> bool:
    """Whether the rendered call, without white space, is written in this format."""
    body = f'{{"name":"{_CALL.name}","{known.arguments_key}":{{"key":"value"}}'
    if known is MISTRAL:
        return f"{known.begin}[{body}" in compact
    return f"{known.begin}{body}}}{known.end}" in compact
