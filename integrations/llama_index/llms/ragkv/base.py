"""ChatSnapKV: ragkv's chat model as a LlamaIndex LLM. Translation only; what happens is in ragkv."""

import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
)
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.llm import ToolSelection, default_completion_to_prompt
from llama_index.core.tools.types import BaseTool

from llama_index.llms.ragkv._fields import OptionFields
from llama_index.llms.ragkv._messages import from_chat_messages
from llama_index.llms.ragkv._responses import responses, to_completion
from llama_index.llms.ragkv._structured import PredictsByGrammar
from llama_index.llms.ragkv._tools import REQUEST_NAMES, request_options, selections, tool_choice
from ragkv.aio import in_thread
from ragkv.chat_model import ChatEvent, ChatRequest, stream_chat, stream_thread
from ragkv.completion import stream_text
from ragkv.deadline import limited
from ragkv.options import OPTION_NAMES, check_names

Reply = Callable[[threading.Event | None], Iterator[ChatResponse]]


class ChatSnapKV(PredictsByGrammar, OptionFields):
    """A local chat model that reads long prompts onto a compressed KV cache.

    Setup: `pip install "ragkv[llama-index]"`. Models load on first use and are shared by the process.

    Instantiate: `llm = ChatSnapKV(model="qwen2.5-coder-1.5b", max_capacity_prompt=4096, max_tokens=256)`
    Invoke: `llm.complete("...")`, `llm.chat([ChatMessage(content="...")])`
    Stream: `for r in llm.stream_chat(messages): print(r.delta, end="")`
    Async: `await llm.achat(messages)`; a cancelled task stops decoding within a token.
    Tool calling: `llm.predict_and_call(tools, "...", tool_required=True)`
    Structured output: `llm.structured_predict(Output, prompt)`, `llm.as_structured_llm(Output)`
    Citations: `CitedAnswerSynthesizer(llm)`
    Response metadata: `response.additional_kwargs` counts tokens, `response.raw` has `ragkv.reply.Stats`.

    Long conversations: `ChatSnapKV(memory=StreamingMemory(...))` reads only what is new, on a cache of constant size.

    Every option, and `tools`, `tool_choice`, `allow_parallel_tool_calls`, `response_format`, `strict` and `thread_id`,
    can also be given to a single call. A name that is neither is an error.
    """

    @classmethod
    def class_name(cls) -> str:
        """The name that serialisation knows."""
        return "ChatSnapKV"

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        return _last(self._reply(messages, kwargs)(None))

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        return (response for response in self._reply(messages, kwargs)(None))

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        return await _alast(in_thread(self._reply(messages, kwargs)))

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        return (response async for response in in_thread(self._reply(messages, kwargs)))

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        return to_completion(_last(self._completion(prompt, formatted, kwargs)(None)))

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        return (to_completion(response) for response in self._completion(prompt, formatted, kwargs)(None))

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        return to_completion(await _alast(in_thread(self._completion(prompt, formatted, kwargs))))

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        return (to_completion(response) async for response in in_thread(self._completion(prompt, formatted, kwargs)))

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        """The calls of a reply, in order."""
        return selections(response, error_on_no_tool_call)

    def _prepare_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        choice = tool_choice(kwargs.pop("tool_choice", None), tool_required)
        user = [ChatMessage(content=user_msg)] if isinstance(user_msg, str) else [user_msg] if user_msg else []
        call = {"tools": tools, "tool_choice": choice, "allow_parallel_tool_calls": allow_parallel_tool_calls}
        return {"messages": [*(chat_history or []), *user], **call, **kwargs}

    def _completion(self, prompt: str, formatted: bool, kwargs: Mapping[str, Any]) -> Reply:
        """A completion of a user message; of raw text, if it is formatted or the user said how to format it."""
        if formatted:
            return self._reply(prompt, kwargs)
        own = self.completion_to_prompt
        if own is not None and own is not default_completion_to_prompt:
            return self._reply(own(prompt), kwargs)
        return self._reply([ChatMessage(content=prompt)], kwargs)

    def _reply(self, prompt: str | Sequence[ChatMessage], kwargs: Mapping[str, Any]) -> Reply:
        """Check a call now; the result loads the model and generates when it is iterated."""
        check_names(kwargs, (*OPTION_NAMES, *REQUEST_NAMES, "timeout", "thread_id"), "a call of ChatSnapKV")
        options = self.options(**{name: value for name, value in kwargs.items() if name in OPTION_NAMES})
        timeout = self.timeout if kwargs.get("timeout") is None else kwargs["timeout"]
        messages = prompt if isinstance(prompt, str) else from_chat_messages(prompt)
        request, memory = request_options(kwargs), self.memory
        thread_id = self.thread_id if kwargs.get("thread_id") is None else kwargs["thread_id"]

        def events(cancel: threading.Event) -> Iterator[ChatEvent]:
            engine, sampling = options.engine(), options.sampling()
            if isinstance(messages, str):
                return stream_text(engine, messages, sampling, cancel=cancel)
            asked = ChatRequest(messages, sampling, blocks=options.blocks(), **request)
            if memory is not None:
                return stream_thread(engine, asked, memory, thread_id, cancel=cancel)
            return stream_chat(engine, [asked], cancel=cancel)

        return lambda cancel: responses(limited(events, timeout, cancel), options.model)


def _last(stream: Iterable[ChatResponse]) -> ChatResponse:
    *_, whole = stream
    return whole.model_copy(update={"delta": None})


async def _alast(stream: AsyncIterator[ChatResponse]) -> ChatResponse:
    async for response in stream:
        whole = response
    return whole.model_copy(update={"delta": None})
