"""`memory=`: calls read what is new in their thread's history, through every way to call a model, and for 200 turns."""

from collections.abc import Callable
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest, ModelResponse, wrap_model_call
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph

from langchain_ragkv import ChatSnapKV
from ragkv.errors import ConfigError
from ragkv.streaming.threads import StreamingMemory


@pytest.fixture
def llm(loads: list[str]) -> ChatSnapKV:
    return ChatSnapKV(model="tiny", max_tokens=6, memory=StreamingMemory(window_length=400))


def _thread(name: str) -> RunnableConfig:
    return {"configurable": {"thread_id": name}}


def _read(message: AIMessage) -> int:
    return message.usage_metadata["input_tokens"]


async def _ainvoke(llm: ChatSnapKV, history: list[BaseMessage], config: RunnableConfig) -> AIMessage:
    return await llm.ainvoke(history, config)


async def _invoke(llm: ChatSnapKV, history: list[BaseMessage], config: RunnableConfig) -> AIMessage:
    return llm.invoke(history, config)


async def _batch(llm: ChatSnapKV, history: list[BaseMessage], config: RunnableConfig) -> AIMessage:
    return llm.batch([history], config)[0]


async def _stream(llm: ChatSnapKV, history: list[BaseMessage], config: RunnableConfig) -> AIMessage:
    chunks = list(llm.stream(history, config))
    return AIMessage(sum(chunks[1:], chunks[0]).text, usage_metadata=sum(chunks[1:], chunks[0]).usage_metadata)


async def _astream(llm: ChatSnapKV, history: list[BaseMessage], config: RunnableConfig) -> AIMessage:
    chunks = [chunk async for chunk in llm.astream(history, config)]
    return AIMessage(sum(chunks[1:], chunks[0]).text, usage_metadata=sum(chunks[1:], chunks[0]).usage_metadata)


async def _stream_whole(llm: ChatSnapKV, history: list[BaseMessage], config: RunnableConfig) -> BaseMessage:
    chunks = list(llm.stream(history, config))
    return sum(chunks[1:], chunks[0])


@pytest.mark.parametrize("call", [_invoke, _ainvoke, _batch, _stream, _astream])
async def test_only_what_is_new_in_a_thread_is_read(llm: ChatSnapKV, call: Callable[..., Any]) -> None:
    histories: dict[str, list[BaseMessage]] = {"a": [], "b": []}
    for number in range(4):
        for name, history in histories.items():
            history.append(HumanMessage(f"Question {number} of {name}?"))
            reply = await call(llm, history, _thread(name))
            assert _read(reply) < 50
            history.append(reply)
    for name in histories:
        assert llm.memory.session(name).report().remembered_turns == (0, 1, 2, 3)


def test_without_a_thread_a_history_is_known_by_its_messages(llm: ChatSnapKV) -> None:
    history: list[BaseMessage] = []
    for number in range(4):
        history.append(HumanMessage(f"Question {number}?"))
        history.append(llm.invoke(history))
    assert len({_read(message) for message in history[1::2]}) == 1


def test_an_edited_history_is_read_again(llm: ChatSnapKV) -> None:
    history: list[BaseMessage] = [HumanMessage("Question 0?")]
    history += [llm.invoke(history, _thread("a")), HumanMessage("Question 1?")]
    llm.invoke(history, _thread("a"))
    history[0] = HumanMessage("Another question?")
    expected = llm.model_copy(update={"memory": StreamingMemory(window_length=400)}).invoke(history)
    assert llm.invoke(history, _thread("a")).content == expected.content
    assert llm.memory.session("a").report().turns == 2


