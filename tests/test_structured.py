"""JSON replies: the instruction reaches the prompt, and text becomes values or one clear error."""

import json
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from ragkv.chat import encode_chat
from ragkv.errors import ReplyError
from ragkv.structured import add_instruction, parse_json_reply, response_schema_instruction


def test_instruction_shows_the_schema() -> None:
    schema = {"type": "object", "properties": {"größe": {"type": "integer"}}}
    text = response_schema_instruction(schema)
    assert json.loads(text.split("\n", 1)[1]) == schema
    assert "größe" in text
    assert "JSON object" in response_schema_instruction()


def test_instruction_joins_the_system_messages_and_is_protected(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    prompt = encode_chat(tokenizer, add_instruction(messages, "Reply with JSON."))
    assert tokenizer.decode(prompt.ids) == (
        "<|im_start|>system\nBe brief.\n\nReply with JSON.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    start, end = prompt.protected[-1]
    assert tokenizer.decode(prompt.ids[start:end]) == "Reply with JSON."
    assert messages[0]["content"] == "Be brief."


def test_instruction_without_system_message() -> None:
    roles = [message["role"] for message in add_instruction([{"role": "user", "content": "Hi"}], "Reply with JSON.")]
    assert roles == ["system", "user"]
    assert [message["role"] for message in add_instruction([], "Reply with JSON.")] == ["system"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": [1]}', {"a": [1]}),
        (' \n{"a": "```"}\n', {"a": "```"}),
        ('```json\n{"a": 1}\n```', {"a": 1}),
        ("```\n[1, 2]\n```", [1, 2]),
        ("null", None),
    ],
)
def test_json_replies(text: str, value: Any) -> None:
    assert parse_json_reply(text) == value


@pytest.mark.parametrize("text", ["", "Sure! Here it is.", '{"a": 1', "[" * 100_000])
def test_other_replies_are_errors(text: str) -> None:
    with pytest.raises(ReplyError, match="not JSON") as error:
        parse_json_reply(text)
    assert len(str(error.value)) < 500


def test_cut_off_json_says_so() -> None:
    with pytest.raises(ReplyError, match="incomplete: max_tokens ended it after 7 characters"):
        parse_json_reply('{"a": 1', finish_reason="length")
