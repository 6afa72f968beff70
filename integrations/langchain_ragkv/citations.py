"""Answers that cite their sources, with any LangChain retriever and any chat model."""

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from langchain_core.documents import Document
from langchain_core.messages import AIMessage
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import run_in_executor

from langchain_ragkv._answers import AnswerStream, Asked, Citation, CitedAnswer, Question, question_text
from ragkv.ordering import PopularFirst
from ragkv.prompt import CitePrompt

__all__ = ["Citation", "CitedAnswer", "CitedAnswerChain", "create_cited_answer_chain"]


def create_cited_answer_chain(
    llm: Runnable[Any, AIMessage],
    retriever: Runnable[str, list[Document]],
    *,
    prompt: CitePrompt = CitePrompt(),
    order: PopularFirst | None = None,
) -> "CitedAnswerChain":
    """A chain that retrieves documents, numbers them, and answers with citations that are checked against them.

    Args:
        llm: a chat model, bound or not. `ChatSnapKV` also protects instructions and document headers on its compressed
            cache, and leaves out the lowest-ranked documents beyond its `context_tokens`.
        retriever: any retriever, best documents first.
        prompt: the texts around documents and question.
        order: puts the documents retrieved most often first, so that prompts begin alike and `ChatSnapKV` reads less
            of them; None keeps the retriever's order.

    Returns:
        A Runnable from a question, or a mapping with one under "input", to a `CitedAnswer`. Streamed, the first chunk
        has the sources, so that numbers mean something from the start; the chunks added up are the whole answer.
    """
    return CitedAnswerChain(llm, retriever, prompt, order)


class CitedAnswerChain(Runnable[Question, CitedAnswer]):
    """See `create_cited_answer_chain`. A batch is one batch for the retriever, then one for the model."""

    def __init__(
        self,
        llm: Runnable[Any, AIMessage],
        retriever: Runnable[str, list[Document]],
        prompt: CitePrompt,
        order: PopularFirst | None = None,
    ) -> None:
        self.llm, self.retriever, self.prompt, self.order = llm, retriever, prompt, order

    def invoke(self, input: Question, config: RunnableConfig | None = None, **kwargs: Any) -> CitedAnswer:  # noqa: A002
        return self._call_with_config(self._answer, input, config, **kwargs)

    async def ainvoke(self, input: Question, config: RunnableConfig | None = None, **kwargs: Any) -> CitedAnswer:  # noqa: A002
        return await self._acall_with_config(self._aanswer, input, config, **kwargs)

    def batch(
        self, inputs: list[Question], config: Any = None, *, return_exceptions: bool = False, **kwargs: Any
    ) -> list[CitedAnswer]:
        return self._batch_with_config(
            self._answers,  # type: ignore[arg-type]  # LangChain also calls functions of inputs and configs alone
            inputs,
            config,
            return_exceptions=return_exceptions,
            **kwargs,
        )

    async def abatch(
        self, inputs: list[Question], config: Any = None, *, return_exceptions: bool = False, **kwargs: Any
    ) -> list[CitedAnswer]:
        return await self._abatch_with_config(
            self._aanswers,  # type: ignore[arg-type]
            inputs,
            config,
            return_exceptions=return_exceptions,
            **kwargs,
        )

    def stream(self, input: Question, config: RunnableConfig | None = None, **kwargs: Any) -> Iterator[CitedAnswer]:  # noqa: A002
        yield from self._transform_stream_with_config(iter([input]), self._chunks, config, **kwargs)

    async def astream(
        self,
        input: Question,  # noqa: A002
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[CitedAnswer]:
        async def inputs() -> AsyncIterator[Question]:
            yield input

        async for chunk in self._atransform_stream_with_config(inputs(), self._achunks, config, **kwargs):
            yield chunk

    # LangChain runs these in a context that knows the chain's own run, so retriever and model report to it.

    def _answer(self, question: Question) -> CitedAnswer:
        asked = self._asked(question, self.retriever.invoke(question_text(question)))
        return asked.answer(self.llm.invoke(asked.messages))

    async def _aanswer(self, question: Question) -> CitedAnswer:
        asked = await self._aasked(question, await self.retriever.ainvoke(question_text(question)))
        return asked.answer(await self.llm.ainvoke(asked.messages))

    def _answers(self, questions: list[Question], config: list[RunnableConfig]) -> list[Exception | CitedAnswer]:
        found = self.retriever.batch([question_text(question) for question in questions], config)
        asked = [self._asked(*each) for each in zip(questions, found, strict=True)]
        replies = self.llm.batch([each.messages for each in asked], config, return_exceptions=True)
        return _results(asked, replies)

    async def _aanswers(self, questions: list[Question], config: list[RunnableConfig]) -> list[Exception | CitedAnswer]:
        found = await self.retriever.abatch([question_text(question) for question in questions], config)
        asked = [await self._aasked(*each) for each in zip(questions, found, strict=True)]
        replies = await self.llm.abatch([each.messages for each in asked], config, return_exceptions=True)
        return _results(asked, replies)

    def _chunks(self, questions: Iterator[Question]) -> Iterator[CitedAnswer]:
        for question in questions:
            answer = AnswerStream(self._asked(question, self.retriever.invoke(question_text(question))))
            yield answer.start()
            for message in self.llm.stream(answer.asked.messages):
                yield from answer.push(message)
            yield from answer.end()

    async def _achunks(self, questions: AsyncIterator[Question]) -> AsyncIterator[CitedAnswer]:
        async for question in questions:
            answer = AnswerStream(await self._aasked(question, await self.retriever.ainvoke(question_text(question))))
            yield answer.start()
            async for message in self.llm.astream(answer.asked.messages):
                for chunk in answer.push(message):
                    yield chunk
            for chunk in answer.end():
                yield chunk

    def _asked(self, question: Question, documents: list[Document]) -> Asked:
        return Asked.about(documents, question_text(question), self.prompt, self.llm, self.order)

    async def _aasked(self, question: Question, documents: list[Document]) -> Asked:
        # Counting tokens may load the model, which is nothing for an event loop.
        return await run_in_executor(None, self._asked, question, documents)


def _results(asked: Sequence[Asked], replies: Sequence[Any]) -> list[Exception | CitedAnswer]:
    """An answer for each reply; what failed stays an exception, and LangChain raises it or returns it."""
    pairs = zip(asked, replies, strict=True)
    return [reply if isinstance(reply, Exception) else each.answer(reply) for each, reply in pairs]
