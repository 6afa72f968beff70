"""The cited answer chain: one numbering from the retriever to the citations, whole or streamed, with any parts."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler, UsageMetadataCallbackHandler
from langchain_core.documents import Document
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableLambda

from langchain_ragkv import ChatSnapKV, CitedAnswer, create_cited_answer_chain
from ragkv.chat import Prompt
from ragkv.engine import Engine
from ragkv.errors import ConfigError, PromptTooLong
from ragkv.ordering import PopularFirst
from ragkv.prompt import CitePrompt

SOURCES = [
    Document(id="a", page_content="Ann wrote the question.", metadata={"title": "Ann", "source": "a.txt"}),
    Document(page_content="Bob wrote the answer."),
    Document(page_content="Cid read both."),
]
SHORT = CitePrompt(system="", rules="Cite.", examples="")
REPLY = "  Ann [1] and Bob [2][1], it is said [7].\n\nNobody else [2, 9]. "


class Shelf(BaseRetriever):
    """Not ragkv's: always the same documents."""

    documents: list[Document]

    def _get_relevant_documents(self, query: str, **_: Any) -> list[Document]:
        return self.documents


class Recorder(BaseCallbackHandler):
    """Runs with their parents, and what was put to the model."""

    def __init__(self) -> None:
        self.runs: list[tuple[str, bool]] = []
        self.asked: list[Any] = []

    def on_chain_start(self, serialized: Any, inputs: Any, **kwargs: Any) -> None:
        self.runs.append((kwargs["name"], kwargs["parent_run_id"] is None))

    def on_retriever_start(self, serialized: Any, query: str, **kwargs: Any) -> None:
        self.runs.append(("retriever", kwargs["parent_run_id"] is None))

    def on_chat_model_start(self, serialized: Any, messages: Any, **kwargs: Any) -> None:
        self.runs.append(("model", kwargs["parent_run_id"] is None))
        self.asked += messages


def scripted(*replies: str) -> GenericFakeChatModel:
    """A chat model that is not ragkv's; it streams words."""
    return GenericFakeChatModel(messages=iter([AIMessage(reply) for reply in replies]))


@pytest.fixture
def shelf() -> Shelf:
    return Shelf(documents=SOURCES)


