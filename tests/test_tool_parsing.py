"""Replies read back: the same parts however they arrive, calls whole, text untouched and at once."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragkv.tools import HERMES, InvalidToolCall, ToolCall, ToolCallStream, ToolSpec, parse_tool_calls

TOOLS = [ToolSpec("add"), ToolSpec("search_all")]
CALL = '<tool_call>\n{"name": "add", "arguments": {"x": 3}}\n</tool_call>'


def summary(parts: list[Any]) -> list[Any]:
    """Parts without ids, and with neighbouring pieces of text joined."""
    joined: list[Any] = []
    for part in parts:
        if isinstance(part, str) and joined and isinstance(joined[-1], str):
            joined[-1] += part
        elif isinstance(part, str):
            joined.append(part)
        else:
            joined.append((type(part).__name__, part.name, part.arguments))
    return joined


ADD_3 = ("ToolCall", "add", {"x": 3})
REPLIES: list[tuple[str, list[Any]]] = [
    ("Just text.", ["Just text."]),
    ("  a < b, <tool> \n", ["  a < b, <tool> \n"]),
    (CALL, [ADD_3]),
    (f"\n{CALL}\n{CALL}\n", [ADD_3, ADD_3]),
    (f"First.\n\n{CALL}\n\nOne more  time.", ["First.", ADD_3, "One more  time."]),
    (CALL.replace("3", '"</tool_call>"'), [("ToolCall", "add", {"x": "</tool_call>"})]),
    (CALL.replace("3", r'"\"</tool_call>"'), [("ToolCall", "add", {"x": '"</tool_call>'})]),
    (CALL.replace("add", "unknown"), [("ToolCall", "unknown", {"x": 3})]),
    (CALL.replace("arguments", "parameters"), [ADD_3]),
    (CALL.replace('{"x": 3}', '"{\\"x\\": 3}"'), [ADD_3]),
    ('<tool_call>\n{"name": "now"}\n</tool_call>', [("ToolCall", "now", {})]),
    (CALL.removesuffix("\n</tool_call>"), [ADD_3]),
    (CALL.removesuffix("_call>"), [ADD_3]),
    ("<tool_call>add(3)</tool_call> So.", [("InvalidToolCall", None, "add(3)"), "So."]),
    ('<tool_call>{"name": "add", "arguments": 3}', [("InvalidToolCall", "add", '{"name": "add", "arguments": 3}')]),
    ('Text <tool_call>{"name": "ad', ["Text", ("InvalidToolCall", None, '{"name": "ad')]),
    ("Text <tool_c", ["Text <tool_c"]),
    ("<tool_call>", [("InvalidToolCall", None, "")]),
    ('{"name": "add", "arguments": {"x": 3}}', [ADD_3]),
    ('```json\n{"name": "add", "arguments": {"x": 3}}\n```\n', [ADD_3]),
    ('[TOOL_CALLS] [{"name": "add", "arguments": {"x": 3}}, {"name": "add", "arguments": {"x": 3}}]', [ADD_3, ADD_3]),
    ('<|python_tag|>{"name": "add", "parameters": {"x": 3}}; {"name": "add", "parameters": {"x": 3}}', [ADD_3, ADD_3]),
    *(
        (text, [text])
        for text in [
            '{"name": "unknown", "arguments": {}}',
            '{"name": "add", "arguments": {"x": 3}} is how to call it.',
            'It is {"name": "add", "arguments": {"x": 3}}',
            '{"name": "add", "argum',
            '{"a": 1}',
            "[1] says so",
        ]
    ),
]


@pytest.mark.parametrize(("text", "expected"), REPLIES)
def test_replies_are_parted(text: str, expected: list[Any]) -> None:
    stream = ToolCallStream(TOOLS)
    assert summary([*stream.push(text), *stream.finish()]) == expected
    stream = ToolCallStream(TOOLS)
    parts = [part for character in text for part in stream.push(character)]
    assert summary([*parts, *stream.finish()]) == expected


@given(st.sampled_from(REPLIES), st.lists(st.integers(0, 120), max_size=12))
def test_any_pieces_give_the_same_parts(reply: tuple[str, list[Any]], cuts: list[int]) -> None:
    text, expected = reply
    stream, parts = ToolCallStream(TOOLS), []
    for start, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(text)], strict=True):
        parts += stream.push(text[start:end])
    assert summary([*parts, *stream.finish()]) == expected


@given(st.text(alphabet='<tool_call>/\\"{} \nab', max_size=60))
def test_text_without_markers_is_never_changed(text: str) -> None:
    if HERMES.begin in text:
        return
    stream = ToolCallStream(TOOLS)
    parts = [part for character in text for part in stream.push(character)]
    assert "".join(map(str, [*parts, *stream.finish()])) == text


def test_plain_text_is_not_delayed() -> None:
    stream = ToolCallStream(TOOLS)
    assert stream.push("Hello") == ["Hello"]
    assert stream.push(" <") == []
    assert stream.push("b> you") == [" <b> you"]


def test_a_call_comes_as_soon_as_it_is_closed_and_has_an_id_of_its_own() -> None:
    stream = ToolCallStream(TOOLS)
    first = stream.push(CALL)
    second = stream.push(CALL)
    assert [type(part) for part in first + second] == [ToolCall, ToolCall]
    ids = {part.id for part in first + second if isinstance(part, ToolCall)}
    assert len(ids) == 2


def test_reply_is_sorted_by_kind() -> None:
    reply = parse_tool_calls(f"Let me see. {CALL} <tool_call>no</tool_call>", TOOLS)
    assert reply.text == "Let me see."
    assert [call.name for call in reply.tool_calls] == ["add"]
    [invalid] = reply.invalid_tool_calls
    assert isinstance(invalid, InvalidToolCall)
    assert "not JSON" in invalid.error
