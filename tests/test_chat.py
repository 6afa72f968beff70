"""From messages to ids: as the template says, with exact spans, and no control token but the template's own."""

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from ragkv.chat import Prompt, Span, encode_chat, encode_text, encode_untrusted
from ragkv.errors import ConfigError
from ragkv.messages import Segment
from tiny import ADDED_TOKENS, CHAT_TEMPLATE, SPECIAL_TOKENS, tiny_tokenizer

CONTROL = [*SPECIAL_TOKENS, *ADDED_TOKENS]
TOOL = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Finds documents.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": [], "strict": True},
    },
}
CALL = {
    "type": "function",
    "function": {"name": "search", "arguments": {"query": "toads", "limits": [1, 2.5, None], "in": {}}},
}
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": "Where is Toad Hall?"},
    {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL]},
    {"role": "tool", "content": "Toad Hall, Canberra"},
    {"role": "assistant", "content": "Canberra [4]"},
    {"role": "user", "content": "And the quick brown fox?"},
]


def _control_count(ids: tuple[int, ...] | list[int]) -> dict[str, int]:
    ids = list(ids)
    return {name: ids.count(tiny_tokenizer().convert_tokens_to_ids(name)) for name in CONTROL}


def _text(ids: tuple[int, ...] | list[int]) -> str:
    return tiny_tokenizer().decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("tools", [None, [], [TOOL], [TOOL, TOOL]])
@pytest.mark.parametrize("length", range(1, len(CONVERSATION) + 1))
def test_benign_chats_read_as_the_template_renders_them(
    tokenizer: PreTrainedTokenizerFast, length: int, tools: list[dict[str, Any]] | None
) -> None:
    """The same text; at the borders of the texts the tokens may be cut otherwise, and there alone."""
    messages = CONVERSATION[:length]
    rendered = tokenizer.apply_chat_template(messages, tools=tools or None, tokenize=False, add_generation_prompt=True)
    prompt = encode_chat(tokenizer, messages, tools)
    assert _text(prompt.ids) == rendered
    assert _control_count(prompt.ids) == _control_count(tokenizer.encode(rendered, add_special_tokens=False))


def test_tokens_equal_those_of_apply_chat_template_where_texts_end_with_words(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    messages = [{"role": "user", "content": "The documents name the answer."}, {"role": "assistant", "content": "Who?"}]
    expected = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    assert list(encode_chat(tokenizer, messages).ids) == expected


def test_a_text_is_encoded_as_it_is(tokenizer: PreTrainedTokenizerFast) -> None:
    prompt = encode_text(tokenizer, "The<|im_end|>answer")
    assert list(prompt.ids) == tokenizer("The<|im_end|>answer")["input_ids"]
    assert tokenizer.eos_token_id in prompt.ids
    assert prompt.spans == ()


def test_spans_are_exactly_their_texts(tokenizer: PreTrainedTokenizerFast) -> None:
    parts = [
        Segment("Documents:\n\n", "instruction"),
        Segment("[1] Toad Hall\n", "header", 1),
        Segment("It is in Canberra. \u00e9\U0001f600\n\n", "document", 1),
        Segment("", "header", 2),
        Segment("unmarked "),
        Segment("Question: Where?\nAnswer:", "question"),
    ]
    prompt = encode_chat(tokenizer, [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}])
    found = [(span.kind, span.document, _text(prompt.ids[span.start : span.end])) for span in prompt.spans]
    marked = [(part.kind, part.document, part.text) for part in parts if part.kind]
    assert found == [("instruction", None, "Be brief."), *marked]


TEXTS = st.lists(
    st.one_of(st.sampled_from(CONTROL), st.text(max_size=5), st.sampled_from(["<|im_", "end|>", "<"])), max_size=6
)


@given(TEXTS.map("".join), st.sampled_from(["instruction", "header", "document", "question", None]))
def test_no_text_becomes_a_control_token(text: str, kind: Any) -> None:
    benign = encode_chat(tiny_tokenizer(), [{"role": "user", "content": [Segment("x", kind, 1)]}])
    prompt = encode_chat(tiny_tokenizer(), [{"role": "user", "content": [Segment(text, kind, 1)]}])
    assert _control_count(prompt.ids) == _control_count(benign.ids)
    assert text in _text(prompt.ids)
    for span in prompt.spans:
        assert _text(prompt.ids[span.start : span.end]) == text


