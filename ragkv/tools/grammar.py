"""The grammar of replies that call tools, in the format that the tokenizer's chat template speaks."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from ragkv.errors import ConfigError
from ragkv.grammar import GrammarConstraint, json_rule
from ragkv.json_schema import moved
from ragkv.tools.formats import HERMES, MISTRAL, ToolFormat, tool_format
from ragkv.tools.spec import ToolSpec, allowed_tools

MAX_PARALLEL_CALLS = 16


def tool_call_constraint(
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[ToolSpec],
    choice: str = "auto",
    *,
    parallel: bool = True,
    strict: bool = False,
    eos_token_ids: Iterable[int] | None = None,
) -> GrammarConstraint:
    """Calls name one of the tools and their arguments fit its schema, in the format that the chat template speaks.

    Args:
        choice: "auto" lets the reply be text, or (where the format allows) text and then calls; "any", "required" or a
            tool's name make it calls alone. For "none" no constraint is needed.
        parallel: allow up to `MAX_PARALLEL_CALLS` calls, else one; Llama's format has one in any case.
        strict: as in `ragkv.grammar.json_schema_constraint`.

    Raises:
        ConfigError: there is no tool to call, no tool of this name, or a schema cannot be followed.
    """
    callable_tools, required = allowed_tools(tools, choice)
    if not callable_tools:
        raise ConfigError(
            f"tool_choice={choice!r} with {len(tools)} tools: there is nothing to call; use no constraint"
        )
    known = tool_format(tokenizer) or HERMES
    bodies = [json_rule(_call_schema(tool, known), strict) for tool in callable_tools]
    rules = [
        *(f"body_{i}: {body}" for i, body in enumerate(bodies)),
        f"body: {' | '.join(f'body_{i}' for i in range(len(bodies)))}",
        *_calls_rules(tokenizer, known, parallel),
        *_start_rules(tokenizer, known, required),
    ]
    return GrammarConstraint(tokenizer, "\n".join(rules) + "\n", eos_token_ids)


def _calls_rules(tokenizer: PreTrainedTokenizerBase, known: ToolFormat, parallel: bool) -> list[str]:
    """All calls of a reply. In HERMES the first opening tag is left to `_start_rules`."""
    begin = _terminal(tokenizer, known.begin)
    further = f"{{0,{MAX_PARALLEL_CALLS - 1}}}"
    if known is HERMES:
        call = rf'call: "\n" body "\n" {_terminal(tokenizer, known.end)}'
        return [call, "calls: call" + (rf' ("\n" {begin} call){further}' if parallel else "")]
    if known is MISTRAL:
        return [f'calls: {begin} " "? "[" body' + (f' (", " body){further}' if parallel else "") + ' "]"']
    return ["calls: body"]


def _start_rules(tokenizer: PreTrainedTokenizerBase, known: ToolFormat, required: bool) -> list[str]:
    """A whole reply: calls, or where they are not required also text.

    In HERMES text may come first, and in it the opening tag, as one token or spelled out, always begins a call. In the
    other formats a reply is either; text does not begin like JSON, which would be read as a call.
    """
    begin = _terminal(tokenizer, known.begin)
    if required:
        return [f"start: {begin} calls" if known is HERMES else "start: calls"]
    if known is not HERMES:
        return [r"TEXT: /[^\s{\[](.|\n)*/", "start: (TEXT | calls)?"]
    token = f"TEXT {begin} | " if begin.startswith("<") else ""
    return [
        r"TEXT: /(.|\n)*/",
        f"tag[lazy]: TEXT {json.dumps(known.begin)}",
        f"start: TEXT | ({token}tag) calls",
    ]


def _call_schema(tool: ToolSpec, known: ToolFormat) -> dict[str, Any]:
    arguments = moved(tool.parameters, f"/properties/{known.arguments_key}")
    keys = {"name": {"const": tool.name}, known.arguments_key: arguments}
    return {"type": "object", "properties": keys, "required": list(keys), "additionalProperties": False}


def _terminal(tokenizer: PreTrainedTokenizerBase, marker: str) -> str:
    """A marker in a grammar: its token where the vocabulary has one (regexes never match those), else its letters."""
    token = tokenizer.get_added_vocab().get(marker)
    return json.dumps(marker) if token is None else f"<[{token}]>"
