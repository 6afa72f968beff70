"""`batch` and `abatch` as one generation.

Each input goes through `invoke` as LangChain wants it (callbacks, cache, rate limiter, tracing), in a thread or task of
its own; inside, its call waits for those of the others, and all that got so far are answered together.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Self

from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import ContextThreadPoolExecutor, get_config_list

from langchain_ragkv._calls import Call
from ragkv.batching import BatchGroup
from ragkv.chat_model import ChatReply, chat, check

Configs = RunnableConfig | Sequence[RunnableConfig] | None


class Batch:
    """The calls that one model is to answer together; leaving it with an error ends their generation."""

    def __init__(self, model: BaseChatModel, size: int) -> None:
        self.model = model
        self._cancel = threading.Event()
        self._group = BatchGroup[Call, ChatReply](size, self._answer)

    def submit(self, call: Call) -> ChatReply:
        """Wait for the others, and return the reply to this call. One that cannot be answered fails alone."""
        check(call.options.engine(), call.request)
        return self._group.submit(call)

    def _answer(self, calls: Sequence[Call]) -> list[ChatReply]:
        # All come from one `batch`, so they have model, policy and timeout in common.
        engine, timeout = calls[0].options.engine(), calls[0].timeout
        return chat(engine, [call.request for call in calls], cancel=self._cancel, timeout_s=timeout)

    @contextmanager
    def member(self) -> Iterator[None]:
        """The time in which one input is answered: `current_batch` finds the batch."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)
            self._group.leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None:
            self._cancel.set()


_current: ContextVar[Batch | None] = ContextVar("ragkv_batch", default=None)


def current_batch(model: BaseChatModel) -> Batch | None:
    """The batch in which this model is being called, if any."""
    batch = _current.get()
    return batch if batch is not None and batch.model is model else None


class BatchingChatModel(BaseChatModel):
    """A chat model whose `_generate` and `_agenerate` submit their call to the `current_batch`, where there is one."""

    def batch(
        self, inputs: list[LanguageModelInput], config: Any = None, *, return_exceptions: bool = False, **kwargs: Any
    ) -> list[Any]:
        """Answer all inputs in one generation, or `max_concurrency` at a time where the config sets it."""

        def invoke(batch: Batch, value: LanguageModelInput, config: RunnableConfig) -> Any:
            with batch.member():
                try:
                    return self.invoke(value, config, **kwargs)
                except Exception as error:
                    if return_exceptions:
                        return error
                    raise

        replies: list[Any] = []
        for some, configs in _groups(inputs, config):
            # On an error the batch is left first, or the executor would wait for replies that nobody wants.
            with ContextThreadPoolExecutor(len(some)) as executor, Batch(self, len(some)) as batch:
                replies += executor.map(invoke, [batch] * len(some), some, configs)
        return replies

    async def abatch(
        self, inputs: list[LanguageModelInput], config: Any = None, *, return_exceptions: bool = False, **kwargs: Any
    ) -> list[Any]:
        """`batch`, without blocking the event loop; cancelling it ends the generation."""

        async def ainvoke(batch: Batch, value: LanguageModelInput, config: RunnableConfig) -> Any:
            with batch.member():
                try:
                    return await self.ainvoke(value, config, **kwargs)
                except Exception as error:
                    if return_exceptions:
                        return error
                    raise

        replies: list[Any] = []
        for some, configs in _groups(inputs, config):
            with Batch(self, len(some)) as batch:
                replies += await asyncio.gather(*(ainvoke(batch, *each) for each in zip(some, configs, strict=True)))
        return replies

    def batch_as_completed(self, inputs: Sequence[LanguageModelInput], config: Any = None, **kwargs: Any) -> Any:
        """`batch` with the positions of the inputs: the replies of one generation are there at the same time."""
        yield from enumerate(self.batch(list(inputs), config, **kwargs))

    async def abatch_as_completed(
        self, inputs: Sequence[LanguageModelInput], config: Any = None, **kwargs: Any
    ) -> AsyncIterator[Any]:
        """`abatch` with the positions of the inputs."""
        for item in enumerate(await self.abatch(list(inputs), config, **kwargs)):
            yield item


def _groups(
    inputs: Sequence[LanguageModelInput], config: Configs
) -> Iterator[tuple[Sequence[LanguageModelInput], list[RunnableConfig]]]:
    """Inputs and configs that are to be answered together."""
    configs = get_config_list(config, len(inputs))
    size = (configs[0].get("max_concurrency") if configs else None) or len(inputs)
    for start in range(0, len(inputs), size or 1):
        yield inputs[start : start + size], configs[start : start + size]