PLACES = st.sampled_from(
    ["system", "user", "result", "argument", "nested", "key", "name", "description", "tool key", "enum"]
)


@given(st.sampled_from(CONTROL), PLACES, st.sampled_from(["", "The "]))
def test_no_control_token_comes_from_anywhere_but_the_template(control: str, place: str, before: str) -> None:
    def conversation(hostile: dict[str, str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        def at(name: str, text: str) -> str:
            return text + hostile.get(name, "")

        arguments = {at("key", "query"): at("argument", "toads"), "deep": [{"x": [at("nested", "y")]}]}
        messages = [
            {"role": "system", "content": at("system", "Be brief.")},
            {"role": "user", "content": at("user", "Where?")},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"function": {"name": at("name", "f"), "arguments": arguments}}],
            },
            {"role": "tool", "content": at("result", "Canberra")},
        ]
        tool = {at("tool key", "name"): "f", "description": at("description", "d"), "enum": [at("enum", "e")]}
        return messages, [tool]

    benign = encode_chat(tiny_tokenizer(), *conversation({}))
    prompt = encode_chat(tiny_tokenizer(), *conversation({place: before + control}))
    assert _control_count(prompt.ids) == _control_count(benign.ids)
    assert before + control in _text(prompt.ids)


@given(TEXTS.map("".join))
def test_untrusted_texts_hold_no_control_token(text: str) -> None:
    ids = encode_untrusted(tiny_tokenizer(), text)
    assert sum(_control_count(ids).values()) == 0
    assert _text(ids) == text


def test_many_control_tokens_are_only_many_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    text = "<|im_end|>" * 5000
    ids = encode_untrusted(tokenizer, text)
    assert sum(_control_count(ids).values()) == 0
    assert _text(ids) == text


def test_tool_calls_and_tools_reach_the_template(tokenizer: PreTrainedTokenizerFast) -> None:
    text = _text(encode_chat(tokenizer, CONVERSATION, [TOOL]).ids)
    assert json.dumps(TOOL) in text
    assert json.dumps({"name": "search", "arguments": CALL["function"]["arguments"]}) in text  # type: ignore[index]


def test_neighbours_are_merged_for_templates_that_want_turns_to_alternate() -> None:
    alternating = CHAT_TEMPLATE.replace(
        '{{- "<|im_start|>"',
        "{%- if not loop.first and loop.previtem.role == message.role %}{{ raise_exception('alternate') }}{% endif %}\n"
        '{{- "<|im_start|>"',
    )
    tokenizer = tiny_tokenizer(alternating)
    twice = [
        {"role": role, "content": text}
        for role, text in [("user", "a"), ("user", "b"), ("assistant", "c"), ("user", "d")]
    ]
    assert "<|im_start|>user\na\n\nb<|im_end|>" in _text(encode_chat(tokenizer, twice).ids)


def test_system_messages_are_folded_where_the_template_refuses_them() -> None:
    refusing = CHAT_TEMPLATE.replace('["system", ', "[")
    tokenizer = tiny_tokenizer(refusing)
    messages = [{"role": "system", "content": "Be <|im_end|> brief."}, {"role": "user", "content": "Where?"}]
    prompt = encode_chat(tokenizer, messages)
    expected = "<|im_start|>user\nBe <|im_end|> brief.\n\nWhere?<|im_end|>\n<|im_start|>assistant\n"
    assert _text(prompt.ids) == expected
    assert _control_count(prompt.ids)["<|im_end|>"] == 1
    assert [span.kind for span in prompt.spans] == ["instruction", "question"]


def test_a_conversation_that_no_template_takes_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ConfigError, match="the model's chat template refuses the conversation: unknown role"):
        encode_chat(tokenizer, [{"role": "narrator", "content": "Once"}])
    with pytest.raises(ConfigError, match="unknown role"):
        encode_chat(tokenizer, [{"role": "system", "content": "s"}, {"role": "narrator", "content": "Once"}])
    with pytest.raises(ConfigError, match=r"messages=\[\]: a chat needs at least one message"):
        encode_chat(tokenizer, [])


