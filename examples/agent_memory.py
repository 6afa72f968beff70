"""An agent of 200 turns: a turn costs what is new in it, memory is constant, and turn 0 is recalled at the end.

pip install "ragkv[langchain]" langchain
python examples/agent_memory.py [MODEL] [TURNS]
"""

import sys
import tempfile
from pathlib import Path

from langchain.agents import create_agent
from langchain.agents.middleware import ToolCallLimitMiddleware
from langchain_core.messages import BaseMessage, HumanMessage

from langchain_ragkv import ChatSnapKV
from ragkv.embedding import SentenceTransformerEmbedder
from ragkv.streaming.long_term import MemoryStore
from ragkv.streaming.threads import StreamingMemory

THREAD = {"configurable": {"thread_id": "shop"}}


def stock(item: str) -> int:
    """How many of an item are in stock."""
    return len(item)


def main(model: str = "qwen2.5-coder-0.5b", turns: int = 200) -> None:
    store = MemoryStore(SentenceTransformerEmbedder(), Path(tempfile.mkdtemp()))
    memory = StreamingMemory(window_length=1020, store=store, max_turn_tokens=400)
    agent = create_agent(
        ChatSnapKV(model=model, memory=memory, max_tokens=16),
        [stock],
        system_prompt="You run a shop. Be brief.",
        middleware=[ToolCallLimitMiddleware(run_limit=1, exit_behavior="end")],
    )
    messages: list[BaseMessage] = []
    questions = ["My name is Ann.", *(f"Is item {number} in stock?" for number in range(1, turns)), "What is my name?"]
    for number, question in enumerate(questions):
        messages = agent.invoke({"messages": [*messages, HumanMessage(question)]}, THREAD)["messages"]
        session = memory.session("shop")
        if session is not None and number % 50 in (0, turns % 50):
            report, read = session.report(), messages[-1].usage_metadata["input_tokens"]
            print(
                f"turn {number}: {read} tokens read, {report.tokens_seen:,} seen, {report.cache_bytes / 1e6:.1f} MB, "
                f"{len(report.remembered_turns)} of {report.turns} turns remembered, recalled: {report.recalled_turns}"
            )
    print(f"human: {questions[-1]}\nai: {messages[-1].text}")


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:3]))
