"""`memory=`: chats, chat engines and agents of LlamaIndex read only what is new in their histories."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.chat_engine import SimpleChatEngine
from llama_index.core.llms import ChatMessage, ChatResponse
from llama_index.core.memory import Memory
from llama_index.core.tools import FunctionTool

from llama_index.llms.ragkv import ChatSnapKV
from ragkv.streaming.threads import StreamingMemory


@pytest.fixture
def llm(tiny_folder: Path) -> ChatSnapKV:
    memory = StreamingMemory(window_length=900)
    return ChatSnapKV(model=str(tiny_folder), dtype="float32", max_tokens=6, memory=memory)


def _read(response: ChatResponse) -> int:
    return response.additional_kwargs["prompt_tokens"]


async def _chat(llm: ChatSnapKV, history: list[ChatMessage], **options: Any) -> ChatResponse:
    return llm.chat(history, **options)


async def _achat(llm: ChatSnapKV, history: list[ChatMessage], **options: Any) -> ChatResponse:
    return await llm.achat(history, **options)


async def _stream(llm: ChatSnapKV, history: list[ChatMessage], **options: Any) -> ChatResponse:
    return list(llm.stream_chat(history, **options))[-1]


async def _astream(llm: ChatSnapKV, history: list[ChatMessage], **options: Any) -> ChatResponse:
    return [response async for response in await llm.astream_chat(history, **options)][-1]


@pytest.mark.parametrize("call", [_chat, _achat, _stream, _astream])
async def test_only_what_is_new_is_read(llm: ChatSnapKV, call: Callable[..., Any]) -> None:
    for options in ({"thread_id": "a"}, {}):
        history: list[ChatMessage] = []
        for number in range(3):
            history.append(ChatMessage(f"Question {number}?"))
            response = await call(llm, history, **options)
            assert _read(response) < 40
            history.append(response.message)
    assert llm.memory.session("a").report().remembered_turns == (0, 1, 2)


def test_a_model_can_have_one_thread(llm: ChatSnapKV) -> None:
    llm.model_copy(update={"thread_id": "mine"}).chat([ChatMessage("Who?")])
    assert llm.memory.session("mine").report().turns == 1


def test_completions_of_messages_go_through_it_too(llm: ChatSnapKV) -> None:
    assert llm.complete("Who?", thread_id="a").text == llm.chat([ChatMessage("Who?")]).message.content
    assert llm.memory.session("a").report().turns == 1


def test_a_chat_engine_goes_on(llm: ChatSnapKV) -> None:
    threaded = llm.model_copy(update={"thread_id": "engine"})
    engine = SimpleChatEngine.from_defaults(llm=threaded, system_prompt="Be brief.", memory=Memory.from_defaults())
    for number in range(4):
        engine.chat(f"Question {number}?")
    report = llm.memory.session("engine").report()
    assert report.remembered_turns == (0, 1, 2, 3)
    assert report.tokens_seen == report.tokens_held < 300


async def test_an_agent_goes_on(llm: ChatSnapKV) -> None:
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    threaded, memory = llm.model_copy(update={"thread_id": "agent"}), Memory.from_defaults(session_id="s")
    agent = FunctionAgent(tools=[FunctionTool.from_defaults(add)], llm=threaded, system_prompt="Be brief.")
    seen = []
    for number in range(3):
        await agent.run(f"Question {number}?", memory=memory)
        seen.append(llm.memory.session("agent").report().tokens_seen)
    report = llm.memory.session("agent").report()
    assert report.remembered_turns == (0, 1, 2)
    assert report.pinned_tokens > 50
    assert seen[2] - seen[1] == seen[1] - seen[0] < 60


def test_a_memory_is_not_serialised(llm: ChatSnapKV) -> None:
    assert "memory" not in llm.to_dict()
