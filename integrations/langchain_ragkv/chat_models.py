"""ChatSnapKV: ragkv's chat model as a LangChain chat model. Translation only; what happens is in ragkv."""

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.messages import BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult

from langchain_ragkv._batch import Batch, current_batch
from langchain_ragkv._calls import Call, read_call
from langchain_ragkv._replies import ReplyChunks, to_result
from langchain_ragkv._threads import ThreadedChatModel
from ragkv.aio import in_thread
from ragkv.chat_model import ChatEvent, ChatReply


class ChatSnapKV(ThreadedChatModel):
    """A local chat model that reads long prompts onto a compressed KV cache.

    Setup:
        ```bash
        pip install "ragkv[langchain]"
        ```
        No key and no server: weights are fetched on first use, and shared by all instances in the process.

    Key init args - completion params:
        model: packaged name, folder, `.gguf` file or hub id; `RAGKV_MODEL` in the environment is the default.
        max_tokens, temperature, top_p, top_k, min_p, repetition_penalty, seed, stop: see `ragkv.config.SamplingParams`.
        timeout: seconds for a reply; decoding stops and `ragkv.errors.ReplyTimeout` is raised when they are over.

    Key init args - KV cache params:
        max_capacity_prompt: entries of the KV cache kept of a prompt, per layer and KV head.
        window_size, kernel_size, pooling: SnapKV's, see `ragkv.policies.SnapKV`.
        policy: "snapkv", "full", "streaming" or a policy object.
        context_tokens: most tokens of documents in the prompt of a cited answer.
        kv_memory_bytes, kv_dir, kv_disk_bytes, kv_disk_dtype, namespace: K/V kept for prompts that begin alike.
        recompute: join the K/V of documents that were read one by one, and compute so many tokens anew: approximate.
        memory: a `ragkv.streaming.threads.StreamingMemory`; each thread (the config's `thread_id`) then has a cache of
            constant size, and a call reads only what is new in its history.

    Key init args - client params:
        device, dtype, attn_implementation, prefill_chunk_size: how the model runs; None chooses for this machine.
        streaming: let `invoke` stream too, for callbacks that show tokens.
        max_retries, api_key: taken because every LangChain model takes them; a local model has no use for either.

    A name that is none of these is an error that suggests the nearest. All but the last four can be said again for a
    single call: `llm.invoke("...", max_tokens=20)`, `llm.bind(model="qwen2.5-coder-0.5b")`.

    Instantiate:
        ```python
        llm = ChatSnapKV(model="qwen2.5-coder-1.5b", max_capacity_prompt=4096, max_tokens=256)
        ```

    Invoke:
        ```python
        llm.invoke([("system", "Translate to French."), ("human", "Hello!")])
        ```

    Stream:
        ```python
        for chunk in llm.stream("Write a haiku."):
            print(chunk.text, end="")
        ```

    Async:
        ```python
        await llm.ainvoke("Hello")  # cancelling the task stops decoding within a token
        await llm.abatch(["Hello", "Hey"])  # one batched generation, as is `batch`
        ```

    Tool calling:
        ```python
        llm.bind_tools([GetWeather], tool_choice="any").invoke("How is Rome?").tool_calls
        ```

    Structured output:
        ```python
        llm.with_structured_output(Joke).invoke("Tell me a joke about cats.")
        ```

    Citations:
        ```python
        create_cited_answer_chain(llm, retriever).invoke("Who wrote it?").citations
        ```

    Response metadata:
        `usage_metadata` counts tokens, those whose K/V were reused included. `response_metadata` has model_name,
        finish_reason ("stop", "length" or "tool_calls") and what `ragkv.reply.Stats` says: ttft_s and so on.
    """

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        call, batch = self._call(messages, stop, kwargs), self._batch()
        reply = _last(self._events(call)) if batch is None else batch.submit(call)
        return to_result(reply, call.options.model)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        call, batch = self._call(messages, stop, kwargs), self._batch()
        if batch is None:
            replies = in_thread(lambda cancel: iter([_last(self._events(call, cancel))]))
        else:
            replies = in_thread(lambda _: iter([batch.submit(call)]))
        return [to_result(reply, call.options.model) async for reply in replies][-1]

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        call = self._call(messages, stop, kwargs)
        chunks = ReplyChunks(call.options.model)
        for event in self._events(call):
            yield from chunks.of(event)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        call = self._call(messages, stop, kwargs)
        chunks = ReplyChunks(call.options.model)
        async for event in in_thread(lambda cancel: self._events(call, cancel)):
            for chunk in chunks.of(event):
                yield chunk

    def _call(self, messages: Sequence[BaseMessage], stop: list[str] | None, kwargs: Mapping[str, Any]) -> Call:
        return read_call(self.options(), self.timeout, messages, {**kwargs, "stop": stop})

    def _batch(self) -> Batch | None:
        """The batch that this call is part of; threads are answered one by one."""
        return current_batch(self) if self.memory is None else None


def _last(events: Iterable[ChatEvent]) -> ChatReply:
    return [event.reply for event in events if event.reply is not None][-1]
