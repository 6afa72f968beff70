"""Messages: segments, merged neighbours, folded system messages; the caller's own lists stay as they were."""

import copy
from typing import Any

from ragkv.messages import Segment, fold_system, in_segments, merge_neighbours


def _texts(messages: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(m["role"], "".join(part.text for part in m["content"])) for m in messages]


def test_strings_become_segments_of_their_kind() -> None:
    messages = in_segments(
        [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "first"},
            {"role": "assistant", "content": "reply"},
            {"role": "user", "content": "last"},
            {"role": "tool", "content": "result", "tool_call_id": "7"},
        ]
    )
    kinds = [m["content"][0].kind for m in messages]
    assert kinds == ["instruction", None, None, "question", None]
    assert messages[-1]["tool_call_id"] == "7"


def test_segments_keep_their_kind() -> None:
    parts = (Segment("[1] Title\n", "header", 1), Segment("why?", "question"))
    assert in_segments([{"role": "user", "content": parts}])[0]["content"] == list(parts)


def test_absent_and_empty_contents_are_empty() -> None:
    messages = in_segments(
        [{"role": "assistant", "content": None}, {"role": "assistant"}, {"role": "user", "content": ""}]
    )
    assert [m["content"] for m in messages] == [[], [], []]


def test_neighbours_of_one_role_are_joined_by_blank_lines() -> None:
    roles = ["system", "system", "user", "user", "assistant", "assistant", "user"]
    merged = merge_neighbours(in_segments([{"role": r, "content": str(i)} for i, r in enumerate(roles)]))
    assert _texts(merged) == [("system", "0\n\n1"), ("user", "2\n\n3"), ("assistant", "4\n\n5"), ("user", "6")]
    assert [part.kind for part in merged[0]["content"]] == ["instruction", None, "instruction"]


def test_tool_calls_and_results_stay_apart() -> None:
    call = {"function": {"name": "f", "arguments": {}}}
    messages = in_segments(
        [
            {"role": "assistant", "content": "a", "tool_calls": [call]},
            {"role": "assistant", "content": "b"},
            {"role": "assistant", "content": "c", "tool_calls": [call]},
            {"role": "tool", "content": "1"},
            {"role": "tool", "content": "2"},
        ]
    )
    assert _texts(merge_neighbours(messages)) == _texts(messages)


def test_system_messages_fold_into_the_first_user_message() -> None:
    messages = in_segments(
        [
            {"role": "system", "content": "s1"},
            {"role": "assistant", "content": "hello"},
            {"role": "user", "content": "u1"},
            {"role": "system", "content": "s2"},
            {"role": "user", "content": "u2"},
        ]
    )
    folded = fold_system(messages)
    assert _texts(folded) == [("assistant", "hello"), ("user", "s1\n\ns2\n\nu1"), ("user", "u2")]
    assert folded[1]["content"][0].kind == "instruction"


def test_system_messages_alone_become_a_user_message() -> None:
    assert _texts(fold_system(in_segments([{"role": "system", "content": "s"}]))) == [("user", "s\n\n")]


def test_the_callers_messages_stay_as_they_were() -> None:
    messages = in_segments(
        [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    )
    before = copy.deepcopy(messages)
    merge_neighbours(messages)
    fold_system(messages)
    assert messages == before
