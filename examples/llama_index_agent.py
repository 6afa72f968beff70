"""LlamaIndex agents with two tools on a local model: one that calls functions, one that reasons in text (ReAct).

pip install "ragkv[llama-index]"
python examples/llama_index_agent.py [MODEL]
"""

import asyncio
import sys

from llama_index.core.agent.workflow import AgentStream, FunctionAgent, ReActAgent, ToolCallResult

from llama_index.llms.ragkv import ChatSnapKV

STOCK = {"apples": 12, "pears": 7}


def count_fruit(fruit: str) -> int:
    """How many pieces of a fruit are in stock. The fruit is a plural, such as apples."""
    return STOCK[fruit]


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


async def ask(agent: FunctionAgent | ReActAgent, question: str) -> None:
    """Run an agent, showing its tools and its words as they come."""
    print(f"\n{type(agent).__name__}: {question}")
    handler = agent.run(question, max_iterations=6)
    async for event in handler.stream_events():
        if isinstance(event, ToolCallResult):
            print(f"{event.tool_name}({event.tool_kwargs}) = {event.tool_output}")
        elif isinstance(event, AgentStream):
            print(event.delta, end="", flush=True)
    print("\nanswer:", await handler)


async def main(model: str = "qwen2.5-coder-1.5b") -> None:
    # What the grammar guarantees is that calls are valid; which tool to call is the model's decision.
    llm = ChatSnapKV(model=model, max_tokens=128)
    await ask(FunctionAgent(tools=[count_fruit, add], llm=llm), "How many apples are in stock?")
    await ask(ReActAgent(tools=[count_fruit, add], llm=llm), "What is 12 plus 7? Use a tool.")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
