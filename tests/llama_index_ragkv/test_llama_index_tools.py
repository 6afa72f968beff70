"""The contract of tool calling, after langchain-tests' list: calls, choices, streams, histories and agents' loops."""

import asyncio
import json
from collections.abc import Callable
from typing import Literal

import pytest
from llama_index.core.base.llms.types import ChatResponse, ToolCallBlock
from llama_index.core.llms import ChatMessage, MessageRole
from llama_index.core.tools import BaseTool, FunctionTool

from llama_index.llms.ragkv import ChatSnapKV
from ragkv.chat import Prompt
from ragkv.errors import ConfigError, ReplyError

ASSISTANT, TOOL = MessageRole.ASSISTANT, MessageRole.TOOL
Say = Callable[..., list[Prompt]]
QUESTION = "What is the value of magic_function(3)? Use the tool."


def magic_function(input: int) -> int:  # noqa: A002
    """Applies a magic function to an input."""
    return input + 2


def turn_light(state: Literal["on", "off"]) -> str:
    """Turns the light on or off."""
    return f"the light is {state}"


def open_door() -> str:
    """Opens the door."""
    return "the door is open"


def tool(function: object) -> BaseTool:
    return FunctionTool.from_defaults(function)  # type: ignore[arg-type]


MAGIC, LIGHT, DOOR = tool(magic_function), tool(turn_light), tool(open_door)


def check_magic(llm: ChatSnapKV, response: ChatResponse) -> None:
    """Exactly one call, the same wherever it is looked for."""
    (call,) = llm.get_tool_calls_from_response(response)
    assert (call.tool_name, call.tool_kwargs) == ("magic_function", {"input": 3})
    assert call.tool_id
    (block,) = [block for block in response.message.blocks if isinstance(block, ToolCallBlock)]
    assert block.tool_call_id == call.tool_id
    (openai,) = response.message.additional_kwargs["tool_calls"]
    assert openai["id"] == call.tool_id
    assert json.loads(openai["function"]["arguments"]) == {"input": 3}
    assert response.raw["finish_reason"] == "tool_calls"
    assert "<tool_call>" not in (response.message.content or "")


def test_tool_calling(qwen: ChatSnapKV) -> None:
    check_magic(qwen, qwen.chat_with_tools([MAGIC], QUESTION))


async def test_tool_calling_async(qwen: ChatSnapKV) -> None:
    chunks = [chunk async for chunk in await qwen.astream_chat_with_tools([MAGIC], QUESTION)]
    check_magic(qwen, chunks[-1])


def test_tool_calling_stream(writer: ChatSnapKV) -> None:
    chunks = list(writer.stream_chat_with_tools([LIGHT], "Light!", tool_required=True))
    *_, whole = chunks
    (call,) = writer.get_tool_calls_from_response(whole)
    assert call.tool_kwargs["state"] in ("on", "off")
    assert "".join(chunk.delta or "" for chunk in chunks) == ""  # markup is not text
    assert whole.additional_kwargs["completion_tokens"] > 1


async def test_tool_calling_achat(writer: ChatSnapKV) -> None:
    response = await writer.achat_with_tools([LIGHT], "Light!", tool_required=True)
    assert writer.get_tool_calls_from_response(response)[0].tool_name == "turn_light"


def test_tools_are_sent_to_the_model(writer: ChatSnapKV, prompts: list[str]) -> None:
    writer.chat_with_tools([MAGIC, LIGHT], "Hello")
    assert "Applies a magic function" in prompts[0]
    assert '"enum": ["on", "off"]' in prompts[0]


def test_tools_in_openai_form(writer: ChatSnapKV) -> None:
    described = LIGHT.metadata.to_openai_tool()
    response = writer.chat([ChatMessage(content="Light!")], tools=[described], tool_choice="required")
    assert writer.get_tool_calls_from_response(response)[0].tool_name == "turn_light"


@pytest.mark.parametrize(
    ("choice", "called"),
    [
        ("any", {"turn_light", "open_door"}),
        ("required", {"turn_light", "open_door"}),
        ("open_door", {"open_door"}),
        ({"type": "function", "function": {"name": "turn_light"}}, {"turn_light"}),
    ],
)
def test_tool_choice(writer: ChatSnapKV, choice: object, called: set[str]) -> None:
    response = writer.chat_with_tools([LIGHT, DOOR], "Hello!", tool_choice=choice)
    assert {call.tool_name for call in writer.get_tool_calls_from_response(response)} <= called
    assert len(writer.get_tool_calls_from_response(response)) == 1


