"""Agents in LlamaIndex: a FunctionAgent that calls functions, and a ReActAgent that reasons in text.

pip install "ragkv[llama-index]"
python examples/llama_index_agent.py [MODEL]
"""

import asyncio
import sys

from llama_index.core.agent.workflow import AgentStream, FunctionAgent, ReActAgent, ToolCallResult
from llama_index.core.tools import FunctionTool

from llama_index.llms.ragkv import ChatSnapKV


def add(a: int, b: int) -> int:
    """Add two integers."""
    return a + b


def opening_hours(museum: str) -> str:
    """Look up when a museum is open."""
    return f"{museum} is open from 10 to 17."


TOOLS = [FunctionTool.from_defaults(add), FunctionTool.from_defaults(opening_hours, return_direct=True)]


async def ask(agent: FunctionAgent | ReActAgent, question: str) -> None:
    """Run an agent, and show its words and its tools as they come."""
    print(f"{type(agent).__name__}: {question}")
    handler = agent.run(question, max_iterations=5)
    async for event in handler.stream_events():
        if isinstance(event, AgentStream):
            print(event.delta, end="", flush=True)
        elif isinstance(event, ToolCallResult):
            print(f"\n  tool: {event.tool_name}({event.tool_kwargs}) = {event.tool_output.content}")
    print(f"\n  answer: {await handler}\n")


async def main(model: str = "qwen2.5-coder-1.5b") -> None:
    llm = ChatSnapKV(model=model, max_tokens=80)
    # "any": the first reply must call a tool. Which, is for the model to say; that the call is valid, for the grammar.
    await ask(FunctionAgent(tools=TOOLS, llm=llm, initial_tool_choice="any"), "When is the Louvre open?")
    await ask(ReActAgent(tools=TOOLS[:1], llm=llm), "What is 17 + 25?")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