@pytest.mark.parametrize("call", [_invoke, _stream_whole])
async def test_a_call_that_was_cut_off_is_no_edit(llm: ChatSnapKV, call: Callable[..., Any]) -> None:
    bound = llm.bind_tools([now], tool_choice="any", max_tokens=8)
    history: list[BaseMessage] = [HumanMessage("What time is it?")]
    history.append(await call(bound, history, _thread("a")))
    assert len(history[-1].invalid_tool_calls) == 1
    session = llm.memory.session("a")
    history.append(HumanMessage("Well?"))
    bound.invoke(history, _thread("a"))
    assert llm.memory.session("a") is session
    # Who reads it all sees what was cut off.
    plain, without = llm.model_copy(update={"memory": None}).bind_tools([now]), [history[0], AIMessage(""), history[2]]
    assert _read(plain.invoke(history)) > _read(plain.invoke(without)) + 5


def test_a_batch_of_threads_is_a_reply_to_each(llm: ChatSnapKV) -> None:
    inputs = [[HumanMessage(f"Question of {name}?")] for name in "abc"]
    replies = llm.batch(inputs, [_thread(name) for name in "abc"])
    fresh = llm.model_copy(update={"memory": StreamingMemory(window_length=400)})
    assert [reply.content for reply in replies] == [fresh.invoke(history).content for history in inputs]
    assert all(llm.memory.session(name).report().turns == 1 for name in "abc")


def test_a_call_can_name_its_thread_itself(llm: ChatSnapKV) -> None:
    llm.invoke("Who?", _thread("a"), thread_id="b")
    llm.bind(thread_id="c").invoke("Who?")
    assert [llm.memory.session(name) is None for name in "abc"] == [True, False, False]
    with pytest.raises(ConfigError, match="did you mean 'thread_id'"):
        llm.invoke("Who?", thread="a")


def test_langgraph_names_the_thread(llm: ChatSnapKV) -> None:
    def chat(state: MessagesState) -> dict[str, Any]:
        return {"messages": [llm.invoke(state["messages"])]}

    graph = StateGraph(MessagesState).add_node("chat", chat).add_edge(START, "chat").compile(InMemorySaver())
    for name, text in (("a", "One?"), ("b", "Two?"), ("a", "Three?")):
        state = graph.invoke({"messages": [HumanMessage(text)]}, _thread(name))
    assert llm.memory.session("a").report().remembered_turns == (0, 1)
    assert llm.memory.session("b").report().remembered_turns == (0,)
    assert _read(state["messages"][-1]) < 40


def now() -> str:
    """The time."""
    return "noon"


@wrap_model_call
def ask_the_clock_first(request: ModelRequest, handler: Callable[[ModelRequest], ModelResponse]) -> ModelResponse:
    """A random model must be made to call a tool, and to stop."""
    if request.messages[-1].type == "tool":
        return handler(request.override(tool_choice="none", model_settings={"max_tokens": 3}))
    one_call = {"max_tokens": 120, "parallel_tool_calls": False}
    return handler(request.override(tool_choice="now", model_settings=one_call))


def test_an_agent_with_tools_goes_on_for_200_turns(loads: list[str]) -> None:
    """Every turn costs the same, memory is constant, and nothing is read twice."""
    memory = StreamingMemory(window_length=600)
    llm = ChatSnapKV(model="tiny", memory=memory)
    agent = create_agent(llm, [now], system_prompt="Be brief.", middleware=[ask_the_clock_first])
    messages, costs, sizes = list[BaseMessage](), list[int](), set[int]()
    for number in range(200):
        messages.append(HumanMessage(f"Question {number:03}?"))
        messages = agent.invoke({"messages": messages}, _thread("a"))["messages"]
        asked, called, result, answered = messages[-4:]
        assert (asked.content, result.content) == (f"Question {number:03}?", "noon")
        assert [call["name"] for call in called.tool_calls] == ["now"]
        costs.append(_read(called) + _read(answered))
        if number >= 20:
            sizes.add(memory.session("a").report().cache_bytes)
    report = memory.session("a").report()
    assert len(messages) == 800
    assert report.turns == 400
    assert report.dropped_turns > 380
    assert report.tokens_held <= report.capacity == 604
    assert len(sizes) == 1
    assert max(costs[1:]) - min(costs[1:]) < 10
    read_and_written = sum(costs) + report.pinned_tokens
    assert read_and_written < report.tokens_seen < read_and_written + 200 * 100
