"""Tools: offered in the template's own format or described, forced or left to the model, and read back whole."""

import copy
import json
from typing import Any, Literal

import pytest
import torch
from pydantic import BaseModel, Field
from transformers import PreTrainedTokenizerFast

from ragkv.chat import encode_chat
from ragkv.config import SamplingParams
from ragkv.engine import Engine
from ragkv.errors import ConfigError
from ragkv.messages import Message, Segment
from ragkv.models import load
from ragkv.tools import (
    HERMES,
    LLAMA,
    MAX_PARALLEL_CALLS,
    MISTRAL,
    ToolCall,
    ToolCallStream,
    ToolFormat,
    ToolReply,
    ToolSpec,
    allowed_tools,
    parse_tool_calls,
    prepare_tool_messages,
    tool_call_constraint,
    tool_format,
)
from test_grammar import follows, write_at_random
from tiny import CHAT_TEMPLATE, VOCABULARY, tiny_tokenizer

PLAIN_CHATML = """\
{%- for message in messages %}{{ "<|im_start|>" + message.role + "\n" + message.content + "<|im_end|>\n" }}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
LLAMA_TEMPLATE = """\
{%- for tool in tools or [] %}{{ tool | tojson(indent=4) }}{% endfor %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.tool_calls %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception("one call only") }}{% endif %}
{%- set call = message.tool_calls[0].function %}
{{- '{"name": "' + call.name + '", "parameters": ' }}{{ call.arguments | tojson }}{{ "}" }}
{%- else %}{{ message.content }}{% endif %}<|im_end|>
{% endfor %}<|im_start|>assistant
"""
MISTRAL_TEMPLATE = """\
{%- if tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}{% endif %}
{%- for message in messages %}
{%- if message.tool_calls %}[TOOL_CALLS] [
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception("nine characters") }}{% endif %}
{{- call.function | tojson | replace("}}", "}") }}, "id": "{{ call.id }}"}{% if not loop.last %}, {% endif %}
{%- endfor %}]
{%- elif message.role == "tool" %}
{%- if message.tool_call_id | length != 9 %}{{ raise_exception("nine characters") }}{% endif %}
[TOOL_RESULTS] {"content": {{ message.content }}, "call_id": "{{ message.tool_call_id }}"}[/TOOL_RESULTS]
{%- else %}[INST] {{ message.content }}[/INST]{% endif %}
{%- endfor %}"""


class Search(BaseModel):
    query: str = Field(max_length=8)
    mode: Literal["fast", "deep"] = "fast"


class Batch(BaseModel):
    searches: list[Search] = Field(max_length=2)


ADD = ToolSpec("add", "Add integers.", {"properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}}})
BATCH = ToolSpec("search_all", "Search for everything.", Batch.model_json_schema())
TOOLS = [ADD, BATCH]
CALL = '<tool_call>\n{"name": "add", "arguments": {"x": 3}}\n</tool_call>'
SEARCH = (
    '<tool_call>\n{"name": "search_all", "arguments": {"searches": [{"query": "é", "mode": "deep"}]}}\n</tool_call>'
)
HISTORY: list[Message] = [
    {"role": "user", "content": "What is 3?"},
    {"role": "assistant", "content": "Let me see.", "tool_calls": [ToolCall("call_1", "add", {"x": 3}).to_openai()]},
    {"role": "tool", "tool_call_id": "call_1", "name": "add", "content": "no such number", "status": "error"},
]


def mistral_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = copy.deepcopy(tiny_tokenizer(MISTRAL_TEMPLATE))
    tokenizer.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]"]})
    return tokenizer


def text_of(tokenizer: PreTrainedTokenizerFast, messages: list[Message], tools: list[ToolSpec]) -> str:
    return str(tokenizer.decode(encode_chat(tokenizer, *prepare_tool_messages(tokenizer, messages, tools)).ids))


# Tools and calls


def test_spec_round_trip_and_defaults() -> None:
    assert ToolSpec.from_openai(ADD.to_openai()) == ADD
    assert ToolSpec.from_openai({"name": "now"}).to_openai() == {
        "type": "function",
        "function": {"name": "now", "description": "", "parameters": {"type": "object", "properties": {}}},
    }


@pytest.mark.parametrize(
    ("tool", "reason"),
    [
        ({"function": {}}, "no name"),
        ({"name": ""}, "needs a name"),
        ({"name": "f", "parameters": {"type": "array"}}, "f"),
    ],
)
def test_unusable_tools_are_errors(tool: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        ToolSpec.from_openai(tool)


def test_call_arguments_may_be_json_text() -> None:
    call = ToolCall("call_1", "add", {"x": 3})
    assert ToolCall.from_openai(call.to_openai()) == call
    assert ToolCall.from_openai({"id": "call_1", "function": {"name": "add", "arguments": '{"x": 3}'}}) == call
    with pytest.raises(ConfigError, match="arguments of 'add' are not JSON"):
        ToolCall.from_openai({"function": {"name": "add", "arguments": "{"}})


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("auto", (TOOLS, False)),
        ("none", ([], False)),
        ("any", (TOOLS, True)),
        ("required", (TOOLS, True)),
        ("search_all", ([BATCH], True)),
    ],
)
def test_allowed_tools(choice: str, expected: tuple[list[ToolSpec], bool]) -> None:
    assert allowed_tools(TOOLS, choice) == expected


def test_impossible_choices_are_errors() -> None:
    with pytest.raises(ConfigError, match=r"'subtract'.*\['add', 'search_all'\]"):
        allowed_tools(TOOLS, "subtract")
    with pytest.raises(ConfigError, match="no tools"):
        allowed_tools([], "any")


# What a template speaks


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHAT_TEMPLATE, HERMES),
        (LLAMA_TEMPLATE, LLAMA),
        (MISTRAL_TEMPLATE, MISTRAL),
        (PLAIN_CHATML, None),
        (CHAT_TEMPLATE.replace("tools", "documents"), None),
        (CHAT_TEMPLATE.replace('"arguments":', '"args":'), None),
        (None, None),
    ],
)
def test_format_is_read_from_what_the_template_renders(template: str | None, expected: ToolFormat | None) -> None:
    assert tool_format(tiny_tokenizer(template)) is expected


def test_template_with_tools_gets_tools_calls_and_results(tokenizer: PreTrainedTokenizerFast) -> None:
    text = text_of(tokenizer, HISTORY, TOOLS)
    assert all(json.dumps(tool.name) in text.split("<|im_end|>")[0] for tool in TOOLS)
    assert f"assistant\nLet me see.{CALL}<|im_end|>" in text
    assert "<|im_start|>tool\nError: no such number<|im_end|>" in text
    assert tokenizer.encode("<tool_call>")[0] in encode_chat(tokenizer, *prepare_tool_messages(tokenizer, HISTORY)).ids


def test_template_without_tools_gets_a_description() -> None:
    tokenizer = tiny_tokenizer(PLAIN_CHATML)
    messages: list[Message] = [{"role": "system", "content": "Be brief."}, *HISTORY]
    text = text_of(tokenizer, messages, TOOLS)
    system, _, rest = text.partition("<|im_end|>\n")
    assert system.startswith("<|im_start|>system\nBe brief.\n\n")
    assert all(json.dumps(tool.to_openai()["function"], ensure_ascii=False) in system for tool in TOOLS)
    assert rest == (
        "<|im_start|>user\nWhat is 3?<|im_end|>\n"
        f"<|im_start|>assistant\nLet me see.\n{CALL}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nError: no such number\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_fallback_keeps_the_question_where_it_was() -> None:
    tokenizer = tiny_tokenizer(PLAIN_CHATML)
    prompt = encode_chat(tokenizer, *prepare_tool_messages(tokenizer, HISTORY, TOOLS))
    [question] = [span for span in prompt.spans if span.kind == "question"]
    assert tokenizer.decode(prompt.ids[question.start : question.end]) == "What is 3?"


def test_fallback_gathers_parallel_results_in_one_user_message() -> None:
    calls = [ToolCall(f"c{i}", "add", {"x": i}).to_openai() for i in range(2)]
    results: list[Message] = [{"role": "tool", "tool_call_id": f"c{i}", "content": str(i)} for i in range(2)]
    messages: list[Message] = [HISTORY[0], {"role": "assistant", "content": None, "tool_calls": calls}, *results]
    text = text_of(tiny_tokenizer(PLAIN_CHATML), messages, [])
    assert text.count("<|im_start|>user") == 2
    assert text.count("<tool_response>") == text.count("</tool_call>") == 2
    assert "You can call" not in text


def test_mistral_ids_are_shortened_alike_in_call_and_result() -> None:
    messages, tools = prepare_tool_messages(mistral_tokenizer(), HISTORY, TOOLS)
    short = messages[1]["tool_calls"][0]["id"]
    assert (len(short), short.isalnum()) == (9, True)
    assert messages[2]["tool_call_id"] == short
    assert tools == [tool.to_openai() for tool in TOOLS]
    assert HISTORY[1]["tool_calls"][0]["id"] == "call_1"


@pytest.mark.parametrize("content", ["Error: no", [Segment("error 404")]])
def test_an_error_that_shows_is_not_marked_twice(content: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    [message], _ = prepare_tool_messages(tokenizer, [{"role": "tool", "content": content, "status": "error"}])
    assert "".join(part.text for part in message["content"]).lower().count("error") == 1


# What the grammar lets through


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, PLAIN_CHATML])
@pytest.mark.parametrize(
    ("choice", "parallel", "text", "valid"),
    [
        ("any", True, CALL, True),
        ("any", True, f"{CALL}\n{SEARCH}", True),
        ("any", False, f"{CALL}\n{SEARCH}", False),
        ("any", True, "Sure.", False),
        ("add", True, CALL, True),
        ("add", True, SEARCH, False),
        ("any", True, CALL.replace("add", "subtract"), False),
        ("any", True, CALL.replace("3", '"3"'), False),
        ("any", True, CALL.replace('{"x": 3}', '{"y": 3}'), False),
        ("any", True, "\n".join([CALL] * MAX_PARALLEL_CALLS), True),
        ("any", True, "\n".join([CALL] * (MAX_PARALLEL_CALLS + 1)), False),
        ("auto", True, "Just a <text> with {braces}.", True),
        ("auto", True, "", True),
        ("auto", True, f"Let me see.\n{CALL}\n{SEARCH}", True),
        ("auto", True, CALL, True),
        ("auto", False, f"{CALL}\n{CALL}", False),
        ("auto", True, f"{CALL} and so on", False),
        ("auto", True, "See: <tool_call>add(3)", False),
        ("any", True, f"{CALL}\n", True),
        ("any", False, f"{CALL}\n\n", False),
        ("auto", True, '{"name": "add", "arguments": {"x": 3}}', True),
        ("auto", True, '```json\n{\n  "name": "add",\n  "arguments": {"x": 3}\n}\n```', True),
        ("auto", True, '```json\n{\n  "name": "add",\n  "arguments": {"y": 3}\n}\n```', False),
        ("auto", True, '{"name": "add"}', False),
        ("auto", True, '```json\n{"name": "Bob", "arguments": [1]}\n```', True),
        ("auto", True, 'So: {"name": "add"}', True),
    ],
)
def test_hermes_grammar(template: str, choice: str, parallel: bool, text: str, valid: bool) -> None:
    tokenizer = tiny_tokenizer(template)
    constraint = tool_call_constraint(tokenizer, TOOLS, choice, parallel=parallel)
    assert follows(constraint, tokenizer, text) == valid


def test_a_tag_spelled_out_begins_a_call_too(tokenizer: PreTrainedTokenizerFast) -> None:
    constraint = tool_call_constraint(tokenizer, TOOLS)
    for character in "Well, <tool_call>":
        constraint.accept(tokenizer.encode(character)[0])
    allowed = constraint.mask(torch.zeros(VOCABULARY)).isfinite().nonzero().flatten()
    assert tokenizer.batch_decode(allowed.unsqueeze(1)) == ["\n"]


@pytest.mark.parametrize(
    ("choice", "text", "valid"),
    [
        ("any", '{"name": "add", "parameters": {"x": 3}}', True),
        ("any", "Hello", False),
        ("auto", '{"name": "add", "parameters": {"x": 3}}', True),
        ("auto", '{"name": "sub", "parameters": {"x": 3}}', False),
        ("auto", "Hello {world}", True),
        ("auto", "", True),
    ],
)
def test_llama_grammar(choice: str, text: str, valid: bool) -> None:
    tokenizer = tiny_tokenizer(LLAMA_TEMPLATE)
    assert follows(tool_call_constraint(tokenizer, TOOLS, choice), tokenizer, text) == valid


@pytest.mark.parametrize(
    ("choice", "text", "valid"),
    [
        ("any", '[TOOL_CALLS] [{"name": "add", "arguments": {"x": 3}}]', True),
        ("any", '[TOOL_CALLS][{"name": "add", "arguments": {}}, {"name": "add", "arguments": {"x": 1}}]', True),
        ("any", '[{"name": "add", "arguments": {"x": 3}}]', False),
        ("auto", '[TOOL_CALLS] [{"name": "add", "arguments": {"x": 3}}]', True),
        ("auto", "[TOOL_CALLS] Hello", False),
        ("auto", "Hello [1]", True),
    ],
)
def test_mistral_grammar(choice: str, text: str, valid: bool) -> None:
    tokenizer = mistral_tokenizer()
    constraint = tool_call_constraint(tokenizer, TOOLS, choice)
    for token in [*tokenizer.encode(text), tokenizer.eos_token_id]:
        if constraint.mask(torch.zeros(VOCABULARY + 1))[token] < 0:
            assert not valid
            return
        constraint.accept(token)
    assert valid


def test_nothing_to_call_is_an_error(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ConfigError, match="nothing to call"):
        tool_call_constraint(tokenizer, TOOLS, "none")


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("template", [CHAT_TEMPLATE, PLAIN_CHATML, LLAMA_TEMPLATE])
def test_random_choices_are_valid_calls(template: str, seed: int) -> None:
    tokenizer = tiny_tokenizer(template)
    constraint = tool_call_constraint(tokenizer, TOOLS, "search_all", parallel=False)
    reply = parse_tool_calls(write_at_random(constraint, tokenizer, seed), TOOLS)
    assert (reply.text, reply.invalid_tool_calls) == ("", ())
    [call] = reply.tool_calls
    assert call.name == "search_all"
    Batch.model_validate(call.arguments)


def test_random_model_calls_through_the_engine(engine_of: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    prompt = encode_chat(tokenizer, *prepare_tool_messages(tokenizer, HISTORY, [ADD]))
    constraint = tool_call_constraint(tokenizer, [ADD], "any", parallel=False)
    stream, parts = ToolCallStream([ADD]), []
    sampling = SamplingParams(max_tokens=100, temperature=1.0, seed=0)
    for chunk in engine_of("qwen2").stream(prompt, sampling, constraints=[constraint]):
        parts += stream.push(chunk.text)
    parts += stream.finish()
    [call] = parts
    assert isinstance(call, ToolCall)
    assert call.name == "add"
    assert call.arguments.get("x", 0) in range(100)


def ask_packaged(name: str, question: str, choice: str, *, parallel: bool = True) -> ToolReply:
    loaded = load(name, device="cpu")
    messages: list[Message] = [{"role": "user", "content": question}]
    prompt = encode_chat(loaded.tokenizer, *prepare_tool_messages(loaded.tokenizer, messages, TOOLS))
    constraint = tool_call_constraint(
        loaded.tokenizer, TOOLS, choice, parallel=parallel, eos_token_ids=loaded.eos_token_ids
    )
    chunks = list(Engine(loaded).stream(prompt, SamplingParams(max_tokens=80), constraints=[constraint]))
    completion = chunks[-1].completion
    assert completion is not None
    assert completion.finish_reason == "stop"
    return parse_tool_calls(completion.text, TOOLS)


def test_a_packaged_model_without_tool_template_calls_when_it_must() -> None:
    reply = ask_packaged("smollm2-135m", "Hello!", "add", parallel=False)
    assert [call.name for call in reply.tool_calls] == ["add"]


@pytest.mark.qwen
@pytest.mark.parametrize("choice", ["auto", "any"])
def test_qwen_calls_once_with_the_right_arguments(choice: str) -> None:
    reply = ask_packaged("qwen2.5-coder-1.5b", "Call add with x = 3.", choice)
    assert (reply.text, reply.invalid_tool_calls) == ("", ())
    assert [(call.name, call.arguments) for call in reply.tool_calls] == [("add", {"x": 3})]


@pytest.mark.qwen
@pytest.mark.parametrize("name", ["qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"])
def test_qwen_template_and_tags(name: str) -> None:
    tokenizer = load(name, device="cpu").tokenizer
    assert tool_format(tokenizer) is HERMES
    [token] = tokenizer.encode(HERMES.begin)
    assert HERMES.begin in tokenizer.decode([token], skip_special_tokens=True)
