"""Agents in LangChain: `create_agent` with two tools, and a LangGraph graph that remembers by a checkpointer.

pip install "ragkv[langchain]" langchain
python examples/langchain_agent.py [MODEL]
"""

import sys
from typing import Any

from langchain.agents import create_agent
from langchain.agents.middleware import ToolCallLimitMiddleware
from langchain_core.messages import HumanMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph

from langchain_ragkv import ChatSnapKV


def add(a: int, b: int) -> int:
    """Add two integers."""
    return a + b


def multiply(a: int, b: int) -> int:
    """Multiply two integers."""
    return a * b


def main(model: str = "qwen2.5-coder-1.5b") -> None:
    llm = ChatSnapKV(model=model, max_tokens=80)

    # The limit is for very small models, which like to repeat a call that was answered.
    agent = create_agent(
        llm,
        [add, multiply],
        system_prompt="Use the tools, then answer in one sentence.",
        middleware=[ToolCallLimitMiddleware(run_limit=2, exit_behavior="end")],
    )
    for question in ("What is 17 + 25?", "What is 6 times 7?"):
        for message in agent.invoke({"messages": [HumanMessage(question)]})["messages"]:
            calls = [f"{call['name']}({call['args']})" for call in getattr(message, "tool_calls", [])]
            print(f"{message.type}: {message.text or ', '.join(calls)}")

    def chat(state: MessagesState) -> dict[str, Any]:
        return {"messages": [llm.invoke(state["messages"])]}

    graph = StateGraph(MessagesState).add_node("chat", chat).add_edge(START, "chat").compile(InMemorySaver())
    for text in ("My name is Ann.", "What is my name?"):
        state = graph.invoke({"messages": [HumanMessage(text)]}, {"configurable": {"thread_id": "ann"}})
        print(f"human: {text}\nai: {state['messages'][-1].text}")
    print(f"{len(state['messages'])} messages in the thread")


if __name__ == "__main__":
    main(*sys.argv[1:])
