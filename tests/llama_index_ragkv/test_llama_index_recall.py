"""`RecallMemoryBlock`: what LlamaIndex's memory flushes is kept per session, and recalled for the messages it fits."""

from pathlib import Path

import pytest
from llama_index.core.base.llms.types import ImageBlock, MessageRole, TextBlock, ToolCallBlock
from llama_index.core.chat_engine import SimpleChatEngine
from llama_index.core.llms import ChatMessage
from llama_index.core.memory import InsertMethod, Memory
from pydantic import ValidationError

from llama_index.llms.ragkv import ChatSnapKV, RecallMemoryBlock
from ragkv.embedding import SentenceTransformerEmbedder
from ragkv.streaming.exchanges import END_OF_RECALLED, RECALLED
from ragkv.streaming.long_term import MemoryStore

TALK = [
    ("My dog is called Rex and he is a corgi.", "A fine name for a corgi."),
    ("I am going to Lisbon in May.", "Lisbon is lovely in May."),
    ("Which sort of bread keeps longest?", "Sourdough keeps for days."),
    ("How do I remove rust from iron gates?", "With vinegar and a brush."),
    ("How deep is Lake Baikal?", "1,642 metres."),
]


@pytest.fixture
def store(tmp_path: Path) -> MemoryStore:
    return MemoryStore(SentenceTransformerEmbedder(), tmp_path / "memory")


def _memory(block: RecallMemoryBlock, session: str = "ann", token_limit: int = 60) -> Memory:
    return Memory.from_defaults(
        session_id=session,
        token_limit=token_limit,
        chat_history_token_ratio=0.35,
        memory_blocks=[block],
        token_flush_size=10,
        insert_method=InsertMethod.USER,
    )


async def _talk(memory: Memory) -> None:
    for question, answer in TALK:
        await memory.aput_messages([ChatMessage(question), ChatMessage(answer, role=MessageRole.ASSISTANT)])


async def test_what_was_flushed_comes_back_where_it_fits(store: MemoryStore) -> None:
    memory = _memory(RecallMemoryBlock(store=store, recall_tokens=60), token_limit=140)
    await _talk(memory)
    await memory.aput(ChatMessage("What is the name of my dog?"))
    history = await memory.aget()
    assert not any("corgi" in str(message.content) for message in history[:-1])
    asked = str(history[-1].content)
    assert RECALLED in asked
    assert END_OF_RECALLED in asked
    assert "> [turn 0] user: My dog is called Rex and he is a corgi.\n> assistant: A fine name for a corgi." in asked
    assert "Lisbon" not in asked


async def test_sessions_do_not_see_each_other_and_outlive_the_process(store: MemoryStore, tmp_path: Path) -> None:
    await _talk(_memory(RecallMemoryBlock(store=store)))
    question = [ChatMessage("What is the name of my dog?")]
    again = RecallMemoryBlock(store=MemoryStore(SentenceTransformerEmbedder(), tmp_path / "memory"))
    assert "Rex" in await again.aget(question, session_id="ann")
    assert await again.aget(question, session_id="bob") == ""
    assert await again.aget([], session_id="ann") == ""
    store.delete("ann")
    assert await RecallMemoryBlock(store=store).aget(question, session_id="ann") == ""


async def test_the_budget_holds(store: MemoryStore) -> None:
    await _talk(_memory(RecallMemoryBlock(store=store)))
    question = [ChatMessage("What is the name of my dog?")]
    from llama_index.core.utils import get_tokenizer

    whole = await RecallMemoryBlock(store=store, recall_tokens=10_000).aget(question, session_id="ann")
    tokens = len(get_tokenizer()(whole))
    exactly = await RecallMemoryBlock(store=store, recall_tokens=tokens + 4).aget(question, session_id="ann")
    assert exactly == whole != ""
    assert await RecallMemoryBlock(store=store, recall_tokens=10).aget(question, session_id="ann") == ""
    with pytest.raises(ValidationError, match="recall_tokens"):
        RecallMemoryBlock(store=store, recall_tokens=0)


async def test_calls_are_kept_and_images_are_not(store: MemoryStore) -> None:
    call = ToolCallBlock(tool_call_id="1", tool_name="weather", tool_kwargs={"city": "Lisbon"})
    blocks = [TextBlock(text="How is the weather in Lisbon?"), ImageBlock(url="http://localhost/a.png")]
    messages = [
        ChatMessage(role=MessageRole.USER, blocks=blocks),
        ChatMessage(role=MessageRole.ASSISTANT, blocks=[call]),
        ChatMessage("It is sunny.", role=MessageRole.TOOL, additional_kwargs={"tool_call_id": "1"}),
        ChatMessage("Sunny.", role=MessageRole.ASSISTANT),
    ]
    block = RecallMemoryBlock(store=store)
    await block.aput(messages, session_id="ann")
    found = await block.aget([ChatMessage("Was it sunny in Lisbon?")], session_id="ann")
    assert "weather({'city': 'Lisbon'})" in found
    assert "tool: It is sunny." in found
    assert "a.png" not in found
    assert len(messages[0].blocks) == 2  # the caller's message is as it was


def test_a_chat_engine_recalls(tiny: ChatSnapKV, store: MemoryStore, prompts: list[str]) -> None:
    memory = _memory(RecallMemoryBlock(store=store, recall_tokens=100), token_limit=200)
    engine = SimpleChatEngine.from_defaults(llm=tiny, memory=memory)
    for question, _ in TALK:
        engine.chat(question)
    assert RECALLED not in prompts[1]
    engine.chat("Tell me about my dog Rex, the corgi.")
    assert "My dog is called Rex" in prompts[-1].split(RECALLED)[1].split(END_OF_RECALLED)[0]
    assert prompts[-1].count("My dog is called Rex") == 1
