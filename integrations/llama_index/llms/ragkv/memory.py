"""ragkv's long-term memory as a block of LlamaIndex's `Memory`: what leaves the history is recalled where it fits."""

import asyncio
from collections.abc import Sequence
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, TextBlock, ToolCallBlock
from llama_index.core.bridge.pydantic import Field
from llama_index.core.memory.memory import BaseMemoryBlock
from llama_index.core.utils import get_tokenizer

from llama_index.llms.ragkv._messages import from_chat_messages
from ragkv.messages import Message
from ragkv.streaming.exchanges import END_OF_RECALLED, RECALLED, as_text, exchanges, last_question
from ragkv.streaming.long_term import MemoryStore


class RecallMemoryBlock(BaseMemoryBlock[str]):
    """Keeps the exchanges that `Memory` flushes, and gives back those most like the last user message.

    Each session of LlamaIndex (`session_id`) is a thread of the store. What it gives is marked as recalled, with the
    numbers of the exchanges; a budget too small for any of them gives nothing.

    Args:
        store: where exchanges are kept; the same store serves `ragkv.streaming.threads.StreamingMemory`.
        recall_tokens: most tokens that are recalled for a message, counted by LlamaIndex's tokenizer.
    """

    name: str = Field(default="recalled", description="The name of the memory block.")
    priority: int = Field(default=1, description="What is recalled is left out before the chat history is.")
    store: MemoryStore = Field(description="Where exchanges are kept.")
    recall_tokens: int = Field(default=256, ge=1, description="Most tokens that are recalled for a message.")

    async def _aget(self, messages: list[ChatMessage] | None = None, session_id: str = "", **block_kwargs: Any) -> str:
        question = last_question(_readable(messages or ()))
        return await asyncio.to_thread(self._recall, question, session_id) if question.strip() else ""

    async def _aput(self, messages: list[ChatMessage]) -> None:
        # LlamaIndex hands the session's id over on the messages.
        session_id = next((str(m.additional_kwargs["session_id"]) for m in messages if _has_session(m)), "")
        await asyncio.to_thread(self._keep, _readable(messages), session_id)

    def _recall(self, question: str, session_id: str) -> str:
        thread, tokenizer = self.store.thread(session_id), get_tokenizer()
        frame = len(tokenizer(RECALLED + END_OF_RECALLED))
        found = thread.recall(question, self.recall_tokens - frame, lambda text: len(tokenizer(text)))
        return RECALLED + "".join(each.line for each in found) + END_OF_RECALLED if found else ""

    def _keep(self, messages: Sequence[Message], session_id: str) -> None:
        thread = self.store.thread(session_id)
        for exchange in exchanges(messages):
            if exchange:
                thread.add(thread.next_turn, as_text(exchange))


def _has_session(message: ChatMessage) -> bool:
    return message.additional_kwargs.get("session_id") is not None


def _readable(messages: Sequence[ChatMessage]) -> list[Message]:
    """The messages with their texts and calls: an image that went by cannot be recalled, and spoils nothing."""
    kept = [[b for b in message.blocks if isinstance(b, TextBlock | ToolCallBlock)] for message in messages]
    return from_chat_messages(
        [message.model_copy(update={"blocks": blocks}) for message, blocks in zip(messages, kept, strict=True)]
    )