def test_without_a_template_texts_follow_each_other() -> None:
    prompt = encode_chat(
        tiny_tokenizer(None), [{"role": "system", "content": "s<|im_end|>"}, {"role": "user", "content": "Where?"}]
    )
    assert _text(prompt.ids) == "s<|im_end|>\n\nWhere?\n\n"
    assert sum(_control_count(prompt.ids).values()) == 0
    assert [span.kind for span in prompt.spans] == ["instruction", "question"]


def test_the_question_reaches_to_the_end_of_the_prompt(tokenizer: PreTrainedTokenizerFast) -> None:
    prompt = encode_chat(tokenizer, CONVERSATION)
    assert prompt.question_tokens is not None
    assert _text(prompt.ids[-prompt.question_tokens :]) == "And the quick brown fox?<|im_end|>\n<|im_start|>assistant\n"
    assert Prompt((1, 2, 3)).question_tokens is None
    assert Prompt((1, 2, 3, 4), (Span(0, 1, "question"), Span(2, 3, "question"))).question_tokens == 2


def test_instructions_are_protected_before_headers() -> None:
    spans = (
        Span(0, 2, "header", 1),
        Span(2, 4, "document", 1),
        Span(4, 6, "instruction"),
        Span(6, 8, "header", 2),
        Span(8, 9, "question"),
        Span(9, 10, "instruction"),
    )
    assert Prompt(tuple(range(10)), spans).protected == [(4, 6), (9, 10), (0, 2), (6, 8)]


def test_a_call_shown_in_doubled_braces_is_shown_in_single_ones(tokenizer: PreTrainedTokenizerFast) -> None:
    shape = '"name": <function-name>, "arguments": <args-json-object>'
    slip = copy.copy(tokenizer)
    slip.chat_template = "{{ '{{" + shape + "}}' }}{{ messages[0].content }}"
    text = slip.decode(encode_chat(slip, [{"role": "user", "content": "{{as it is}}"}]).ids)
    assert text == "{" + shape + "}{{as it is}}"


def test_a_begun_reply_stands_behind_the_generation_prompt(tokenizer: PreTrainedTokenizerFast) -> None:
    begun = [Segment("Where?", "question"), Segment("\nAnswer: <|im_end|>", "reply")]
    prompt = encode_chat(tokenizer, [{"role": "user", "content": begun}])
    plain = encode_chat(tokenizer, [{"role": "user", "content": begun[:1]}])
    assert _text(prompt.ids) == _text(plain.ids) + "Answer: <|im_end|>"
    assert _control_count(prompt.ids) == _control_count(plain.ids)
    assert prompt.question_tokens == len(prompt) - prompt.spans[0].start
    assert (prompt.begun, plain.begun) == (True, False)
    open_end = encode_chat(tokenizer, [{"role": "user", "content": begun}], add_generation_prompt=False)
    assert "Where?\nAnswer:" in _text(open_end.ids)


def test_only_the_last_message_can_begin_the_reply(tokenizer: PreTrainedTokenizerFast) -> None:
    begun = {"role": "user", "content": [Segment("Where?"), Segment(" Here:", "reply")]}
    prompt = encode_chat(
        tokenizer, [begun, {"role": "assistant", "content": "No."}, {"role": "user", "content": "Why?"}]
    )
    assert "Where? Here:" in _text(prompt.ids)
    assert not _text(prompt.ids).endswith("Here:")


def test_a_begun_reply_survives_folding_and_the_lack_of_a_template() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [Segment("Q", "question"), Segment("A:", "reply")]},
    ]
    refusing = tiny_tokenizer(CHAT_TEMPLATE.replace('["system", ', "["))
    assert _text(encode_chat(refusing, messages).ids).endswith("<|im_start|>assistant\nA:")
    assert _text(encode_chat(tiny_tokenizer(None), messages).ids).endswith("Q\n\nA:")
