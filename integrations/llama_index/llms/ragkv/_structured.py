"""Structured prediction by grammar: the reply is constrained to the JSON schema of a pydantic class."""

from collections.abc import AsyncGenerator, Generator, Mapping
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, ChatResponse
from llama_index.core.instrumentation import get_dispatcher  # type: ignore[attr-defined]
from llama_index.core.instrumentation.events.llm import LLMStructuredPredictEndEvent, LLMStructuredPredictStartEvent
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.program.utils import FlexibleModel, process_streaming_objects
from llama_index.core.prompts import PromptTemplate
from llama_index.core.types import Model, PydanticProgramMode

from ragkv.structured import parse_json_reply

dispatcher = get_dispatcher(__name__)


class PredictsByGrammar(FunctionCallingLLM):
    """`structured_predict` in four forms; LlamaIndex's own where `pydantic_program_mode` is not the default."""

    @dispatcher.span
    def structured_predict(
        self, output_cls: type[Model], prompt: PromptTemplate, llm_kwargs: dict[str, Any] | None = None, **args: Any
    ) -> Model:
        """An object of `output_cls`. A reply that `max_tokens` cut off is a ReplyError."""
        if not self._by_grammar():
            return super().structured_predict(output_cls, prompt, llm_kwargs, **args)  # type: ignore[no-any-return]
        dispatcher.event(LLMStructuredPredictStartEvent(output_cls=output_cls, template=prompt, template_args=args))
        messages = self._messages_for(prompt, args)
        result = _parsed(output_cls, self.chat(messages, **_constrained(output_cls, llm_kwargs)))
        dispatcher.event(LLMStructuredPredictEndEvent(output=result))
        return result

    @dispatcher.span
    async def astructured_predict(
        self, output_cls: type[Model], prompt: PromptTemplate, llm_kwargs: dict[str, Any] | None = None, **args: Any
    ) -> Model:
        """`structured_predict` without blocking the event loop."""
        if not self._by_grammar():
            return await super().astructured_predict(  # type: ignore[no-any-return]
                output_cls, prompt, llm_kwargs, **args
            )
        dispatcher.event(LLMStructuredPredictStartEvent(output_cls=output_cls, template=prompt, template_args=args))
        messages = self._messages_for(prompt, args)
        result = _parsed(output_cls, await self.achat(messages, **_constrained(output_cls, llm_kwargs)))
        dispatcher.event(LLMStructuredPredictEndEvent(output=result))
        return result

    def _structured_stream_call(
        self, output_cls: type[Model], prompt: PromptTemplate, llm_kwargs: dict[str, Any] | None = None, **args: Any
    ) -> Generator[Model | list[Model] | FlexibleModel | list[FlexibleModel], None, None]:
        if not self._by_grammar():
            yield from super()._structured_stream_call(output_cls, prompt, llm_kwargs, **args)
            return
        objects = _Objects(output_cls)
        for response in self.stream_chat(self._messages_for(prompt, args), **_constrained(output_cls, llm_kwargs)):
            yield objects.push(response)

    async def _structured_astream_call(
        self, output_cls: type[Model], prompt: PromptTemplate, llm_kwargs: dict[str, Any] | None = None, **args: Any
    ) -> AsyncGenerator[Model | list[Model] | FlexibleModel | list[FlexibleModel], None]:
        if not self._by_grammar():
            return await super()._structured_astream_call(output_cls, prompt, llm_kwargs, **args)
        stream = await self.astream_chat(self._messages_for(prompt, args), **_constrained(output_cls, llm_kwargs))
        objects = _Objects(output_cls)

        async def generate() -> AsyncGenerator[Model | list[Model] | FlexibleModel | list[FlexibleModel], None]:
            async for response in stream:
                yield objects.push(response)

        return generate()

    def _by_grammar(self) -> bool:
        return self.pydantic_program_mode == PydanticProgramMode.DEFAULT

    def _messages_for(self, prompt: PromptTemplate, args: Mapping[str, Any]) -> list[ChatMessage]:
        return self._extend_messages(prompt.format_messages(llm=self, **args))


class _Objects:
    """What a stream of JSON shows so far: partial objects, and in the end the whole one."""

    def __init__(self, output_cls: type[Any]) -> None:
        self._output_cls = output_cls
        self._current: Any = None

    def push(self, response: ChatResponse) -> Any:
        if response.raw is not None:  # the last
            return _parsed(self._output_cls, response)
        shown = None if self._current is None else [self._current]
        self._current = process_streaming_objects(response, self._output_cls, cur_objects=shown)
        return self._current


def _constrained(output_cls: type[Model], llm_kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    return {**(llm_kwargs or {}), "response_format": output_cls}


def _parsed(output_cls: type[Model], response: ChatResponse) -> Model:
    raw: Mapping[str, Any] = response.raw or {}
    value = parse_json_reply(response.message.content or "", raw.get("finish_reason", "stop"))
    return output_cls.model_validate(value)