def test_tool_choice_none(writer: ChatSnapKV, prompts: list[str]) -> None:
    response = writer.chat_with_tools([LIGHT], "Hello!", tool_choice="none")
    assert writer.get_tool_calls_from_response(response, error_on_no_tool_call=False) == []
    assert "turn_light" not in prompts[0]


def test_tool_choice_of_an_unknown_tool(writer: ChatSnapKV) -> None:
    with pytest.raises(ConfigError, match="tool_choice='shut_door'"):
        writer.chat_with_tools([LIGHT, DOOR], "Hello!", tool_choice="shut_door")


def test_tool_calling_with_no_arguments(writer: ChatSnapKV) -> None:
    response = writer.chat_with_tools([DOOR], "Open!", tool_required=True)
    assert writer.get_tool_calls_from_response(response)[0].tool_kwargs == {}


def test_no_call_where_one_is_expected(writer: ChatSnapKV) -> None:
    with pytest.raises(ReplyError, match=r"the reply has none .*finish_reason='length'"):
        writer.get_tool_calls_from_response(writer.chat([ChatMessage(content="Hello!")]))


def test_a_call_that_was_cut_off(writer: ChatSnapKV) -> None:
    response = writer.chat_with_tools([LIGHT], "Light!", tool_required=True, max_tokens=8)
    assert response.raw["invalid_tool_calls"][0]["name"] is None
    with pytest.raises(ReplyError, match=r"not JSON.*raise max_tokens"):
        writer.get_tool_calls_from_response(response)


def test_predict_and_call(writer: ChatSnapKV) -> None:
    answer = writer.predict_and_call([DOOR], "Open!", tool_required=True)
    assert str(answer) == "the door is open"
    assert answer.sources[0].tool_name == "open_door"


async def test_apredict_and_call(writer: ChatSnapKV) -> None:
    assert str(await writer.apredict_and_call([DOOR], "Open!", tool_required=True)) == "the door is open"


TWO_CALLS = "\n".join(
    f'<tool_call>\n{{"name": "magic_function", "arguments": {{"input": {n}}}}}\n</tool_call>' for n in (3, 5)
)


async def test_parallel_calls(writer: ChatSnapKV, say: Say) -> None:
    say(TWO_CALLS)
    whole = writer.chat_with_tools([MAGIC], "Both!", allow_parallel_tool_calls=True)
    chunks = [chunk async for chunk in await writer.astream_chat_with_tools([MAGIC], "Both!")]
    for response in (whole, chunks[-1]):
        calls = writer.get_tool_calls_from_response(response)
        assert [call.tool_kwargs["input"] for call in calls] == [3, 5]
        assert len({call.tool_id for call in calls}) == 2
    counts = [len(writer.get_tool_calls_from_response(chunk, error_on_no_tool_call=False)) for chunk in chunks]
    assert counts == sorted(counts)
    assert 1 in counts  # a call is there as soon as it is whole


def test_no_parallel_calls(qwen: ChatSnapKV) -> None:
    question = "Call magic_function for 3, and also call magic_function for 5."
    response = qwen.chat_with_tools([MAGIC], question, max_tokens=80, tool_required=True)
    assert len(qwen.get_tool_calls_from_response(response)) == 1


def test_all_results_of_parallel_calls(writer: ChatSnapKV, say: Say) -> None:
    say(TWO_CALLS)
    assert str(writer.predict_and_call([MAGIC], "Both!", allow_parallel_tool_calls=True)) == "5\n\n7"


def history(call: ChatMessage, result: ChatMessage) -> list[ChatMessage]:
    return [ChatMessage(content="What is 1 + 2?"), call, result]