class TestWithAnyModel:
    def test_citations_are_documents_and_bad_ones_are_told_apart(self, shelf: Shelf) -> None:
        answer = create_cited_answer_chain(scripted(REPLY), shelf).invoke("Who wrote it?")
        assert answer.answer == REPLY.strip()
        assert [(citation.number, citation.document) for citation in answer.citations] == [
            (1, SOURCES[0]),
            (2, SOURCES[1]),
        ]
        assert answer.invalid_citations == [7, 9]
        assert answer.sources == SOURCES
        assert answer.dropped_documents == []

    def test_the_prompt_is_plain_text_with_the_question_last(self, shelf: Shelf) -> None:
        recorder = Recorder()
        chain = create_cited_answer_chain(scripted("x"), shelf)
        chain.invoke({"input": "Who wrote it?"}, {"callbacks": [recorder]})
        [[system, human]] = recorder.asked
        assert isinstance(system, SystemMessage)
        assert isinstance(human, HumanMessage)
        assert "[1] Ann\nAnn wrote the question." in human.content
        assert "[2]\nBob wrote the answer." in human.content
        assert str(human.content).endswith("Question: Who wrote it?\nAnswer:")

    def test_an_order_of_its_own(self, shelf: Shelf) -> None:
        """Popular documents come first, and numbers follow the prompt."""
        order, watch = PopularFirst(), Recorder()
        chain = create_cited_answer_chain(scripted("[1]", "[1][3]"), shelf, order=order)
        chain.invoke("Who?")
        shelf.documents = [SOURCES[2], Document(page_content="Dee."), SOURCES[0]]
        answer = chain.invoke("When?", {"callbacks": [watch]})
        assert answer.sources == [SOURCES[0], SOURCES[2], shelf.documents[1]]
        assert [citation.document for citation in answer.citations] == [SOURCES[0], shelf.documents[1]]
        text = watch.asked[0][-1].content
        assert text.index("[1] Ann") < text.index("[2]\nCid") < text.index("[3]\nDee")

    def test_streamed_pieces_add_up_and_ids_are_stable(self, shelf: Shelf) -> None:
        whole = create_cited_answer_chain(scripted(REPLY), shelf).invoke("Who?")
        chunks = list(create_cited_answer_chain(scripted(REPLY), shelf).stream("Who?"))
        assert _sum(iter(chunks)) == whole
        assert (chunks[0].sources, chunks[0].answer) == (SOURCES, "")
        assert all(chunk.sources == [] for chunk in chunks[1:])
        shown = [citation for chunk in chunks for citation in chunk.citations]
        assert shown == whole.citations
        assert [number for chunk in chunks for number in chunk.invalid_citations] == whole.invalid_citations
        assert len(chunks) > 5

    def test_a_citation_is_shown_once_its_bracket_is_closed(self, shelf: Shelf) -> None:
        pieces = ["Ann [", "1", "]", "[2", "]."]

        def stream(_: Any) -> Iterator[AIMessage]:
            yield from (AIMessageChunk(piece) for piece in pieces)

        chunks = list(create_cited_answer_chain(RunnableLambda(stream), shelf).stream("Who?"))[1:]
        assert [[citation.number for citation in chunk.citations] for chunk in chunks] == [[], [], [1], [], [2]]

    @pytest.mark.parametrize("reply", ["Ann\nDocuments: Bob's [3], Ann [9]", "Ann\nDocuments: [3] Bob's [9] Ann"])
    async def test_titles_decide_where_documents_are_named(self, reply: str) -> None:
        """At once or while the reply comes in, when a title may not be whole yet."""
        sources = [Document(page_content=title, metadata={"title": title}) for title in ("Ann", "Bob's", "Cid")]
        shelf = Shelf(documents=sources)
        pieces = [reply[n : n + 3] for n in range(0, len(reply), 3)]

        def stream(_: Any) -> Iterator[AIMessage]:
            yield from (AIMessageChunk(piece) for piece in pieces)

        whole = create_cited_answer_chain(scripted(reply), shelf).invoke("Who?")
        assert [citation.document for citation in whole.citations] == [sources[1], sources[0]]
        assert whole.invalid_citations == []
        chunks = list(create_cited_answer_chain(RunnableLambda(stream), shelf).stream("Who?"))
        assert [citation for chunk in chunks for citation in chunk.citations] == whole.citations
        assert _sum(iter(chunks)) == whole
        again = [chunk async for chunk in create_cited_answer_chain(scripted(reply), shelf).astream("Who?")]
        assert _sum(iter(again)) == whole
        assert [citation for chunk in again for citation in chunk.citations] == whole.citations

    async def test_async(self, shelf: Shelf) -> None:
        whole = create_cited_answer_chain(scripted(REPLY), shelf).invoke("Who?")
        assert await create_cited_answer_chain(scripted(REPLY), shelf).ainvoke("Who?") == whole
        chunks = [chunk async for chunk in create_cited_answer_chain(scripted(REPLY), shelf).astream("Who?")]
        assert _sum(iter(chunks)) == whole
        assert await create_cited_answer_chain(scripted(REPLY), shelf).abatch(["Who?"]) == [whole]

    def test_retriever_and_model_report_to_the_chain(self, shelf: Shelf) -> None:
        for call in ("invoke", "stream", "batch"):
            recorder = Recorder()
            chain = create_cited_answer_chain(scripted("x"), shelf)
            argument: Any = ["Who?"] if call == "batch" else "Who?"
            list(getattr(chain, call)(argument, {"callbacks": [recorder]}))
            assert recorder.runs == [("CitedAnswerChain", True), ("retriever", False), ("model", False)]

    def test_any_prompt(self, shelf: Shelf) -> None:
        recorder = Recorder()
        chain = create_cited_answer_chain(scripted("x"), shelf, prompt=CitePrompt(system="", examples="", rules="Go."))
        chain.invoke("Who?", {"callbacks": [recorder]})
        [[human]] = recorder.asked
        assert str(human.content).endswith("Go.\n\nQuestion: Who?\nAnswer:")

    def test_no_question(self, shelf: Shelf) -> None:
        with pytest.raises(ConfigError, match='under "input"'):
            create_cited_answer_chain(scripted("x"), shelf).invoke({"query": "Who?"})

    def test_no_documents(self) -> None:
        answer = create_cited_answer_chain(scripted("Ann [1]."), Shelf(documents=[])).invoke("Who?")
        assert (answer.citations, answer.invalid_citations, answer.sources) == ([], [1], [])

    def test_one_failure_of_a_batch(self, shelf: Shelf) -> None:
        chain = create_cited_answer_chain(scripted("Ann [1]."), shelf)  # one reply for two questions
        results = chain.batch(["Who?", "Who else?"], return_exceptions=True)
        assert [isinstance(result, CitedAnswer) for result in results].count(True) == 1
        assert [isinstance(result, Exception) for result in results].count(True) == 1


