"""`batch` is one generation; async forms decode off the event loop and stop when they are cancelled."""

import asyncio
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate

from langchain_ragkv import ChatSnapKV
from ragkv.errors import PromptTooLong, ReplyTimeout

QUESTIONS = [f"Who wrote question {n}?" for n in range(9)]
TOO_LONG = "the answer names the documents " * 200


class Runs(BaseCallbackHandler):
    """Which runs started, ended and failed."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.ended: list[str] = []
        self.failed: list[BaseException] = []

    def on_chat_model_start(self, serialized: Any, messages: Any, **kwargs: Any) -> None:
        self.started.append(messages[0][0].content)

    def on_llm_end(self, response: Any, **kwargs: Any) -> None:
        self.ended.append(response.generations[0][0].text)

    def on_llm_error(self, error: BaseException, **kwargs: Any) -> None:
        self.failed.append(error)


class TestBatch:
    def test_is_one_generation_and_equals_single_calls(self, llm: ChatSnapKV, generations: list[int]) -> None:
        # More inputs than LangChain's executor has threads by default.
        replies = llm.batch(QUESTIONS)
        assert generations == [9]
        assert [reply.text for reply in replies] == [llm.invoke(question).text for question in QUESTIONS]

    async def test_abatch(self, llm: ChatSnapKV, generations: list[int]) -> None:
        replies = await llm.abatch(QUESTIONS)
        assert generations == [9]
        assert [reply.text for reply in replies] == [llm.invoke(question).text for question in QUESTIONS]

    async def test_as_completed(self, llm: ChatSnapKV, generations: list[int]) -> None:
        replies = dict(llm.batch_as_completed(QUESTIONS[:3]))
        areplies = {at: reply async for at, reply in llm.abatch_as_completed(QUESTIONS[:3])}
        assert generations == [3, 3]
        assert sorted(replies) == sorted(areplies) == [0, 1, 2]
        assert replies[2].text == areplies[2].text == llm.invoke(QUESTIONS[2]).text

    def test_in_a_chain(self, llm: ChatSnapKV, generations: list[int]) -> None:
        chain = ChatPromptTemplate.from_template("Who wrote {what}?") | llm.bind(max_tokens=5) | StrOutputParser()
        assert len(chain.batch([{"what": "this"}, {"what": "that"}])) == 2
        assert generations == [2]

    def test_max_concurrency(self, llm: ChatSnapKV, generations: list[int]) -> None:
        assert len(llm.batch(QUESTIONS, {"max_concurrency": 4})) == 9
        assert generations == [4, 4, 1]
        assert llm.batch([]) == []

    def test_callbacks_and_cache_work_for_each_input(self, llm: ChatSnapKV, generations: list[int]) -> None:
        cached = ChatSnapKV(model="tiny", max_tokens=5, cache=InMemoryCache())
        first = cached.invoke(QUESTIONS[1])
        runs = Runs()
        replies = cached.batch(QUESTIONS[:3], {"callbacks": [runs]})
        assert generations == [1, 2]
        assert replies[1].text == first.text
        assert sorted(runs.started) == QUESTIONS[:3]
        assert sorted(runs.ended) == sorted(reply.text for reply in replies)

    def test_an_input_that_cannot_be_answered_fails_alone(self, llm: ChatSnapKV, generations: list[int]) -> None:
        runs = Runs()
        inputs = [QUESTIONS[0], TOO_LONG, QUESTIONS[1]]
        first, failed, last = llm.batch(inputs, {"callbacks": [runs]}, return_exceptions=True)
        assert isinstance(failed, PromptTooLong)
        assert (first.text, last.text) == tuple(llm.invoke(question).text for question in QUESTIONS[:2])
        assert generations == [2, 1, 1]
        assert runs.failed == [failed]
        with pytest.raises(PromptTooLong):
            llm.batch(inputs)

    async def test_an_input_that_cannot_be_answered_fails_alone_async(self, llm: ChatSnapKV) -> None:
        first, failed = await llm.abatch([QUESTIONS[0], TOO_LONG], return_exceptions=True)
        assert isinstance(failed, PromptTooLong)
        assert first.text == llm.invoke(QUESTIONS[0]).text
        with pytest.raises(PromptTooLong):
            await llm.abatch([QUESTIONS[0], TOO_LONG])

    def test_timeout_is_for_the_batch(self, llm: ChatSnapKV, slow_tokens: Any) -> None:
        with pytest.raises(ReplyTimeout):
            llm.batch(QUESTIONS[:2], timeout=0.1, max_tokens=200)
        assert slow_tokens.count <= 12

    async def test_cancelling_ends_the_generation(self, llm: ChatSnapKV, slow_tokens: Any) -> None:
        task = asyncio.create_task(llm.abatch(QUESTIONS[:2], max_tokens=200))
        await _until(lambda: slow_tokens.count >= 4)
        await _cancelled(task)
        await _still(slow_tokens, allowed=2)


class TestAsync:
    async def test_replies_equal_those_of_sync_calls(self, llm: ChatSnapKV) -> None:
        text = llm.invoke(QUESTIONS[0]).text
        assert (await llm.ainvoke(QUESTIONS[0])).text == text
        assert "".join([chunk.text async for chunk in llm.astream(QUESTIONS[0])]) == text

    async def test_tokens_arrive_as_they_are_made_and_the_loop_runs_on(self, llm: ChatSnapKV, slow_tokens: Any) -> None:
        beats = 0

        async def beat() -> None:
            nonlocal beats
            while True:
                beats += 1
                await asyncio.sleep(0.001)

        heart = asyncio.create_task(beat())
        made_when_shown = [slow_tokens.count async for chunk in llm.astream(QUESTIONS[0]) if chunk.text]
        heart.cancel()
        assert len(set(made_when_shown)) > 5
        assert made_when_shown[0] < 10
        assert beats > 24

    @pytest.mark.parametrize("method", ["ainvoke", "astream"])
    async def test_cancelling_stops_decoding_within_a_token(
        self, llm: ChatSnapKV, slow_tokens: Any, method: str
    ) -> None:
        async def call() -> None:
            if method == "ainvoke":
                await llm.ainvoke(QUESTIONS[0], max_tokens=200)
            else:
                async for _ in llm.astream(QUESTIONS[0], max_tokens=200):
                    pass

        task = asyncio.create_task(call())
        await _until(lambda: slow_tokens.count >= 3)
        await _cancelled(task)
        await _still(slow_tokens, allowed=1)

    async def test_leaving_a_stream_stops_decoding(self, llm: ChatSnapKV, slow_tokens: Any) -> None:
        async for chunk in llm.astream(QUESTIONS[0], max_tokens=200):
            if chunk.text:
                break
        await asyncio.sleep(0)
        await _still(slow_tokens, allowed=1)

    def test_leaving_a_sync_stream_stops_decoding(self, llm: ChatSnapKV, slow_tokens: Any) -> None:
        for chunk in llm.stream(QUESTIONS[0], max_tokens=200):
            if chunk.text:
                break
        assert slow_tokens.count < 10

    async def test_errors_reach_the_caller(self, llm: ChatSnapKV) -> None:
        with pytest.raises(PromptTooLong):
            await llm.ainvoke(TOO_LONG)
        with pytest.raises(PromptTooLong):
            [chunk async for chunk in llm.astream(TOO_LONG)]

    async def test_concurrent_calls(self, llm: ChatSnapKV) -> None:
        replies = await asyncio.gather(*(llm.ainvoke(question) for question in QUESTIONS[:3]))
        assert [reply.text for reply in replies] == [llm.invoke(question).text for question in QUESTIONS[:3]]


async def _until(true: Any) -> None:
    async with asyncio.timeout(20):
        while not true():
            await asyncio.sleep(0.001)


async def _cancelled(task: "asyncio.Task[Any]") -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def _still(tokens: Any, allowed: int) -> None:
    """No more than `allowed` tokens are made from now on."""
    made = tokens.count
    await asyncio.sleep(10 * tokens.seconds)
    assert tokens.count <= made + allowed