BLOCK = ChatMessage(
    role=ASSISTANT, blocks=[ToolCallBlock(tool_call_id="abc123", tool_name="add", tool_kwargs={"a": 1, "b": 2})]
)
JSON_BLOCK = ChatMessage(
    role=ASSISTANT, blocks=[ToolCallBlock(tool_call_id="abc123", tool_name="add", tool_kwargs='{"a": 1, "b": 2}')]
)
OLD_STYLE = ChatMessage(
    role=ASSISTANT,
    content="",
    additional_kwargs={
        "tool_calls": [
            {"id": "abc123", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
        ]
    },
)


@pytest.mark.parametrize("call", [BLOCK, JSON_BLOCK, OLD_STYLE], ids=["block", "block with JSON", "additional_kwargs"])
def test_tool_message_histories(writer: ChatSnapKV, prompts: list[str], call: ChatMessage) -> None:
    result = ChatMessage(role=TOOL, content="3", additional_kwargs={"tool_call_id": "abc123"})
    writer.chat(history(call, result))
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>' in prompts[0]
    assert "<|im_start|>tool\n3<|im_end|>" in prompts[0]


def test_tool_message_error_status(writer: ChatSnapKV, prompts: list[str]) -> None:
    extra = {"tool_call_id": "abc123", "is_error": True}
    writer.chat(history(BLOCK, ChatMessage(role=TOOL, content="no such number", additional_kwargs=extra)))
    assert "<|im_start|>tool\nError: no such number<|im_end|>" in prompts[0]


def test_structured_few_shot_examples(writer: ChatSnapKV) -> None:
    """Examples of tool use in the history, and then a user's turn with the same tools."""
    result = ChatMessage(role=TOOL, content="3", additional_kwargs={"tool_call_id": "abc123"})
    examples = [*history(BLOCK, result), ChatMessage(role=ASSISTANT, content="It is 3.")]
    response = writer.chat_with_tools([DOOR], "Open!", chat_history=examples, tool_required=True)
    assert writer.get_tool_calls_from_response(response)[0].tool_name == "open_door"


def test_its_own_messages_are_a_history(writer: ChatSnapKV, prompts: list[str]) -> None:
    asked = ChatMessage(content="Open!")
    reply = writer.chat_with_tools([DOOR], chat_history=[asked], tool_required=True).message
    read_again = ChatMessage.model_validate_json(reply.model_dump_json())
    result = ChatMessage(role=TOOL, content="open", additional_kwargs={"tool_call_id": "x"})
    writer.chat_with_tools([DOOR], chat_history=[asked, read_again, result])
    assert prompts[1].count('{"name": "open_door", "arguments": {}}') == 1


def test_unicode_tool_call_integration(qwen: ChatSnapKV) -> None:
    def create_customer(customer_name: str) -> str:
        """Creates a customer, whose name is in any language."""
        return customer_name

    question = "Create a customer named '你好啊集团' - call the tool."
    response = qwen.chat_with_tools([tool(create_customer)], question, tool_required=True)
    assert qwen.get_tool_calls_from_response(response)[0].tool_kwargs == {"customer_name": "你好啊集团"}


def test_agent_loop(qwen: ChatSnapKV, prompts: list[str]) -> None:
    """A call, and a turn after its result."""

    def get_weather(location: str) -> str:
        """Get the weather at a location."""
        return f"It is snowing in {location}."

    messages = [ChatMessage(content="What is the weather in San Francisco, CA?")]
    first = qwen.chat_with_tools([tool(get_weather)], chat_history=messages)
    (call,) = qwen.get_tool_calls_from_response(first)
    assert call.tool_name == "get_weather"
    extra = {"tool_call_id": call.tool_id}
    result = get_weather(**call.tool_kwargs)
    messages += [first.message, ChatMessage(role=TOOL, content=result, additional_kwargs=extra)]
    answer = qwen.chat_with_tools([tool(get_weather)], chat_history=messages)
    assert answer.message.role == ASSISTANT  # this small model may also ask for the weather again
    assert "<tool_response>\nIt is snowing in San Francisco, CA.\n</tool_response>" in prompts[1]


async def test_concurrent_tool_calls(writer: ChatSnapKV) -> None:
    replies = await asyncio.gather(
        writer.achat_with_tools([DOOR], "Open!", tool_required=True),
        writer.achat_with_tools([LIGHT], "Light!", tool_required=True),
    )
    names = [writer.get_tool_calls_from_response(reply)[0].tool_name for reply in replies]
    assert names == ["open_door", "turn_light"]
