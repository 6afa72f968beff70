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
        eos_token_ids: give all of the model's: some end a reply after a call with another token than after text.

    Raises:
        ConfigError: there is no tool to call, no tool of this name, or a schema cannot be followed.
    """
    callable_tools, required = allowed_tools(tools, choice)
    if not callable_tools:
        raise ConfigError(
            f"tool_choice={choice!r} with {len(tools)} tools: there is nothing to call; use no constraint"
        )
    known = tool_format(tokenizer) or HERMES
    bodies = [f"body_{i}: {json_rule(_call_schema(tool, known), strict)}" for i, tool in enumerate(callable_tools)]
    rules = [*bodies, f"body: {_any_of('body', callable_tools)}"]
    if known is HERMES:
        rules += _hermes_rules(tokenizer, parallel)
        rules += _text_or_hermes_rules(tokenizer, callable_tools, strict) if not required else ["start: open calls"]
    else:
        rules += _json_rules(tokenizer, known, parallel, required)
    return GrammarConstraint(tokenizer, "\n".join(rules) + "\n", eos_token_ids)


def _hermes_rules(tokenizer: PreTrainedTokenizerBase, parallel: bool) -> list[str]:
    """Calls between tags, a line feed between them and, as Qwen2.5-Coder wants it, perhaps after the last."""
    further = rf' ("\n" open call){{0,{MAX_PARALLEL_CALLS - 1}}}' if parallel else ""
    return [
        f"open: {_terminal(tokenizer, HERMES.begin)}",
        rf'call: "\n" body "\n" {_terminal(tokenizer, HERMES.end)}',
        rf'calls: call{further} "\n"?',
    ]


def _text_or_hermes_rules(tokenizer: PreTrainedTokenizerBase, tools: Sequence[ToolSpec], strict: bool) -> list[str]:
    """A text in which what begins a call (the opening tag, as a token or spelled out) is followed by a whole one.

    The same holds for a reply that begins with the bare JSON of a call of a known tool, perhaps in a code fence: so
    calls Qwen2.5-Coder, and the parser takes it for a call.
    """
    opened = "TEXT open | " if _terminal(tokenizer, HERMES.begin).startswith("<") else ""
    rules = [
        r"TEXT: /(.|\n)*/",
        r'BARE: /\s*(```(json)?\s*)?\{\s*"name":\s*/',
        f"tag[lazy]: TEXT {json.dumps(HERMES.begin)}",
        f"start: TEXT | ({opened}tag) calls | {_any_of('bare', tools)}",
    ]
    for i, tool in enumerate(tools):
        rules += [
            f"bare_name_{i}[lazy]: BARE {json.dumps(json.dumps(tool.name))}",
            f"arguments_{i}: {json_rule(tool.parameters, strict)}",
            rf'bare_{i}: bare_name_{i} /,\s{{0,8}}"arguments":\s?/ arguments_{i} /\s{{0,4}}\}}\s?(```)?/',
        ]
    return rules


def _json_rules(tokenizer: PreTrainedTokenizerBase, known: ToolFormat, parallel: bool, required: bool) -> list[str]:
    """Mistral's list of calls or Llama's one; or a text, which does not begin like JSON: it would be read as a call."""
    further = f' (", " body){{0,{MAX_PARALLEL_CALLS - 1}}}' if parallel else ""
    listed = f'{_terminal(tokenizer, known.begin)} " "? "[" body{further} "]"'
    rules = [f"calls: {listed if known is MISTRAL else 'body'}"]
    if required:
        return [*rules, "start: calls"]
    return [*rules, r"TEXT: /[^\s{\[](.|\n)*/", "start: (TEXT | calls)?"]


def _any_of(rule: str, tools: Sequence[ToolSpec]) -> str:
    return " | ".join(f"{rule}_{i}" for i in range(len(tools)))


def _call_schema(tool: ToolSpec, known: ToolFormat) -> dict[str, Any]:
    arguments = moved(tool.parameters, f"/properties/{known.arguments_key}")
    keys = {"name": {"const": tool.name}, known.arguments_key: arguments}
    return {"type": "object", "properties": keys, "required": list(keys), "additionalProperties": False}


def _terminal(tokenizer: PreTrainedTokenizerBase, marker: str) -> str:
    """A marker in a grammar: its token where the vocabulary has one (regexes never match those), else its letters."""
    token = tokenizer.get_added_vocab().get(marker)
    return json.dumps(marker) if token is None else f"<[{token}]>"
