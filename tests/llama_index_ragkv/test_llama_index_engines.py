"""Query engines, chat engines and agents of LlamaIndex on ChatSnapKV. Replies are scripted: the wiring counts."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from llama_index.core import Settings, SummaryIndex
from llama_index.core.agent.workflow import AgentStream, FunctionAgent, ReActAgent, ToolCallResult
from llama_index.core.base.llms.types import LLMMetadata
from llama_index.core.chat_engine import CondensePlusContextChatEngine, ContextChatEngine, SimpleChatEngine
from llama_index.core.llms import ChatMessage
from llama_index.core.memory import Memory
from llama_index.core.schema import TextNode
from llama_index.core.tools import FunctionTool
from pydantic import BaseModel

from llama_index.llms.ragkv import ChatSnapKV
from ragkv.chat import Prompt

Say = Callable[..., list[Prompt]]
SAMPLE = Path(__file__).parents[2] / "evals/ragkv_evals/data/hotpotqa_sample.jsonl"
FACTS = SummaryIndex([TextNode(text="The door is green."), TextNode(text="The roof is red.")])


def decoded(llm: ChatSnapKV, prompt: Prompt) -> str:
    return llm.options().engine().tokenizer.decode(prompt.ids)


def passages() -> Iterator[str]:
    for line in SAMPLE.read_text().splitlines():
        for paragraph in json.loads(line)["paragraphs"]:
            yield paragraph["title"] + "\n" + "".join(paragraph["sentences"])


@pytest.fixture(scope="module")
def long_index(qwen: ChatSnapKV) -> SummaryIndex:
    """Nodes of 24 to 25 thousand tokens, as the model counts them."""
    nodes, tokens = list[TextNode](), 0
    for text in passages():
        nodes.append(TextNode(text=text))
        tokens += len(qwen.tokenize(text))
        if tokens >= 24_000:
            return SummaryIndex(nodes)
    raise AssertionError("the sample is too short")


def test_one_call_for_24k_tokens(qwen: ChatSnapKV, long_index: SummaryIndex, say: Say) -> None:
    """The context window is the model's own, so that the default query engine has nothing to refine."""
    seen = say("Indeed.")
    assert str(long_index.as_query_engine(llm=qwen).query("Who?")) == "Indeed."
    assert [24_000 < len(prompt) < 32_768 - qwen.max_tokens for prompt in seen] == [True]


