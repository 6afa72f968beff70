"""`memory=`: which thread a call belongs to, and the session that has read its history."""

import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.runnables import RunnableConfig, ensure_config
from pydantic import Field, SkipValidation

from langchain_ragkv._calls import Call
from langchain_ragkv._tools import ToolBindingChatModel
from ragkv.chat_model import ChatEvent, stream_chat, stream_thread
from ragkv.streaming.threads import StreamingMemory


class ThreadedChatModel(ToolBindingChatModel):
    """A chat model that goes on where a thread's last call ended, if it has a memory.

    The thread is the config's `thread_id`, as LangGraph and its checkpointers name it.
    """

    memory: SkipValidation[StreamingMemory | None] = Field(default=None, exclude=True, repr=False)

    def invoke(
        self,
        input: LanguageModelInput,  # noqa: A002
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AIMessage:
        return super().invoke(input, config, stop=stop, **self._in_thread(config, kwargs))

    async def ainvoke(
        self,
        input: LanguageModelInput,  # noqa: A002
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AIMessage:
        return await super().ainvoke(input, config, stop=stop, **self._in_thread(config, kwargs))

    def stream(
        self,
        input: LanguageModelInput,  # noqa: A002
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> Iterator[AIMessageChunk]:
        yield from super().stream(input, config, stop=stop, **self._in_thread(config, kwargs))

    async def astream(
        self,
        input: LanguageModelInput,  # noqa: A002
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[AIMessageChunk]:
        async for chunk in super().astream(input, config, stop=stop, **self._in_thread(config, kwargs)):
            yield chunk

    def _in_thread(self, config: RunnableConfig | None, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The options of a call with the thread that its config names."""
        thread_id = ensure_config(config).get("configurable", {}).get("thread_id")
        if self.memory is None or thread_id is None or "thread_id" in kwargs:
            return kwargs
        return {**kwargs, "thread_id": str(thread_id)}

    def _events(self, call: Call, cancel: threading.Event | None = None) -> Iterator[ChatEvent]:
        """Answer a call; the model is loaded here if it was not before."""
        engine, timeout = call.options.engine(), call.timeout
        if self.memory is None:
            return stream_chat(engine, [call.request], cancel=cancel, timeout_s=timeout)
        return stream_thread(engine, call.request, self.memory, call.thread_id, cancel=cancel, timeout_s=timeout)
