"""Agents in LangChain: `create_agent` with two tools, and a LangGraph graph that remembers by a checkpointer.

pip install "ragkv[langchain]" langchain
python examples/langchain_agent.py [MODEL]
"""

import sys
from typing import Any

from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph

from langchain_ragkv import ChatSnapKV


def add(a: int, b: int) -> int:
    """Add two integers."""
    return a + b


def opening_hours(museum: str) -> str:
    """Look up when a museum is open."""
    return f"{museum} is open from 10 to 17."


def ask_agent(llm: ChatSnapKV, question: str) -> None:
    agent = create_agent(llm, [add, opening_hours], system_prompt="Use the tools, then answer in one sentence.")
    print(question)
    for message in agent.invoke({"messages": [HumanMessage(question)]}, {"recursion_limit": 10})["messages"][1:]:
        calls = [f"{call['name']}({call['args']})" for call in getattr(message, "tool_calls", [])]
        print(f"  {message.type}: {message.text or ', '.join(calls)}")


def remember(llm: ChatSnapKV) -> None:
    def chat(state: MessagesState) -> dict[str, Any]:
        return {"messages": [llm.invoke(state["messages"])]}

    builder = StateGraph(MessagesState)
    builder.add_node("chat", chat)
    builder.add_edge(START, "chat")
    graph = builder.compile(checkpointer=InMemorySaver())
    for text in ("My name is Ann.", "What is my name?"):
        state = graph.invoke({"messages": [HumanMessage(text)]}, {"configurable": {"thread_id": "ann"}})
        print(f"{text}\n  {state['messages'][-1].text}")
    print(f"  {len(state['messages'])} messages in the thread")


def main(model: str = "qwen2.5-coder-1.5b") -> None:
    llm = ChatSnapKV(model=model, max_tokens=80)
    ask_agent(llm, "What is 17 + 25?")
    ask_agent(llm, "When is the Louvre open?")
    remember(llm)


if __name__ == "__main__":
    main(*sys.argv[1:])