def test_many_calls_for_llamaindex_default_window(
    qwen: ChatSnapKV, long_index: SummaryIndex, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the test above is there to prevent."""
    default = LLMMetadata(is_chat_model=True, model_name="unknown")
    monkeypatch.setattr(ChatSnapKV, "metadata", property(lambda _: default))
    seen = say("Indeed.")
    long_index.as_query_engine(llm=qwen).query("Who?")
    assert len(seen) > 5


def test_nodes_can_be_counted_in_the_models_tokens(
    qwen: ChatSnapKV, long_index: SummaryIndex, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []

    def tokenize(text: str) -> list[int]:
        counted.append(len(text))
        return qwen.tokenize(text)

    monkeypatch.setattr("llama_index.core.global_tokenizer", None)
    monkeypatch.setattr(Settings, "_tokenizer", None)
    Settings.tokenizer = tokenize
    seen = say("Indeed.")
    long_index.as_query_engine(llm=qwen).query("Who?")
    assert len(seen) == 1
    assert max(counted) > 90_000  # all nodes in one piece


async def test_query_engine_async_and_streamed(tiny: ChatSnapKV, say: Say) -> None:
    say("Green.")
    assert str(await FACTS.as_query_engine(llm=tiny).aquery("Which colour?")) == "Green."
    stream = FACTS.as_query_engine(llm=tiny, streaming=True).query("Which colour?")
    assert "".join(stream.response_gen) == "Green."


@pytest.mark.parametrize("mode", ["compact", "tree_summarize", "simple_summarize", "refine", "accumulate"])
def test_response_modes(tiny: ChatSnapKV, say: Say, mode: str) -> None:
    say("Green.")
    assert "Green." in str(FACTS.as_query_engine(llm=tiny, response_mode=mode).query("Which colour?"))


def test_structured_query_engine(writer: ChatSnapKV) -> None:
    class Light(BaseModel):
        """A light."""

        on: bool

    response = FACTS.as_query_engine(llm=writer.as_structured_llm(Light)).query("Is it on?")
    assert isinstance(response.response, Light)


def test_simple_chat_engine(tiny: ChatSnapKV, say: Say) -> None:
    seen = say("Hello!", "You said hi.")
    engine = SimpleChatEngine.from_defaults(llm=tiny, system_prompt="Be brief.")
    assert str(engine.chat("hi")) == "Hello!"
    assert "".join(engine.stream_chat("What did I say?").response_gen) == "You said hi."
    assert "assistant\nHello!<|im_end|>" in decoded(tiny, seen[1])


async def test_context_chat_engine(tiny: ChatSnapKV, say: Say) -> None:
    seen = say("Green.")
    engine = ContextChatEngine.from_defaults(retriever=FACTS.as_retriever(), llm=tiny)
    assert str(engine.chat("Which colour is the door?")) == "Green."
    assert str(await engine.achat("Again?")) == "Green."
    assert "The roof is red." in decoded(tiny, seen[0])


def test_condense_plus_context_chat_engine(tiny: ChatSnapKV, say: Say) -> None:
    seen = say("Green.", "What is the colour of the roof?", "Red.")
    memory = Memory.from_defaults(token_limit=500)
    engine = CondensePlusContextChatEngine.from_defaults(retriever=FACTS.as_retriever(), llm=tiny, memory=memory)
    assert str(engine.chat("Which colour is the door?")) == "Green."
    assert str(engine.chat("And the roof?")) == "Red."  # the question was condensed in between
    assert len(seen) == 3


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'


async def test_function_agent(writer: ChatSnapKV, say: Say) -> None:
    seen = say(CALL, "It is 5.")
    agent = FunctionAgent(tools=[FunctionTool.from_defaults(add)], llm=writer, system_prompt="Use the tools.")
    handler = agent.run("What is 2 + 3?")
    events = [event async for event in handler.stream_events()]
    assert str(await handler) == "It is 5."
    (result,) = [event for event in events if isinstance(event, ToolCallResult)]
    assert result.tool_output.raw_output == 5
    assert "".join(event.delta for event in events if isinstance(event, AgentStream)) == "It is 5."
    assert "tool\n5<|im_end|>" in decoded(writer, seen[1])


async def test_function_agent_without_streaming(writer: ChatSnapKV, say: Say) -> None:
    say(CALL + "\n" + CALL, "It is 5 and 5.")
    agent = FunctionAgent(tools=[FunctionTool.from_defaults(add)], llm=writer, streaming=False)
    output = await agent.run("What is 2 + 3, twice?")
    assert str(output) == "It is 5 and 5."
    assert len(output.tool_calls) == 2


async def test_function_agent_forced_to_begin_with_a_tool(writer: ChatSnapKV, prompts: list[str]) -> None:
    """The tiny model would never call one by itself."""

    def stop_here() -> str:
        """Ends it."""
        return "ended"

    tool = FunctionTool.from_defaults(stop_here, return_direct=True)
    agent = FunctionAgent(tools=[tool], llm=writer, initial_tool_choice="stop_here")
    assert str(await agent.run("Go!")) == "ended"
    assert len(prompts) == 1


async def test_react_agent(writer: ChatSnapKV, say: Say) -> None:
    seen = say(
        'Thought: I need a tool.\nAction: add\nAction Input: {"a": 2, "b": 3}\n',
        "Thought: I can answer without using any more tools.\nAnswer: It is 5.",
    )
    agent = ReActAgent(tools=[FunctionTool.from_defaults(add)], llm=writer)
    assert str(await agent.run("What is 2 + 3?")) == "It is 5."
    assert "Observation: 5" in decoded(writer, seen[1])


async def test_memory_between_runs(writer: ChatSnapKV, say: Say) -> None:
    seen = say(CALL, "It is 5.", "I added.")
    agent = FunctionAgent(tools=[FunctionTool.from_defaults(add)], llm=writer)
    memory = Memory.from_defaults(token_limit=2000)
    await agent.run("What is 2 + 3?", memory=memory)
    await agent.run("What did you do?", memory=memory)
    assert '{"a": 2, "b": 3}' in decoded(writer, seen[2])
    assert isinstance((await memory.aget_all())[0], ChatMessage)