class TestWithChatSnapKV:
    def test_segments_reach_the_engine(self, llm: ChatSnapKV, shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
        prompts: list[Prompt] = []
        stream = Engine.stream

        def spy(self: Engine, given: list[Prompt], *args: Any, **kwargs: Any) -> Any:
            prompts.extend(given)
            return stream(self, given, *args, **kwargs)

        monkeypatch.setattr(Engine, "stream", spy)
        create_cited_answer_chain(llm.bind(max_tokens=2), shelf).invoke("Who?")
        kinds = [span.kind for span in prompts[0].spans]
        assert [kind for kind in kinds if kind in ("header", "document")] == ["header", "document"] * 3
        assert (kinds[0], kinds[-1]) == ("instruction", "question")
        assert prompts[0].question_tokens is not None

    def test_whole_streamed_and_async_agree(self, llm: ChatSnapKV, shelf: Shelf) -> None:
        chain = create_cited_answer_chain(llm, shelf)
        whole = chain.invoke("Who?")
        assert whole.answer
        assert _sum(chain.stream("Who?")) == whole
        assert asyncio.run(chain.ainvoke("Who?")) == whole

    def test_batch_is_one_generation(self, llm: ChatSnapKV, shelf: Shelf, generations: list[int]) -> None:
        chain = create_cited_answer_chain(llm, shelf)
        answers = chain.batch(["Who?", "Who else?", "What?"])
        assert generations == [3]
        assert answers[1] == chain.invoke("Who else?")

    def test_documents_beyond_context_tokens_are_left_out_and_named(self, shelf: Shelf, loads: list[str]) -> None:
        llm = ChatSnapKV(model="tiny", max_tokens=2)
        needed = ChatSnapKV.get_num_tokens(llm, "[1] Ann\nAnn wrote the question.\n\n")
        for bound in (
            llm.bind(context_tokens=needed + 2),
            ChatSnapKV(model="tiny", max_tokens=2, context_tokens=needed + 2),
        ):
            answer = create_cited_answer_chain(bound, shelf).invoke("Who?")
            assert (answer.sources, answer.dropped_documents) == (SOURCES[:1], SOURCES[1:])
        with pytest.raises(PromptTooLong, match="context_tokens=3"):
            create_cited_answer_chain(llm.bind(context_tokens=3), shelf).invoke("Who?")

    def test_too_many_documents_are_an_error_if_nothing_was_said(self, llm: ChatSnapKV) -> None:
        many = Shelf(documents=SOURCES * 60)
        with pytest.raises(PromptTooLong, match="give fewer documents"):
            create_cited_answer_chain(llm, many).invoke("Who?")

    def test_documents_are_joined_in_any_order(self, loads: list[str]) -> None:
        """All computed anew is the usual answer; with nothing, documents that were read before are not read again."""
        usage = UsageMetadataCallbackHandler()
        llm = ChatSnapKV(model="tiny", max_tokens=8, kv_memory_bytes=10**8, namespace="blocks")
        for documents in (SOURCES, SOURCES[::-1]):
            usual, joined = (
                create_cited_answer_chain(model, Shelf(documents=documents), prompt=SHORT).invoke("Who wrote it?")
                for model in (llm, llm.bind(recompute=1))
            )
            assert joined == usual
        again = create_cited_answer_chain(llm.bind(recompute=0), Shelf(documents=SOURCES[1:]), prompt=SHORT)
        again.invoke("Who wrote it?", config={"callbacks": [usage]})
        (counts,) = usage.usage_metadata.values()
        details = counts["input_token_details"]
        assert details["cache_creation"] == 0
        assert details["cache_read"] > counts["input_tokens"] // 4


def _sum(chunks: Iterator[CitedAnswer]) -> CitedAnswer:
    whole = next(chunks)
    for chunk in chunks:
        whole += chunk
    return whole
